#include "libtorch/ecs/anchor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/counter.h"
#include "host/ecs_schedule.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/text.h"
#include "libtorch/ecs/whitening.h"

namespace torch_sgmcmc {
namespace {

bool IsFinite(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.isfinite().all().item<bool>();
}

TaylorSums SumUp(const AllData& data,
                 const at::Tensor& probes,
                 const HMCECSOptions& options) {
  const bool second_order = options.control_variate() == 2;
  const char* low =
      options.control_variate() == 0 ? kConstantForm : kLinearForm;
  std::vector<std::string> forms = {low};
  if (second_order || options.mass_matrix() != "identity") {
    forms = RowsOf(data.closure) != nullptr
                ? std::vector<std::string>{kPredictorForm}
                : std::vector<std::string>{kRankOneForm, kWholeForm};
  }
  for (const std::string& form : forms) {
    std::optional<TaylorSums> sums =
        TaylorSums::AtPresent(data.closure,
                              data.params,
                              data.chunks("control variates"),
                              form,
                              probes);
    if (!sums) continue;
    if (!second_order) sums->form = low;
    if (sums->form == kConstantForm) sums->gradient.zero_();
    return *std::move(sums);
  }
  throw std::logic_error("whole Hessians fit any model");
}

}  // namespace

std::function<at::Tensor()> AllData::chunks(const char* what) const {
  const int64_t n = num_data;
  const int64_t size = chunk_size;
  const auto like = at::TensorOptions(at::kLong).device(params[0].device());
  return [=, tell = progress, done = int64_t{0}]() mutable -> at::Tensor {
    if (done > 0 && tell) tell(what, done, n);
    if (done == n) return {};
    const int64_t begin = done;
    done += std::min(size, n - begin);
    return at::arange(begin, done, like);
  };
}

at::Tensor AllData::log_likelihood() const {
  std::vector<at::Tensor> sums;
  const auto next = chunks("log posterior");
  for (at::Tensor chunk = next(); chunk.defined(); chunk = next()) {
    const at::AutoGradMode enable_grad(true);
    sums.push_back(
        LogLikelihoods(closure, chunk).detach().to(at::kDouble).sum());
  }
  return at::stack(sums).sum();
}

at::Tensor AllData::probes(const at::Tensor& like) const {
  const std::vector<at::Tensor> drawn = {at::empty_like(like),
                                         at::empty_like(like)};
  const std::vector<int64_t> offsets = {0, like.numel()};
  gaussian_(drawn,
            /*std=*/1,
            offsets,
            seed,
            /*step=*/0,
            static_cast<int64_t>(Purpose::kProbe),
            std::nullopt,
            std::nullopt,
            /*num_chains=*/0);
  const auto rounded = [&](const at::Tensor& z) {
    return FlatRow(SplitLike(z, params)).to(at::kDouble);
  };
  return at::stack({rounded(drawn[0]), rounded(drawn[1])});
}

ECSAnchor ECSAnchor::Choose(const AllData& data,
                            const at::Tensor& theta,
                            const ECSPrior& prior,
                            const HMCECSOptions& options) {
  const std::vector<at::Tensor> there = SplitLike(theta, data.params);
  ECSAnchor chosen;
  chosen.theta = FlatRow(there).to(at::kDouble);  // as it is rounded
  chosen.num_data = data.num_data;
  {
    const at::Tensor directions = data.probes(chosen.theta);
    const Exchanged at_anchor(data.params, there);
    chosen.sums = SumUp(data, directions, options);
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
    curvature = (prior.precision.diag() - sums.hessian) / options.temperature();
  }
  chosen.whitening = Whitening(options.mass_matrix(), curvature);
  if (!HasHessian(sums.form)) sums.hessian = at::Tensor();
  return chosen;
}

TaylorTerms ECSAnchor::expand(const AllData& data,
                              const at::Tensor& indices) const {
  const at::Tensor probe = data.probes(theta)[0];
  const Exchanged at_anchor(data.params, SplitLike(theta, data.params));
  return TaylorTerms::AtPresent(
      data.closure, data.params, indices, sums.form, probe);
}

void ECSAnchor::check_near(const at::Tensor& log_likelihood,
                           const at::Tensor& there,
                           const ECSPrior& prior,
                           double temperature) const {
  at::Tensor change = log_likelihood - sums.value;
  change = change - prior.energy(there);
  change = change + prior.energy(theta);
  const double fall = -change.item<double>() / temperature;
  const double highest = DeepestFall(theta.numel());
  if (fall <= highest) return;
  throw std::runtime_error(
      "HMCECS has left the posterior: the log posterior of all data is " +
      FourDigits(fall) + " below that at θ* (that of draws is at most " +
      FourDigits(highest) +
      " below). Start again nearer the mode (set_anchor() gives a warm-up up), "
      "with variant(\"perturbed\"), control_variate(2), or a larger subsample_size "
      "or num_products");
}

}  // namespace torch_sgmcmc
