// Each operator is looked up once and then called through torch's dispatcher,
// below autograd: the samplers need no graph, and every layer that is passed by
// saves a good part of a small step's time.
#include "torch_sgmcmc/operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace torch_sgmcmc {
namespace {

// An operator's name as a template argument: what is looked up once is kept for
// each name.
template <size_t kSize>
struct Name {
  // Written as a literal.
  // cppcheck-suppress noExplicitConstructor
  // NOLINTNEXTLINE(google-explicit-constructor)
  constexpr Name(const char (&literal)[kSize]) {
    std::copy_n(literal, kSize, text);
  }
  char text[kSize] = {};
};

// How the dispatcher passes an argument: tensors by reference.
template <typename T>
using Passed =
    std::conditional_t<std::is_same_v<T, at::Tensor> ||
                           std::is_same_v<T, std::optional<at::Tensor>>,
                       const T&,
                       T>;

// Calls the operator. Its schema must be that of the arguments' types, which
// torch checks at the first call.
template <Name kName, typename Result = void, typename... Args>
Result Call(const Args&... args) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kName.text, "")
                             .template typed<Result(Passed<Args>...)>();
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(args...);
}

}  // namespace

void sgld_step_(at::TensorList params,
                at::TensorList grads,
                at::TensorList masters,
                double lr,
                double num_data,
                double prior_precision,
                double temperature,
                const NoiseKey& key) {
  Call<"torch_sgmcmc::sgld_step_">(params,
                                   grads,
                                   masters,
                                   lr,
                                   num_data,
                                   prior_precision,
                                   temperature,
                                   key.offsets,
                                   key.seed,
                                   key.step,
                                   key.device_step);
}

void sghmc_step_(at::TensorList params,
                 at::TensorList grads,
                 at::TensorList momenta,
                 at::TensorList grad_variances,
                 at::TensorList masters,
                 const SGHMCStep& step,
                 const NoiseKey& key) {
  Call<"torch_sgmcmc::sghmc_step_">(params,
                                    grads,
                                    momenta,
                                    grad_variances,
                                    masters,
                                    step.lr,
                                    step.momentum,
                                    step.num_data,
                                    step.prior_precision,
                                    step.temperature,
                                    step.noise_estimate,
                                    step.resample_momentum_every,
                                    key.offsets,
                                    key.seed,
                                    key.step,
                                    key.device_step);
}

void psgld_step_(at::TensorList params,
                 at::TensorList grads,
                 at::TensorList square_averages,
                 at::TensorList sensitivities,
                 at::TensorList curvatures,
                 at::TensorList masters,
                 const PSGLDStep& step,
                 const NoiseKey& key) {
  Call<"torch_sgmcmc::psgld_step_">(params,
                                    grads,
                                    square_averages,
                                    sensitivities,
                                    curvatures,
                                    masters,
                                    step.lr,
                                    step.num_data,
                                    step.prior_precision,
                                    step.temperature,
                                    step.decay,
                                    step.eps,
                                    key.offsets,
                                    key.seed,
                                    key.step,
                                    key.device_step);
}

void psgld_frozen_step_(at::TensorList params,
                        at::TensorList grads,
                        at::TensorList roots,
                        at::TensorList masters,
                        const PSGLDStep& step,
                        const NoiseKey& key) {
  Call<"torch_sgmcmc::psgld_frozen_step_">(params,
                                           grads,
                                           roots,
                                           masters,
                                           step.lr,
                                           step.num_data,
                                           step.prior_precision,
                                           step.temperature,
                                           key.offsets,
                                           key.seed,
                                           key.step,
                                           key.device_step);
}

void sgnht_step_(at::TensorList params,
                 at::TensorList grads,
                 at::TensorList momenta,
                 at::TensorList thermostats,
                 at::TensorList masters,
                 const SGNHTStep& step,
                 const NoiseKey& key) {
  Call<"torch_sgmcmc::sgnht_step_">(params,
                                    grads,
                                    momenta,
                                    thermostats,
                                    masters,
                                    step.lr,
                                    step.momentum,
                                    step.num_data,
                                    step.prior_precision,
                                    step.temperature,
                                    step.thermostat_rate,
                                    key.offsets,
                                    key.seed,
                                    key.step,
                                    key.device_step);
}

at::Tensor ewsg_log_ratio(at::TensorList params,
                          at::TensorList grads,
                          at::TensorList proposals,
                          at::TensorList momenta,
                          const EWSGWeights& weights) {
  return Call<"torch_sgmcmc::ewsg_log_ratio", at::Tensor>(
      params,
      grads,
      proposals,
      momenta,
      weights.lr,
      weights.momentum,
      weights.num_data,
      weights.prior_precision,
      weights.temperature,
      weights.surrogate,
      weights.num_chains);
}

at::Tensor metropolis_decide(const at::Tensor& log_ratios,
                             int64_t proposal,
                             int64_t purpose,
                             int64_t seed,
                             int64_t step) {
  return Call<"torch_sgmcmc::metropolis_decide", at::Tensor>(
      log_ratios, proposal, purpose, seed, step);
}

void select_chains_(at::TensorList tensors,
                    at::TensorList others,
                    const at::Tensor& chosen) {
  Call<"torch_sgmcmc::select_chains_">(tensors, others, chosen);
}

void hmc_momenta_(at::TensorList momenta,
                  at::TensorList masses,
                  double temperature,
                  const NoiseKey& key) {
  Call<"torch_sgmcmc::hmc_momenta_">(
      momenta, masses, temperature, key.offsets, key.seed, key.step);
}

void hmc_leapfrog_(at::TensorList params,
                   at::TensorList grads,
                   at::TensorList momenta,
                   at::TensorList masses,
                   at::TensorList masters,
                   const HMCLeapfrog& step) {
  Call<"torch_sgmcmc::hmc_leapfrog_">(params,
                                      grads,
                                      momenta,
                                      masses,
                                      masters,
                                      step.kick,
                                      step.drift,
                                      step.num_data,
                                      step.prior_precision);
}

at::Tensor hmc_energy(at::TensorList params,
                      at::TensorList momenta,
                      at::TensorList masses,
                      double prior_precision,
                      int64_t num_chains) {
  return Call<"torch_sgmcmc::hmc_energy", at::Tensor>(
      params, momenta, masses, prior_precision, num_chains);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> ecs_estimate(
    const at::Tensor& values,
    const at::Tensor& theta,
    const ECSSums& sums,
    const ECSExpansions& expansions,
    const ECSEstimation& estimator) {
  return Call<"torch_sgmcmc::ecs_estimate",
              std::tuple<at::Tensor, at::Tensor, at::Tensor>>(
      values,
      theta,
      sums.anchor,
      expansions.values,
      expansions.slopes,
      expansions.scales,
      expansions.hessians,
      estimator.temperature,
      estimator.num_data,
      estimator.batch_size,
      estimator.num_products,
      estimator.lower_bound);
}

std::tuple<at::Tensor, at::Tensor> ecs_density(const ECSPull& pull,
                                               const at::Tensor& theta,
                                               const ECSSums& sums,
                                               const ECSExpansions& expansions,
                                               const at::Tensor& prior,
                                               double temperature) {
  return Call<"torch_sgmcmc::ecs_density", std::tuple<at::Tensor, at::Tensor>>(
      pull.estimate,
      pull.gradient,
      pull.weights,
      pull.bends,
      theta,
      sums.anchor,
      expansions.slopes,
      expansions.scales,
      expansions.hessians,
      sums.value,
      sums.gradient,
      sums.hessian,
      prior,
      temperature);
}

at::Tensor ecs_leapfrog_(const at::Tensor& x,
                         const at::Tensor& momentum,
                         const at::Tensor& gradient,
                         const std::optional<at::Tensor>& whitening,
                         const at::Tensor& origin,
                         double kick,
                         double drift) {
  return Call<"torch_sgmcmc::ecs_leapfrog_", at::Tensor>(
      x, momentum, gradient, whitening, origin, kick, drift);
}

void gradient_variance_(at::TensorList grads,
                        at::TensorList variances,
                        at::TensorList previous,
                        double weight) {
  Call<"torch_sgmcmc::gradient_variance_">(grads, variances, previous, weight);
}

void control_variate_(at::TensorList grads,
                      at::TensorList anchor_grads,
                      at::TensorList full_grads) {
  Call<"torch_sgmcmc::control_variate_">(grads, anchor_grads, full_grads);
}

void gaussian_(at::TensorList out,
               double std,
               int64_t purpose,
               const NoiseKey& key) {
  Call<"torch_sgmcmc::gaussian_">(
      out, std, key.offsets, key.seed, key.step, purpose, key.device_step);
}

void sbps_place_(at::TensorList params,
                 at::TensorList origins,
                 at::TensorList directions,
                 double time) {
  Call<"torch_sgmcmc::sbps_place_">(params, origins, directions, time);
}

at::Tensor sbps_reflection_sums(at::TensorList params,
                                at::TensorList grads,
                                at::TensorList velocities,
                                at::TensorList preconditioners,
                                double weight_decay) {
  return Call<"torch_sgmcmc::sbps_reflection_sums", at::Tensor>(
      params, grads, velocities, preconditioners, weight_decay);
}

void sbps_reflect_(at::TensorList params,
                   at::TensorList grads,
                   at::TensorList velocities,
                   at::TensorList preconditioners,
                   const SBPSReflection& reflection) {
  Call<"torch_sgmcmc::sbps_reflect_">(params,
                                      grads,
                                      velocities,
                                      preconditioners,
                                      reflection.weight_decay,
                                      reflection.scale,
                                      reflection.gain);
}

void sbps_adapt_(at::TensorList params,
                 at::TensorList grads,
                 at::TensorList square_averages,
                 double weight_decay,
                 double decay) {
  Call<"torch_sgmcmc::sbps_adapt_">(
      params, grads, square_averages, weight_decay, decay);
}

at::Tensor sbps_preconditioner_sum(at::TensorList square_averages, double eps) {
  return Call<"torch_sgmcmc::sbps_preconditioner_sum", at::Tensor>(
      square_averages, eps);
}

void sbps_precondition_(at::TensorList square_averages,
                        at::TensorList velocities,
                        at::TensorList preconditioners,
                        at::TensorList directions,
                        double eps,
                        double scale) {
  Call<"torch_sgmcmc::sbps_precondition_">(
      square_averages, velocities, preconditioners, directions, eps, scale);
}

at::Tensor sbps_reflect_sums_(at::TensorList params,
                              at::TensorList grads,
                              at::TensorList velocities,
                              at::TensorList origins,
                              const SBPSReflection& reflection) {
  return Call<"torch_sgmcmc::sbps_reflect_sums_", at::Tensor>(
      params,
      grads,
      velocities,
      origins,
      reflection.weight_decay,
      reflection.scale,
      reflection.gain);
}

at::Tensor sbps_precondition_sums_(at::TensorList square_averages,
                                   at::TensorList velocities,
                                   at::TensorList preconditioners,
                                   at::TensorList directions,
                                   at::TensorList origins,
                                   double eps,
                                   double scale) {
  return Call<"torch_sgmcmc::sbps_precondition_sums_", at::Tensor>(
      square_averages,
      velocities,
      preconditioners,
      directions,
      origins,
      eps,
      scale);
}

at::Tensor sbps_line_sums(at::TensorList origins, at::TensorList directions) {
  return Call<"torch_sgmcmc::sbps_line_sums", at::Tensor>(origins, directions);
}

at::Tensor sum_of_squares(at::TensorList tensors) {
  return Call<"torch_sgmcmc::sum_of_squares", at::Tensor>(tensors);
}

bool has_cuda() {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("torch_sgmcmc::gaussian_", "")
      .hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

bool any_nonfinite(at::TensorList tensors) {
  return Call<"torch_sgmcmc::any_nonfinite", bool>(tensors);
}

at::Tensor count_nonfinite(at::TensorList tensors) {
  return Call<"torch_sgmcmc::count_nonfinite", at::Tensor>(tensors);
}

at::Tensor step_or_nothing(const at::Tensor& counts,
                           int64_t step,
                           const std::optional<at::Tensor>& device_step) {
  return Call<"torch_sgmcmc::step_or_nothing", at::Tensor>(
      counts, step, device_step);
}

}  // namespace torch_sgmcmc
