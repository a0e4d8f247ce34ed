#include "torch_sgmcmc/psgld.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "libtorch/core/checks.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/roots.h"
#include "libtorch/core/versions.h"

namespace torch_sgmcmc {

// Python's default is true.
PSGLDOptions::PSGLDOptions() { put("gamma", false); }

PSGLDOptions::PSGLDOptions(double lr) : PSGLDOptions() { put("lr", lr); }

void PSGLDOptions::check_values() const {
  OptionsOf::check_values();
  if (get<bool>("gamma")) {
    Invalid(
        "Invalid gamma: true (must be false in C++: continue it in Python)");
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

void PSGLD::prepare(Work& work) {
  const auto& options = OptionsOfWork<PSGLDOptions>(work);
  work.state.resize(3);  // the operator's lists of Γ stay empty
  for (size_t i = 0; i < work.params.size(); ++i) {
    const at::Tensor& param = work.params[i];
    at::Tensor& square = own_state_of(param)["square_average"];
    if (!square.defined()) {
      square = ZeroState(param).copy_(work.grads[i]).square_();
    }
    if (options.adapt()) {
      if (!roots_.empty()) roots_.erase(param.unsafeGetTensorImpl());
      work.state[0].push_back(square);
    } else {
      auto& root = roots_[param.unsafeGetTensorImpl()];
      work.state[0].push_back(root.of(square, options.eps()));
    }
  }
  start_masters(work);
}

std::vector<std::string> PSGLD::state_keys() const {
  return {"square_average", "master"};
}

void PSGLD::update(const Work& work) {
  const bool adapts = OptionsOfWork<PSGLDOptions>(work).adapt();
  update_by(adapts ? method() : "psgld_frozen_step_", work);
}

}  // namespace torch_sgmcmc
