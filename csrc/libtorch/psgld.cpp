#include "torch_sgmcmc/psgld.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "libtorch/operators.h"
#include "libtorch/sampler_impl.h"
#include "ops/psgld.h"

namespace torch_sgmcmc {
namespace {

// The correctly rounded square root, equal on all processors.
at::Tensor Root(const at::Tensor& tensor) {
  at::Tensor roots = tensor.detach().clone();
  square_root_({roots});
  return roots;
}

// √G, cached while V and ε are unchanged.
class CachedRoot {
 public:
  const at::Tensor& of(const at::Tensor& v, double eps) {
    const int64_t version = VersionOf(v);
    if (!root_.defined() || !v_.is_same(v) || version_ != version ||
        eps_ != eps) {
      // Correctly rounded operations, equal on all processors.
      root_ = Root(Root(v).add_(eps)).reciprocal_();
      v_ = v;
      version_ = version;
      eps_ = eps;
    }
    return root_;
  }

 private:
  at::Tensor root_;
  at::Tensor v_;
  int64_t version_ = 0;
  double eps_ = 0;
};

class PSGLDImpl : public SamplerImpl {
 public:
  PSGLDImpl() : SamplerImpl("psgld_step_") {}

 protected:
  void prepare(TensorLists& lists) override {
    const bool adapts = lists.options->get<bool>("adapt");
    lists.state.resize(3);  // the operator's lists of Γ stay empty
    const OptionValues& options = *lists.options;
    const double eps =
        LeastRoot(options.number("eps"), options.lr(),
                  options.number("prior_precision") / options.num_data());
    for (size_t i = 0; i < lists.params.size(); ++i) {
      const at::Tensor& param = lists.params[i];
      at::Tensor& square = own_state_of(param)["square_average"];
      if (!square.defined()) {
        square = ZeroState(param).copy_(lists.grads[i]).square_();
      }
      if (adapts) {
        if (!roots_.empty()) roots_.erase(param.unsafeGetTensorImpl());
        lists.state[0].push_back(square);
      } else {
        CachedRoot& root = roots_[param.unsafeGetTensorImpl()];
        lists.state[0].push_back(root.of(square, eps));
      }
    }
  }

  void update(const TensorLists& lists) override {
    const bool adapts = lists.options->get<bool>("adapt");
    update_by(adapts ? op_ : "psgld_frozen_step_", lists);
  }

  std::vector<std::string> state_keys() const override {
    return {"square_average", "master"};
  }

  void parameters_changed() override { roots_.clear(); }

 private:
  // Of frozen preconditioners, by the parameter's TensorImpl.
  std::unordered_map<const void*, CachedRoot> roots_;
};

const bool kPSGLD = Register<PSGLDOptions, PSGLDImpl>();

}  // namespace
}  // namespace torch_sgmcmc
