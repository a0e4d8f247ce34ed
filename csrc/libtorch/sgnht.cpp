#include "torch_sgmcmc/sgnht.h"

#include "libtorch/core/options_of_work.h"

namespace torch_sgmcmc {

void SGNHT::update(const Work& work) {
  const auto& options = OptionsOfWork<SGNHTOptions>(work);
  update_by("sgnht_step_",
            work,
            {{"thermostat_rate",
              options.thermostat_rate().value_or(
                  options.lr() * options.temperature() / options.num_data())}});
}

}  // namespace torch_sgmcmc
