// What a sampler can sample: torch_sgmcmc/_impl/parameters.py in C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace torch_sgmcmc {

// A module's parameters and buffers by their names.
torch::OrderedDict<std::string, at::Tensor> TensorsOf(
    const torch::nn::Module& module);

// Whether strides leave open that elements share memory.
bool MayRepeat(const at::Tensor& param);

// Throws if the sampler of this name cannot sample a parameter.
// `place` is which one, in errors of dtype.
void CheckParameter(const char* sampler,
                    const at::Tensor& param,
                    const std::string& place = "");

// Throws unless a parameter holds so many chains.
void CheckChains(const at::Tensor& param,
                 const std::optional<int64_t>& num_chains);

// Throws if parameters of the groups, each without repetitions, overlap.
void CheckMemory(const std::vector<std::vector<at::Tensor>>& groups);

}  // namespace torch_sgmcmc
