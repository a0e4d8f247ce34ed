// Averages over the continuous trajectory of a bouncy particle.
//
//   torch_sgmcmc::TimeAverage average(sampler);
//   for (int i = 0; i < steps; ++i) sampler.step(closure);
//   average.mean(param), average.variance(param)
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "torch_sgmcmc/export.h"
#include "torch_sgmcmc/sbps.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

/// The exact time averages of the parameters and of their squares,
///
///   (1/τ) ∫ θ(t) dt,  (1/τ) ∫ θ(t)² dt,
///
/// over every step of an SBPS from its construction on, also if it is moved.
/// Numbers and state dict are those
/// of Python's TimeAverage without a function.
///
/// Reference: A. Pakman, D. Gilboa, D. Carlson and L. Paninski, Stochastic
/// Bouncy Particle Sampler, ICML 2017, eq. 19.
class TORCH_SGMCMC_API TimeAverage {
 public:
  explicit TimeAverage(SBPS& sampler);
  ~TimeAverage();
  TimeAverage(const TimeAverage&) = delete;
  TimeAverage(TimeAverage&&) = delete;
  TimeAverage& operator=(const TimeAverage&) = delete;
  TimeAverage& operator=(TimeAverage&&) = delete;

  /// Stops following; what has been averaged stays.
  void remove();

  /// Trajectory time that has been averaged over.
  double time() const { return time_; }

  /// Time averages of a parameter, in float64. Throw std::invalid_argument if
  /// it has not moved.
  at::Tensor mean(const at::Tensor& param) const;
  at::Tensor mean_square(const at::Tensor& param) const;
  /// mean_square less the square of mean.
  at::Tensor variance(const at::Tensor& param) const;

  /// The averages so far; tensors are shared, not copied.
  StateDict state_dict() const;
  /// Continues the averages of another run. Throws std::invalid_argument if
  /// they are not of these parameters; nothing is loaded then.
  void load_state_dict(const StateDict& dict);

 private:
  struct Moments {
    at::Tensor mean;
    at::Tensor square;
  };
  void follow(const Flight& flight, double begin, double end);
  const Moments& of(const at::Tensor& param) const;
  std::vector<at::Tensor> params() const;

  SamplerRef sampler_;
  bool follows_ = true;
  int64_t hook_;
  double time_ = 0;
  std::unordered_map<const void*, Moments> moments_;
};

}  // namespace torch_sgmcmc
