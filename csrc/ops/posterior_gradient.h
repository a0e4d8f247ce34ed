// The gradient of U / N in updates, shared by CPU and CUDA, grad the mean
// loss's:
//
//   g = grad + (lambda / N) (theta - mu).
#pragma once

#include <cstdint>

#include "random/arithmetic.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// Coefficients from numbers by name: number("lr") of a NamedCall
// (launch/call.h).
struct PriorCoefficients {
  template <class Call>
  explicit PriorCoefficients(const Call& number)
      : weight_decay(number("prior_precision") / number("num_data")),
        prior_mean(number("prior_mean")) {}

  double weight_decay;  // lambda / N
  double prior_mean;    // mu, where there is no array of it
};

// An update by this gradient, at every step.
template <class Real>
class PosteriorGradient {
 public:
  // From coefficients with a prior's.
  template <class Coefficients>
  explicit PosteriorGradient(const Coefficients& c)
      : weight_decay_(static_cast<Real>(c.weight_decay)),
        prior_mean_(static_cast<Real>(c.prior_mean)) {}

  SG_HOST_DEVICE bool skips(uint64_t /*step*/) const { return false; }
  SG_HOST_DEVICE Real prior_mean() const { return prior_mean_; }

 protected:
  SG_INLINE Real Gradient(Real theta, Real mean, Real grad) const {
    return Fma(weight_decay_, theta - mean, grad);
  }

 private:
  Real weight_decay_;
  Real prior_mean_;
};

}  // namespace torch_sgmcmc
