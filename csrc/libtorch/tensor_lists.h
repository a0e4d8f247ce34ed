// The tensors of a step, calls of operators with them, and checks of
// parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
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
  Tensors params;
  Tensors grads;
  std::vector<int64_t> offsets;
  // Empty if the mean is options->prior_mean().
  Tensors prior_means;
  // Of the params in bf16 or fp16.
  Tensors masters;
  std::vector<Tensors> state;
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
Tensors CopiesOfMeans(const Tensors& means, const Tensors& params);

// Prior means as an operator's argument.
inline std::optional<at::TensorList> MeansOf(const Tensors& means) {
  if (means.empty()) return std::nullopt;
  return means;
}

// A number that changes with each write; for inference tensors, always.
int64_t VersionOf(const at::Tensor& tensor);

// Tells autograd of an operator's writes.
void BumpVersions(at::TensorList tensors);

// ---- Calls of operators with a spec (method.cpp) ----------------------------

const OpSpec& OpSpecNamed(std::string_view op);

// The keys of a spec's state, the master's last.
std::vector<std::string> KeysOf(const OpSpec& spec);

struct UpdateNumbers {
  std::array<double, kMaxArguments> own = {};
  CommonNumbers common;
};

// An operator with a spec, called with a class's hyperparameters.
class Method {
 public:
  Method(const char* op, const OptionValues& options);

  const char* op() const { return op_; }
  const OpSpec& spec() const { return spec_; }

  void update(
      const TensorLists& lists,
      std::initializer_list<std::pair<std::string_view, double>> instead) const;

 private:
  const char* op_;
  const OpSpec& spec_;
  void (*call_)(const TensorLists& lists,
                const UpdateNumbers& numbers) = nullptr;
  // Places of the spec's numbers in the options, which may lack some.
  std::vector<std::optional<size_t>> places_;
  std::vector<double TensorLists::*> from_lists_;  // or null
  std::vector<size_t> common_places_;              // of kCommonNumbers
};

// ---- Checks of parameters ---------------------------------------------------

// A module's parameters and buffers by name.
torch::OrderedDict<std::string, at::Tensor> TensorsOf(
    const torch::nn::Module& module);

// Throws if a sampler with so many chains cannot sample a parameter; `place` is
// for the message.
void CheckParameter(const char* sampler, const at::Tensor& param,
                    const std::optional<int64_t>& num_chains,
                    const std::string& place = "");

void CheckMemory(const std::vector<Tensors>& groups);

}  // namespace torch_sgmcmc
