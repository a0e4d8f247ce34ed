// torch_sgmcmc::sbps_* for any device: a driver for what changes tensors, a
// reducer for what sums them up.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "samplers/sbps.h"

namespace torch_sgmcmc {

inline std::vector<int64_t> NoOffsets(const TensorList& tensors) {
  std::vector<int64_t> zeros(tensors.size(), 0);
  return zeros;
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

template <class Reducer>
Tensor SBPSSumsOfLine(TensorList origins,
                      TensorList directions,
                      double prior_mean,
                      std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "sbps_line_sums";
  CheckNotEmpty(kOp, "origins", origins);
  CheckFinite(kOp, "prior_mean", prior_mean);
  const Plan plan(kOp,
                  {{"origins", Role::kStatistic, origins},
                   {"directions", Role::kStatistic, directions},
                   PriorMeans(prior_means)},
                  NoOffsets(origins));
  using Sums = SBPSLineSums</*kArrays=*/2, /*kOrigin=*/0, /*kDirection=*/1>;
  Tensor sums = SumsLike(origins[0], kSums<Sums>);
  Reducer::Reduce(plan, Sums(prior_mean), /*num_chains=*/1, sums);
  return sums;
}

inline void CheckReflection(const char* op,
                            double weight_decay,
                            double scale,
                            double gain,
                            double prior_mean) {
  CheckFinite(op, "prior_mean", prior_mean);
  CheckNumber(op, "weight_decay", weight_decay);
  CheckNumber(op, "scale", scale, /*positive=*/true);
  CheckFinite(op, "gain", gain);
}

template <class Driver>
void SBPSReflect(TensorList params,
                 TensorList grads,
                 TensorList velocities,
                 TensorList preconditioners,
                 double weight_decay,
                 double scale,
                 double gain,
                 double prior_mean,
                 std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "sbps_reflect_";
  CheckReflection(kOp, weight_decay, scale, gain, prior_mean);
  std::vector<Argument> arguments = {{"params", Role::kGradient, params},
                                     {"grads", Role::kGradient, grads},
                                     {"velocities", Role::kState, velocities}};
  const SBPSReflectCoefficients c{weight_decay, scale, gain, prior_mean};
  if (preconditioners.empty()) {
    arguments.push_back(PriorMeans(prior_means));
    Plan plan(kOp, arguments, NoOffsets(params));
    SBPSApply<SBPSReflectUpdate, Driver>(kOp, plan, c);
  } else {
    arguments.push_back({"preconditioners", Role::kStatistic, preconditioners});
    arguments.push_back(PriorMeans(prior_means));
    Plan plan(kOp, arguments, NoOffsets(params));
    SBPSApply<SBPSPreconditionedReflectUpdate, Driver>(kOp, plan, c);
  }
}

// The same without a preconditioner, and the sums of the line that the new
// velocities make from `origins`, in one pass.
template <class Reducer>
Tensor SBPSReflectSums(TensorList params,
                       TensorList grads,
                       TensorList velocities,
                       TensorList origins,
                       double weight_decay,
                       double scale,
                       double gain,
                       double prior_mean,
                       std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "sbps_reflect_sums_";
  CheckReflection(kOp, weight_decay, scale, gain, prior_mean);
  CheckNotEmpty(kOp, "params", params);
  Plan plan(kOp,
            {{"params", Role::kGradient, params},
             {"grads", Role::kGradient, grads},
             {"velocities", Role::kState, velocities},
             {"origins", Role::kStatistic, origins},
             PriorMeans(prior_means)},
            NoOffsets(params));
  using Sums = SBPSLineSums</*kArrays=*/4, /*kOrigin=*/3, /*kDirection=*/2>;
  Tensor sums = SumsLike(params[0], kSums<Sums>);
  Reducer::template UpdateAndReduce<SBPSReflectUpdate>(
      kOp,
      plan,
      SBPSReflectCoefficients{weight_decay, scale, gain, prior_mean},
      Sums(prior_mean),
      sums);
  plan.Finish();
  return sums;
}

template <class Driver>
void SBPSAdapt(TensorList params,
               TensorList grads,
               TensorList square_averages,
               double weight_decay,
               double decay,
               double prior_mean,
               std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "sbps_adapt_";
  CheckNumber(kOp, "weight_decay", weight_decay);
  CheckFinite(kOp, "prior_mean", prior_mean);
  if (!(decay >= 0 && decay < 1)) {
    Fail(kOp,
         "Invalid decay: " + std::to_string(decay) + " (must be in [0, 1))");
  }
  Plan plan(kOp,
            {{"params", Role::kGradient, params},
             {"grads", Role::kGradient, grads},
             {"square_averages", Role::kState, square_averages},
             PriorMeans(prior_means)},
            NoOffsets(params));
  SBPSApply<SBPSAdaptUpdate, Driver>(
      kOp, plan, SBPSAdaptCoefficients{weight_decay, decay, prior_mean});
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

// The same, and the sums of the line that the directions make from `origins`,
// in one pass.
template <class Reducer>
Tensor SBPSPreconditionSums(TensorList square_averages,
                            TensorList velocities,
                            TensorList preconditioners,
                            TensorList directions,
                            TensorList origins,
                            double eps,
                            double scale,
                            double prior_mean,
                            std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "sbps_precondition_sums_";
  CheckNumber(kOp, "eps", eps, /*positive=*/true);
  CheckNumber(kOp, "scale", scale, /*positive=*/true);
  CheckFinite(kOp, "prior_mean", prior_mean);
  CheckNotEmpty(kOp, "square_averages", square_averages);
  Plan plan(kOp,
            {{"square_averages", Role::kStatistic, square_averages},
             {"velocities", Role::kStatistic, velocities},
             {"preconditioners", Role::kState, preconditioners},
             {"directions", Role::kState, directions},
             {"origins", Role::kStatistic, origins},
             PriorMeans(prior_means)},
            NoOffsets(square_averages));
  using Sums = SBPSLineSums</*kArrays=*/5, /*kOrigin=*/4, /*kDirection=*/3>;
  Tensor sums = SumsLike(square_averages[0], kSums<Sums>);
  Reducer::template UpdateAndReduce<SBPSPreconditionUpdate>(
      kOp,
      plan,
      SBPSPreconditionCoefficients{eps, scale},
      Sums(prior_mean),
      sums);
  plan.Finish();
  return sums;
}

template <class Reducer>
Tensor SBPSSumsOfReflection(TensorList params,
                            TensorList grads,
                            TensorList velocities,
                            TensorList preconditioners,
                            double weight_decay,
                            double prior_mean,
                            std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "sbps_reflection_sums";
  CheckNumber(kOp, "weight_decay", weight_decay);
  CheckFinite(kOp, "prior_mean", prior_mean);
  CheckNotEmpty(kOp, "params", params);
  std::vector<Argument> arguments = {
      {"params", Role::kGradient, params},
      {"grads", Role::kGradient, grads},
      {"velocities", Role::kStatistic, velocities}};
  const auto run = [&](const auto& map) {
    arguments.push_back(PriorMeans(prior_means));
    const Plan plan(kOp, arguments, NoOffsets(params));
    Tensor sums = SumsLike(params[0], kSums<SBPSReflectionSums<true>>);
    Reducer::Reduce(plan, map, /*num_chains=*/1, sums);
    return sums;
  };
  if (preconditioners.empty()) {
    return run(SBPSReflectionSums<false>(weight_decay, prior_mean));
  }
  arguments.push_back({"preconditioners", Role::kStatistic, preconditioners});
  return run(SBPSReflectionSums<true>(weight_decay, prior_mean));
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
  m.impl("sbps_reflect_sums_", TORCH_BOX(&SBPSReflectSums<Reducer>));
  m.impl("sbps_precondition_sums_", TORCH_BOX(&SBPSPreconditionSums<Reducer>));
  m.impl("sbps_line_sums", TORCH_BOX(&SBPSSumsOfLine<Reducer>));
  m.impl("sbps_reflection_sums", TORCH_BOX(&SBPSSumsOfReflection<Reducer>));
  m.impl("sbps_preconditioner_sum",
         TORCH_BOX(&SBPSSumOfPreconditioner<Reducer>));
}

}  // namespace torch_sgmcmc
