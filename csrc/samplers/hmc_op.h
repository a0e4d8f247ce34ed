// torch_sgmcmc::hmc_momenta_, hmc_leapfrog_ and hmc_energy for any device.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "samplers/gaussian.h"
#include "samplers/hmc.h"

namespace torch_sgmcmc {

template <class Driver>
void HMCMomenta(TensorList momenta,
                TensorList masses,
                double temperature,
                std::vector<int64_t> offsets,
                int64_t seed,
                int64_t step,
                Rows rows) {
  constexpr const char* kOp = "hmc_momenta_";
  CheckNumber(kOp, "temperature", temperature, /*positive=*/true);
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kMomentum);
  std::vector<Argument> arguments = {{"momenta", Role::kOutput, momenta}};
  if (!masses.empty()) {
    arguments.push_back({"masses", Role::kStatistic, masses});
  }
  Plan plan(kOp, arguments, offsets, /*num_chains=*/1, {rows});
  Driver driver(kOp, plan, std::nullopt);
  const double std = std::sqrt(temperature);
  if (masses.empty()) {
    driver.template Apply<GaussianFill>(GaussianCoefficients{std}, stream);
  } else {
    driver.template Apply<MomentumFill>(MomentumCoefficients{std}, stream);
  }
  plan.Finish();
}

template <class Driver>
void HMCLeapfrog(TensorList params,
                 TensorList grads,
                 TensorList momenta,
                 TensorList masses,
                 TensorList masters,
                 double kick,
                 double drift,
                 double num_data,
                 double prior_precision,
                 double prior_mean,
                 std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "hmc_leapfrog_";
  CheckNumber(kOp, "kick", kick);
  CheckNumber(kOp, "drift", drift);
  CheckNumber(kOp, "num_data", num_data, /*positive=*/true);
  CheckNumber(kOp, "prior_precision", prior_precision);
  CheckFinite(kOp, "prior_mean", prior_mean);
  const bool moves = drift != 0;
  std::vector<Argument> arguments = {
      {"params", moves ? Role::kParameter : Role::kPosition, params},
      {"grads", Role::kGradient, grads},
      {"momenta", Role::kState, momenta}};
  if (!masses.empty()) {
    arguments.push_back({"masses", Role::kStatistic, masses});
  }
  arguments.push_back(PriorMeans(prior_means));
  arguments.push_back({"masters", Role::kMaster, masters});
  Plan plan(kOp, arguments, std::vector<int64_t>(params.size(), 0));
  Driver driver(kOp, plan, std::nullopt);
  const LeapfrogCoefficients c(
      kick, drift, num_data, prior_precision, prior_mean);
  const NoiseStream none{0, 0, 0};
  if (!moves) {
    driver.template Apply<KickUpdate>(c, none);
  } else if (masses.empty()) {
    driver.template Apply<LeapfrogUpdate>(c, none);
  } else {
    driver.template Apply<LeapfrogMassUpdate>(c, none);
  }
  plan.Finish();
}

// torch_sgmcmc::hmc_energy, with a map that reads no more than it needs.
template <class Reducer>
Tensor HMCEnergies(TensorList params,
                   TensorList momenta,
                   TensorList masses,
                   double prior_precision,
                   int64_t num_chains,
                   double prior_mean,
                   std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "hmc_energy";
  CheckNumber(kOp, "prior_precision", prior_precision);
  CheckFinite(kOp, "prior_mean", prior_mean);
  if (num_chains < 1) {
    Fail(kOp,
         "Invalid num_chains: " + std::to_string(num_chains) +
             " (must be >= 1)");
  }
  if (params.empty()) Fail(kOp, "params is empty");
  std::vector<Argument> arguments = {{"params", Role::kGradient, params},
                                     {"momenta", Role::kStatistic, momenta}};
  if (!masses.empty()) {
    arguments.push_back({"masses", Role::kStatistic, masses});
  }
  arguments.push_back(PriorMeans(prior_means));
  const Plan plan(
      kOp, arguments, std::vector<int64_t>(params.size(), 0), num_chains);
  Tensor result =
      torch::stable::new_empty(params[0], {num_chains}, ScalarType::Double);
  const auto reduce = [&](const auto& map) {
    Reducer::Reduce(plan, map, num_chains, result);
  };
  if (prior_precision != 0 && !masses.empty()) {
    reduce(EnergyTerm<true, true>(prior_precision, prior_mean));
  } else if (prior_precision != 0) {
    reduce(EnergyTerm<true, false>(prior_precision, prior_mean));
  } else if (!masses.empty()) {
    reduce(EnergyTerm<false, true>(prior_precision, prior_mean));
  } else {
    reduce(EnergyTerm<false, false>(prior_precision, prior_mean));
  }
  return result;
}

}  // namespace torch_sgmcmc
