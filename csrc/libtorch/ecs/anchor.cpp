// The control variates of HMC-ECS: where theta* is, and the sums over all data.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/counter.h"
#include "host/ecs_schedule.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/python_text.h"
#include "libtorch/ecs/target.h"
#include "libtorch/ecs/warmup.h"
#include "libtorch/ecs/whitening.h"
#include "torch_sgmcmc/hmcecs.h"

namespace torch_sgmcmc {
namespace {

bool IsFinite(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.isfinite().all().item<bool>();
}

}  // namespace

void HMCECS::add_param_group(
    const torch::optim::OptimizerParamGroup& param_group) {
  Sampler::add_param_group(param_group);
  // All of it is of other parameters.
  anchor_ = nullptr;
  subsample_ = nullptr;
  warmup_ = nullptr;
  present_ = nullptr;
  proposals_ = nullptr;
}

// Whether there is no theta*, or the sums are those of other data.
bool HMCECS::needs_anchor() const {
  return anchor_ == nullptr ||
         anchor_->num_data != static_cast<int64_t>(first().num_data());
}

void HMCECS::set_anchor(const Closure& closure, const ProgressHook& progress) {
  if (closure == nullptr) step();  // says what is missing
  const at::NoGradGuard no_grad;
  check_ready();
  anchor_at(closure, FlatRow(all_params()).to(at::kDouble), progress);
  warmup_ = nullptr;
}

void HMCECS::anchor_at(const Closure& closure,
                       const at::Tensor& theta,
                       const ProgressHook& progress,
                       bool moved) {
  const at::NoGradGuard no_grad;
  const HMCECSOptions& group = first();
  const std::vector<at::Tensor> params = all_params();
  const std::vector<at::Tensor> parts = SplitLike(theta, params);
  ECSAnchor chosen;
  chosen.theta = FlatRow(parts).to(at::kDouble);  // as it is rounded
  chosen.num_data = static_cast<int64_t>(group.num_data());
  {
    const at::Tensor directions = probes(chosen.theta);
    const Exchanged at_anchor(params, parts);
    chosen.sums = sum_up(closure, params, directions, progress);
  }
  TaylorSums& sums = chosen.sums;
  if (!IsFinite(sums.value) || !IsFinite(sums.gradient) ||
      !IsFinite(sums.hessian)) {
    throw std::runtime_error(
        "HMCECS got log-likelihoods or derivatives that are not finite at the "
        "anchor of the control variates");
  }
  if (moved) check_near(sums.value, chosen.theta);
  at::Tensor curvature;
  if (sums.hessian.defined()) {
    curvature = (prior().diag() - sums.hessian) / group.temperature();
  }
  chosen.whitening = Whitening(group.mass_matrix(), curvature);
  if (group.control_variate() == 1) sums.hessian = at::Tensor();
  std::shared_ptr<const ExpandedSubsample> kept;
  if (subsample_ != nullptr && subsample_->layout == layout()) {
    // The same data, with other expansions.
    kept = std::make_shared<const ExpandedSubsample>(
        ExpandedSubsample{subsample_->layout,
                          subsample_->counts,
                          subsample_->indices,
                          expand(closure, subsample_->indices, chosen)});
  }  // else of other sizes: the next step draws one
  // Nothing fails from here on.
  anchor_ = std::make_shared<const ECSAnchor>(std::move(chosen));
  subsample_ = std::move(kept);
  present_ = nullptr;
  proposals_ = nullptr;
  count(anchor_->num_data);
  for_each_group(
      [](HMCECSOptions& options) { options.mean_difference_.set(0.0); });
}

// Throws if the parameters are not near theta*, with a pass through all data.
void HMCECS::check_place(const Closure& closure, const ProgressHook& progress) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums;
  const auto next = chunks("log posterior", progress);
  for (at::Tensor chunk = next(); chunk.defined(); chunk = next()) {
    const at::AutoGradMode enable_grad(true);
    sums.push_back(
        LogLikelihoods(closure, chunk).detach().to(at::kDouble).sum());
  }
  count(anchor_->num_data);
  check_near(at::stack(sums).sum(), FlatRow(all_params()).to(at::kDouble));
}

// Throws if the log posterior fell from theta* to theta as it falls to no draw.
void HMCECS::check_near(const at::Tensor& log_likelihood,
                        const at::Tensor& theta) const {
  const at::Tensor precisions = prior();
  const at::Tensor& at_anchor = anchor_->theta;
  at::Tensor change = log_likelihood - anchor_->sums.value;
  change = change - at::dot(precisions * theta, theta) * 0.5;
  change = change + at::dot(precisions * at_anchor, at_anchor) * 0.5;
  const double fall = -change.item<double>() / first().temperature();
  const double highest = DeepestFall(theta.numel());
  if (fall <= highest) return;
  throw std::runtime_error(
      "HMCECS has left the posterior: the log posterior of all data is " +
      FourDigits(fall) + " below that at θ* (that of draws is at most " +
      FourDigits(highest) +
      " below). Start again nearer the mode (set_anchor() gives a warm-up up), "
      "with variant='perturbed', control_variate=2, or a larger subsample_size "
      "or num_products");
}

// The indices of all data, chunk by chunk; an undefined tensor is the end.
std::function<at::Tensor()> HMCECS::chunks(const char* what,
                                           const ProgressHook& progress) const {
  const auto n = static_cast<int64_t>(first().num_data());
  const int64_t size = first().chunk_size();
  const auto like =
      at::TensorOptions(at::kLong).device(all_params()[0].device());
  return [=, done = int64_t{0}]() mutable -> at::Tensor {
    if (done > 0 && progress) progress(what, done, n);
    if (done == n) return {};
    const int64_t begin = done;
    done += std::min(size, n - begin);
    return at::arange(begin, done, like);
  };
}

void HMCECS::count(int64_t evaluations) {
  const int64_t all = first().num_evaluations_.get() + evaluations;
  for_each_group(
      [&](HMCECSOptions& options) { options.num_evaluations_.set(all); });
}

TaylorSums HMCECS::sum_up(const Closure& closure,
                          const std::vector<at::Tensor>& params,
                          const at::Tensor& probes,
                          const ProgressHook& progress) const {
  const HMCECSOptions& group = first();
  const bool second_order = group.control_variate() == 2;
  const bool needed = second_order || group.mass_matrix() != "identity";
  std::vector<std::string> forms = {kLinearForm};
  if (needed) {
    forms = RowsOf(closure) != nullptr
                ? std::vector<std::string>{kPredictorForm}
                : std::vector<std::string>{kRankOneForm, kWholeForm};
  }
  for (const std::string& form : forms) {
    std::optional<TaylorSums> sums = TaylorSums::AtPresent(
        closure, params, chunks("control variates", progress), form, probes);
    if (!sums) continue;
    if (!second_order) sums->form = kLinearForm;
    return *std::move(sums);
  }
  throw std::logic_error("whole Hessians fit any model");
}

// Two random directions, as the parameters' type rounds them.
at::Tensor HMCECS::probes(const at::Tensor& like) const {
  const std::vector<at::Tensor> drawn = {at::empty_like(like),
                                         at::empty_like(like)};
  const std::vector<int64_t> offsets = {0, like.numel()};
  gaussian_(drawn,
            /*std=*/1,
            offsets,
            seed(),
            /*step=*/0,
            static_cast<int64_t>(Purpose::kProbe),
            std::nullopt);
  const std::vector<at::Tensor> params = all_params();
  const auto rounded = [&](const at::Tensor& z) {
    return FlatRow(SplitLike(z, params)).to(at::kDouble);
  };
  return at::stack({rounded(drawn[0]), rounded(drawn[1])});
}

// The expansions of the data with these indices, which count as evaluations.
TaylorTerms HMCECS::expand(const Closure& closure,
                           const at::Tensor& indices,
                           const ECSAnchor& anchor) {
  const std::vector<at::Tensor> params = all_params();
  const at::Tensor probe = probes(anchor.theta)[0];
  count(indices.numel());
  const Exchanged at_anchor(params, SplitLike(anchor.theta, params));
  return TaylorTerms::AtPresent(
      closure, params, indices, anchor.sums.form, probe);
}

}  // namespace torch_sgmcmc
