#include <torch/csrc/stable/library.h>

#include "apply/reduce.h"
#include "samplers/ewsg_op.h"

namespace torch_sgmcmc {
namespace {

Tensor LogRatio(TensorList params,
                TensorList grads,
                TensorList proposals,
                TensorList momenta,
                double lr,
                double momentum,
                double num_data,
                double prior_precision,
                double temperature,
                int64_t surrogate,
                int64_t num_chains) {
  std::optional<Tensor> result;
  EWSGLogRatios(params,
                grads,
                proposals,
                momenta,
                lr,
                momentum,
                num_data,
                prior_precision,
                temperature,
                surrogate,
                num_chains,
                [&](const Plan& plan, const auto& map, int64_t chains) {
                  result = torch::stable::new_empty(
                      params[0], {chains}, ScalarType::Double);
                  ReduceOnCpu(plan.segments(),
                              map,
                              chains,
                              static_cast<double*>(result->data_ptr()));
                });
  return *result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("ewsg_log_ratio", TORCH_BOX(&torch_sgmcmc::LogRatio));
}
