// Is it the posterior? Temperatures of a chain while it runs.
//
//   torch_sgmcmc::Gauges gauges(sampler);
//   ...  // the training loop as it was
//   std::cout << gauges.summary() << '\n';
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torch_sgmcmc/export.h"
#include "torch_sgmcmc/sampler.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

struct GaugesOptions {
  /// Steps between observations, each of which costs about as much as an
  /// update; of SBPS, steps of about one window.
  TORCH_ARG(int64_t, every) = 20;
  /// c, a tensor for each parameter in the order of the groups, in their
  /// shapes; empty for 0.
  TORCH_ARG(std::vector<at::Tensor>, centers);
  /// The parameters' names, for tables; empty for group, place and shape.
  TORCH_ARG(std::vector<std::string>, names);
};

/// Temperatures of a chain, by tensor.
///
/// With d the elements of a tensor, N num_data, m the momentum and g the
/// gradient that a step uses (prior included), means over steps of
///
///   T_conf = N (θ - c)·g / d,
///   T_kin = N (1 + m) ‖v‖² / (2 lr d), or (SGLD) T + lr N ‖g‖² / (2 d).
///
/// In equilibrium both are equal, for any potential, step size and minibatch
/// noise; T_kin / T - 1 is the heating by minibatches and by the step's length.
/// HMC is observed by whole trajectories (host/trajectory_heat.h), SBPS by
/// windows of trajectory time (host/flight_heat.h). Numbers, words and state
/// dict are those of Python's Gauges, where more is said.
///
/// They follow a sampler that is moved. When it is destroyed they are detached;
/// what was read stays.
class TORCH_SGMCMC_API Gauges {
 public:
  /// A mean over the observed steps and half the width of its 95 % interval.
  struct Reading {
    double mean;
    double half_width;
  };
  struct Temperatures {
    Reading kinetic;
    Reading configurational;
    /// T_conf - T_kin.
    Reading excess;
    /// What the minibatches' noise adds; NaN where that is not known.
    Reading minibatch_heating;
    /// T_conf by the gradients that were used, less T_conf by those of
    /// observe(): 0 if the former are unbiased.
    Reading gradient_bias;
    /// The part of coordinates whose step was clipped: SGLRW, else NaN.
    Reading clipped;
  };
  struct Finding {
    int64_t tensor;
    /// "hot", "cold", "not in equilibrium" or "biased gradient".
    std::string fault;
    /// A part of T.
    double size;
  };

  /// Observes a sampler from its next step on. Throws std::invalid_argument if
  /// it is capturable or observed already, or an option is not as it should be.
  explicit Gauges(Sampler& sampler, const GaugesOptions& options = {});
  ~Gauges();
  Gauges(const Gauges&) = delete;
  Gauges(Gauges&&) = delete;
  Gauges& operator=(const Gauges&) = delete;
  Gauges& operator=(Gauges&&) = delete;

  /// Ends the observation; what was read stays.
  void detach();
  /// Forgets what was observed, as after a burn-in.
  void reset();

  /// Observes where the chain is, by a gradient that is right: the closure
  /// computes the mean loss of a minibatch drawn uniformly, or of all data, and
  /// calls backward(). For SBPS and EWSG: T_conf beside T. For the others,
  /// before a step: whether its gradients are those of the loss, see
  /// gradient_bias. Gradients are as before when it ends.
  void observe(const torch::optim::Optimizer::LossClosure& closure);

  int64_t num_observed() const;
  Temperatures tensor(int64_t index) const;
  /// Means over a group's coordinates, and over all.
  Temperatures group(int64_t index) const;
  Temperatures all() const;

  /// What is wrong, worst first: heating beyond `budget`, a part of T, what is
  /// not in equilibrium, and biased gradients. `rate` is the probability that a
  /// chain without fault is blamed for anything.
  std::vector<Finding> findings(double budget = 0.05, double rate = 0.01) const;
  /// That in words, with the way out.
  std::string summary(double budget = 0.05, double rate = 0.01) const;

  StateDict state_dict() const;
  /// Throws std::invalid_argument if it is not of these parameters; nothing is
  /// loaded then.
  void load_state_dict(const StateDict& dict);

 private:
  struct Observer;
  std::unique_ptr<Observer> observer_;
};

}  // namespace torch_sgmcmc
