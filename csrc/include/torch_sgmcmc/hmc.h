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
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_sgmcmc/export.h"
#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of HMC: those of OptionsOf (no lr, temperature > 0, not
/// capturable), and the following. A param group can set prior_precision and
/// prior_mean alone.
class TORCH_SGMCMC_API HMCOptions : public OptionsOf<HMCOptions> {
 public:
  static constexpr const char* kSampler = "HMC";

  /// Options of a param group.
  HMCOptions() {
    for (const char* count :
         {"num_trajectories", "num_accepted", "num_divergences"}) {
      keep<int64_t>(count, 0);
    }
    // The state of the step size's adaptation; empty when there is none.
    keep("dual_averaging", std::vector<double>());
  }
  /// Options with the given step size.
  explicit HMCOptions(double step_size) : HMCOptions() {
    this->step_size(step_size);
  }

  // The step size is not on SGD's scale.
  HMCOptions& lr(double value) = delete;

  /// ε > 0, the leapfrog's step on U itself: ε² = lr / N in terms of the other
  /// samplers' lr. HMC::warmup adapts it.
  TORCH_SGMCMC_ARG(double, step_size)

  /// m >= 1, the number of leapfrog steps of a trajectory. Either it or
  /// trajectory_length must be set.
  TORCH_SGMCMC_ARG(std::optional<int64_t>, num_steps)

  /// τ > 0: the number of steps is the nearest to τ / ε, and at least 1.
  TORCH_SGMCMC_ARG(std::optional<double>, trajectory_length)

  /// Whether to make the Metropolis test. Default: true.
  TORCH_SGMCMC_ARG(bool, metropolis)

  /// k >= 0; the momentum is drawn afresh before every k-th trajectory, and
  /// with 0 but once, at the start. A momentum that is kept is turned round
  /// when a trajectory is rejected. Default: 1.
  TORCH_SGMCMC_ARG(int64_t, resample_momentum_every)

  /// K makes K independent chains at once: every parameter has a leading
  /// dimension K, the closure returns the K chains' mean losses and calls
  /// backward() on their sum. Default: none, one chain.
  TORCH_SGMCMC_ARG(std::optional<int64_t>, num_chains)

  // What torch's learning-rate schedulers use.
  double get_lr() const override { return step_size(); }
  void set_lr(double value) override { step_size(value); }

  void check_values() const override;
  void check_progress() const override;
  const char* why_equal() const override {
    return "there is one trajectory for all";
  }
  std::optional<int64_t> chains() const override { return num_chains(); }
  bool is_shared(std::string_view name) const override {
    return !name.starts_with("prior_");
  }
};

class TrajectoryHeat;

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
/// State: "momentum", if it is kept, and "mass", if it was set.
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
  std::vector<std::string> state_keys() const override;
  void check_saved_state(const SamplerParamState& state,
                         int64_t index) const override;

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

  static std::vector<Start> copies(const std::vector<Work>& work);
  void forget(const at::Tensor& param, const char* key);
  void set_step_size(double value);
  Trajectory simulate(const LossClosure& closure,
                      std::optional<int64_t> most_steps);
  at::Tensor go_on(const LossClosure& closure,
                   const torch::Tensor& loss,
                   std::vector<Work>& work,
                   std::optional<int64_t> most_steps);
  torch::Tensor integrate(const LossClosure& closure,
                          std::vector<Work>& work,
                          std::optional<int64_t> most_steps,
                          TrajectoryHeat* heat);
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
