#include "torch_sgmcmc/sgld.h"

#include "optim/noise_key.h"
#include "torch_sgmcmc/operators.h"

namespace torch_sgmcmc {

void SGLD::update(const Work& work) {
  const SamplerOptions& options = *work.options;
  sgld_step_(work.params,
             work.grads,
             options.lr(),
             options.num_data(),
             options.prior_precision(),
             options.temperature(),
             KeyOf(work));
}

}  // namespace torch_sgmcmc
