// The gradient of U / N in updates, shared by CPU and CUDA, grad the mean
// loss's:
//
//   g = grad + (lambda / N) (theta - mu).
#pragma once

#include <string>

#include "random/arithmetic.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// lambda / N, from numbers by name: number("lr") of a NamedCall
// (launch/call.h).
double WeightDecay(const auto& number) {
  return number("prior_precision") / number("num_data");
}

// lr T / N.
double ScaledTemperature(const auto& number) {
  return number("lr") * number("temperature") / number("num_data");
}

// A message if a noise estimate exceeds the friction, which is `what`.
std::string RefusalOfEstimate(const auto& number, double friction,
                              const char* what) {
  const double estimate = number("noise_estimate");
  // momentum 0.9 and noise_estimate 0.1 add up to 1 only after rounding.
  if (estimate <= friction + 1e-12) return "";
  return "Invalid noise_estimate: " + std::to_string(estimate) +
         " (must not exceed the friction " + what + " = " +
         std::to_string(friction) + ")";
}

// An update by this gradient.
template <class Real>
class PosteriorGradient {
 public:
  PosteriorGradient(double weight_decay, double prior_mean)
      : weight_decay_(static_cast<Real>(weight_decay)),
        prior_mean_(static_cast<Real>(prior_mean)) {}
  explicit PosteriorGradient(const auto& number)
      : PosteriorGradient(WeightDecay(number), number("prior_mean")) {}

  SG_HOST_DEVICE Real prior_mean() const { return prior_mean_; }

 protected:
  SG_INLINE Real Gradient(Real theta, Real mean, Real grad) const {
    return Fma(weight_decay_, theta - mean, grad);
  }

 private:
  Real weight_decay_;
  Real prior_mean_;  // mu, where there is no array of it
};

}  // namespace torch_sgmcmc
