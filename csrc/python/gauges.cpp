// torch_sgmcmc._C.Gauges.
#include "host/gauges.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/batch_means.h"

namespace py = pybind11;
using torch_sgmcmc::BatchMeans;
using torch_sgmcmc::Gauge;
using torch_sgmcmc::Motion;
using torch_sgmcmc::host::Gauges;

namespace {

// lr, N, T, momentum, noise estimate; motion, resample_momentum_every, step.
using Numbers = std::tuple<double, double, double, double, double>;
using Kinds = std::tuple<int, int64_t, int64_t>;
using SettingsTuples = std::vector<std::pair<Numbers, Kinds>>;

std::vector<torch_sgmcmc::GaugeSettings> SettingsOf(
    const SettingsTuples& tuples) {
  std::vector<torch_sgmcmc::GaugeSettings> settings;
  settings.reserve(tuples.size());
  for (const auto& [numbers, kinds] : tuples) {
    const auto [lr, num_data, temperature, momentum, noise] = numbers;
    const auto [motion, every, step] = kinds;
    settings.push_back({static_cast<Motion>(motion),
                        lr,
                        num_data,
                        temperature,
                        momentum,
                        noise,
                        every,
                        step});
  }
  return settings;
}

}  // namespace

// NOLINTNEXTLINE(misc-use-internal-linkage): csrc/python/module.cpp calls it.
void BindGauges(py::module_& m) {
  py::dict motions;
  motions["LANGEVIN"] = static_cast<int>(Motion::kLangevin);
  motions["MOMENTUM"] = static_cast<int>(Motion::kMomentum);
  motions["THERMOSTAT"] = static_cast<int>(Motion::kThermostat);
  motions["LATTICE"] = static_cast<int>(Motion::kLattice);
  motions["HALF_DRIFTS"] = static_cast<int>(Motion::kHalfDrifts);
  motions["NONE"] = static_cast<int>(Motion::kNone);
  m.attr("NOISE_EVERY") = torch_sgmcmc::kNoiseEvery;
  m.attr("MOST_ROWS") = torch_sgmcmc::kMostRows;
  m.attr("Motion") = py::module_::import("enum").attr("IntEnum")(
      "Motion", motions, py::arg("module") = m.attr("__name__"));

  m.def(
      "motion_of",
      [](const std::string& sampler) {
        return static_cast<int>(torch_sgmcmc::MotionOf(sampler));
      },
      py::arg("sampler"),
      "How a sampler of this class moves: a Motion.");
  m.def(
      "has_unbiased_gradients",
      [](const std::string& sampler) {
        return torch_sgmcmc::HasUnbiasedGradients(sampler);
      },
      py::arg("sampler"),
      "Whether it steps by unbiased gradients.");
  m.def(
      "observation_interval",
      &torch_sgmcmc::ObservationInterval,
      py::arg("every"),
      py::arg("resample_momentum_every"),
      "Steps between observations that see all of a cycle of redrawn momenta.");

  py::class_<BatchMeans>(
      m, "BatchMeans", "A mean and its error (csrc/host/batch_means.h).")
      .def(py::init<>())
      .def("add", &BatchMeans::Add, py::arg("value"))
      .def_property_readonly("count", &BatchMeans::count)
      .def_property_readonly("mean", &BatchMeans::Mean)
      .def_property_readonly("error", &BatchMeans::Error)
      .def("half_width", &BatchMeans::HalfWidth, py::arg("probability"))
      .def_property_readonly("means", &BatchMeans::means);

  py::class_<Gauges>(
      m, "Gauges", "Temperatures of a chain (csrc/host/gauges.h).")
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>>(),
           py::arg("numels"),
           py::arg("groups"))
      .def(
          "add",
          [](Gauges& gauges,
             const std::vector<std::array<double, 7>>& sums,
             const SettingsTuples& settings,
             bool has_noise) {
            std::vector<torch_sgmcmc::GaugeSums> all;
            all.reserve(sums.size());
            for (const auto& s : sums) {
              all.push_back({s[0], s[1], s[2], s[3], s[4], s[5], s[6]});
            }
            gauges.Add(all, SettingsOf(settings), has_noise);
          },
          py::arg("sums"),
          py::arg("settings"),
          py::arg("has_noise"))
      .def(
          "add_forces",
          [](Gauges& gauges,
             const std::vector<double>& used,
             const std::vector<double>& others,
             const SettingsTuples& settings) {
            gauges.AddForces(used, others, SettingsOf(settings));
          },
          py::arg("used"),
          py::arg("others"),
          py::arg("settings"))
      .def_property_readonly("num_tensors", &Gauges::num_tensors)
      .def_property_readonly("num_groups", &Gauges::num_groups)
      .def(
          "series",
          [](const Gauges& gauges, size_t index) {
            const Gauge& g = gauges.gauges().at(index);
            return std::make_tuple(g.kinetic,
                                   g.configurational,
                                   g.excess,
                                   g.minibatch,
                                   g.gradient_bias,
                                   g.clipped);
          },
          py::arg("index"),
          "T_kin, T_conf, their difference, the minibatches' heating, the "
          "gradients' bias, the part that is clipped: of a tensor, then of the groups, then of all.")
      .def(
          "findings",
          [](const Gauges& gauges, double budget, double rate) {
            std::vector<std::tuple<int64_t, std::string, double>> result;
            for (const auto& f : gauges.Findings(budget, rate)) {
              result.emplace_back(
                  f.tensor, torch_sgmcmc::host::NameOf(f.fault), f.size);
            }
            return result;
          },
          py::arg("budget"),
          py::arg("rate"))
      .def("summary",
           &Gauges::Summary,
           py::arg("names"),
           py::arg("takes_noise_estimate"),
           py::arg("budget"),
           py::arg("rate"))
      .def_property("state", &Gauges::State, &Gauges::SetState);
}
