// The warm-up of HMC-ECS: what it adapts, and when.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>
#include <vector>

#include "host/ecs_schedule.h"
#include "host/ecs_sizes.h"
#include "host/leapfrog_steps.h"
#include "host/metropolis.h"
#include "libtorch/core/checks.h"
#include "libtorch/ecs/target.h"
#include "libtorch/ecs/warmup.h"
#include "torch_sgmcmc/hmcecs.h"

namespace torch_sgmcmc {

void HMCECS::warmup(const Closure& closure,
                    int64_t steps,
                    const HMCECSWarmup& settings) {
  const double acceptance = settings.target_acceptance;
  CheckReal("target_acceptance", acceptance, {.high = 1, .low_open = true});
  if (settings.target_variance) {
    const double variance = *settings.target_variance;
    if (variance != kLeastTime || first().variant() != "signed") {
      CheckReal("target_variance", variance, {.low_open = true});
    }
  }
  const ECSSchedule schedule(steps, settings.anchor_every);
  if (settings.target_variance) schedule.CheckSizing();
  check_ready();
  const auto set_step_size = [&](double value) {
    for_each_group(
        [&](HMCECSOptions& options) { options.step_size_.set(value); });
  };
  if (warmup_ != nullptr) {
    warmup_->check(steps, settings);
  } else {
    set_anchor(closure, settings.progress);
    begin_adaptation({steps,
                      acceptance,
                      settings.anchor_every,
                      settings.target_variance,
                      /*done=*/0,
                      DualAveraging(first().step_size(), acceptance),
                      {}});
  }
  const auto move_anchor_in_time = [&] {
    if (schedule.MovesAnchorAfter(warmup_->done) && !warmup_->draws.empty()) {
      move_anchor(closure, settings.progress);
    }
  };
  move_anchor_in_time();
  for (int64_t i = warmup_->done; i < steps; ++i) {
    const double log_ratio = sweep(closure, kMostWarmupSteps);
    ECSWarmup next = *warmup_;
    next.adaptation.Update(MeanAcceptance({log_ratio}));
    set_step_size(next.adaptation.step_size());
    next.draws.push_back({present_->theta,
                          present_->variance,
                          present_->mean,
                          present_->lowest});
    if (schedule.ChoosesSizesAfter(i + 1)) {
      choose_sizes(next.draws, settings.target_variance);
    }
    next.done = i + 1;
    warmup_ = std::make_shared<const ECSWarmup>(std::move(next));
    move_anchor_in_time();
    if (settings.progress) settings.progress("warm-up", i + 1, steps);
  }
  check_place(closure, settings.progress);
  set_step_size(warmup_->adaptation.averaged());
  HMCECSOptions& counts = progress();
  counts.num_trajectories_.set(0);
  counts.num_accepted_.set(0);
  counts.num_divergences_.set(0);
  counts.num_subsamples_accepted_.set(0);
  warmup_ = nullptr;
}

// Adapts the step size anew, from what it is.
void HMCECS::begin_adaptation(const ECSWarmup& progress) {
  ECSWarmup begun = progress;
  begun.adaptation =
      DualAveraging(first().step_size(), progress.target_acceptance);
  begun.draws.clear();
  warmup_ = std::make_shared<const ECSWarmup>(std::move(begun));
}

// Puts theta* amidst the late draws since it was chosen last.
void HMCECS::move_anchor(const Closure& closure, const ProgressHook& progress) {
  std::vector<at::Tensor> late;
  for (const ECSDraw& draw : LateDraws(warmup_->draws)) {
    late.push_back(draw.theta);
  }
  anchor_at(closure, at::stack(late).mean(0), progress, /*moved=*/true);
  const double averaged = warmup_->adaptation.averaged();
  for_each_group(
      [&](HMCECSOptions& options) { options.step_size_.set(averaged); });
  begin_adaptation(*warmup_);
}

// The sizes and a, by what the draws since the last theta* had.
void HMCECS::choose_sizes(const std::vector<ECSDraw>& draws,
                          const std::optional<double>& target) {
  const std::vector<ECSDraw> late = LateDraws(draws);
  if (late.empty()) return;
  std::vector<double> variances;
  std::vector<double> means;
  std::vector<double> lowest;
  for (const ECSDraw& draw : late) {
    variances.push_back(draw.variance);
    means.push_back(draw.mean);
    lowest.push_back(draw.lowest);
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
          *target == kLeastTime
              ? ChooseNumProductsByLowest(
                    variances, chosen.num_products(), means, lowest)
              : ChooseNumProducts(variances, chosen.num_products(), *target));
    }
    progress().mean_difference_.set(MeanOf(means));
  }
  for_each_group([&](HMCECSOptions& options) { options.share(chosen); });
  present_ = nullptr;
}

}  // namespace torch_sgmcmc
