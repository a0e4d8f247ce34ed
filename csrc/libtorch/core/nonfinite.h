// What samplers do about gradients that are not finite: Note [Who looks at
// gradients] of torch_sgmcmc/chain/nonfinite.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/rescaling.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

// The step is to be left out. It is no error, and never leaves step().
struct StepLeftOut {};

// What a closure has made is not finite; and its losses, where they are
// returned if the step is left out.
class NonfiniteError : public std::runtime_error {
 public:
  explicit NonfiniteError(const std::string& message, at::Tensor losses = {})
      : std::runtime_error(message), losses_(std::move(losses)) {}

  const at::Tensor& losses() const { return losses_; }

 private:
  at::Tensor losses_;
};

// What was counted, for each parameter, of one kind of tensor.
struct Seen {
  const char* what;
  std::vector<at::Tensor> params;
  at::Tensor counts;
};

struct Sampler::Watch {
  // What the device was asked in this step.
  std::vector<Seen> seen;
  // What it has yet to tell of the last step, and what was then to be done.
  std::vector<Seen> pending;
  std::string choice;
  std::optional<c10::Event> event;
  // Records of momenta as they were before it, by group.
  std::vector<std::pair<size_t, std::optional<MomentumSettings>>> undo;
  // The error that this has turned out to be; empty if there is none.
  std::string error;
};

// "0 of group 1, of shape [2, 3]"
std::string NameOf(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const at::Tensor& param);

// Throws std::invalid_argument unless options of this class take the value.
void CheckNonfinite(const SamplerOptions& options);

}  // namespace torch_sgmcmc
