#include "host/bounce_clock.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>

#include "host/draws.h"

namespace torch_sgmcmc {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Pieces per width of the hyperbola's bend, where chords are 0.8 % too high.
constexpr double kPieces = 4;
constexpr int kMaxPieces = 256;

// The first line's horizon, in mean times of a proposal.
constexpr double kNearby = 0x1p-10;

// Quads of a step.
constexpr uint64_t kArrivals = 0;
constexpr uint64_t kDecision = 1;

// Numbers that Save() writes ahead of the observations, and for each.
constexpr size_t kHead = 7;
constexpr size_t kEach = 3;

[[noreturn]] void InvalidClock(const std::string& why) {
  throw std::invalid_argument("Invalid clock: " + why);
}

}  // namespace

// The band's end is a line plus a branch of a hyperbola: convex, below its
// chords.
PiecewiseRate BounceClock::Rate(double num_std) const {
  const LineFit fit = regression_.Fit();
  const auto upper = [&](double time) {
    return fit.Mean(time) + num_std * std::sqrt(fit.Variance(time));
  };
  const double spread = fit.slope_variance + fit.curvature;
  // The hyperbola's vertex and width.
  const double vertex =
      (fit.slope_variance * fit.centre + fit.curvature * fit.last) / spread;
  const double bend = std::sqrt(fit.Variance(vertex) / spread);
  // The horizon: twice the time in which the rate changes, or far enough for an
  // arrival (except with probability e^-8) at a rate that grows from 0.
  const double level =
      std::abs(fit.Mean(now_)) + num_std * std::sqrt(fit.Variance(now_));
  const double change = std::abs(fit.slope) + num_std * std::sqrt(spread);
  const bool blind = !(level > std::sqrt(std::numeric_limits<double>::min()) *
                                   (4 + 4 * num_std));
  double reach =
      blind ? blind_ : std::max(2 * level / change, 4 / std::sqrt(change));
  // On the first line the slope's scale is a guess, which may be far too small.
  if (!blind && regression_.prior().lines == 0) {
    reach = std::min(reach, std::max(now_, kNearby / level));
  }

  PiecewiseRate rate;
  rate.Add(now_, upper(now_));
  double passed = 0;
  for (int i = 1; i < kMaxPieces && passed < reach; ++i) {
    const double time = now_ + passed;
    const double step = std::max(bend, std::abs(time - vertex)) / kPieces;
    passed = std::min(reach, passed + step);
    rate.Add(now_ + passed, upper(now_ + passed));
  }
  if (passed < reach) rate.Add(now_ + reach, upper(now_ + reach));
  return rate;
}

NextEvent BounceClock::Next(double num_std, double refresh_rate,
                            const NoiseStream& stream) const {
  if (regression_.empty()) return {ClockEvent::kObserve, 0, 0};
  const UniformPair u = Uniforms(stream, kArrivals);
  const PiecewiseRate rate = Rate(num_std);
  const PiecewiseRate::Arrival arrival = rate.Find(-std::log(u.first));
  const double wait = std::max(0.0, arrival.time - now_);
  const double refreshment =
      refresh_rate > 0 ? -std::log(u.second) / refresh_rate : kInfinity;
  if (refreshment < wait) return {ClockEvent::kRefreshment, refreshment, 0};
  if (!arrival.found) return {ClockEvent::kObserve, wait, 0};
  return {ClockEvent::kProposal, wait, arrival.value};
}

bool BounceClock::Accepts(double rate, double value,
                          const NoiseStream& stream) {
  return Uniforms(stream, kDecision).first * rate < value;
}

void BounceClock::Observe(double wait, double value, double variance) {
  now_ += wait;
  regression_.Add({now_, value, variance});
  if (value == 0 && variance == 0 && wait > 0) blind_ *= 2;
}

void BounceClock::Bounce(double wait, double value, double variance,
                         double reflected) {
  Observe(wait, value, variance);
  Restart();
  regression_.Add({0, reflected, variance});
}

void BounceClock::Take(ClockEvent event, double wait, double value,
                       double variance,
                       const std::optional<double>& reflected) {
  if (reflected) {
    Bounce(wait, value, variance, *reflected);
    return;
  }
  const bool refreshed = event == ClockEvent::kRefreshment;
  if (refreshed) Restart();
  Observe(refreshed ? 0 : wait, value, variance);
}

void BounceClock::Restart() {
  regression_.Restart();
  now_ = 0;
}

std::string BounceClock::Warning(int64_t proposals, int64_t violations,
                                 double num_std) {
  constexpr int64_t kEnough = 1000;
  const auto all = static_cast<double>(proposals);
  const double rate = static_cast<double>(violations) / all;
  const double expected = 0.5 * std::erfc(num_std / std::sqrt(2));
  if (proposals < kEnough || rate <= 3 * expected + 0.01) return "";
  std::array<char, 512> text{};
  std::snprintf(
      text.data(), text.size(),
      "At %.0f of %.0f proposals of SBPS (%.1f%%) the observed rate was above "
      "the proposed one; %.1f%% are expected with num_std = %g. Bounces are "
      "lost there, which biases the posterior: use a larger num_std or "
      "larger minibatches, and make sure that these are independent",
      static_cast<double>(violations), all, 100 * rate, 100 * expected,
      num_std);
  return text.data();
}

std::vector<double> BounceClock::Save() const {
  const SlopePrior& p = regression_.prior();
  std::vector<double> saved = {now_,    blind_,         p.mean,      p.variance,
                               p.lines, p.error_excess, p.error_time};
  for (const Observation& o : regression_.history()) {
    saved.insert(saved.end(), {o.time, o.value, o.variance});
  }
  return saved;
}

namespace {

void CheckSaved(const std::vector<double>& saved) {
  const auto count = saved.size();
  if (count < kHead || (count - kHead) % kEach != 0 ||
      (count - kHead) / kEach > LineRegression::kHistory) {
    InvalidClock("it has " + std::to_string(count) +
                 " numbers (must be 7, and 3 for each of at most 32 "
                 "observations)");
  }
  for (const double number : saved) {
    if (!std::isfinite(number)) InvalidClock("a number is not finite");
  }
}

}  // namespace

BounceClock BounceClock::Load(const std::vector<double>& saved) {
  CheckSaved(saved);
  std::vector<Observation> history;
  for (size_t i = kHead; i < saved.size(); i += kEach) {
    history.push_back({saved[i], saved[i + 1], saved[i + 2]});
    const double before =
        history.size() > 1 ? history[history.size() - 2].time : 0;
    if (saved[i] < before || saved[i] > saved[0] || saved[i + 2] < 0) {
      InvalidClock("its observations are not in order");
    }
  }
  if (saved[0] < 0 || saved[1] <= 0 || saved[3] < 0 || saved[4] < 0 ||
      saved[6] < 0) {
    InvalidClock("a time, a variance or a count is negative");
  }
  BounceClock clock;
  clock.now_ = saved[0];
  clock.blind_ = saved[1];
  clock.regression_ = LineRegression(
      std::move(history), {saved[2], saved[3], saved[4], saved[5], saved[6]});
  return clock;
}

namespace {

// The part of a piece with y > 0, from `begin` to `end` in units of the piece's
// length; a and b are y at its ends in units of `height`.
struct PositivePart {
  double begin;
  double end;
  double a;
  double b;
  double height;

  double area() const { return 0.5 * (a + b) * (end - begin); }
};

PositivePart PositivePartOf(double a, double b) {
  const double height = std::max(a, b);
  if (!(height > 0)) return {0, 0, 0, 0, 0};
  a /= height;
  b /= height;
  if (a < 0) return {-a / (b - a), 1, 0, b, height};
  if (b < 0) return {0, a / (a - b), a, 0, height};
  return {0, 1, a, b, height};
}

}  // namespace

void PiecewiseRate::Add(double time, double value) {
  times_.push_back(time);
  values_.push_back(value);
}

PiecewiseRate::Arrival PiecewiseRate::Find(double area) const {
  for (size_t i = 1; i < times_.size(); ++i) {
    const double length = times_[i] - times_[i - 1];
    const PositivePart p = PositivePartOf(values_[i - 1], values_[i]);
    const double unit = p.height * length;
    const double piece = unit * p.area();
    if (!(unit > 0) || area > piece) {
      area -= piece;
      continue;
    }
    // Solves a x + (b - a) x^2 / 2 = r without cancellation.
    const double width = p.end - p.begin;
    const double r = area / (unit * width);
    const double root =
        std::sqrt(std::max(0.0, p.a * p.a + 2 * (p.b - p.a) * r));
    const double x = r > 0 ? std::min(1.0, 2 * r / (p.a + root)) : 0;
    return {true, times_[i - 1] + length * (p.begin + width * x),
            p.height * (p.a + (p.b - p.a) * x)};
  }
  return {false, times_.back(), values_.back()};
}

double PiecewiseRate::Integral(double time) const {
  double sum = 0;
  for (size_t i = 1; i < times_.size() && times_[i - 1] < time; ++i) {
    const double end = std::min(time, times_[i]);
    const PositivePart p = PositivePartOf(values_[i - 1], Value(end));
    sum += p.height * (end - times_[i - 1]) * p.area();
  }
  return sum;
}

double PiecewiseRate::Value(double time) const {
  const auto next = std::upper_bound(times_.begin(), times_.end() - 1, time);
  const auto i =
      static_cast<size_t>(std::max<std::ptrdiff_t>(1, next - times_.begin()));
  const double length = times_[i] - times_[i - 1];
  if (!(length > 0)) return values_[i];
  const double x = (time - times_[i - 1]) / length;
  return values_[i - 1] + (values_[i] - values_[i - 1]) * x;
}

}  // namespace torch_sgmcmc
