#include "host/piecewise_rate.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace torch_sgmcmc {
namespace {

// The part of a piece where y > 0, from `begin` to `end` in units of the
// piece's length; a and b are y at its ends in units of `height`.
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
    // a x + (b - a) x^2 / 2 = r over a length of 1, solved without
    // cancellation.
    const double width = p.end - p.begin;
    const double r = area / (unit * width);
    const double root =
        std::sqrt(std::max(0.0, p.a * p.a + 2 * (p.b - p.a) * r));
    const double x = r > 0 ? std::min(1.0, 2 * r / (p.a + root)) : 0;
    return {true,
            times_[i - 1] + length * (p.begin + width * x),
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
