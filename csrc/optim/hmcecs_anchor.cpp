// The control variates of HMC-ECS: where theta* is, and the sums over all data.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/counter.h"
#include "optim/ecs_target.h"
#include "optim/ecs_warmup.h"
#include "optim/whitening.h"
#include "torch_sgmcmc/hmcecs.h"
#include "torch_sgmcmc/operators.h"

namespace torch_sgmcmc {
namespace {

// Lets parameters have other memory while it lives.
class Exchanged {
 public:
  Exchanged(std::vector<at::Tensor> params,
            const std::vector<at::Tensor>& values)
      : params_(std::move(params)) {
    own_.reserve(params_.size());
    for (const at::Tensor& param : params_) {
      own_.push_back(param.variable_data());
    }
    for (size_t i = 0; i < params_.size(); ++i) params_[i].set_data(values[i]);
  }
  ~Exchanged() {
    for (size_t i = 0; i < params_.size(); ++i) params_[i].set_data(own_[i]);
  }
  Exchanged(const Exchanged&) = delete;
  Exchanged& operator=(const Exchanged&) = delete;
  Exchanged(Exchanged&&) = delete;
  Exchanged& operator=(Exchanged&&) = delete;

 private:
  std::vector<at::Tensor> params_;
  std::vector<at::Tensor> own_;
};

bool IsFinite(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.isfinite().all().item<bool>();
}

}  // namespace

// None if it is of other parameters: a group was added since.
const ECSAnchor* HMCECS::anchor() const {
  if (anchor_ == nullptr) return nullptr;
  int64_t size = 0;
  for (const at::Tensor& param : all_params()) size += param.numel();
  return anchor_->theta.numel() == size ? anchor_.get() : nullptr;
}

// Whether there is no theta*, or the sums are those of other data.
bool HMCECS::needs_anchor() const {
  const ECSAnchor* kept = anchor();
  return kept == nullptr ||
         kept->num_data != static_cast<int64_t>(first().num_data());
}

void HMCECS::set_anchor(const Closure& closure, const ProgressHook& progress) {
  if (closure == nullptr) step();  // says what is missing
  const at::NoGradGuard no_grad;
  check_groups();
  anchor_at(closure, FlatRow(all_params()).to(at::kDouble), progress);
  warmup_ = nullptr;
}

void HMCECS::anchor_at(const Closure& closure,
                       const at::Tensor& theta,
                       const ProgressHook& progress) {
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
  at::Tensor curvature;
  if (sums.hessian.defined()) {
    curvature = (prior().diag() - sums.hessian) / group.temperature();
  }
  chosen.whitening = Whitening(group.mass_matrix(), curvature);
  if (group.control_variate() == 1) sums.hessian = at::Tensor();
  std::shared_ptr<const ExpandedSubsample> kept;
  if (anchor() != nullptr && subsample_ != nullptr &&
      subsample_->layout == layout()) {
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
  const int64_t evaluations = group.num_evaluations_.get() + anchor_->num_data;
  for_each_group([&](HMCECSOptions& options) {
    options.num_evaluations_.set(evaluations);
    options.mean_difference_.set(0.0);
  });
}

TaylorSums HMCECS::sum_up(const Closure& closure,
                          const std::vector<at::Tensor>& params,
                          const at::Tensor& probes,
                          const ProgressHook& progress) const {
  const HMCECSOptions& group = first();
  const auto n = static_cast<int64_t>(group.num_data());
  const int64_t size = group.chunk_size();
  const auto like = at::TensorOptions(at::kLong).device(params[0].device());
  const bool second_order = group.control_variate() == 2;
  const bool needed = second_order || group.mass_matrix() != "identity";
  const std::vector<std::string> forms =
      needed
          ? std::vector<std::string>{kPredictorForm, kRankOneForm, kWholeForm}
          : std::vector<std::string>{kLinearForm};
  for (const std::string& form : forms) {
    int64_t done = 0;
    const auto next = [&]() -> at::Tensor {
      if (done > 0 && progress) progress("control variates", done, n);
      if (done == n) return {};
      const int64_t begin = done;
      done += std::min(size, n - begin);
      return at::arange(begin, done, like);
    };
    std::optional<TaylorSums> sums =
        TaylorSums::AtPresent(closure, params, next, form, probes);
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
            static_cast<int64_t>(Purpose::kProbe),
            {offsets, seed(), /*step=*/0});
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
  const int64_t evaluations = first().num_evaluations_.get() + indices.numel();
  for_each_group([&](HMCECSOptions& options) {
    options.num_evaluations_.set(evaluations);
  });
  const Exchanged at_anchor(params, SplitLike(anchor.theta, params));
  return TaylorTerms::AtPresent(
      closure, params, indices, anchor.sums.form, probe, anchor.sums.gate);
}

}  // namespace torch_sgmcmc
