// SBPS's clock and bounce rates.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "host/bounce_clock.h"
#include "random/counter.h"

namespace py = pybind11;

namespace torch_sgmcmc {
namespace {

NoiseStream ClockStream(int64_t seed, uint64_t step) {
  return KeyedStream(seed, step, Purpose::kBounceClock);
}

}  // namespace

void BindBouncy(py::module_& m) {
  m.attr("LOOK") = static_cast<int>(ClockEvent::kObserve);
  m.attr("PROPOSAL") = static_cast<int>(ClockEvent::kProposal);
  m.attr("REFRESHMENT") = static_cast<int>(ClockEvent::kRefreshment);

  py::class_<BounceClock>(m, "BounceClock",
                          "The clock of SBPS's observations, bounces and a "
                          "new velocity (csrc/host/bounce_clock.h).")
      .def(py::init<>())
      .def_static("load", &BounceClock::Load)
      .def("save", &BounceClock::Save)
      .def("copy", [](const BounceClock& clock) { return clock; })
      .def("__deepcopy__",
           [](const BounceClock& clock, const py::dict&) { return clock; })
      .def(py::pickle([](const BounceClock& clock) { return clock.Save(); },
                      [](const std::vector<double>& saved) {
                        return BounceClock::Load(saved);
                      }))
      .def(
          "__eq__",
          [](const BounceClock& one, const BounceClock& other) {
            return one.Save() == other.Save();
          },
          py::is_operator())
      .def("__repr__",
           [](const BounceClock& clock) {
             return py::str("BounceClock(now={}, observations={})")
                 .format(clock.now(), clock.regression().history().size());
           })
      .def(
          "next",
          [](const BounceClock& clock, double num_std, double refresh_rate,
             int64_t seed, uint64_t step) {
            const NextEvent next =
                clock.Next(num_std, refresh_rate, ClockStream(seed, step));
            return std::make_tuple(static_cast<int>(next.event), next.wait,
                                   next.rate);
          },
          py::arg("num_std"), py::arg("refresh_rate"), py::kw_only(),
          py::arg("seed"), py::arg("step"),
          "The next event, the time until then, and the rate of proposals "
          "there: a pure function of the clock and of the arguments.")
      .def_static(
          "accepts",
          [](double rate, double value, int64_t seed, uint64_t step) {
            return BounceClock::Accepts(rate, value, ClockStream(seed, step));
          },
          py::arg("rate"), py::arg("value"), py::kw_only(), py::arg("seed"),
          py::arg("step"),
          "Whether a proposal that observed G = value bounces: with "
          "probability min(1, [value]+ / rate).")
      .def("observe", &BounceClock::Observe)
      .def("bounce", &BounceClock::Bounce)
      .def(
          "take",
          [](BounceClock& clock, int event, double wait, double value,
             double variance, const std::optional<double>& reflected) {
            clock.Take(static_cast<ClockEvent>(event), wait, value, variance,
                       reflected);
          },
          "What a step comes to: observe() or bounce(), on a new line if it has "
          "refreshed.")
      .def_property("observation_decay", &BounceClock::observation_decay,
                    &BounceClock::set_observation_decay)
      .def_static("warning", &BounceClock::Warning)
      .def("restart", &BounceClock::Restart)
      .def(
          "rate",
          [](const BounceClock& clock, double num_std,
             const std::vector<double>& times) {
            if (clock.regression().empty()) {
              throw py::value_error(
                  "Invalid clock: it has no observation to predict from");
            }
            const PiecewiseRate rate = clock.Rate(num_std);
            std::vector<double> values;
            values.reserve(times.size());
            for (const double time : times) values.push_back(rate.Value(time));
            return values;
          },
          "The polygon whose positive part is the rate of proposals, at times "
          "since the line began.")
      .def_property_readonly("now", &BounceClock::now)
      .def_property_readonly("observations", [](const BounceClock& clock) {
        std::vector<std::tuple<double, double, double>> all;
        for (const auto& o : clock.regression().history()) {
          all.emplace_back(o.time, o.value, o.variance);
        }
        return all;
      });
  m.def("samples_by", &SamplesBy,
        "How many multiples of the interval are not after the time.");

  m.def(
      "rate_of",
      [](uintptr_t losses, uintptr_t derivatives, int64_t count,
         bool double_precision, double num_data, double temperature,
         bool replacement, double prior) {
        const auto of = [&](auto zero) {
          using T = decltype(zero);
          // NOLINTBEGIN(performance-no-int-to-ptr): what data_ptr() gives.
          const Moments moments =
              MomentsOf(reinterpret_cast<const T*>(losses),
                        reinterpret_cast<const T*>(derivatives), count);
          // NOLINTEND(performance-no-int-to-ptr)
          const RateEstimate rate =
              RateOf(moments, num_data, temperature, replacement, prior);
          return std::make_tuple(moments.bad, rate.value, rate.variance);
        };
        return double_precision ? of(double{}) : of(float{});
      },
      "Of two rows of count numbers at these addresses on the host, in float64 "
      "or float32: how many losses are not finite, the rate of change of U / T "
      "along a line, and its variance.");
}

}  // namespace torch_sgmcmc
