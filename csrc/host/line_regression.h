// What noisy observations of a rate along a straight line say of its future.
//
// Observations (t, G, c^2) are taken for G = b0 + b1 t + N(0, c^2), with a flat
// prior on b0 and N(m, s^2) on b1 (Pakman et al. 2017, eq. 9 to 12). Around the
// weighted mean time the two are independent given the data:
//
//   E G(t)   = mean + slope (t - centre)
//   rho^2(t) = 1 / sum(1 / c^2) + (t - centre)^2 / (precision of the slope)
//              + c_last^2 + d^2 (t - t_last)^2
//
// The last term is ours. It is 0 where G is linear, and where it is not, keeps
// the band open when the regression is sure of a slope that soon is another
// (see Note [Prior of the slope]).
//
// The regression is local, if it is to be, by weights that decay: 1 / c^2 is
// multiplied by exp(-observation_decay sqrt(b) (t_last - t)). The paper leaves
// open how they do. Here it is by the time that was flown since, and
// observation_decay has no unit: b is the scale of slopes that were seen, |m| +
// s, and 1 / sqrt(b) the standard deviation of a Gaussian of such a slope.
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
// After every line m and s^2 make a step up the logarithm of the marginal
// likelihood of the line's observations, in the metric of the EM algorithm:
//   m   += w (E[b1 | data] - m)                     = w s^2 d/dm
//   s^2 += w (E[(b1 - m)^2 | data] - s^2)           = 2 w s^4 d/ds^2
// which needs no step size: w = 1 / lines, and kForget at least, so that the
// slopes of the way to the posterior are forgotten. Before the first line has
// ended, s is the square of the largest rate seen: that is the scale of the
// curvature, wherever the rate itself is of the order of its root, and larger
// elsewhere. d^2 is the excess of the squared errors of prediction over what
// the regression expects, per squared time since the observation before, as a
// ratio of running means.
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

// The regression at one moment: all that is needed to predict.
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
  // More observations than this push out the oldest: the line is fitted to
  // where the particle is now.
  static constexpr size_t kHistory = 32;

  // Of the weights, >= 0; with 0 they do not decay.
  double observation_decay() const { return observation_decay_; }
  void set_observation_decay(double observation_decay) {
    observation_decay_ = observation_decay;
  }

  bool empty() const { return history_.empty(); }
  double last_time() const { return history_.back().time; }
  const std::vector<Observation>& history() const { return history_; }
  const SlopePrior& prior() const { return prior_; }

  // Takes an observation, and learns from the error of its prediction.
  void Add(const Observation& observation);

  // Forgets the line, and learns from its slope.
  void Restart();

  // Needs an observation.
  LineFit Fit() const;

  // For who saves and loads.
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
