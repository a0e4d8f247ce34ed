// What SBPS's temperatures are summed from: its flight, by windows of time.
//
// Note [Heat of a flight]
// In whitened coordinates y = A^-1 (theta - c) of D parameters the particle
// moves along v, |v| = 1, and bounces at the rate E[v . h]+ with h = A g, g the
// stochastic gradient of U / T. Under the target, v is uniform on the sphere
// and knows nothing of theta, so that for the d_k coordinates of a tensor
//   E|v_k|^2 = d_k / D,
//   E[[v . h]+ (y_k . v_k)] = E[y_k . h_k] / (2 D) = E[x_k . g_k] / (2 D),
// as the half of the sphere on which v . h > 0 gives half of the second moments
// of v. Proposals of bounces come at a rate that is known, each with its own
// v . h; a sum over them of f / rate is an integral of f over time wherever
// the rate is not 0. So a flight of the length t has
//   T_kin = (T D / d_k) integral |v_k|^2 / t,
//   T_conf = (2 T D / d_k) (sum over proposals ([v . h]+ / rate) (y_k . v_k)
//                           - c integral y_k . v_k) / t,
// at no cost but two sums: both are T in equilibrium, for any noise of the
// minibatches. (T_kin of all is T always: the speed is one.) The integral is 0
// in the mean, since E|y_k|^2 does not change; with c = E[v . h]+, the mean of
// what was seen before, it takes off most of what minibatches add to the error.
// A bounce is lost where v . h exceeds the rate. It is in this T_conf
// nevertheless, which therefore shows what the loss does: the particle flies
// out too far, and T_conf > T.
//
// Temperatures are means over windows of one length: a mean over events would
// count a place by how often something happens there.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_sgmcmc {

// What a step of SBPS came to.
struct FlightPiece {
  double until;  // its end, since the line began
  double wait;   // trajectory time that was flown
  double rate;   // of proposals, 0 if none was made at the end
  double value;  // v . h there
};

// Of one window, by tensor: D / t integral |v_k|^2, and 2 D / t times what
// T_conf has in brackets.
struct FlightWindow {
  std::vector<double> heat;
  std::vector<double> force;
};

class FlightHeat {
 public:
  // A wait of more windows than that makes windows longer.
  static constexpr double kMostWindows = 64;

  // Takes in a piece of a line with |v_k|^2 along it and y_k . v_k where it
  // begins, NaN for tensors that do not move; returns the windows that ended. A
  // window is as long as the first `steps` pieces were, which choose that
  // length and are not in it.
  std::vector<FlightWindow> Fly(const FlightPiece& piece,
                                const std::vector<double>& squares,
                                const std::vector<double>& products,
                                const std::vector<int64_t>& numels,
                                int64_t steps);

  // Empty before the first piece.
  std::vector<double> State() const;
  // Throws std::invalid_argument if it is none of so many tensors.
  void SetState(const std::vector<double>& state, size_t tensors);

 private:
  double length_ = 0;  // of a window
  double elapsed_ = 0;
  int64_t steps_ = 0;  // that have chosen the length
  bool is_chosen_ = false;
  double flown_ = 0;    // in all
  double bounces_ = 0;  // of which so many were to be expected
  FlightWindow sums_;   // of the window that has not ended, not yet divided
};

}  // namespace torch_sgmcmc
