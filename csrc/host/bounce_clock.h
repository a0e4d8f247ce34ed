// The clock of SBPS's particle: observations, bounces, refreshments.
//
// From the observations on its straight line the clock proposes the next time
// of a bounce: the first arrival of a Poisson process whose rate is the upper
// end of the band in which the regression predicts the next observation
// (Pakman et al. 2017, section 4). Refreshments of the velocity compete with
// it. Where the clock has no observation yet, and where nothing arrives within
// the horizon that the regression can be trusted for, the particle
// observes, and cannot bounce. Before it knows the slope of any line, it
// observes nearby, and then at most twice as far each time.
//
// All randomness is a function of (seed, step): two quads of the purpose
// kBounceClock a step (Note [Counter layout]).
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
// The rate is [y(t)]+ with y linear between nodes. Its integral is a piecewise
// quadratic, which is inverted exactly: the first arrival is where it reaches a
// unit exponential variable. Everything is computed relative to the height and
// the length of a piece, so that no scale overflows or loses digits.
class PiecewiseRate {
 public:
  // Appends a node. Times must not decrease.
  void Add(double time, double value);

  struct Arrival {
    bool found;    // false if the rate ends before
    double time;   // else the time of the last node
    double value;  // y there
  };
  // Where the integral of the rate from the first node on reaches `area`.
  Arrival Find(double area) const;

  // The integral of the rate from the first node to `time`.
  double Integral(double time) const;

  // y at `time`, which must be within the nodes.
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
  // What happens next. `num_std` is the half width k of the band in standard
  // deviations; the rate of refreshments may be 0.
  NextEvent Next(double num_std, double refresh_rate,
                 const NoiseStream& stream) const;

  // True if the particle bounces at a proposal that observed G = value: with
  // probability min(1, [value]+ / rate).
  static bool Accepts(double rate, double value, const NoiseStream& stream);

  // The particle has moved on for `wait` and observed, and flies on.
  void Observe(double wait, double value, double variance);

  // It has observed (value, variance) and bounced: along its new velocity the
  // same minibatch gives `reflected`.
  void Bounce(double wait, double value, double variance, double reflected);

  // What a step comes to at its event: it has observed there, and bounced if
  // there is a `reflected`. At a refreshment the new line is observed.
  void Take(ClockEvent event, double wait, double value, double variance,
            const std::optional<double>& reflected);

  // It has another velocity (or place, or target): a line without observation.
  void Restart();

  // The rate of proposals from now on, up to the horizon. Needs an observation.
  PiecewiseRate Rate(double num_std) const;

  // Since the line began.
  double now() const { return now_; }
  const LineRegression& regression() const { return regression_; }

  // What to warn of, after so many proposals of which so many observed more
  // than the rate that was proposed: where these are far more than the band
  // should let through, and proposals enough to tell. Empty if there is
  // nothing.
  static std::string Warning(int64_t proposals, int64_t violations,
                             double num_std);

  // How fast observations of a line are forgotten: a setting, which the clock
  // does not remember (host/line_regression.h).
  double observation_decay() const { return regression_.observation_decay(); }
  void set_observation_decay(double observation_decay) {
    regression_.set_observation_decay(observation_decay);
  }

  // All that the clock remembers, and a clock that remembers it. Throws
  // std::invalid_argument if the numbers are not such.
  std::vector<double> Save() const;
  static BounceClock Load(const std::vector<double>& saved);

 private:
  double now_ = 0;
  double blind_ = kBlind;
  LineRegression regression_;

  // The horizon while all observations are 0: twice as far at every such
  // observation.
  static constexpr double kBlind = 0x1p-10;
};

// How many multiples k * interval, k >= 1, are not after the time. Products
// decide, which are the times of the samples, for a quotient may be rounded up
// or down to another whole number.
inline int64_t SamplesBy(double time, double interval) {
  const double quotient = std::floor(time / interval);
  if (quotient >= 0x1p53) return int64_t{1} << 53;  // nearer than times can be
  const auto count = static_cast<int64_t>(quotient);
  if (static_cast<double>(count) * interval > time) return count - 1;
  const bool more = static_cast<double>(count + 1) * interval <= time;
  return count + static_cast<int64_t>(more);
}

}  // namespace torch_sgmcmc
