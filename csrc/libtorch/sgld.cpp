#include "torch_sgmcmc/sgld.h"

#include "libtorch/core/noise_key.h"
#include "torch_sgmcmc/operators.h"

namespace torch_sgmcmc {

std::unique_ptr<SamplerParamState> SGLD::new_state() const {
  return std::make_unique<SGLDParamState>();
}

void SGLD::prepare(Work& work) { start_masters(work); }

void SGLD::update(const Work& work) {
  const SamplerOptions& options = *work.options;
  sgld_step_(work.params,
             work.grads,
             work.masters,
             options.lr(),
             options.num_data(),
             options.prior_precision(),
             options.temperature(),
             KeyOf(work));
}

}  // namespace torch_sgmcmc
