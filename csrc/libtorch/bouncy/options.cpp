#include <cmath>
#include <limits>
#include <stdexcept>

#include "host/bounce_clock.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "torch_sgmcmc/sbps.h"

namespace torch_sgmcmc {

namespace {

constexpr const char* kCounts[] = {"num_samples",
                                   "num_looks",
                                   "num_proposals",
                                   "num_bounces",
                                   "num_violations",
                                   "num_refreshments",
                                   "num_derivatives",
                                   "num_gradients"};

}  // namespace

// What the sampler keeps of its trajectory, the same in all groups.
SBPSOptions::SBPSOptions() {
  keep("trajectory_time", 0.0);
  keep("line_time", 0.0);
  keep("clock", BounceClock().Save());
  keep("observed_target", std::vector<double>());
  keep("observed_interval", std::optional<double>());
  for (const char* count : kCounts) keep<int64_t>(count, 0);
}

double SBPSOptions::get_lr() const {
  throw std::logic_error(
      "SBPS has no lr: its particle has unit speed, and a scheduler of learning "
      "rates would do nothing (change temperature or refresh_rate by hand)");
}

void SBPSOptions::set_lr(double /*value*/) { get_lr(); }

void SBPSOptions::check_values() const {
  OptionsOf::check_values();
  refuse_capturable();
}

void SBPSOptions::check_progress() const {
  for (const char* time : {"trajectory_time", "line_time"}) {
    CheckReal(time, get<double>(time));
  }
  for (const char* count : kCounts) CheckCount(count, get<int64_t>(count));
  const auto all = get<int64_t>("num_proposals");
  for (const char* part : {"num_bounces", "num_violations"}) {
    CheckPart(part, get<int64_t>(part), "num_proposals", all);
  }
  for (const double value : get<std::vector<double>>("observed_target")) {
    CheckReal(
        "observed_target",
        value,
        {.low = -std::numeric_limits<double>::infinity(), .low_open = true});
  }
  const auto interval = get<std::optional<double>>("observed_interval");
  if (interval) CheckReal("observed_interval", *interval, {.low_open = true});
  BounceClock::Load(get<std::vector<double>>("clock"));
}

}  // namespace torch_sgmcmc
