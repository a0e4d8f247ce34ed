#include "torch_sgmcmc/sgld.h"

#include "libtorch/core/noise_key.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/prior.h"

namespace torch_sgmcmc {

std::unique_ptr<SamplerParamState> SGLD::new_state() const {
  return std::make_unique<SGLDParamState>();
}

void SGLD::prepare(Work& work) { start_masters(work); }

void SGLD::update(const Work& work) {
  const SamplerOptions& options = *work.options;
  const NoiseKey key = KeyOf(work);
  sgld_step_(work.params,
             work.grads,
             work.masters,
             options.lr(),
             options.num_data(),
             options.prior_precision(),
             options.temperature(),
             key.offsets,
             key.seed,
             key.step,
             key.device_step,
             options.prior_mean(),
             MeansOf(work.prior_means),
             /*rows=*/std::nullopt,
             key.num_chains);
}

}  // namespace torch_sgmcmc
