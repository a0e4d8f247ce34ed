// Hamiltonian Monte Carlo.
//
//   torch_sgmcmc::HMC sampler(net->parameters(),
//                             torch_sgmcmc::HMCOptions(1e-3)
//                                 .trajectory_length(0.05)
//                                 .num_data(1000));
//   const auto closure = [&] {
//     auto loss = cross_entropy(net->forward(x), y);  // of all data
//     loss.backward();
//     return loss;
//   };
//   sampler.warmup(closure, 200);
//   sampler.step(closure);
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_sgmcmc/export.h"
#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of HMC: those of OptionsOf (no lr, temperature > 0, not
/// capturable), and the following. A param group can set prior_precision alone.
class TORCH_SGMCMC_API HMCOptions : public OptionsOf<HMCOptions> {
 public:
  /// Options of a param group.
  HMCOptions() = default;
  /// Options with the given step size.
  explicit HMCOptions(double step_size) { step_size_.set(step_size); }

  // The step size is not on SGD's scale.
  HMCOptions& lr(double value) = delete;

  double step_size() const { return step_size_.get(); }
  /// ε > 0, the leapfrog's step on U itself: ε² = lr / N in terms of the other
  /// samplers' lr. HMC::warmup adapts it.
  HMCOptions& step_size(double value) { return set(step_size_, value); }

  const std::optional<int64_t>& num_steps() const { return num_steps_.get(); }
  /// m >= 1, the number of leapfrog steps of a trajectory. Either it or
  /// trajectory_length must be set.
  HMCOptions& num_steps(std::optional<int64_t> value) {
    return set(num_steps_, value);
  }

  const std::optional<double>& trajectory_length() const {
    return trajectory_length_.get();
  }
  /// τ > 0: the number of steps is the nearest to τ / ε, and at least 1.
  HMCOptions& trajectory_length(std::optional<double> value) {
    return set(trajectory_length_, value);
  }

  bool metropolis() const { return metropolis_.get(); }
  /// Whether to make the Metropolis test. Default: true.
  HMCOptions& metropolis(bool value) { return set(metropolis_, value); }

  int64_t resample_momentum_every() const {
    return resample_momentum_every_.get();
  }
  /// k >= 0; the momentum is drawn afresh before every k-th trajectory, and
  /// with 0 but once, at the start. A momentum that is kept is turned round
  /// when a trajectory is rejected. Default: 1.
  HMCOptions& resample_momentum_every(int64_t value) {
    return set(resample_momentum_every_, value);
  }

  const std::optional<int64_t>& num_chains() const { return num_chains_.get(); }
  /// K makes K independent chains at once: every parameter has a leading
  /// dimension K, the closure returns the K chains' mean losses and calls
  /// backward() on their sum. Default: none, one chain.
  HMCOptions& num_chains(std::optional<int64_t> value) {
    return set(num_chains_, value);
  }

  // What torch's learning-rate schedulers use.
  double get_lr() const override { return step_size(); }
  void set_lr(double value) override { step_size_.set(value); }

  const char* sampler() const override { return "HMC"; }
  void check() const override;
  void check_progress() const override;
  const char* why_equal() const override {
    return "there is one trajectory for all";
  }
  std::vector<std::pair<const char*, bool>> shared() const override;
  void share(const SamplerOptions& other) override;
  void check_param(const at::Tensor& param) const override;

 private:
  friend OptionsOf;
  friend class HMC;

  static constexpr auto fields() {
    return std::make_tuple(
        std::make_pair("step_size", &HMCOptions::step_size_),
        std::make_pair("num_steps", &HMCOptions::num_steps_),
        std::make_pair("trajectory_length", &HMCOptions::trajectory_length_),
        std::make_pair("num_data", &HMCOptions::num_data_),
        std::make_pair("prior_precision", &HMCOptions::prior_precision_),
        std::make_pair("temperature", &HMCOptions::temperature_),
        std::make_pair("metropolis", &HMCOptions::metropolis_),
        std::make_pair("resample_momentum_every",
                       &HMCOptions::resample_momentum_every_),
        std::make_pair("num_chains", &HMCOptions::num_chains_),
        std::make_pair("num_trajectories", &HMCOptions::num_trajectories_),
        std::make_pair("num_accepted", &HMCOptions::num_accepted_),
        std::make_pair("num_divergences", &HMCOptions::num_divergences_),
        std::make_pair("dual_averaging", &HMCOptions::dual_averaging_));
  }

  Hyperparameter<double> step_size_{kNotSet};
  Hyperparameter<std::optional<int64_t>> num_steps_{std::nullopt};
  Hyperparameter<std::optional<double>> trajectory_length_{std::nullopt};
  Hyperparameter<bool> metropolis_{true};
  Hyperparameter<int64_t> resample_momentum_every_{1};
  Hyperparameter<std::optional<int64_t>> num_chains_{std::nullopt};
  // Counted by the sampler.
  Hyperparameter<int64_t> num_trajectories_{0};
  Hyperparameter<int64_t> num_accepted_{0};
  Hyperparameter<int64_t> num_divergences_{0};
  // The state of the step size's adaptation; empty when there is none.
  Hyperparameter<std::vector<double>> dual_averaging_{{}};
};

/// What HMC remembers of a parameter, of its shape, in fp64 for fp64 parameters
/// and in fp32 for all others: the momentum, if it is kept, and the mass, if it
/// was set.
class TORCH_SGMCMC_API HMCParamState : public ParamStateOf<HMCParamState> {
 public:
  at::Tensor momentum;
  at::Tensor mass;

  void from_dict(const StateDict& dict,
                 const at::Tensor& param,
                 int64_t index) override;

 private:
  friend ParamStateOf;

  static constexpr auto fields() {
    return std::make_tuple(std::make_pair("momentum", &HMCParamState::momentum),
                           std::make_pair("mass", &HMCParamState::mass),
                           std::make_pair("master", &HMCParamState::master));
  }
};

/// One step is one trajectory: with r ~ N(0, T M), num_steps times
///
///   r <- r - ε/2 ∇U(θ),   θ <- θ + ε M⁻¹ r,   r <- r - ε/2 ∇U(θ),
///
/// accepted with probability min(1, exp(-ΔH / T)), H = U(θ) + rᵀ M⁻¹ r / 2;
/// otherwise θ is again what it was, bit for bit.
///
/// Samples exp(-U(θ)/T), U(θ) = N · loss + Σ λ‖θ‖²/2, exactly if the closure
/// computes the loss of all data. Fed minibatches it is the naive stochastic
/// gradient HMC of Chen et al. 2014, which does not; SGHMC does. It warns if
/// the loss changes between steps while the parameters do not.
///
/// Reference: S. Duane et al., Hybrid Monte Carlo, 1987; algorithm 1 of T.
/// Chen, E. B. Fox and C. Guestrin, Stochastic Gradient Hamiltonian Monte
/// Carlo, ICML 2014.
class TORCH_SGMCMC_API HMC : public SamplerOf<HMCOptions> {
 public:
  using SamplerOf::SamplerOf;

  /// Simulates one trajectory and decides on it. The closure is called
  /// num_steps + 1 times, with the gradients cleared before. Returns the loss
  /// at the trajectory's start.
  // NOLINTNEXTLINE(google-default-arguments): as torch's own.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// Makes steps that adapt the step size to a probability of acceptance, by
  /// dual averaging (M. D. Hoffman and A. Gelman, JMLR 2014). If it does not
  /// finish, the next call goes on with it: two calls are exactly one call of
  /// as many steps. The counts begin afresh when it ends.
  void warmup(const LossClosure& closure,
              int64_t steps,
              double target_acceptance = 0.8,
              bool finish = true);

  /// Sets the diagonal mass M: a tensor for each parameter, in the order of the
  /// param groups, finite and > 0, that broadcasts to its shape. Momenta that
  /// were kept are drawn afresh.
  void set_mass(const std::vector<at::Tensor>& masses);
  /// Sets all masses to 1.
  void set_mass(std::nullopt_t none);

  /// The part of all trajectories that was accepted since the warm-up; NaN
  /// before any.
  double acceptance_rate() const;

  /// The number of trajectories since the warm-up whose energy was not finite.
  int64_t num_divergences() const;

 protected:
  void prepare(Work& work) override;
  void update(const Work& work) override;
  bool looks_later(const std::vector<Work>& work) const override;
  std::unique_ptr<SamplerParamState> new_state() const override;

 private:
  struct Trajectory {
    torch::Tensor loss;     // at its start
    at::Tensor log_ratios;  // of the Metropolis test, if there was one
  };

  // Where a list of parameters is at the start of a trajectory.
  struct Start {
    std::vector<at::Tensor> params;
    std::vector<at::Tensor> masters;
  };

  const HMCOptions& first() const;
  static std::vector<Start> copies(const std::vector<Work>& work);
  template <typename Change>
  void for_each_group(Change change);
  std::vector<at::Tensor> all_params() const;
  void forget(const at::Tensor& param, at::Tensor HMCParamState::*what);
  void check_groups() const;
  Trajectory simulate(const LossClosure& closure,
                      std::optional<int64_t> most_steps);
  at::Tensor go_on(const LossClosure& closure,
                   const torch::Tensor& loss,
                   std::vector<Work>& work,
                   std::optional<int64_t> most_steps);
  torch::Tensor integrate(const LossClosure& closure,
                          std::vector<Work>& work,
                          std::optional<int64_t> most_steps);
  static void leapfrog(const std::vector<Work>& work,
                       double kick,
                       double drift);
  at::Tensor energy(const at::Tensor& losses,
                    const std::vector<Work>& work) const;
  at::Tensor decide(const at::Tensor& log_ratios,
                    std::vector<Work>& work,
                    const std::vector<Start>& saved,
                    const std::vector<std::vector<at::Tensor>>& turned);
  std::vector<std::pair<int64_t, const void*>> marks() const;
  void check_same_target(const at::Tensor& losses);

  // The chains' losses at the end of the last step, the parameters then
  // (versions and memory), and how many steps running began with another loss
  // at the same ones.
  at::Tensor known_;
  std::vector<std::pair<int64_t, const void*>> known_at_;
  int64_t num_changes_ = 0;
};

}  // namespace torch_sgmcmc
