// Predicts a rate along a straight line from noisy observations.
//
// The model is G = b0 + b1 t + N(0, c^2), with a flat prior on b0 and N(m, s^2)
// on b1 (Pakman et al. 2017, eq. 9 to 12). Around the weighted mean time b0 and
// b1 are independent given the data:
//
//   E G(t)   = mean + slope (t - centre)
//   rho^2(t) = 1 / sum(1 / c^2) + (t - centre)^2 / (precision of the slope)
//              + c_last^2 + d^2 (t - t_last)^2
//
// The last term is not the paper's. It is 0 for a linear G, and else widens the
// band, as slopes change (Note [Prior of the slope]).
//
// A local regression multiplies 1 / c^2 by exp(-observation_decay sqrt(b)
// (t_last - t)), b = |m| + s the scale of slopes, 1 / sqrt(b) the standard
// deviation of a Gaussian of such a slope. The paper leaves the decay open.
#pragma once

#include <cstddef>
#include <vector>

namespace torch_sgmcmc {

struct Observation {
  double time;      // since the line began
  double value;     // G, the observed rate of change of U / T
  double variance;  // c^2, of the observation
};

// Note [Prior of the slope]
// After every line m and s^2 make an EM step of the line's marginal likelihood:
//   m   += w (E[b1 | data] - m)                     = w s^2 d/dm
//   s^2 += w (E[(b1 - m)^2 | data] - s^2)           = 2 w s^4 d/ds^2
// with w = max(1 / lines, kForget), so that slopes of the burn-in lose their
// weight. On the first line s is the square of the largest observed rate, at
// least the scale of the curvature. d^2 is the excess of squared prediction
// errors over the expected ones, per squared time since the last observation,
// as a ratio of running means.
struct SlopePrior {
  double mean = 0;
  double variance = 0;
  double lines = 0;         // learned from
  double error_excess = 0;  // of squared errors of prediction
  double error_time = 0;    // squared times that they are over

  static constexpr double kForget = 0.02;

  // d^2.
  double curvature() const {
    return error_time > 0 && error_excess > 0 ? error_excess / error_time : 0;
  }
};

// The regression's present fit.
struct LineFit {
  double centre;
  double mean;
  double slope;
  double base_variance;   // of the mean, and c_last^2
  double slope_variance;  // 1 / (precision of the slope)
  double curvature;       // d^2
  double last;            // time of the last observation

  double Mean(double time) const { return mean + slope * (time - centre); }
  // rho^2.
  double Variance(double time) const;
};

class LineRegression {
 public:
  // The number of latest observations that are used.
  static constexpr size_t kHistory = 32;

  double observation_decay() const { return observation_decay_; }
  void set_observation_decay(double observation_decay) {
    observation_decay_ = observation_decay;
  }

  bool empty() const { return history_.empty(); }
  double last_time() const { return history_.back().time; }
  const std::vector<Observation>& history() const { return history_; }
  const SlopePrior& prior() const { return prior_; }

  // Adds an observation, and updates d^2 by its prediction error.
  void Add(const Observation& observation);

  // Starts another line, and updates the prior by the last slope.
  void Restart();

  // Needs an observation.
  LineFit Fit() const;

  LineRegression() = default;
  LineRegression(std::vector<Observation> history, const SlopePrior& prior);

 private:
  struct Sums;
  Sums Weigh() const;

  std::vector<Observation> history_;
  SlopePrior prior_;
  double observation_decay_ = 0;
};

}  // namespace torch_sgmcmc
