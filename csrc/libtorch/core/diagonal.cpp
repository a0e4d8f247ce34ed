#include "libtorch/core/diagonal.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <string>

#include "libtorch/core/checks.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

bool IsPositive(const at::Tensor& tensor) {
  return tensor.isfinite().logical_and(tensor > 0).all().item<bool>();
}

}  // namespace

std::vector<at::Tensor> Diagonals(const char* what,
                                  const std::vector<at::Tensor>& given,
                                  const std::vector<at::Tensor>& params) {
  const std::string invalid = std::string("Invalid ") + what + ": ";
  if (given.size() != params.size()) {
    Invalid(invalid + std::to_string(given.size()) +
            " (must be one for each of the " + std::to_string(params.size()) +
            " parameters)");
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i < params.size(); ++i) {
    const std::string which = invalid + "number " + std::to_string(i);
    if (!given[i].defined()) Invalid(which + " is undefined");
    kept.push_back(ZeroState(params[i]));
    const at::Tensor value =
        given[i].to(kept[i].device(), kept[i].scalar_type());
    try {
      kept[i].copy_(value.expand(params[i].sizes()));
    } catch (const c10::Error&) {
      Invalid(which + " has shape " + Shape(value.sizes()) +
              " (must broadcast to " + Shape(params[i].sizes()) + ")");
    }
    if (!IsPositive(value)) {
      Invalid(which + " has elements out of range (must be finite and > 0)");
    }
  }
  return kept;
}

void CheckSavedDiagonal(const char* name,
                        int64_t index,
                        const at::Tensor& value) {
  if (IsPositive(value)) return;
  Invalid(std::string("Invalid state_dict: ") + name + " of parameter " +
          std::to_string(index) +
          " has elements out of range (must be finite and > 0)");
}

}  // namespace torch_sgmcmc
