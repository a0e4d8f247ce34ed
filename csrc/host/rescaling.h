// The rescaling of momenta and noise estimates when lr, T or N change: in
// equilibrium Var(v) = lr T / N, and beta = lr N Var(grad) / (2 T).
#pragma once

#include <cmath>
#include <limits>
#include <optional>

namespace torch_sgmcmc {

struct MomentumSettings {
  friend bool operator==(const MomentumSettings&,
                         const MomentumSettings&) = default;

  double lr = 0;
  double temperature = 0;
  double num_data = 1;
};

// The factor for momenta of type Real; none if they are to be drawn: after T =
// 0, or if the factor is not a normal number. Both lr are positive.
template <class Real>
std::optional<double> MomentumScale(const MomentumSettings& from,
                                    const MomentumSettings& to) {
  double scale = to.lr / from.lr;  // as in SGD, whose buffer is -v / lr
  if (from.temperature == 0) {
    if (to.temperature > 0) return std::nullopt;
  } else if (to.temperature == 0) {
    scale = std::sqrt(scale);
  } else {
    const double before = from.lr * from.temperature / from.num_data;
    const double after = to.lr * to.temperature / to.num_data;
    scale = std::sqrt(after / before);
  }
  using Limits = std::numeric_limits<Real>;
  const bool is_normal = scale >= Limits::min() && scale <= Limits::max();
  return is_normal ? std::optional(scale) : std::nullopt;
}

// The factor for beta; at T = 0 that of lr and N.
inline double NoiseEstimateScale(const MomentumSettings& from,
                                 const MomentumSettings& to) {
  const double scale = to.lr / from.lr * (to.num_data / from.num_data);
  const bool is_thermal = from.temperature > 0 && to.temperature > 0;
  return is_thermal ? scale * (from.temperature / to.temperature) : scale;
}

}  // namespace torch_sgmcmc
