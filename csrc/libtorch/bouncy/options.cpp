#include <cmath>
#include <limits>
#include <stdexcept>

#include "host/bounce_clock.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "torch_sgmcmc/sbps.h"

namespace torch_sgmcmc {

std::vector<double> SBPSOptions::FreshClock() { return BounceClock().Save(); }

double SBPSOptions::get_lr() const {
  throw std::logic_error(
      "SBPS has no lr: its particle has unit speed, and a scheduler of learning "
      "rates would do nothing (change temperature or refresh_rate by hand)");
}

void SBPSOptions::set_lr(double /*value*/) { get_lr(); }

void SBPSOptions::check() const {
  OptionsOf::check();
  refuse_capturable();
}

void SBPSOptions::check_progress() const {
  CheckReal("trajectory_time", trajectory_time_.get());
  CheckReal("line_time", line_time_.get());
  CheckCount("num_samples", num_samples_.get());
  CheckCount("num_looks", num_looks_.get());
  CheckCount("num_proposals", num_proposals_.get());
  CheckCount("num_bounces", num_bounces_.get());
  CheckCount("num_violations", num_violations_.get());
  CheckCount("num_refreshments", num_refreshments_.get());
  CheckCount("num_derivatives", num_derivatives_.get());
  CheckCount("num_gradients", num_gradients_.get());
  const int64_t all = num_proposals_.get();
  CheckPart("num_bounces", num_bounces_.get(), "num_proposals", all);
  CheckPart("num_violations", num_violations_.get(), "num_proposals", all);
  for (const double value : observed_target_.get()) {
    CheckReal(
        "observed_target",
        value,
        {.low = -std::numeric_limits<double>::infinity(), .low_open = true});
  }
  if (observed_interval_.get()) {
    CheckReal(
        "observed_interval", *observed_interval_.get(), {.low_open = true});
  }
  BounceClock::Load(clock_.get());
}

}  // namespace torch_sgmcmc
