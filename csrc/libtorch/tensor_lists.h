// The tensors of a step, and checks of parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libtorch/options.h"
#include "ops/op_spec.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace torch_sgmcmc {

// A group's parameters with a gradient on one device, their state, and the
// operator's other arguments.
struct TensorLists {
  const OptionValues* options = nullptr;
  int64_t seed = 0;
  Count step;
  int64_t num_chains = 0;  // chains with a seed each, or 0
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<int64_t> offsets;
  // Empty if the mean is options->prior_mean().
  std::vector<at::Tensor> prior_means;
  // Of the params in bf16 or fp16.
  std::vector<at::Tensor> masters;
  std::vector<std::vector<at::Tensor>> state;
  // For deferred checks: an int64 scalar in place of the step; negative, the
  // device skips the update.
  at::Tensor gate;
  // The rescaling for changed settings, and the noise estimate for these.
  double momentum_scale = 1;
  double thermostat_scale = 1;
  double noise_estimate = 0;
};

// The key of noise. `device_step`, an int64 scalar on the tensors' device, is
// added to `step`; negative, the operator does nothing.
struct NoiseKey {
  at::IntArrayRef offsets;
  int64_t seed = 0;
  int64_t step = 0;
  std::optional<at::Tensor> device_step = std::nullopt;
  int64_t num_chains = 0;
};
NoiseKey KeyOf(const TensorLists& lists);

// The dtype of arithmetic and state for a parameter.
at::ScalarType StateDtype(const at::Tensor& param);

// Zeros like a parameter, of StateDtype.
at::Tensor ZeroState(const at::Tensor& param);

// True if a parameter is the rounded value of a master: Note [Master
// parameters] in ops/roles.h.
bool HasMaster(const at::Tensor& param);

// Creates missing state; `tensors` has a pointer for each of lists.params.
void StartState(const TensorLists& lists,
                const std::vector<at::Tensor*>& tensors, Start how);

// Copies of prior means in the dtype of arithmetic. Throws unless there is one
// for each parameter, of its shape and finite.
std::vector<at::Tensor> CopiesOfMeans(const std::vector<at::Tensor>& means,
                                      const std::vector<at::Tensor>& params);

// Prior means as an operator's argument.
inline std::optional<at::TensorList> MeansOf(
    const std::vector<at::Tensor>& means) {
  if (means.empty()) return std::nullopt;
  return means;
}

// A number that changes with each write; for inference tensors, always.
int64_t VersionOf(const at::Tensor& tensor);

// Tells autograd of an operator's writes.
void BumpVersions(at::TensorList tensors);

// ---- Checks of parameters (parameters.cpp) ---------------------------------

// A module's parameters and buffers by name.
torch::OrderedDict<std::string, at::Tensor> TensorsOf(
    const torch::nn::Module& module);

// True if elements may share memory.
bool MayRepeat(const at::Tensor& param);

// Throws if the sampler cannot sample a parameter; `place` is for the message.
void CheckParameter(const char* sampler, const at::Tensor& param,
                    const std::string& place = "");

// Throws unless a parameter has so many chains.
void CheckChains(const at::Tensor& param,
                 const std::optional<int64_t>& num_chains);

// Throws if parameters overlap in memory.
void CheckMemory(const std::vector<std::vector<at::Tensor>>& groups);

}  // namespace torch_sgmcmc
