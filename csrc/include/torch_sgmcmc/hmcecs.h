// Hamiltonian Monte Carlo with energy conserving subsampling.
//
//   torch_sgmcmc::HMCECS sampler({theta},
//                                torch_sgmcmc::HMCECSOptions()
//                                    .num_data(x.size(0))
//                                    .subsample_size(1000));
//   const auto closure = [&](const torch::Tensor& indices) {
//     return -binary_cross_entropy_with_logits(  // of each datum
//         x.index({indices}).mv(theta), y.index({indices}),
//         BinaryCrossEntropyWithLogitsFuncOptions().reduction(torch::kNone));
//   };
//   sampler.warmup(closure, 1000);
//   sampler.step(closure);
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch_sgmcmc/export.h"
#include "torch_sgmcmc/log_likelihood.h"
#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

class ECSTarget;
struct AllData;
struct ECSAnchor;
struct ECSDraw;
struct ECSPoint;
struct ECSPrior;
struct ECSSampling;
struct ECSWarmup;
struct ExpandedSubsample;
class BlockProposals;
struct SubsampleLayout;
struct TaylorTerms;

/// Hyperparameters of HMCECS: num_data (whole, >= 1), prior_precision,
/// prior_mean, temperature > 0 and seed of OptionsOf, and the following. There
/// is no lr. A param group can have a prior of its own, all else is for the
/// whole sampler.
class TORCH_SGMCMC_API HMCECSOptions : public OptionsOf<HMCECSOptions> {
 public:
  HMCECSOptions() = default;

  // The step size is not on SGD's scale.
  HMCECSOptions& lr(double value) = delete;

  /// m, the number of data in u, >= 2, or for "signed" in each of its
  /// minibatches, >= 1 (about λ m in all). Must be set.
  TORCH_SGMCMC_ARG(int64_t, subsample_size) = 0;

  /// "perturbed" or "signed". Default: "perturbed".
  TORCH_SGMCMC_ARG(std::string, variant) = std::string("perturbed");

  /// ε > 0, the leapfrog's step, which HMCECS::warmup adapts. Default:
  /// trajectory_length / 6.
  TORCH_SGMCMC_ARG(double, step_size) = kNotSet;

  /// > 0: the number of leapfrog steps is the nearest to trajectory_length / ε,
  /// and at least 1 (during a warm-up at most 1024). Default: 1.2.
  TORCH_SGMCMC_ARG(double, trajectory_length) = 1.2;

  /// G >= 1, the number of blocks that u is parted into, of which one is
  /// proposed anew in a step. Default: 100.
  TORCH_SGMCMC_ARG(int64_t, num_blocks) = 100;

  /// 2, 1 or 0, the order of the Taylor expansions. (Python has Gauss-Newton
  /// expansions as well.) Default: 2.
  TORCH_SGMCMC_ARG(int64_t, control_variate) = 2;

  /// "dense", "diagonal" (both from the Hessian of all data at θ*) or
  /// "identity", which needs no Hessian. Default: "dense".
  TORCH_SGMCMC_ARG(std::string, mass_matrix) = std::string("dense");

  /// λ >= 1, the number of factors, for "signed". Default: 100.
  TORCH_SGMCMC_ARG(int64_t, num_products) = 100;

  /// > 0: the target is restricted to θ and u where the estimated variance of
  /// log|L̂| is at most this. Default: 1000.
  TORCH_SGMCMC_ARG(double, max_variance) = 1000.0;

  /// Number of data for which the sums over all data call the closure at a
  /// time, >= 1. Default: 8192.
  TORCH_SGMCMC_ARG(int64_t, chunk_size) = 8192;

 public:
  // What torch's learning-rate schedulers use.
  double get_lr() const override { return step_size(); }
  void set_lr(double value) override { step_size_.set(value); }

  const char* sampler() const override { return "HMCECS"; }
  void check() const override;
  void check_progress() const override;
  const char* why_equal() const override {
    return "there is one trajectory for all";
  }
  // There is no going on from a density that is not finite.
  std::vector<std::string> nonfinite_choices() const override {
    return {"raise", "skip"};
  }

 private:
  friend OptionsOf;
  friend class HMCECS;

  // The same with the step size that follows from the trajectory's length.
  HMCECSOptions complete() const;

  template <typename Visit>
  static void fields(Visit visit) {
    visit("num_data", &HMCECSOptions::num_data_, Scope::kShared);
    visit("subsample_size", &HMCECSOptions::subsample_size_, Scope::kShared);
    visit("num_products", &HMCECSOptions::num_products_, Scope::kShared);
    visit("variant", &HMCECSOptions::variant_, Scope::kShared);
    visit("step_size", &HMCECSOptions::step_size_, Scope::kShared);
    visit("trajectory_length",
          &HMCECSOptions::trajectory_length_,
          Scope::kShared);
    visit("num_blocks", &HMCECSOptions::num_blocks_, Scope::kShared);
    visit("control_variate", &HMCECSOptions::control_variate_, Scope::kShared);
    visit("mass_matrix", &HMCECSOptions::mass_matrix_, Scope::kShared);
    visit("temperature", &HMCECSOptions::temperature_, Scope::kShared);
    visit("max_variance", &HMCECSOptions::max_variance_, Scope::kShared);
    visit("chunk_size", &HMCECSOptions::chunk_size_, Scope::kShared);
    visit("prior_precision", &HMCECSOptions::prior_precision_);
    visit("prior_mean", &HMCECSOptions::prior_mean_);
    visit("num_trajectories",
          &HMCECSOptions::num_trajectories_,
          Scope::kProgress);
    visit("num_accepted", &HMCECSOptions::num_accepted_, Scope::kProgress);
    visit(
        "num_divergences", &HMCECSOptions::num_divergences_, Scope::kProgress);
    visit("num_subsamples_accepted",
          &HMCECSOptions::num_subsamples_accepted_,
          Scope::kProgress);
    visit(
        "num_evaluations", &HMCECSOptions::num_evaluations_, Scope::kProgress);
    visit("sign", &HMCECSOptions::sign_, Scope::kProgress);
    visit(
        "mean_difference", &HMCECSOptions::mean_difference_, Scope::kProgress);
  }

  // What the sampler keeps count of, the same in all groups.
  Hyperparameter<int64_t> num_trajectories_{0};
  Hyperparameter<int64_t> num_accepted_{0};
  Hyperparameter<int64_t> num_divergences_{0};
  Hyperparameter<int64_t> num_subsamples_accepted_{0};
  Hyperparameter<int64_t> num_evaluations_{0};
  Hyperparameter<int64_t> sign_{1};
  // a is this less λ: the mean of the estimates of the sum of all d.
  Hyperparameter<double> mean_difference_{0.0};
};

/// How long work comes along: what is done ("warm-up", or "control variates"
/// within it), how much of it, and how much there is.
using ProgressHook =
    std::function<void(const char* what, int64_t done, int64_t total)>;

/// How HMCECS::warmup adapts.
struct HMCECSWarmup {
  /// In (0, 1), of trajectories.
  double target_acceptance = 0.8;
  /// >= 1: after so many steps θ* is put to the mean of the second half of the
  /// draws since it was chosen last, and the mass matrix with it, unless less
  /// than half as many steps are left.
  int64_t anchor_every = 200;
  /// > 0: m ("perturbed") or λ ("signed") is chosen so that the variance of
  /// log|L̂| is about this, or with "signed" less, as a adds to the estimate
  /// where it was far from its place; m does not fall below 30, or what it was
  /// if that is less. Infinity ("signed" alone): as few factors as are safely
  /// positive, to save computing time. None leaves the sizes as they are.
  std::optional<double> target_variance = std::nullopt;
  /// Called after every step and every chunk of data.
  ProgressHook progress = nullptr;
};

/// The likelihood is estimated from a subsample u of the data, and one and the
/// same u is used along a whole trajectory and in its Metropolis test. A step
/// makes a proposal for one block of u, accepted with probability
/// min(1, |L̂(θ, u')| / |L̂(θ, u)|), and then a trajectory of the leapfrog on
/// Û(θ) = -log|L̂(θ, u)| + λ‖θ‖²/2, as HMC does, and its Metropolis test.
///
/// The estimators are made from d_k = l_k - q_k, where l_k is the
/// log-likelihood of datum k and q_k its Taylor expansion around a fixed θ*.
/// With m data, drawn uniformly with replacement (or by weights, see
/// set_sampling_weights), "perturbed" has
///
///   log L̂ = Σ q_k + d̂ - σ̂²/2,  d̂ = N/m Σ d_u,  σ̂² = N²/m² Σ (d_u - d̄)²,
///
/// and "signed", with X_l ~ Poisson(1) minibatches of m data in each of λ
/// factors and a of the warm-up,
///
///   L̂ = exp(Σ q_k) Π_l exp((a + λ)/λ) Π_{h <= X_l} (d̂_hl - a)/λ.
///
/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ‖²/2: signed exactly, if a
/// draw counts with its sign, E f = Σ s f / Σ s; perturbed a density near it,
/// to O(1 / (N m²)) if θ* is the mode. Look at estimator_variance(), which
/// should not be far above 1.
///
/// With "dense" step_size and trajectory_length are in units of the posterior's
/// standard deviations. Use parameters in float64, and start near the mode.
/// More: docs/samplers/hmcecs.md.
///
/// Errors, beside those of Sampler: std::invalid_argument for log-likelihoods
/// of a wrong shape, std::runtime_error if they have no graph or are not finite
/// where a step starts or at θ*, or if the chain has left: then no parameter
/// has changed.
///
/// Reference: K.-D. Dang, M. Quiroz, R. Kohn, M.-N. Tran and M. Villani,
/// Hamiltonian Monte Carlo with Energy Conserving Subsampling, JMLR 20, 2019:
/// algorithm 1, eq. 4.1 to 4.7 and 5.1 to 5.3.
class TORCH_SGMCMC_API HMCECS : public SamplerOf<HMCECSOptions> {
 public:
  /// Returns the log-likelihoods [M] of the data with the given indices (an
  /// int64 tensor [M] on the parameters' device) as a tensor with a graph, that
  /// of a datum being independent of the others. It is called with the same
  /// tensor for as long as u is the same, and does not call backward(). A
  /// LogLikelihood is such a closure, and its rows make expansions cheap.
  using Closure = std::function<torch::Tensor(const torch::Tensor& indices)>;

  /// Samples the parameters, in one param group.
  HMCECS(std::vector<at::Tensor> params, const HMCECSOptions& defaults);
  /// Samples the parameters of several groups.
  HMCECS(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
         const HMCECSOptions& defaults);

  /// See Sampler::add_param_group. θ* is then chosen anew, and a warm-up in
  /// progress is given up.
  void add_param_group(
      const torch::optim::OptimizerParamGroup& param_group) override;

  /// Updates the subsample, then simulates one trajectory and decides on it.
  /// Returns the estimate of the mean loss, -log|L̂| / N, at the draw: a float64
  /// scalar.
  torch::Tensor step(const Closure& closure);
  /// Throws std::invalid_argument: it needs the closure of the other.
  // NOLINTNEXTLINE(google-default-arguments): as torch's own.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// Makes steps, >= 1, that adapt θ*, the mass, the step size (by dual
  /// averaging), a of the signed estimator, and the size of the subsample. θ*
  /// is first put where the parameters are. Then all is frozen, and the counts
  /// of acceptances and divergences begin afresh.
  ///
  /// If an exception ends it early, the sampler is as after the last step that
  /// was made, and the next call with the same arguments goes on with it, also
  /// in another process that has loaded the state dict.
  void warmup(const Closure& closure,
              int64_t steps,
              const HMCECSWarmup& settings = {});

  /// Puts θ* where the parameters are, with a pass through all data, and gives
  /// up a warm-up in progress. Whatever is thrown, θ* is as before.
  void set_anchor(const Closure& closure,
                  const ProgressHook& progress = nullptr);

  /// Sets the probabilities π = w / Σ w with which data are drawn, by weights w
  /// [num_data]: real numbers > 0, none below 2^-40 of their sum, which are
  /// copied and are part of the state dict. In all estimates d / (N π) takes
  /// the place of d (eq. 4.2), and u is drawn anew. If it throws, nothing has
  /// changed.
  void set_sampling_weights(const at::Tensor& weights);
  /// Draws data uniformly, as at first.
  void set_sampling_weights(std::nullopt_t none);

  /// The sign of the likelihood's estimate at the last draw: 1 or -1.
  int64_t sign() const;
  /// The part of all trajectories that was accepted since the warm-up; NaN
  /// before any.
  double acceptance_rate() const;
  /// The part of all proposals for u that was accepted since the warm-up.
  double subsample_acceptance_rate() const;
  /// Trajectories since the warm-up that ended out of bounds: their energy was
  /// not finite, or the estimator's variance above max_variance.
  int64_t num_divergences() const;
  /// Evaluations of single data's log-likelihoods and gradients, in all:
  /// warm-up and control variates included, N for each choice of θ*.
  int64_t num_evaluations() const;
  /// The estimated variance of the log of the last draw's estimate; NaN before.
  double estimator_variance() const;

 protected:
  void update(const Work& work) override;
  void write_common(StateDict& state) const override;
  std::vector<std::string> common_keys() const override;
  std::function<void()> read_common(const StateDict& state) override;

 private:
  struct Move {  // a step for the parameters
    std::shared_ptr<const ECSPoint> end;
    double log_ratio;
    bool accepted;
  };

  ECSPrior prior() const;
  double rate(int64_t count) const;

  AllData data(const Closure& closure,
               const ProgressHook& progress = nullptr) const;
  bool needs_anchor() const;
  void anchor_at(const Closure& closure,
                 const at::Tensor& theta,
                 const ProgressHook& progress,
                 bool moved = false);
  void check_place(const Closure& closure, const ProgressHook& progress);
  void count(int64_t evaluations);
  TaylorTerms expand(const Closure& closure,
                     const at::Tensor& indices,
                     const ECSAnchor& anchor);

  // ecs/hmcecs_warmup.cpp
  void begin_adaptation(const ECSWarmup& progress);
  void move_anchor(const Closure& closure, const ProgressHook& progress);
  void choose_sizes(const std::vector<ECSDraw>& draws,
                    const std::optional<double>& target);

  // hmcecs.cpp
  SubsampleLayout layout() const;
  void forget_subsample();
  std::shared_ptr<const ExpandedSubsample> subsample(const Closure& closure);
  std::shared_ptr<const ExpandedSubsample> proposed(
      const Closure& closure, const ExpandedSubsample& current);
  double sweep(const Closure& closure, std::optional<int64_t> most_steps);
  ECSTarget target(const Closure& closure) const;
  std::vector<double> target_key() const;
  std::shared_ptr<const ECSPoint> start(ECSTarget& target);
  Move update_subsample(ECSTarget& target,
                        const std::shared_ptr<const ECSPoint>& present);
  Move trajectory(ECSTarget& target,
                  const std::shared_ptr<const ECSPoint>& present,
                  std::optional<int64_t> most_steps);
  Move travel(ECSTarget& target,
              const std::shared_ptr<const ECSPoint>& present,
              const at::Tensor& r,
              std::optional<int64_t> most_steps);
  void check_ready() const;
  double leapfrog_steps() const;
  bool is_check_due() const;
  bool is_out_of_bounds(const ECSTarget& target,
                        const ECSPoint& point,
                        const ECSPoint& present) const;
  bool decide(double log_ratio, int64_t test) const;

  std::shared_ptr<const ECSSampling> sampling_;  // uniform without
  std::shared_ptr<const ECSAnchor> anchor_;
  std::shared_ptr<const ExpandedSubsample> subsample_;
  std::shared_ptr<const ECSWarmup> warmup_;  // in progress
  // What can be computed again, and is not saved.
  std::shared_ptr<const ECSPoint> present_;
  std::vector<double> present_target_;
  std::shared_ptr<const BlockProposals> proposals_;
};

}  // namespace torch_sgmcmc
