// What a step updates, and the tensors that go with it.
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

// The parameters of one group on one device that have a gradient, what the
// sampler remembers of them, and the lists that its operator takes besides.
struct TensorLists {
  const OptionValues* options = nullptr;
  int64_t seed = 0;
  Count step;  // the number of updates made before
  // Chains with a seed each that tensors hold, or 0.
  int64_t num_chains = 0;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<int64_t> offsets;
  // The means of their priors; empty if they are options->prior_mean().
  std::vector<at::Tensor> prior_means;
  // For the params in bf16 or fp16.
  std::vector<at::Tensor> masters;
  std::vector<std::vector<at::Tensor>> state;
  // Where the device decides whether to make the update: an int64 scalar in
  // place of the step, negative if it does not. Undefined elsewhere.
  at::Tensor gate;
  // Numbers of operators: what momenta and thermostats of other settings are
  // multiplied by, and the noise estimate for the present ones.
  double momentum_scale = 1;
  double thermostat_scale = 1;
  double noise_estimate = 0;
};

// The noise of these lists. `device_step`, an int64 scalar on the tensors'
// device, is added to `step`; negative, it leaves everything as it is.
struct NoiseKey {
  at::IntArrayRef offsets;
  int64_t seed = 0;
  int64_t step = 0;
  std::optional<at::Tensor> device_step = std::nullopt;
  int64_t num_chains = 0;
};
NoiseKey KeyOf(const TensorLists& lists);

// The type of arithmetic and of state for a parameter.
at::ScalarType StateDtype(const at::Tensor& param);

// Zeros like a parameter, in fp64 for fp64 and in fp32 for all others: what a
// sampler remembers is not rounded to half precision.
at::Tensor ZeroState(const at::Tensor& param);

// True if a parameter is the rounded value of a master: Note [Master
// parameters] in ops/roles.h.
bool HasMaster(const at::Tensor& param);

// Creates state as the spec says where there is none: `tensors` has a pointer
// for each of lists.params.
void StartState(const TensorLists& lists,
                const std::vector<at::Tensor*>& tensors, Start how);

// The means of these parameters' priors, as they are kept: copies in the type
// of the arithmetic. Throws unless they are one for each, of its shape and
// finite.
std::vector<at::Tensor> CopiesOfMeans(const std::vector<at::Tensor>& means,
                                      const std::vector<at::Tensor>& params);

// As an operator takes them: none if there are none.
inline std::optional<at::TensorList> MeansOf(
    const std::vector<at::Tensor>& means) {
  if (means.empty()) return std::nullopt;
  return means;
}

// Differs if the tensor was written to in between. An inference tensor counts
// nothing: then it always differs.
int64_t VersionOf(const at::Tensor& tensor);

// Tells autograd that an operator changed these.
void BumpVersions(at::TensorList tensors);

// ---- Parameters that a sampler accepts (parameters.cpp)
// ----------------------

// A module's parameters and buffers by their names.
torch::OrderedDict<std::string, at::Tensor> TensorsOf(
    const torch::nn::Module& module);

// True if strides leave open that elements share memory.
bool MayRepeat(const at::Tensor& param);

// Throws if the sampler of this name cannot sample a parameter.
// `place` is which one, in errors of dtype.
void CheckParameter(const char* sampler, const at::Tensor& param,
                    const std::string& place = "");

// Throws unless a parameter holds so many chains.
void CheckChains(const at::Tensor& param,
                 const std::optional<int64_t>& num_chains);

// Throws if parameters of the groups, each without repetitions, overlap.
void CheckMemory(const std::vector<std::vector<at::Tensor>>& groups);

}  // namespace torch_sgmcmc
