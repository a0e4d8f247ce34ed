#include "torch_sgmcmc/psgld.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/counter.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/noise_key.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/roots.h"
#include "libtorch/core/versions.h"

namespace torch_sgmcmc {
namespace {

bool IsCorrected(const Work& work) {
  return OptionsOfWork<PSGLDOptions>(work).adapt() &&
         OptionsOfWork<PSGLDOptions>(work).gamma();
}

// Estimates the diagonal of the Hessian (Hutchinson), of all groups at once: it
// couples them, so probes for each alone would make the chain depend on how
// parameters are grouped. The result has a list for each of `work`, empty for
// those without a correction.
std::vector<std::vector<at::Tensor>> Curvatures(const std::vector<Work>& work) {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> probes;
  std::vector<at::Tensor> with_graph;
  std::vector<at::Tensor> their_probes;
  for (const Work& lists : work) {
    if (!IsCorrected(lists)) continue;
    std::vector<at::Tensor> normal;
    for (const at::Tensor& param : lists.params) {
      normal.push_back(at::empty_like(param));
    }
    const NoiseKey key = KeyOf(lists);
    gaussian_(normal,
              1.0,
              key.offsets,
              key.seed,
              key.step,
              static_cast<int64_t>(Purpose::kProbe),
              key.device_step,
              /*rows=*/std::nullopt,
              key.num_chains);
    for (size_t i = 0; i < normal.size(); ++i) {
      params.push_back(lists.params[i]);
      probes.push_back(at::ones_like(normal[i]).copysign_(normal[i]));
      if (lists.grads[i].requires_grad()) {
        with_graph.push_back(lists.grads[i]);
        their_probes.push_back(probes.back());
      }
    }
  }
  std::vector<std::vector<at::Tensor>> curvatures(work.size());
  if (params.empty()) return curvatures;
  if (with_graph.empty()) {
    throw std::runtime_error(
        "PSGLD got gradients without a graph, and Γ needs second derivatives: "
        "call loss.backward({}, std::nullopt, /*create_graph=*/true), or set "
        "gamma(false) and stop adaptation, by adapt(false), after burn-in");
  }
  std::vector<at::Tensor> products;
  try {
    products = torch::autograd::grad(with_graph,
                                     params,
                                     their_probes,
                                     /*retain_graph=*/true,
                                     /*create_graph=*/false,
                                     /*allow_unused=*/true);
  } catch (const std::exception& error) {
    if (std::string(error.what()).find("modified by an inplace operation") ==
        std::string::npos) {
      throw;
    }
    throw std::runtime_error(
        "PSGLD got gradients of parameters that have changed since, and Γ "
        "needs second derivatives: step once for each backward pass, after it, "
        "and sample all parameters of a loss with one sampler");
  }
  size_t next = 0;
  for (size_t i = 0; i < work.size(); ++i) {
    if (!IsCorrected(work[i])) continue;
    for (size_t j = 0; j < work[i].params.size(); ++j, ++next) {
      const at::Tensor& product = products[next];
      curvatures[i].push_back(product.defined() ? product * probes[next]
                                                : at::zeros_like(probes[next]));
    }
  }
  return curvatures;
}

// Starts V and W so that Gamma is bounded: docs/samplers/psgld.md.
void BeginGamma(SamplerParamState& state,
                const at::Tensor& grad,
                const at::Tensor& curvature,
                double scale,
                bool is_new,
                int64_t num_chains) {
  const at::Tensor square = state["square_average"];
  state["sensitivity"] = at::zeros_like(square);
  const at::Tensor h = curvature.to(square.scalar_type());
  if (is_new) state["sensitivity"].copy_(grad).mul_(h).mul_(2);
  square.add_(h.abs().mul_(scale));
  // Where V is 0, the mean of what is one chain's.
  const auto fill = [](const at::Tensor& own) {
    const at::Tensor mean =
        (sum_of_squares({Root(own)}) / own.numel()).to(own.scalar_type());
    own.copy_(at::where(own == 0, mean, own));
  };
  if (num_chains == 0) return fill(square);
  for (const at::Tensor& own : square.unbind()) fill(own);
}

}  // namespace

void PSGLDOptions::check_values() const {
  OptionsOf::check_values();
  if (capturable() && adapt() && gamma()) {
    Invalid(
        "Invalid gamma: true needs second derivatives from autograd and "
        "excludes capturable (set gamma(false), or adapt(false))");
  }
}

const at::Tensor& detail::KeptRoot::of(const at::Tensor& v, double eps) {
  const int64_t version = VersionOf(v);
  if (!root_.defined() || !v_.is_same(v) || version_ != version ||
      eps_ != eps) {
    // Operations that are rounded in one way only, so that this is the same on
    // every processor, as all updates are.
    root_ = Root(Root(v).add_(eps)).reciprocal_();
    v_ = v;
    version_ = version;
    eps_ = eps;
  }
  return root_;
}

// Not where the first h enters the state before the update.
bool PSGLD::looks_later(const std::vector<Work>& work) const {
  if (!Sampler::looks_later(work)) return false;
  for (const Work& lists : work) {
    if (!IsCorrected(lists)) continue;
    for (const at::Tensor& param : lists.params) {
      if (!state_of(param)["sensitivity"].defined()) return false;
    }
  }
  return true;
}

void PSGLD::prepare_all(std::vector<Work>& work) {
  auto curvatures = Curvatures(work);
  // V may change before the update.
  if (std::ranges::any_of(work, IsCorrected)) check_fit(work);
  check_finite(work, curvatures, "second derivative (for Γ)");
  for (size_t i = 0; i < work.size(); ++i) {
    Work& lists = work[i];
    const bool is_corrected = IsCorrected(lists);
    const auto& options = OptionsOfWork<PSGLDOptions>(lists);
    lists.state.resize(3);
    for (size_t j = 0; j < lists.params.size(); ++j) {
      const at::Tensor& param = lists.params[j];
      SamplerParamState& state = own_state_of(param);
      at::Tensor& square = state["square_average"];
      const bool is_new = !square.defined();
      if (is_new) square = ZeroState(param).copy_(lists.grads[j]).square_();
      if (!options.adapt()) {
        auto& root = roots_[param.unsafeGetTensorImpl()];
        lists.state[0].push_back(root.of(square, options.eps()));
        continue;
      }
      if (!roots_.empty()) roots_.erase(param.unsafeGetTensorImpl());
      lists.state[0].push_back(square);
      at::Tensor& sensitivity = state["sensitivity"];
      if (!is_corrected) {  // V moves on without it
        sensitivity = at::Tensor();
        continue;
      }
      if (!sensitivity.defined()) {
        const double scale = options.temperature() / options.num_data();
        BeginGamma(state,
                   lists.grads[j],
                   curvatures[i][j],
                   scale,
                   is_new,
                   options.chains_with_seeds());
      }
      lists.state[1].push_back(sensitivity);
    }
    lists.state[2] = std::move(curvatures[i]);
    start_masters(lists);
  }
}

void PSGLD::update(const Work& work) {
  const bool adapts = OptionsOfWork<PSGLDOptions>(work).adapt();
  update_by(adapts ? method() : "psgld_frozen_step_", work);
}

}  // namespace torch_sgmcmc
