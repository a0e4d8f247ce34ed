// HMC-ECS: sizes, estimates, subsamples and when θ* moves.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "host/ecs_estimate.h"
#include "host/ecs_schedule.h"
#include "host/ecs_sizes.h"
#include "host/subsample.h"
#include "python/memory.h"

namespace py = pybind11;
using torch_sgmcmc::Memory;

void BindECS(py::module_& m) {
  m.def("mean_of", &torch_sgmcmc::MeanOf, py::arg("numbers"));
  m.def("choose_subsample_size",
        &torch_sgmcmc::ChooseSubsampleSize,
        py::arg("variances"),
        py::arg("size"),
        py::arg("target"),
        py::arg("num_data"),
        "The size of HMC-ECS's perturbed subsamples (csrc/host/ecs_sizes.h).");
  m.def("choose_num_products",
        &torch_sgmcmc::ChooseNumProducts,
        py::arg("variances"),
        py::arg("size"),
        py::arg("target"),
        "The number of HMC-ECS's factors (csrc/host/ecs_sizes.h).");
  m.def("choose_num_products_by_lowest",
        &torch_sgmcmc::ChooseNumProductsByLowest,
        py::arg("variances"),
        py::arg("size"),
        py::arg("means"),
        py::arg("lowest"),
        "The same, to save computing time.");

  using torch_sgmcmc::ECSEstimator;
  py::class_<ECSEstimator>(
      m,
      "ECSEstimator",
      "How HMC-ECS estimates a likelihood from differences, and where the chain "
      "may not go by it (csrc/host/ecs_estimate.h).")
      .def(py::init<double, int64_t, int64_t, double>(),
           py::arg("num_data"),
           py::arg("batch_size") = 1,
           py::arg("num_products") = 0,
           py::arg("lower_bound") = 0.0)
      .def_readonly("num_data", &ECSEstimator::num_data)
      .def_readonly("batch_size", &ECSEstimator::batch_size)
      .def_readonly("num_products", &ECSEstimator::num_products)
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

  m.def("is_check_due",
        &torch_sgmcmc::IsCheckDue,
        py::arg("trajectories"),
        py::arg("num_data"),
        py::arg("cost"),
        "Whether HMC-ECS looks at all data (csrc/host/ecs_schedule.h).");
  m.def("deepest_fall",
        &torch_sgmcmc::DeepestFall,
        py::arg("dimension"),
        "How far below its value at θ* the log posterior may be.");
  using torch_sgmcmc::ECSSchedule;
  py::class_<ECSSchedule>(m,
                          "ECSSchedule",
                          "Which step of a warm-up of HMC-ECS does what "
                          "(csrc/host/ecs_schedule.h).")
      .def(py::init<int64_t, int64_t>(),
           py::arg("steps"),
           py::arg("anchor_every"))
      .def("check_sizing",
           &ECSSchedule::CheckSizing,
           "Raises if there are no draws by which to choose the sizes.")
      .def(
          "moves_anchor_after", &ECSSchedule::MovesAnchorAfter, py::arg("done"))
      .def("chooses_sizes_after",
           &ECSSchedule::ChoosesSizesAfter,
           py::arg("done"));
  m.def("first_late",
        &torch_sgmcmc::FirstLate,
        py::arg("draws"),
        "Of so many draws of a warm-up, the first that is used.");

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
