// What the gauges sum over a tensor before an update, shared by CPU and CUDA.
//
// With x = theta - center, g = grad + (lambda / N) (theta - mu), and the
// gradient of the step before:
//   kLangevin, kPreconditioned    x . g,  sum w g^2
//   kMomentum                     x . g,  v . v,  x . v
//   kThermostat                   x . g,  v . v,  sum x s v
//   kNoise, kPreconditionedNoise  sum w (grad - grad before)^2 / 2
// w = 1 / (sqrt(V) + eps) with V as the update will have it, else 1; s what a
// thermostat has learnt. Temperatures are made of them in host/gauges.h. A list
// that is not there is replaced by another one, which is not looked at.
#pragma once

#include <math.h>

#include <array>
#include <cstddef>

#include "core/macros.h"
#include "core/roles.h"

namespace torch_sgmcmc {

enum class GaugeKind {
  kLangevin,
  kPreconditioned,
  kMomentum,
  kThermostat,
  kNoise,
  kPreconditionedNoise
};

constexpr size_t CountOf(GaugeKind kind) {
  if (kind == GaugeKind::kMomentum || kind == GaugeKind::kThermostat) return 3;
  return kind < GaugeKind::kMomentum ? 2 : 1;
}

struct GaugeNumbers {
  double weight_decay;
  double center_scale;  // 0 without centers
  double decay;         // of V
  double eps;
  double prior_mean;  // mu, where there is no array of it
};

// Arrays: grad, theta, center, v or the gradient before, V or s, mu.
template <GaugeKind kKind>
class GaugeTerms {
 public:
  static constexpr bool kOfNoise = CountOf(kKind) == 1;
  static constexpr bool kWeighted = kKind == GaugeKind::kPreconditioned ||
                                    kKind == GaugeKind::kPreconditionedNoise;
  static constexpr std::array<Role, 6> kRoles = {
      Role::kGradient,
      Role::kStatistic,
      Role::kStatistic,
      kOfNoise ? Role::kGradient : Role::kStatistic,
      Role::kStatistic,
      Role::kPriorMean};
  static constexpr std::array<bool, 6> kReads = {
      true,
      !kOfNoise,
      !kOfNoise,
      CountOf(kKind) != 2,
      kWeighted || kKind == GaugeKind::kThermostat,
      !kOfNoise};

  explicit GaugeTerms(const GaugeNumbers& numbers) : n_(numbers) {}

  SG_INLINE double prior_mean() const { return n_.prior_mean; }

  SG_INLINE std::array<double, CountOf(kKind)> operator()(
      const double (&x)[6]) const {
    double weight = 1;
    if constexpr (kWeighted) {
      weight =
          1 / (sqrt(n_.decay * x[4] + (1 - n_.decay) * x[0] * x[0]) + n_.eps);
    }
    if constexpr (kOfNoise) {
      const double change = x[0] - x[3];
      return {0.5 * weight * change * change};
    } else {
      const double g = x[0] + n_.weight_decay * (x[1] - x[5]);
      const double position = x[1] - n_.center_scale * x[2];
      if constexpr (CountOf(kKind) == 2) {
        return {position * g, weight * g * g};
      } else if constexpr (kKind == GaugeKind::kMomentum) {
        return {position * g, x[3] * x[3], position * x[3]};
      } else {
        return {position * g, x[3] * x[3], position * (x[4] * x[3])};
      }
    }
  }
  SG_INLINE static double Finish(double sum) { return sum; }

 private:
  GaugeNumbers n_;
};

}  // namespace torch_sgmcmc
