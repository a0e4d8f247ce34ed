// The operators behind the samplers, as C++ functions.
//
// They are what torch.ops.torch_sgmcmc.* are in Python: pure functions of their
// arguments that change the lists given first in place. csrc/library.cpp says
// more of each argument. Lists must not be empty, but `masters`, which has an
// fp32 tensor for each of the parameters in bf16 or fp16. Autograd is not told
// of the change; the samplers do that.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "torch_sgmcmc/export.h"

namespace torch_sgmcmc {

/// Where the noise of a call comes from. `device_step`, an int64 scalar on the
/// tensors' device, is added to `step`; negative, it leaves everything as it
/// is.
struct NoiseKey {
  at::IntArrayRef offsets;
  int64_t seed = 0;
  int64_t step = 0;
  std::optional<at::Tensor> device_step = std::nullopt;
};

/// One update of SGLD.
TORCH_SGMCMC_API void sgld_step_(at::TensorList params,
                                 at::TensorList grads,
                                 at::TensorList masters,
                                 double lr,
                                 double num_data,
                                 double prior_precision,
                                 double temperature,
                                 const NoiseKey& key);

/// Hyperparameters of sghmc_step_.
struct SGHMCStep {
  double lr = 0;
  double momentum = 0;
  double num_data = 1;
  double prior_precision = 0;
  double temperature = 1;
  double noise_estimate = 0;
  int64_t resample_momentum_every = 0;
};

/// One update of SGHMC. An empty list of gradient variances means that
/// noise_estimate is used.
TORCH_SGMCMC_API void sghmc_step_(at::TensorList params,
                                  at::TensorList grads,
                                  at::TensorList momenta,
                                  at::TensorList grad_variances,
                                  at::TensorList masters,
                                  const SGHMCStep& step,
                                  const NoiseKey& key);

/// Hyperparameters of psgld_step_.
struct PSGLDStep {
  double lr = 0;
  double num_data = 1;
  double prior_precision = 0;
  double temperature = 1;
  double decay = 0.99;
  double eps = 1e-5;
};

/// One update of PSGLD that adapts. Sensitivities and curvatures (the diagonal
/// of the minibatch's Hessian) are given while Γ is wanted, otherwise empty.
TORCH_SGMCMC_API void psgld_step_(at::TensorList params,
                                  at::TensorList grads,
                                  at::TensorList square_averages,
                                  at::TensorList sensitivities,
                                  at::TensorList curvatures,
                                  at::TensorList masters,
                                  const PSGLDStep& step,
                                  const NoiseKey& key);

/// One update of PSGLD with a preconditioner G that stays, given as √G; decay
/// and eps do not matter.
TORCH_SGMCMC_API void psgld_frozen_step_(at::TensorList params,
                                         at::TensorList grads,
                                         at::TensorList roots,
                                         at::TensorList masters,
                                         const PSGLDStep& step,
                                         const NoiseKey& key);

/// Hyperparameters of sgnht_step_.
struct SGNHTStep {
  double lr = 0;
  double momentum = 0;
  double num_data = 1;
  double prior_precision = 0;
  double temperature = 1;
  double thermostat_rate = 0;
};

/// One update of SGNHT.
TORCH_SGMCMC_API void sgnht_step_(at::TensorList params,
                                  at::TensorList grads,
                                  at::TensorList momenta,
                                  at::TensorList thermostats,
                                  at::TensorList masters,
                                  const SGNHTStep& step,
                                  const NoiseKey& key);

/// Hyperparameters of ewsg_log_ratio.
struct EWSGWeights {
  double lr = 0;
  double momentum = 0;
  double num_data = 1;
  double prior_precision = 0;
  double temperature = 1;
  /// 0 to 3 for "momentum", "zero", "one" and "full_momentum".
  int64_t surrogate = 0;
  int64_t num_chains = 1;
};

/// W(proposals) - W(grads) of EWSG for each chain, in float64. An empty list of
/// momenta stands for zeros.
TORCH_SGMCMC_API at::Tensor ewsg_log_ratio(at::TensorList params,
                                           at::TensorList grads,
                                           at::TensorList proposals,
                                           at::TensorList momenta,
                                           const EWSGWeights& weights);

/// Which chains accept the proposal of that number in that step: each with
/// probability min(1, exp(log ratio)), by uniforms of the given purpose
/// (csrc/core/counter.h).
TORCH_SGMCMC_API at::Tensor metropolis_decide(const at::Tensor& log_ratios,
                                              int64_t proposal,
                                              int64_t purpose,
                                              int64_t seed,
                                              int64_t step);

/// Copies the chosen chains (rows) from others to tensors.
TORCH_SGMCMC_API void select_chains_(at::TensorList tensors,
                                     at::TensorList others,
                                     const at::Tensor& chosen);

/// Draws momenta from N(0, T M); an empty list of masses stands for ones.
TORCH_SGMCMC_API void hmc_momenta_(at::TensorList momenta,
                                   at::TensorList masses,
                                   double temperature,
                                   const NoiseKey& key);

/// What one part of a leapfrog step moves by.
struct HMCLeapfrog {
  double kick = 0;
  /// 0 leaves the parameters alone.
  double drift = 0;
  double num_data = 1;
  double prior_precision = 0;
};

/// r <- r - kick (N grad + λ θ), then θ <- θ + drift r / m.
TORCH_SGMCMC_API void hmc_leapfrog_(at::TensorList params,
                                    at::TensorList grads,
                                    at::TensorList momenta,
                                    at::TensorList masses,
                                    at::TensorList masters,
                                    const HMCLeapfrog& step);

/// λ‖θ‖² / 2 + Σ r² / (2 m) of each chain, in float64.
TORCH_SGMCMC_API at::Tensor hmc_energy(at::TensorList params,
                                       at::TensorList momenta,
                                       at::TensorList masses,
                                       double prior_precision,
                                       int64_t num_chains);

/// Taylor expansions of M data around theta*, in float64: v_i + g_i'δ +
/// δ'H_i δ / 2. HMCECS has more of it.
struct ECSExpansions {
  at::Tensor values;  // v: [M]
  at::Tensor slopes;  // g: [1, M, d], or [2, M, d] with y
  std::optional<at::Tensor> scales = std::nullopt;    // H_i = scale_i y_i y_i'
  std::optional<at::Tensor> hessians = std::nullopt;  // H: [M, d, d]
};

/// The sums over all data of the expansions, and where theta* is.
struct ECSSums {
  at::Tensor anchor;                                 // [d]
  at::Tensor value;                                  // scalar
  at::Tensor gradient;                               // [d]
  std::optional<at::Tensor> hessian = std::nullopt;  // [d, d]
};

/// Which estimate ecs_estimate makes.
struct ECSEstimation {
  double temperature = 1;
  double num_data = 1;
  int64_t batch_size = 1;
  /// 0 for the perturbed estimator.
  int64_t num_products = 0;
  double lower_bound = 0;
};

/// The estimate of a likelihood, from log-likelihoods [M] of a subsample at
/// theta: its derivatives by them, what ecs_density needs of the expansions,
/// and the row of its logarithm, the variance of that, the mean, and the sign.
/// On the CPU, in float64.
TORCH_SGMCMC_API std::tuple<at::Tensor, at::Tensor, at::Tensor> ecs_estimate(
    const at::Tensor& values,
    const at::Tensor& theta,
    const ECSSums& sums,
    const ECSExpansions& expansions,
    const ECSEstimation& estimator);

/// What ecs_density takes of ecs_estimate and of the closure's gradient.
struct ECSPull {
  at::Tensor weights;
  at::Tensor bends;
  at::Tensor estimate;
  at::Tensor gradient;  // of the weighted log-likelihoods, by theta: [d]
};

/// The log density at theta and whether all is finite (1 or 0), as a row; and
/// its gradient. `prior` has the precision of each element.
TORCH_SGMCMC_API std::tuple<at::Tensor, at::Tensor> ecs_density(
    const ECSPull& pull,
    const at::Tensor& theta,
    const ECSSums& sums,
    const ECSExpansions& expansions,
    const at::Tensor& prior,
    double temperature);

/// r <- r + kick W'gradient, x <- x + drift r; returns origin + W x. W is a
/// matrix, a diagonal, or none for 1.
TORCH_SGMCMC_API at::Tensor ecs_leapfrog_(
    const at::Tensor& x,
    const at::Tensor& momentum,
    const at::Tensor& gradient,
    const std::optional<at::Tensor>& whitening,
    const at::Tensor& origin,
    double kick,
    double drift);

/// Places parameters on straight lines: origin + time * direction.
TORCH_SGMCMC_API void sbps_place_(at::TensorList params,
                                  at::TensorList origins,
                                  at::TensorList directions,
                                  double time);

/// origin . direction and |direction|^2, in float64.
TORCH_SGMCMC_API at::Tensor sbps_line_sums(at::TensorList origins,
                                           at::TensorList directions);

/// v . Ag, |Ag|^2 and |v|^2 with g = grad + weight_decay * param, in float64.
/// An empty list of preconditioners stands for A = 1.
TORCH_SGMCMC_API at::Tensor sbps_reflection_sums(at::TensorList params,
                                                 at::TensorList grads,
                                                 at::TensorList velocities,
                                                 at::TensorList preconditioners,
                                                 double weight_decay);

/// Hyperparameters of sbps_reflect_.
struct SBPSReflection {
  double weight_decay = 0;
  double scale = 1;
  double gain = 0;
};

/// v <- scale v - gain Ag.
TORCH_SGMCMC_API void sbps_reflect_(at::TensorList params,
                                    at::TensorList grads,
                                    at::TensorList velocities,
                                    at::TensorList preconditioners,
                                    const SBPSReflection& reflection);

/// v <- scale v - gain g, and in the same pass the sums of the new line from
/// `origins`: see sbps_line_sums.
TORCH_SGMCMC_API at::Tensor sbps_reflect_sums_(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList velocities,
    at::TensorList origins,
    const SBPSReflection& reflection);

/// V <- decay V + (1 - decay) g^2.
TORCH_SGMCMC_API void sbps_adapt_(at::TensorList params,
                                  at::TensorList grads,
                                  at::TensorList square_averages,
                                  double weight_decay,
                                  double decay);

/// The sum of 1 / (sqrt(V) + eps), in float64.
TORCH_SGMCMC_API at::Tensor sbps_preconditioner_sum(
    at::TensorList square_averages, double eps);

/// A <- scale / (sqrt(V) + eps) and the directions A v.
TORCH_SGMCMC_API void sbps_precondition_(at::TensorList square_averages,
                                         at::TensorList velocities,
                                         at::TensorList preconditioners,
                                         at::TensorList directions,
                                         double eps,
                                         double scale);

/// The same, and in the same pass the sums of the line from `origins`: see
/// sbps_line_sums.
TORCH_SGMCMC_API at::Tensor sbps_precondition_sums_(
    at::TensorList square_averages,
    at::TensorList velocities,
    at::TensorList preconditioners,
    at::TensorList directions,
    at::TensorList origins,
    double eps,
    double scale);

/// Takes gradients into running variances: half the mean squared difference of
/// consecutive gradients, with the given weight of the newest.
TORCH_SGMCMC_API void gradient_variance_(at::TensorList grads,
                                         at::TensorList variances,
                                         at::TensorList previous,
                                         double weight);

/// Turns the gradients of a minibatch into those of a control variate:
/// grads + full_grads - anchor_grads. full_grads are in float64 for float64
/// gradients and in float32 for all others.
TORCH_SGMCMC_API void control_variate_(at::TensorList grads,
                                       at::TensorList anchor_grads,
                                       at::TensorList full_grads);

/// Fills tensors with the normals of the given purpose (csrc/core/counter.h).
TORCH_SGMCMC_API void gaussian_(at::TensorList out,
                                double std,
                                int64_t purpose,
                                const NoiseKey& key);

/// The sum of squares of all elements, in float64 and in a fixed order.
TORCH_SGMCMC_API at::Tensor sum_of_squares(at::TensorList tensors);

/// Whether this build has CUDA kernels.
TORCH_SGMCMC_API bool has_cuda();

/// Whether any element is not finite: on the CPU, where nobody need wait.
TORCH_SGMCMC_API bool any_nonfinite(at::TensorList tensors);

/// Row i of the result: how many elements of tensor i are NaN, and infinite.
TORCH_SGMCMC_API at::Tensor count_nonfinite(at::TensorList tensors);

/// step + device_step if all counts are 0, else -1, on the counts' device.
TORCH_SGMCMC_API at::Tensor step_or_nothing(
    const at::Tensor& counts,
    int64_t step,
    const std::optional<at::Tensor>& device_step = std::nullopt);

}  // namespace torch_sgmcmc
