// Samplers that decide on the host: HMC, EWSG, and their warm-up.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "core/counter.h"
#include "host/closure_watch.h"
#include "host/dual_averaging.h"
#include "host/index_chain.h"
#include "host/leapfrog_steps.h"
#include "host/metropolis.h"
#include "host/ratio.h"

namespace py = pybind11;

void BindTrajectories(py::module_& m) {
  m.def(
      "index_chain_accepts",
      [](double log_ratio, int64_t seed, uint64_t step, uint64_t proposal) {
        return torch_sgmcmc::IndexChainAccepts(
            log_ratio,
            {static_cast<uint64_t>(seed),
             step,
             static_cast<uint32_t>(torch_sgmcmc::Purpose::kIndexChain)},
            /*chain=*/0,
            proposal);
      },
      py::arg("log_ratio"),
      py::kw_only(),
      py::arg("seed"),
      py::arg("step"),
      py::arg("proposal"),
      "Whether EWSG's index chain takes a proposed minibatch: with probability "
      "min(1, exp(log_ratio)), a pure function of the arguments.");

  m.attr("MOST_CHANGES") = torch_sgmcmc::kMostChanges;
  m.def("changes_running",
        &torch_sgmcmc::ChangesRunning,
        py::arg("before"),
        py::arg("known"),
        py::arg("now"),
        py::arg("temperature"),
        py::arg("num_data"),
        "Of HMC's losses at the same parameters (csrc/host/closure_watch.h).");
  m.def("changed_target", &torch_sgmcmc::ChangedTarget);
  m.def("equal_running",
        &torch_sgmcmc::EqualRunning,
        py::arg("before"),
        py::arg("equal"),
        py::arg("zero"),
        py::kw_only(),
        py::arg("hint"),
        py::arg("off"),
        "Of EWSG's minibatches (csrc/host/closure_watch.h).");

  m.def("ratio", &torch_sgmcmc::Ratio, py::arg("part"), py::arg("whole"));
  m.attr("MOST_WARMUP_STEPS") = torch_sgmcmc::kMostWarmupSteps;
  m.def("leapfrog_steps",
        &torch_sgmcmc::LeapfrogSteps,
        py::arg("num_steps"),
        py::arg("length"),
        py::arg("step_size"),
        py::arg("most") = std::nullopt,
        "Of a trajectory (csrc/host/leapfrog_steps.h).");
  m.def("mean_acceptance",
        &torch_sgmcmc::MeanAcceptance,
        py::arg("log_ratios"),
        "The mean of min(1, exp(log_ratio)), 0 for one that is not finite.");

  using torch_sgmcmc::DualAveraging;
  py::class_<DualAveraging>(
      m,
      "DualAveraging",
      "Adapts a step size to a target acceptance probability (Hoffman and "
      "Gelman 2014).")
      .def(py::init<double, double>(), py::arg("step_size"), py::arg("target"))
      .def(py::init<std::vector<double>>(), py::arg("state"))
      .def("update",
           &DualAveraging::Update,
           py::arg("acceptance"),
           "Takes in a trajectory's acceptance probability; returns the next "
           "step size.")
      .def_property_readonly("target", &DualAveraging::target)
      .def_property_readonly("count", &DualAveraging::count)
      .def_property_readonly("step_size", &DualAveraging::step_size)
      .def_property_readonly("averaged", &DualAveraging::averaged)
      .def_property_readonly("state", &DualAveraging::state);
}
