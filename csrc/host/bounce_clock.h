// The clock of SBPS's particle: observations, bounces, refreshments.
//
// From the observations on a line the clock proposes the time of the next
// bounce: the first arrival of a Poisson process whose rate is the upper end of
// the regression's prediction band (Pakman et al. 2017, section 4).
// Refreshments compete with it. Without an observation, or without an arrival
// within the horizon of the regression, the particle only observes. On the
// first line it observes nearby, then at most twice as far each time.
//
// A step uses two quads of the purpose kBounceClock (Note [Counter layout]).
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/line_regression.h"
#include "random/counter.h"

namespace torch_sgmcmc {

// A Poisson process whose rate is the positive part of a polygon.
//
// The rate is [y(t)]+ with y linear between nodes. The first arrival is where
// its integral, a piecewise quadratic, reaches a unit exponential variable.
// Numbers are relative to a piece's height and length, so that no scale
// overflows.
class PiecewiseRate {
 public:
  // Appends a node. Times must not decrease.
  void Add(double time, double value);

  struct Arrival {
    bool found;    // false if the rate ends before
    double time;   // else the time of the last node
    double value;  // y there
  };
  // The time at which the integral from the first node on reaches `area`.
  Arrival Find(double area) const;

  // The integral of the rate from the first node to `time`.
  double Integral(double time) const;

  double Value(double time) const;

 private:
  std::vector<double> times_;
  std::vector<double> values_;
};

// Values are known to Python.
enum class ClockEvent : int { kObserve = 0, kProposal = 1, kRefreshment = 2 };

struct NextEvent {
  ClockEvent event;
  double wait;  // trajectory time until then
  double rate;  // of proposals at that time; 0 except for a proposal
};

class BounceClock {
 public:
  // The next event. `num_std` is the half width k of the band.
  NextEvent Next(double num_std, double refresh_rate,
                 const NoiseStream& stream) const;

  // True, with probability min(1, [value]+ / rate), for a bounce at G = value.
  static bool Accepts(double rate, double value, const NoiseStream& stream);

  // An observation after `wait`, without a bounce.
  void Observe(double wait, double value, double variance);

  // An observation and a bounce; `reflected` is G along the new velocity.
  void Bounce(double wait, double value, double variance, double reflected);

  // The result of a step at its event; it bounced if there is a `reflected`. At
  // a refreshment the observation is of the new line.
  void Take(ClockEvent event, double wait, double value, double variance,
            const std::optional<double>& reflected);

  // A new line: another velocity, place or target.
  void Restart();

  // The rate of proposals up to the horizon. Needs an observation.
  PiecewiseRate Rate(double num_std) const;

  double now() const { return now_; }
  const LineRegression& regression() const { return regression_; }

  // A warning if far more proposals violate the band than expected, else empty.
  static std::string Warning(int64_t proposals, int64_t violations,
                             double num_std);

  // The decay of observations (host/line_regression.h), which is not saved.
  double observation_decay() const { return regression_.observation_decay(); }
  void set_observation_decay(double observation_decay) {
    regression_.set_observation_decay(observation_decay);
  }

  // The clock's state as numbers. Load throws std::invalid_argument.
  std::vector<double> Save() const;
  static BounceClock Load(const std::vector<double>& saved);

 private:
  double now_ = 0;
  double blind_ = kBlind;
  LineRegression regression_;

  // The first horizon while all observations are 0; doubled at each.
  static constexpr double kBlind = 0x1p-10;
};

// ---- The observed rate ------------------------------------------------------

// The moments of a minibatch's losses and derivatives.
struct Moments {
  int64_t bad;     // losses that are not finite
  int64_t count;   // of examples
  double mean;     // of the derivatives
  double squares;  // the sum of the squares of their distances from it
};

// Of `count` >= 2 losses and derivatives.
template <class T>
Moments MomentsOf(const T* losses, const T* derivatives, int64_t count) {
  Moments m{0, count, 0, 0};
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(losses[i])) ++m.bad;
    m.mean += static_cast<double>(derivatives[i]);
  }
  m.mean /= static_cast<double>(count);
  for (int64_t i = 0; i < count; ++i) {
    const double from_mean = static_cast<double>(derivatives[i]) - m.mean;
    m.squares += from_mean * from_mean;
  }
  return m;
}

struct RateEstimate {
  double value;     // G
  double variance;  // c^2

  bool finite() const {
    return std::isfinite(value) && std::isfinite(variance);
  }
};

// The rate of change of U / T along a line, from the moments and the prior's
// part of the derivative of U. Draws without replacement have less variance.
inline RateEstimate RateOf(const Moments& m, double num_data,
                           double temperature, bool replacement, double prior) {
  const auto n = static_cast<double>(m.count);
  const double variance = m.squares / static_cast<double>(m.count - 1);
  const double scale = num_data / temperature;
  const double correction = replacement ? 1 : 1 - n / num_data;
  return {scale * m.mean + prior / temperature,
          variance * correction * (scale * scale / n)};
}

// The number of multiples k * interval <= time, k >= 1. Compares products, the
// times of samples, since a rounded quotient may be off by one.
inline int64_t SamplesBy(double time, double interval) {
  const double quotient = std::floor(time / interval);
  if (quotient >= 0x1p53) return int64_t{1} << 53;  // nearer than times can be
  const auto count = static_cast<int64_t>(quotient);
  if (static_cast<double>(count) * interval > time) return count - 1;
  const bool more = static_cast<double>(count + 1) * interval <= time;
  return count + static_cast<int64_t>(more);
}

}  // namespace torch_sgmcmc
