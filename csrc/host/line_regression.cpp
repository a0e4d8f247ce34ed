#include "host/line_regression.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace torch_sgmcmc {
namespace {

// The smallest standard deviation of an observation, as a part of the largest
// rate: exact gradients are rounded, too.
constexpr double kFloor = 1e-3;
constexpr double kSmallest = std::numeric_limits<double>::min();
constexpr double kLargest = std::numeric_limits<double>::max();

}  // namespace

// Weighted sums around the weighted mean time.
struct LineRegression::Sums {
  double weight = 0;      // sum w
  double centre = 0;      // sum w t / sum w
  double mean = 0;        // sum w G / sum w
  double square = 0;      // sum w (t - centre)^2
  double product = 0;     // sum w (t - centre) (G - mean)
  double prior_mean = 0;  // of the slope
  double prior_precision = 0;
  double last_variance = 0;

  double precision() const { return square + prior_precision; }
  double slope() const {
    return (product + prior_precision * prior_mean) / precision();
  }
};

double LineFit::Variance(double time) const {
  const double from_centre = time - centre;
  const double from_last = time - last;
  return base_variance + slope_variance * from_centre * from_centre +
         curvature * from_last * from_last;
}

LineRegression::LineRegression(std::vector<Observation> history,
                               const SlopePrior& prior)
    : history_(std::move(history)), prior_(prior) {}

LineRegression::Sums LineRegression::Weigh() const {
  double largest = 0;
  double curvature = 0;
  for (const Observation& o : history_) {
    largest = std::max(largest, std::abs(o.value));
    curvature = std::max(curvature, o.value * o.value + o.variance);
  }
  const double floor = std::max(kSmallest, kFloor * kFloor * largest * largest);
  const bool is_first = prior_.lines == 0;
  const double slope =
      is_first ? curvature : std::abs(prior_.mean) + std::sqrt(prior_.variance);
  // Finite, so that the last observation has a weight.
  const double decay =
      std::min(kLargest, observation_decay_ * std::sqrt(slope));
  const auto weight = [&](const Observation& o) {
    return std::exp(-decay * (last_time() - o.time)) / (o.variance + floor);
  };
  Sums s;
  for (const Observation& o : history_) {
    const double w = weight(o);
    s.weight += w;
    s.centre += w * o.time;
    s.mean += w * o.value;
  }
  s.centre /= s.weight;
  s.mean /= s.weight;
  for (const Observation& o : history_) {
    const double w = weight(o);
    s.square += w * (o.time - s.centre) * (o.time - s.centre);
    s.product += w * (o.time - s.centre) * (o.value - s.mean);
  }
  s.last_variance = history_.back().variance + floor;
  const double variance = is_first ? curvature * curvature : prior_.variance;
  s.prior_mean = prior_.mean;
  s.prior_precision = 1 / std::max(kSmallest, variance);
  return s;
}

LineFit LineRegression::Fit() const {
  const Sums s = Weigh();
  return {s.centre,          s.mean,
          s.slope(),         1 / s.weight + s.last_variance,
          1 / s.precision(), prior_.curvature(),
          last_time()};
}

void LineRegression::Add(const Observation& observation) {
  if (history_.size() > 1 && observation.time > last_time()) {
    const LineFit fit = Fit();
    const double time = observation.time - last_time();
    const double error = observation.value - fit.Mean(observation.time);
    const double expected = fit.Variance(observation.time) -
                            fit.curvature * time * time -
                            history_.back().variance + observation.variance;
    constexpr double kKeep = 1 - SlopePrior::kForget;
    prior_.error_excess =
        kKeep * prior_.error_excess + (error * error - expected);
    prior_.error_time = kKeep * prior_.error_time + time * time;
  }
  if (history_.size() == kHistory) history_.erase(history_.begin());
  history_.push_back(observation);
}

void LineRegression::Restart() {
  if (history_.size() > 1) {
    const Sums s = Weigh();
    if (s.square > 0) {
      const double slope = s.slope();
      if (prior_.lines == 0) {
        // One slope does not determine the spread.
        prior_.mean = slope;
        prior_.variance = 1 / s.precision() + slope * slope;
      } else {
        const double w = std::max(SlopePrior::kForget, 1 / (prior_.lines + 1));
        const double step = slope - prior_.mean;
        const double spread = 1 / s.precision() + step * step;
        prior_.variance += w * (spread - prior_.variance);
        prior_.mean += w * step;
      }
      prior_.lines += 1;
    }
  }
  history_.clear();
}

}  // namespace torch_sgmcmc
