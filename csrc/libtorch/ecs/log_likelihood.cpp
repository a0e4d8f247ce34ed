#include "torch_sgmcmc/log_likelihood.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "libtorch/core/checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

void NeedTensor(const char* name, const at::Tensor& result) {
  if (result.defined()) return;
  Invalid(std::string("Invalid ") + name +
          ": got an undefined Tensor (must be a tensor)");
}

}  // namespace

LogLikelihood::LogLikelihood(OfData outputs,
                             OfOutputs log_likelihood,
                             OfData rows)
    : outputs_(std::move(outputs)),
      log_likelihood_(std::move(log_likelihood)),
      rows_(std::move(rows)) {
  if (outputs_ == nullptr) Invalid("Invalid outputs: empty (must be callable)");
  if (log_likelihood_ == nullptr) {
    Invalid("Invalid log_likelihood: empty (must be callable)");
  }
}

at::Tensor LogLikelihood::operator()(const at::Tensor& indices) const {
  return of_outputs(outputs(indices), indices);
}

at::Tensor LogLikelihood::outputs(const at::Tensor& indices) const {
  at::Tensor result = outputs_(indices);
  NeedTensor("outputs", result);
  if (result.dim() == 0 || result.size(0) != indices.numel()) {
    Invalid("Invalid outputs: shape " + Shape(result.sizes()) + " (must be [" +
            std::to_string(indices.numel()) +
            ", ...], one row for each index)");
  }
  if (at::GradMode::is_enabled() && !result.requires_grad()) {
    throw std::runtime_error(
        "LogLikelihood got outputs that do not depend on the parameters, or "
        "have no graph");
  }
  return result;
}

at::Tensor LogLikelihood::of_outputs(const at::Tensor& outputs,
                                     const at::Tensor& indices) const {
  return log_likelihood_(outputs, indices);
}

at::Tensor LogLikelihood::rows(const at::Tensor& indices, int64_t d) const {
  const at::Tensor result = rows_(indices);
  NeedTensor("rows", result);
  const std::vector<int64_t> wanted = {indices.numel(), d};
  if (result.sizes() != wanted) {
    Invalid("Invalid rows: shape " + Shape(result.sizes()) + " (must be " +
            Shape(wanted) + ", one row for each index)");
  }
  return result.detach();
}

}  // namespace torch_sgmcmc
