#include <limits>
#include <string>

#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "torch_sgmcmc/hmcecs.h"

namespace torch_sgmcmc {

void HMCECSOptions::check() const {
  OptionsOf::check();
  if (subsample_size_.is_set() && variant() == "perturbed") {
    CheckInteger("subsample_size", subsample_size(), 2);
  }
  refuse_capturable();
}

void HMCECSOptions::check_progress() const {
  const int64_t all = num_trajectories_.get();
  const char* whole = "num_trajectories";
  CheckPart("num_accepted", num_accepted_.get(), whole, all);
  CheckPart("num_divergences", num_divergences_.get(), whole, all);
  CheckPart(
      "num_subsamples_accepted", num_subsamples_accepted_.get(), whole, all);
  CheckCount("num_evaluations", num_evaluations_.get());
  if (sign_.get() != 1 && sign_.get() != -1) {
    Invalid("Invalid sign: " + std::to_string(sign_.get()) +
            " (must be 1 or -1)");
  }
  CheckReal("mean_difference",
            mean_difference_.get(),
            {.low = -std::numeric_limits<double>::infinity()});
}

HMCECSOptions HMCECSOptions::complete() const {
  CheckReal("trajectory_length", trajectory_length(), {.low_open = true});
  HMCECSOptions result = *this;
  if (!step_size_.is_set()) result.step_size(trajectory_length() / 6);
  return result;
}

}  // namespace torch_sgmcmc
