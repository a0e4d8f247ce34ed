// How much each leapfrog step of a trajectory counts in HMC's temperatures.
//
// Note [Heat of a trajectory]
// With the Metropolis test a state is distributed like exp(-H / T) where a
// trajectory starts and where it is decided on. So, in equilibrium, x . grad U
// at the start has mean T d, and r M^-1 r of the momentum that is kept, at the
// end or turned round, too.
//
// Without the test nothing is exact, and as for the other samplers it is
// E|x|^2_M that does not change. Let x_j, g_j = grad U there, and r_j be at the
// start of leapfrog step j of m, h_j its momentum between the kicks, and c_j =
// x_j . r_j. A step makes
//   c_{j+1} = c_j - eps/2 x_j.g_j + eps h_j M^-1 h_j - eps/2 x_{j+1}.g_{j+1},
//   |x_{j+1}|^2_M = |x_j|^2_M + 2 eps c_j - eps^2 x_j.g_j + eps^2 h_j M^-1 h_j.
// Summed over the trajectory, E|x_m|^2_M = E|x_0|^2_M says
//   2 m / eps E[c_0] + sum_j (2 (m - j) - 1) E[h_j M^-1 h_j]
//     = m E[x_0 . g_0] + sum_{j >= 1} 2 (m - j) E[x_j . g_j],
// with m^2 as the sum of the weights on either side; both are divided by m^2 d.
// E[c_0] = 0 if the momentum is drawn afresh. Again neither the potential, nor
// eps, nor minibatches' noise matter, as long as the two half kicks between
// two steps have one gradient.
//
// HMC-ECS is as HMC with the test, with the estimate of U for its subsample u:
// the joint density of theta and u is sampled, and for each u its conditional
// has the identity, without signs as with them as weights. Its momenta are
// standard normal along whitened coordinates, so T |r|^2 stands for them.
#pragma once

#include <cstdint>

namespace torch_sgmcmc {

struct HeatWeights {
  double force;  // of x . grad U at the step's start
  double heat;   // of h M^-1 h
  double turn;   // of x . r at the step's start
};

// Of leapfrog step `index` of `count`; `redrawn`: the momentum was.
inline HeatWeights HeatWeightsOf(int64_t index,
                                 int64_t count,
                                 double step_size,
                                 bool redrawn) {
  const auto m = static_cast<double>(count);
  const double left = m - static_cast<double>(index);
  const bool first = index == 0;
  return {(first ? 1 : 2) * left / (m * m),
          (2 * left - 1) / (m * m),
          first && !redrawn ? 2 / (step_size * m) : 0};
}

}  // namespace torch_sgmcmc
