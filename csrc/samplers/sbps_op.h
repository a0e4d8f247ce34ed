// torch_sgmcmc::sbps_* for any device: a driver for what changes tensors, a
// reducer for what sums them up.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "samplers/sbps.h"

namespace torch_sgmcmc {

inline std::vector<int64_t> NoOffsets(const TensorList& tensors) {
  std::vector<int64_t> zeros(tensors.size(), 0);
  return zeros;
}

inline void CheckFinite(const char* op, const char* name, double value) {
  if (std::isfinite(value)) return;
  Fail(op,
       std::string("Invalid ") + name + ": " + std::to_string(value) +
           " (must be finite)");
}

inline void CheckNotEmpty(const char* op,
                          const char* name,
                          const TensorList& tensors) {
  if (tensors.empty()) Fail(op, std::string(name) + " is empty");
}

template <template <class> class Update, class Driver, class Coefficients>
void SBPSApply(const char* op, Plan& plan, const Coefficients& coefficients) {
  Driver driver(op, plan, std::nullopt);
  driver.template Apply<Update>(coefficients, NoiseStream{0, 0, 0});
  plan.Finish();
}

template <class Driver>
void SBPSPlace(TensorList params,
               TensorList origins,
               TensorList directions,
               double time) {
  constexpr const char* kOp = "sbps_place_";
  CheckFinite(kOp, "time", time);
  Plan plan(kOp,
            {{"params", Role::kOutput, params},
             {"origins", Role::kStatistic, origins},
             {"directions", Role::kStatistic, directions}},
            NoOffsets(params));
  SBPSApply<SBPSPlaceUpdate, Driver>(kOp, plan, SBPSPlaceCoefficients{time});
}

// A row of float64 numbers beside a tensor.
inline Tensor SumsLike(const Tensor& like, int64_t count) {
  return torch::stable::new_empty(like, {count}, ScalarType::Double);
}

// The same, and the line's sums, in one pass.
template <class Reducer>
Tensor SBPSPlaceSums(TensorList params,
                     TensorList origins,
                     TensorList directions,
                     double time) {
  constexpr const char* kOp = "sbps_place_sums_";
  CheckFinite(kOp, "time", time);
  CheckNotEmpty(kOp, "params", params);
  Plan plan(kOp,
            {{"params", Role::kOutput, params},
             {"origins", Role::kStatistic, origins},
             {"directions", Role::kStatistic, directions}},
            NoOffsets(params));
  Tensor sums = SumsLike(params[0], kSums<SBPSLineSums>);
  Reducer::template UpdateAndReduce<SBPSPlaceUpdate>(
      kOp, plan, SBPSPlaceCoefficients{time}, SBPSLineSums(), sums);
  plan.Finish();
  return sums;
}

// The line's sums alone.
template <class Reducer>
Tensor SBPSSumsOfLine(TensorList origins, TensorList directions) {
  constexpr const char* kOp = "sbps_line_sums";
  CheckNotEmpty(kOp, "origins", origins);
  // The map knows parameters, too, but does not look at them.
  const Plan plan(kOp,
                  {{"origins", Role::kStatistic, origins},
                   {"origins", Role::kStatistic, origins},
                   {"directions", Role::kStatistic, directions}},
                  NoOffsets(origins));
  Tensor sums = SumsLike(origins[0], kSums<SBPSLineSums>);
  Reducer::Reduce(plan, SBPSLineSums(), /*num_chains=*/1, sums);
  return sums;
}

template <class Driver>
void SBPSReflect(TensorList params,
                 TensorList grads,
                 TensorList velocities,
                 TensorList preconditioners,
                 double weight_decay,
                 double scale,
                 double gain) {
  constexpr const char* kOp = "sbps_reflect_";
  CheckNumber(kOp, "weight_decay", weight_decay);
  CheckNumber(kOp, "scale", scale, /*positive=*/true);
  CheckFinite(kOp, "gain", gain);
  std::vector<Argument> arguments = {{"params", Role::kGradient, params},
                                     {"grads", Role::kGradient, grads},
                                     {"velocities", Role::kState, velocities}};
  const SBPSReflectCoefficients c{weight_decay, scale, gain};
  if (preconditioners.empty()) {
    Plan plan(kOp, arguments, NoOffsets(params));
    SBPSApply<SBPSReflectUpdate, Driver>(kOp, plan, c);
  } else {
    arguments.push_back({"preconditioners", Role::kStatistic, preconditioners});
    Plan plan(kOp, arguments, NoOffsets(params));
    SBPSApply<SBPSPreconditionedReflectUpdate, Driver>(kOp, plan, c);
  }
}

template <class Driver>
void SBPSAdapt(TensorList params,
               TensorList grads,
               TensorList square_averages,
               double weight_decay,
               double decay) {
  constexpr const char* kOp = "sbps_adapt_";
  CheckNumber(kOp, "weight_decay", weight_decay);
  if (!(decay >= 0 && decay < 1)) {
    Fail(kOp,
         "Invalid decay: " + std::to_string(decay) + " (must be in [0, 1))");
  }
  Plan plan(kOp,
            {{"params", Role::kGradient, params},
             {"grads", Role::kGradient, grads},
             {"square_averages", Role::kState, square_averages}},
            NoOffsets(params));
  SBPSApply<SBPSAdaptUpdate, Driver>(
      kOp, plan, SBPSAdaptCoefficients{weight_decay, decay});
}

template <class Driver>
void SBPSPrecondition(TensorList square_averages,
                      TensorList velocities,
                      TensorList preconditioners,
                      TensorList directions,
                      double eps,
                      double scale) {
  constexpr const char* kOp = "sbps_precondition_";
  CheckNumber(kOp, "eps", eps, /*positive=*/true);
  CheckNumber(kOp, "scale", scale, /*positive=*/true);
  Plan plan(kOp,
            {{"square_averages", Role::kStatistic, square_averages},
             {"velocities", Role::kStatistic, velocities},
             {"preconditioners", Role::kState, preconditioners},
             {"directions", Role::kState, directions}},
            NoOffsets(square_averages));
  SBPSApply<SBPSPreconditionUpdate, Driver>(
      kOp, plan, SBPSPreconditionCoefficients{eps, scale});
}

template <class Reducer>
Tensor SBPSSumsOfReflection(TensorList params,
                            TensorList grads,
                            TensorList velocities,
                            TensorList preconditioners,
                            double weight_decay) {
  constexpr const char* kOp = "sbps_reflection_sums";
  CheckNumber(kOp, "weight_decay", weight_decay);
  CheckNotEmpty(kOp, "params", params);
  std::vector<Argument> arguments = {
      {"params", Role::kGradient, params},
      {"grads", Role::kGradient, grads},
      {"velocities", Role::kStatistic, velocities}};
  Tensor sums = SumsLike(params[0], kSums<SBPSReflectionSums<true>>);
  const auto run = [&](const auto& map) {
    const Plan plan(kOp, arguments, NoOffsets(params));
    Reducer::Reduce(plan, map, /*num_chains=*/1, sums);
  };
  if (preconditioners.empty()) {
    run(SBPSReflectionSums<false>(weight_decay));
  } else {
    arguments.push_back({"preconditioners", Role::kStatistic, preconditioners});
    run(SBPSReflectionSums<true>(weight_decay));
  }
  return sums;
}

template <class Reducer>
Tensor SBPSSumOfPreconditioner(TensorList square_averages, double eps) {
  constexpr const char* kOp = "sbps_preconditioner_sum";
  CheckNumber(kOp, "eps", eps, /*positive=*/true);
  CheckNotEmpty(kOp, "square_averages", square_averages);
  const Plan plan(kOp,
                  {{"square_averages", Role::kStatistic, square_averages}},
                  NoOffsets(square_averages));
  Tensor result = SumsLike(square_averages[0], 1);
  Reducer::Reduce(plan, SBPSPreconditionerSum(eps), /*num_chains=*/1, result);
  return result;
}

// The registrations of one device.
template <class Driver, class Reducer, class Library>
void RegisterSBPS(Library& m) {
  m.impl("sbps_place_", TORCH_BOX(&SBPSPlace<Driver>));
  m.impl("sbps_reflect_", TORCH_BOX(&SBPSReflect<Driver>));
  m.impl("sbps_adapt_", TORCH_BOX(&SBPSAdapt<Driver>));
  m.impl("sbps_precondition_", TORCH_BOX(&SBPSPrecondition<Driver>));
  m.impl("sbps_place_sums_", TORCH_BOX(&SBPSPlaceSums<Reducer>));
  m.impl("sbps_line_sums", TORCH_BOX(&SBPSSumsOfLine<Reducer>));
  m.impl("sbps_reflection_sums", TORCH_BOX(&SBPSSumsOfReflection<Reducer>));
  m.impl("sbps_preconditioner_sum",
         TORCH_BOX(&SBPSSumOfPreconditioner<Reducer>));
}

}  // namespace torch_sgmcmc
