// Finds the step size at which Hamiltonian trajectories are accepted with a
// given probability: Nesterov's dual averaging, section 3.2 of M. D. Hoffman
// and A. Gelman, The No-U-Turn Sampler, JMLR 2014.
//
// After trajectory t, accepted with probability a_t,
//   h_t       = (1 - 1 / (t + t0)) h_{t-1} + (target - a_t) / (t + t0),
//   log e_t   = mu - sqrt(t) / gamma h_t,
//   log avg_t = t^-kappa log e_t + (1 - t^-kappa) log avg_{t-1},
// with mu = log(10 e_0), gamma = 0.05, t0 = 10 and kappa = 0.75. The next
// trajectory has the size e_t; what is kept when adaptation ends is avg_t.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_sgmcmc {

class DualAveraging {
 public:
  // All there is to know: target, mu, t, h, log e, log avg.
  using State = std::vector<double>;

  // Throws std::invalid_argument unless the step size is finite and positive
  // and the target is in (0, 1).
  DualAveraging(double step_size, double target);

  // Continues from a state. Throws std::invalid_argument if it is none.
  explicit DualAveraging(State state);

  // Takes in the acceptance probability of a trajectory, in [0, 1] (throws
  // std::invalid_argument otherwise), and returns the size of the next one's
  // steps.
  double Update(double acceptance);

  double target() const { return state_[0]; }
  int64_t count() const { return static_cast<int64_t>(state_[2]); }
  // The size to try next, and the average to keep. Never 0 nor infinite.
  double step_size() const;
  double averaged() const;
  const State& state() const { return state_; }

 private:
  State state_;
};

}  // namespace torch_sgmcmc
