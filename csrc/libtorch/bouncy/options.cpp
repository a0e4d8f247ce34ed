#include <cmath>

#include "host/bounce_clock.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "torch_sgmcmc/sbps.h"

namespace torch_sgmcmc {

std::vector<double> SBPSOptions::FreshClock() { return BounceClock().Save(); }

void SBPSOptions::check() const {
  if (!num_data_.is_set() && std::isnan(num_data())) {
    Invalid(
        "Invalid num_data: not set (SBPS needs the number of training "
        "examples; 1 if the loss is U itself)");
  }
  CheckReal("num_data", num_data(), {.low_open = true});
  CheckReal("prior_precision", prior_precision());
  CheckReal("temperature", temperature(), {.low_open = true});
  CheckReal("confidence", confidence());
  CheckReal("refresh_rate", refresh_rate());
  CheckReal("decay", decay(), {.high = 1.0});
  CheckReal("eps", eps(), {.low_open = true});
  if (sample_interval()) {
    CheckReal("sample_interval", *sample_interval(), {.low_open = true});
  }
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
    CheckReal("observed_target", value);
  }
  if (observed_interval_.get()) {
    CheckReal(
        "observed_interval", *observed_interval_.get(), {.low_open = true});
  }
  BounceClock::Load(clock_.get());
}

}  // namespace torch_sgmcmc
