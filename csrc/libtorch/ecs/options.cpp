#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "torch_sgmcmc/hmcecs.h"

namespace torch_sgmcmc {
namespace {

// Throws unless the value is one of the choices, as Python shows them.
void CheckChoice(const char* name,
                 const std::string& value,
                 const std::vector<std::string>& choices) {
  std::string wanted;
  for (const std::string& choice : choices) {
    if (value == choice) return;
    wanted += (wanted.empty() ? "" : " or ") + choice;
  }
  Invalid(std::string("Invalid ") + name + ": " + value + " (must be " +
          wanted + ")");
}

}  // namespace

void HMCECSOptions::check() const {
  require("num_data", num_data_, "the number of data");
  if (num_data() != std::floor(num_data()) || std::abs(num_data()) >= 0x1p63) {
    Invalid("Invalid num_data: " + Repr(num_data()) +
            " (must be an int, got float)");
  }
  CheckInteger("num_data", static_cast<int64_t>(num_data()), 1);
  CheckChoice("variant", Repr(variant()), {"'perturbed'", "'signed'"});
  if (!subsample_size_.is_set() && subsample_size() == 0) {
    Invalid(
        "Invalid subsample_size: not set (HMCECS needs the number of data in a "
        "subsample)");
  }
  CheckInteger(
      "subsample_size", subsample_size(), variant() == "perturbed" ? 2 : 1);
  CheckReal("step_size", step_size(), {.low_open = true});
  CheckReal("trajectory_length", trajectory_length(), {.low_open = true});
  CheckInteger("num_blocks", num_blocks(), 1);
  CheckChoice("control_variate", std::to_string(control_variate()), {"2", "1"});
  CheckChoice("mass_matrix",
              Repr(mass_matrix()),
              {"'dense'", "'diagonal'", "'identity'"});
  check_target();
  CheckReal("temperature", temperature(), {.low_open = true});
  CheckInteger("num_products", num_products(), 1);
  CheckReal("max_variance", max_variance(), {.low_open = true});
  CheckInteger("chunk_size", chunk_size(), 1);
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
