#include "libtorch/store/chosen_tensors.h"

#include <fnmatch.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "libtorch/core/checks.h"

namespace torch_sgmcmc {
namespace {

bool Matches(const std::vector<std::string>& patterns,
             const std::string& name) {
  return std::any_of(
      patterns.begin(), patterns.end(), [&](const std::string& pattern) {
        return ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
      });
}

bool Has(Sampler& sampler, const at::Tensor& tensor) {
  for (const auto& group : sampler.param_groups()) {
    for (const at::Tensor& p : group.params()) {
      if (p.is_same(tensor)) return p.requires_grad();
    }
  }
  return false;
}

}  // namespace

ChosenTensors::ChosenTensors(const torch::nn::Module* model,
                             Collector::Tensors tensors,
                             Sampler& sampler,
                             const CollectorOptions& options)
    : model_(model), tensors_(std::move(tensors)) {
  const auto named = Parameters();
  const auto& patterns = options.parameters();
  for (const std::string& pattern : patterns) {
    if (std::none_of(named.begin(), named.end(), [&](const auto& item) {
          return Matches({pattern}, item.first);
        })) {
      Invalid("Invalid parameters: no parameter is named '" + pattern + "'");
    }
  }
  for (const auto& [name, tensor] : named) {
    if ((patterns.empty() || Matches(patterns, name)) &&
        (!options.sampled() || Has(sampler, tensor))) {
      names_.push_back(name);
    }
  }
  if (names_.empty()) {
    Invalid("Invalid parameters: none of the model's is chosen");
  }
  if (!options.buffers() || model_ == nullptr) return;
  for (const auto& item : model_->named_buffers()) {
    names_.push_back(item.key());
  }
}

std::map<std::string, at::Tensor> ChosenTensors::Now() const {
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, tensor] : Parameters()) all[name] = tensor;
  if (model_ != nullptr) {
    for (const auto& item : model_->named_buffers()) {
      all[item.key()] = item.value();
    }
  }
  std::map<std::string, at::Tensor> chosen;
  for (const std::string& name : names_) chosen[name] = all.at(name);
  return chosen;
}

Collector::Tensors ChosenTensors::Parameters() const {
  if (model_ == nullptr) return tensors_;
  Collector::Tensors named;
  for (const auto& item : model_->named_parameters()) {
    named.emplace_back(item.key(), item.value());
  }
  return named;
}

}  // namespace torch_sgmcmc
