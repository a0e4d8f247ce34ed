#include "libtorch/tensor_lists.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "host/parameters.h"
#include "libtorch/checks.h"
#include "libtorch/operators.h"
#include "random/counter.h"

namespace torch_sgmcmc {
namespace {

ParameterMemory MemoryOf(const at::Tensor& param) {
  return {param.device().str(),
          // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
          reinterpret_cast<int64_t>(param.const_data_ptr()),
          static_cast<int64_t>(param.element_size()), param.sizes().vec(),
          param.strides().vec()};
}

}  // namespace

NoiseKey KeyOf(const TensorLists& lists) {
  NoiseKey key{lists.offsets, lists.seed};
  key.num_chains = lists.num_chains;
  if (lists.gate.defined()) {
    key.device_step = lists.gate;
    return key;
  }
  key.step = lists.step.host;
  if (lists.step.is_on_device()) key.device_step = lists.step.device;
  return key;
}

at::ScalarType StateDtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor ZeroState(const at::Tensor& param) {
  return at::zeros_like(param, at::TensorOptions(StateDtype(param)));
}

bool HasMaster(const at::Tensor& param) {
  return param.scalar_type() == at::kBFloat16 ||
         param.scalar_type() == at::kHalf;
}

void StartState(const TensorLists& lists,
                const std::vector<at::Tensor*>& tensors, Start how) {
  Tensors fresh;
  std::vector<size_t> places;
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i]->defined()) continue;
    fresh.push_back(ZeroState(lists.params[i]));
    places.push_back(i);
    offsets.push_back(lists.offsets[i]);
  }
  if (fresh.empty()) return;
  if (how == Start::kStationary) {
    const OptionValues& options = *lists.options;
    NoiseKey key = KeyOf(lists);
    key.offsets = offsets;
    gaussian_(
        fresh,
        // The update scales all momenta or none.
        std::sqrt(options.lr() * options.temperature() / options.num_data()) /
            lists.momentum_scale,
        key.offsets, key.seed, key.step,
        static_cast<int64_t>(Purpose::kMomentum), key.device_step,
        /*rows=*/std::nullopt, key.num_chains);
  }
  for (size_t i = 0; i < places.size(); ++i) *tensors[places[i]] = fresh[i];
}

Tensors CopiesOfMeans(const Tensors& means, const Tensors& params) {
  if (means.size() != params.size()) {
    Invalid("Invalid prior_mean: ", means.size(), " tensors for a group of ",
            params.size(),
            " parameters (must be one for each; of several groups each needs "
            "its own)");
  }
  const at::NoGradGuard no_grad;
  Tensors copies;
  for (size_t i = 0; i < means.size(); ++i) {
    const at::Tensor& mean = means[i];
    const std::string which =
        "Invalid prior_mean: number " + std::to_string(i) + " ";
    if (!mean.defined()) Invalid(which, "is undefined");
    if (!mean.is_floating_point() || mean.layout() != at::kStrided) {
      Invalid(which, "is of ", DtypeName(mean.scalar_type()), " and layout ",
              LayoutName(mean.layout()),
              " (must be floating point, and torch::kStrided)");
    }
    if (mean.sizes() != params[i].sizes()) {
      Invalid(which, "has shape ", Shape(mean.sizes()), " (must be ",
              Shape(params[i].sizes()), ", its parameter's shape)");
    }
    copies.push_back(ZeroState(params[i]).copy_(mean.detach()));
    if (!copies.back().isfinite().all().item<bool>()) {
      Invalid(which, "has elements that are not finite");
    }
  }
  return copies;
}

int64_t VersionOf(const at::Tensor& tensor) {
  static std::atomic<int64_t> unknown = 0;
  return tensor.is_inference() ? --unknown
                               : static_cast<int64_t>(tensor._version());
}

void BumpVersions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

// ---- Checks of parameters ---------------------------------------------------

void CheckParameter(const char* sampler, const at::Tensor& param,
                    const std::optional<int64_t>& num_chains,
                    const std::string& place) {
  const std::string cannot =
      std::string("Invalid parameter: ") + sampler + " cannot sample ";
  if (!param.defined()) Invalid(cannot, "an undefined Tensor");
  if (param.layout() != at::kStrided || param.is_nested()) {
    Invalid(cannot, "the layout ",
            (param.is_nested() ? "nested" : LayoutName(param.layout())),
            " (must be torch::kStrided)");
  }
  switch (param.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
      break;
    default:
      Invalid(cannot, DtypeName(param.scalar_type()), place,
              " (must be torch::kFloat, kDouble, kBFloat16 or kHalf; a complex "
              "parameter can be kept as torch::view_as_real of it)");
  }
  if (!param.is_cpu() && !param.is_cuda()) {
    Invalid(cannot, "on the device ", param.device().str(),
            " (must be cpu or cuda; a module on meta has no numbers before "
            "to_empty() and its initialisation)");
  }
  if (param.is_neg()) {
    Invalid(cannot, "a negative view (take resolve_neg() of it)");
  }
  if (!param.is_leaf()) Invalid("can't optimize a non-leaf Tensor");
  if (MayRepeat(param.sizes(), param.strides()) &&
      FindOverlap({MemoryOf(param)})) {
    Invalid(cannot,
            "an expanded parameter (several elements share memory): shape ",
            Shape(param.sizes()), ", strides ", Shape(param.strides()));
  }
  if (num_chains && (param.dim() == 0 || param.size(0) != *num_chains)) {
    Invalid("Invalid parameter: shape ", Shape(param.sizes()),
            " (must have a leading dimension of num_chains = ", *num_chains,
            ")");
  }
}

void CheckMemory(const std::vector<Tensors>& groups) {
  std::vector<std::pair<size_t, size_t>> places;
  std::vector<ParameterMemory> memories;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < groups[i].size(); ++j) {
      if (groups[i][j].numel() == 0) continue;
      places.emplace_back(i, j);
      memories.push_back(MemoryOf(groups[i][j]));
    }
  }
  const auto shared = FindOverlap(memories);
  if (!shared) return;
  const auto [first, second] =
      std::minmax(places[shared->first], places[shared->second]);
  Invalid("Invalid parameters: number ", first.second, " of group ",
          first.first, " and number ", second.second, " of group ",
          second.first, " overlap in memory (each must have its own)");
}

}  // namespace torch_sgmcmc
