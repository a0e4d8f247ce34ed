// What momenta and noise estimates become when lr, T or N change.
//
// A momentum is the move of a step, v = sqrt(lr / N) r with r the momentum of
// unit mass: in equilibrium Var(v) = lr T / N. Momenta of other settings are
// multiplied by the change of that scale. So is the part of the friction that
// balances minibatch noise, beta = lr N Var(grad) / (2 T).
#pragma once

#include <cmath>
#include <optional>

namespace torch_sgmcmc {

// The numbers of a param group that the scale of a momentum depends on.
struct MomentumSettings {
  friend bool operator==(const MomentumSettings&,
                         const MomentumSettings&) = default;

  double lr = 0;
  double temperature = 0;
  double num_data = 1;
};

// The factor for momenta; none where they are to be drawn, as there was no
// temperature, or one of the scales underflows. Both lr are positive.
inline std::optional<double> MomentumScale(const MomentumSettings& from,
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
  if (!(scale > 0) || !std::isfinite(scale)) return std::nullopt;
  return scale;
}

// The factor for beta, which has no meaning at T = 0: it then follows lr and N.
inline double NoiseEstimateScale(const MomentumSettings& from,
                                 const MomentumSettings& to) {
  const double scale = to.lr / from.lr * (to.num_data / from.num_data);
  const bool is_thermal = from.temperature > 0 && to.temperature > 0;
  return is_thermal ? scale * (from.temperature / to.temperature) : scale;
}

}  // namespace torch_sgmcmc
