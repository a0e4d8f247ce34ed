#include "host/dual_averaging.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace torch_sgmcmc {
namespace {

constexpr double kGamma = 0.05;
constexpr double kShift = 10;  // t0
constexpr double kKappa = 0.75;
// Sizes are kept within what a double can square: a target that no size
// reaches drives the logarithm on for ever.
constexpr double kLargestLog = 300;

constexpr const char* kNoState =
    "state of dual averaging (must be finite, with a whole count)";

enum Place { kTarget, kMu, kCount, kError, kLog, kLogAverage };

[[noreturn]] void Invalid(const std::string& what) {
  throw std::invalid_argument("Invalid " + what);
}

void CheckTarget(double target) {
  if (target > 0 && target < 1) return;
  Invalid("target: " + std::to_string(target) + " (must be in (0, 1))");
}

double FromLog(double log) {
  return std::exp(std::clamp(log, -kLargestLog, kLargestLog));
}

}  // namespace

DualAveraging::DualAveraging(double step_size, double target) {
  if (!std::isfinite(step_size) || step_size <= 0) {
    Invalid("step_size: " + std::to_string(step_size) +
            " (must be finite and > 0)");
  }
  CheckTarget(target);
  const double log = std::log(step_size);
  state_ = {target, std::log(10.0) + log, 0, 0, log, log};
}

DualAveraging::DualAveraging(State state) : state_(std::move(state)) {
  if (state_.size() != kLogAverage + 1) Invalid(kNoState);
  CheckTarget(state_[kTarget]);
  const bool finite = std::all_of(
      state_.begin(), state_.end(), [](double x) { return std::isfinite(x); });
  if (!finite || state_[kCount] < 0 ||
      state_[kCount] != std::floor(state_[kCount])) {
    Invalid(kNoState);
  }
}

double DualAveraging::Update(double acceptance) {
  if (!(acceptance >= 0 && acceptance <= 1)) {
    Invalid("acceptance: " + std::to_string(acceptance) +
            " (must be in [0, 1])");
  }
  const double t = state_[kCount] += 1;
  const double weight = 1 / (t + kShift);
  double& error = state_[kError];
  error = (1 - weight) * error + weight * (state_[kTarget] - acceptance);
  state_[kLog] = state_[kMu] - std::sqrt(t) / kGamma * error;
  const double share = std::pow(t, -kKappa);
  state_[kLogAverage] =
      share * state_[kLog] + (1 - share) * state_[kLogAverage];
  return step_size();
}

double DualAveraging::step_size() const { return FromLog(state_[kLog]); }

double DualAveraging::averaged() const { return FromLog(state_[kLogAverage]); }

}  // namespace torch_sgmcmc
