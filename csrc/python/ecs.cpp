// HMC-ECS: estimates and subsamples.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <tuple>

#include "host/ecs_estimate.h"
#include "host/subsample.h"
#include "python/memory.h"

namespace py = pybind11;
using torch_sgmcmc::Memory;

void BindECS(py::module_& m) {
  using torch_sgmcmc::ECSEstimator;
  py::class_<ECSEstimator>(
      m,
      "ECSEstimator",
      "How HMC-ECS estimates a likelihood from differences, and where the chain "
      "may not go by it (csrc/host/ecs_estimate.h).")
      .def(py::init<double, int64_t, int64_t, double>(),
           py::arg("num_data"),
           py::arg("batch_size") = 1,
           py::arg("num_factors") = 0,
           py::arg("lower_bound") = 0.0)
      .def_readonly("num_data", &ECSEstimator::num_data)
      .def_readonly("batch_size", &ECSEstimator::batch_size)
      .def_readonly("num_factors", &ECSEstimator::num_factors)
      .def_readonly("lower_bound", &ECSEstimator::lower_bound)
      .def(
          "estimate",
          [](const ECSEstimator& estimator,
             uintptr_t differences,
             int64_t count,
             uintptr_t weights) {
            // NOLINTBEGIN(performance-no-int-to-ptr): what data_ptr() gives.
            const auto result = torch_sgmcmc::EstimateLikelihood(
                estimator,
                reinterpret_cast<const double*>(differences),
                count,
                reinterpret_cast<double*>(weights));
            // NOLINTEND(performance-no-int-to-ptr)
            return std::make_tuple(result.log,
                                   result.variance,
                                   result.mean,
                                   result.sign,
                                   result.lowest);
          },
          py::arg("differences"),
          py::arg("count"),
          py::arg("weights"),
          "Log, variance, mean, sign and lowest, from count float64 numbers at "
          "an address on the host; the derivatives are written to another.")
      .def("is_overturned",
           &torch_sgmcmc::IsOverturned,
           py::arg("mean"),
           "Whether a signed estimate is from a mean below its lower bound.")
      .def("is_out_of_bounds",
           &torch_sgmcmc::IsOutOfBounds,
           py::arg("variance"),
           py::arg("mean"),
           py::kw_only(),
           py::arg("present_variance"),
           py::arg("max_variance"),
           "Whether a proposal with this estimate is rejected as it is.");

  using torch_sgmcmc::Subsample;
  py::class_<Subsample>(m,
                        "Subsample",
                        "Which data HMC-ECS estimates from, and what it "
                        "proposes instead (csrc/host/subsample.h).")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, bool, int64_t>(),
           py::kw_only(),
           py::arg("num_data"),
           py::arg("num_cells"),
           py::arg("num_blocks"),
           py::arg("batch_size"),
           py::arg("poisson"),
           py::arg("seed"))
      .def("begin",
           &Subsample::Begin,
           py::arg("block"),
           "The first cell of a block.")
      .def(
          "draw",
          [](const Subsample& subsample, uint64_t step) {
            const torch_sgmcmc::Cells cells = subsample.Draw(step);
            return std::make_tuple(cells.counts, Memory(cells.indices));
          },
          py::arg("step"),
          "A whole subsample: the numbers of minibatches in its cells, and the "
          "memory of int64 indices.")
      .def(
          "propose",
          [](const Subsample& subsample, uint64_t step) {
            const torch_sgmcmc::BlockProposal proposal =
                subsample.Propose(step);
            return std::make_tuple(proposal.block,
                                   proposal.cells.counts,
                                   Memory(proposal.cells.indices));
          },
          py::arg("step"),
          "A block and its new cells, as of draw().");
}
