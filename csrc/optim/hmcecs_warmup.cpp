// The warm-up of HMC-ECS: what it adapts, and when.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <string>
#include <vector>

#include "host/dual_averaging.h"
#include "host/ecs_sizes.h"
#include "host/metropolis.h"
#include "optim/checks.h"
#include "optim/ecs_target.h"
#include "torch_sgmcmc/hmcecs.h"

namespace torch_sgmcmc {
namespace {

// Early in a warm-up the step size may be far too small, and a trajectory of
// given length endless.
constexpr int64_t kMostStepsOfWarmup = 1024;

void CheckWarmup(int64_t steps, const HMCECSWarmup& settings) {
  CheckInteger("steps", steps, 1);
  CheckReal("target_acceptance",
            settings.target_acceptance,
            {.high = 1, .low_open = true});
  CheckInteger("anchor_every", settings.anchor_every, 1);
  if (settings.target_variance) {
    CheckReal("target_variance", *settings.target_variance, {.low_open = true});
  }
}

// The later half: draw number size / 2 and those after it.
template <typename T>
std::vector<T> LaterHalf(const std::vector<T>& all) {
  return {all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2), all.end()};
}

}  // namespace

void HMCECS::warmup(const Closure& closure,
                    int64_t steps,
                    const HMCECSWarmup& settings) {
  CheckWarmup(steps, settings);
  const int64_t every = settings.anchor_every;
  // The last multiple of `every` after which at least half as many steps are
  // left.
  const int64_t room = steps - every / 2;
  const int64_t last = room < every ? 0 : room - room % every;
  const int64_t sizing = (last + steps) / 2;
  if (settings.target_variance && sizing <= last) {
    Invalid("Invalid steps: " + std::to_string(steps) + " (must be >= " +
            std::to_string(last + 2) + " for target_variance with " +
            "anchor_every=" + std::to_string(every) + ")");
  }
  set_anchor(closure, settings.progress);
  const auto set_step_size = [&](double value) {
    for_each_group(
        [&](HMCECSOptions& options) { options.step_size_.set(value); });
  };
  DualAveraging adaptation(first().step_size(), settings.target_acceptance);
  std::vector<Draw> draws;
  for (int64_t i = 1; i <= steps; ++i) {
    const double log_ratio = sweep(closure, kMostStepsOfWarmup);
    adaptation.Update(MeanAcceptance({log_ratio}));
    set_step_size(adaptation.step_size());
    draws.push_back({present_->theta, present_->variance, present_->mean});
    if (i <= last && i % every == 0) {
      std::vector<at::Tensor> late;
      for (const Draw& draw : LaterHalf(draws)) late.push_back(draw.theta);
      draws.clear();
      anchor_at(closure, at::stack(late).mean(0), settings.progress);
      set_step_size(adaptation.averaged());
      adaptation =
          DualAveraging(adaptation.averaged(), settings.target_acceptance);
    } else if (i == sizing) {
      choose_sizes(draws, settings.target_variance);
    }
    if (settings.progress) settings.progress("warm-up", i, steps);
  }
  set_step_size(adaptation.averaged());
  for_each_group([&](HMCECSOptions& options) {
    options.num_trajectories_.set(0);
    options.num_accepted_.set(0);
    options.num_divergences_.set(0);
    options.num_subsamples_accepted_.set(0);
  });
}

// The sizes and a, by what the draws since the last theta* had.
void HMCECS::choose_sizes(const std::vector<Draw>& draws,
                          const std::optional<double>& target) {
  const std::vector<Draw> late = LaterHalf(draws);
  if (late.empty()) return;
  std::vector<double> variances;
  std::vector<double> means;
  for (const Draw& draw : late) {
    variances.push_back(draw.variance);
    means.push_back(draw.mean);
  }
  HMCECSOptions chosen = first();
  if (chosen.variant() == "perturbed") {
    if (target) {
      chosen.subsample_size(
          ChooseSubsampleSize(variances,
                              chosen.subsample_size(),
                              *target,
                              static_cast<int64_t>(chosen.num_data())));
    }
  } else {
    if (target) {
      chosen.num_products(
          ChooseNumProducts(variances, chosen.num_products(), *target));
    }
    chosen.mean_difference_.set(MeanOf(means));
  }
  for_each_group([&](HMCECSOptions& options) { options.share(chosen); });
  present_ = nullptr;
}

}  // namespace torch_sgmcmc
