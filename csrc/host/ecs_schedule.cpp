#include "host/ecs_schedule.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace torch_sgmcmc {
namespace {

constexpr double kCheckEvery = 10;
constexpr double kRarity = 20;

void CheckPositive(const char* name, int64_t value) {
  if (value >= 1) return;
  throw std::invalid_argument(std::string("Invalid ") + name + ": " +
                              std::to_string(value) + " (must be >= 1)");
}

}  // namespace

bool IsCheckDue(int64_t trajectories, double num_data, double cost) {
  const double period = std::ceil(kCheckEvery * num_data / cost);
  const auto done = static_cast<double>(trajectories);
  return done > 0 && std::fmod(done, period) == 0;
}

double DeepestFall(int64_t dimension) {
  const auto d = static_cast<double>(dimension);
  return d + std::sqrt(2 * d * kRarity) + kRarity;
}

ECSSchedule::ECSSchedule(int64_t steps, int64_t anchor_every)
    : steps_(steps), anchor_every_(anchor_every) {
  CheckPositive("steps", steps);
  CheckPositive("anchor_every", anchor_every);
  // Not so late that less than half as many steps are left.
  const int64_t room = steps - anchor_every / 2;
  if (room >= anchor_every) last_ = room - room % anchor_every;
  // NOLINTNEXTLINE(cppcoreguidelines-prefer-member-initializer): by last_.
  sizing_ = last_ + (steps - last_) / 2;
}

void ECSSchedule::CheckSizing() const {
  if (sizing_ > last_) return;
  throw std::invalid_argument(
      "Invalid steps: " + std::to_string(steps_) +
      " (with target_variance, 2 or more must follow the last choice of θ*, "
      "which anchor_every = " +
      std::to_string(anchor_every_) + " makes after " + std::to_string(last_) +
      ")");
}

bool ECSSchedule::MovesAnchorAfter(int64_t done) const {
  return done > 0 && done <= last_ && done % anchor_every_ == 0;
}

}  // namespace torch_sgmcmc
