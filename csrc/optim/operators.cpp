// Each operator is looked up once and then called through torch's dispatcher,
// below autograd: the samplers need no graph, and every layer that is passed by
// saves a good part of a small step's time.
#include "torch_sgmcmc/operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace torch_sgmcmc {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

template <typename Signature>
c10::TypedOperatorHandle<Signature> Operator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

}  // namespace

void sgld_step_(at::TensorList params,
                at::TensorList grads,
                double lr,
                double num_data,
                double prior_precision,
                double temperature,
                const NoiseKey& key) {
  static const auto op =
      Operator<void(at::TensorList,
                    at::TensorList,
                    double,
                    double,
                    double,
                    double,
                    at::IntArrayRef,
                    int64_t,
                    int64_t,
                    const OptionalTensor&)>("torch_sgmcmc::sgld_step_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(params,
          grads,
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
                 const SGHMCStep& step,
                 const NoiseKey& key) {
  static const auto op =
      Operator<void(at::TensorList,
                    at::TensorList,
                    at::TensorList,
                    at::TensorList,
                    double,
                    double,
                    double,
                    double,
                    double,
                    double,
                    int64_t,
                    at::IntArrayRef,
                    int64_t,
                    int64_t,
                    const OptionalTensor&)>("torch_sgmcmc::sghmc_step_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(params,
          grads,
          momenta,
          grad_variances,
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
                 const PSGLDStep& step,
                 const NoiseKey& key) {
  static const auto op =
      Operator<void(at::TensorList,
                    at::TensorList,
                    at::TensorList,
                    at::TensorList,
                    at::TensorList,
                    double,
                    double,
                    double,
                    double,
                    double,
                    double,
                    bool,
                    at::IntArrayRef,
                    int64_t,
                    int64_t,
                    const OptionalTensor&)>("torch_sgmcmc::psgld_step_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(params,
          grads,
          square_averages,
          sensitivities,
          curvatures,
          step.lr,
          step.num_data,
          step.prior_precision,
          step.temperature,
          step.decay,
          step.eps,
          step.adapt,
          key.offsets,
          key.seed,
          key.step,
          key.device_step);
}

void sgnht_step_(at::TensorList params,
                 at::TensorList grads,
                 at::TensorList momenta,
                 at::TensorList thermostats,
                 const SGNHTStep& step,
                 const NoiseKey& key) {
  static const auto op =
      Operator<void(at::TensorList,
                    at::TensorList,
                    at::TensorList,
                    at::TensorList,
                    double,
                    double,
                    double,
                    double,
                    double,
                    double,
                    at::IntArrayRef,
                    int64_t,
                    int64_t,
                    const OptionalTensor&)>("torch_sgmcmc::sgnht_step_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(params,
          grads,
          momenta,
          thermostats,
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
  static const auto op =
      Operator<at::Tensor(at::TensorList,
                          at::TensorList,
                          at::TensorList,
                          at::TensorList,
                          double,
                          double,
                          double,
                          double,
                          double,
                          int64_t,
                          int64_t)>("torch_sgmcmc::ewsg_log_ratio");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(params,
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

at::Tensor ewsg_decide(const at::Tensor& log_ratios,
                       int64_t proposal,
                       int64_t seed,
                       int64_t step) {
  static const auto op =
      Operator<at::Tensor(const at::Tensor&, int64_t, int64_t, int64_t)>(
          "torch_sgmcmc::ewsg_decide");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(log_ratios, proposal, seed, step);
}

void ewsg_select_(at::TensorList grads,
                  at::TensorList proposals,
                  const at::Tensor& accepted) {
  static const auto op =
      Operator<void(at::TensorList, at::TensorList, const at::Tensor&)>(
          "torch_sgmcmc::ewsg_select_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(grads, proposals, accepted);
}

void gradient_variance_(at::TensorList grads,
                        at::TensorList variances,
                        at::TensorList previous,
                        double weight) {
  static const auto op =
      Operator<void(at::TensorList, at::TensorList, at::TensorList, double)>(
          "torch_sgmcmc::gradient_variance_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(grads, variances, previous, weight);
}

void gaussian_(at::TensorList out,
               double std,
               int64_t purpose,
               const NoiseKey& key) {
  static const auto op =
      Operator<void(at::TensorList,
                    double,
                    at::IntArrayRef,
                    int64_t,
                    int64_t,
                    int64_t,
                    const OptionalTensor&)>("torch_sgmcmc::gaussian_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(out, std, key.offsets, key.seed, key.step, purpose, key.device_step);
}

void sbps_place_(at::TensorList params,
                 at::TensorList origins,
                 at::TensorList directions,
                 double time) {
  static const auto op =
      Operator<void(at::TensorList, at::TensorList, at::TensorList, double)>(
          "torch_sgmcmc::sbps_place_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(params, origins, directions, time);
}

at::Tensor sbps_reflection_sums(at::TensorList params,
                                at::TensorList grads,
                                at::TensorList velocities,
                                at::TensorList preconditioners,
                                double weight_decay) {
  static const auto op = Operator<at::Tensor(
      at::TensorList, at::TensorList, at::TensorList, at::TensorList, double)>(
      "torch_sgmcmc::sbps_reflection_sums");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(params, grads, velocities, preconditioners, weight_decay);
}

void sbps_reflect_(at::TensorList params,
                   at::TensorList grads,
                   at::TensorList velocities,
                   at::TensorList preconditioners,
                   const SBPSReflection& reflection) {
  static const auto op = Operator<void(at::TensorList,
                                       at::TensorList,
                                       at::TensorList,
                                       at::TensorList,
                                       double,
                                       double,
                                       double)>("torch_sgmcmc::sbps_reflect_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(params,
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
  static const auto op = Operator<void(
      at::TensorList, at::TensorList, at::TensorList, double, double)>(
      "torch_sgmcmc::sbps_adapt_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(params, grads, square_averages, weight_decay, decay);
}

at::Tensor sbps_preconditioner_sum(at::TensorList square_averages, double eps) {
  static const auto op = Operator<at::Tensor(at::TensorList, double)>(
      "torch_sgmcmc::sbps_preconditioner_sum");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(square_averages, eps);
}

void sbps_precondition_(at::TensorList square_averages,
                        at::TensorList velocities,
                        at::TensorList preconditioners,
                        at::TensorList directions,
                        double eps,
                        double scale) {
  static const auto op =
      Operator<void(at::TensorList,
                    at::TensorList,
                    at::TensorList,
                    at::TensorList,
                    double,
                    double)>("torch_sgmcmc::sbps_precondition_");
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.call(square_averages, velocities, preconditioners, directions, eps, scale);
}

at::Tensor sbps_dot(at::TensorList tensors, at::TensorList directions) {
  static const auto op = Operator<at::Tensor(at::TensorList, at::TensorList)>(
      "torch_sgmcmc::sbps_dot");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(tensors, directions);
}

at::Tensor sbps_moments(const at::Tensor& derivatives) {
  static const auto op =
      Operator<at::Tensor(const at::Tensor&)>("torch_sgmcmc::sbps_moments");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(derivatives);
}

at::Tensor sum_of_squares(at::TensorList tensors) {
  static const auto op =
      Operator<at::Tensor(at::TensorList)>("torch_sgmcmc::sum_of_squares");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(tensors);
}

bool has_cuda() {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("torch_sgmcmc::gaussian_", "")
      .hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

}  // namespace torch_sgmcmc
