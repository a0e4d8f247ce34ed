#include "torch_sgmcmc/sgnht.h"

#include <vector>

#include "libtorch/core/momentum.h"
#include "libtorch/core/noise_key.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/prior.h"

namespace torch_sgmcmc {

std::unique_ptr<SamplerParamState> SGNHT::new_state() const {
  return std::make_unique<SGNHTParamState>();
}

void SGNHT::prepare(Work& work) {
  std::vector<SGNHTParamState*> states;
  std::vector<at::Tensor*> momenta;
  for (const at::Tensor& param : work.params) {
    states.push_back(&static_cast<SGNHTParamState&>(state_of(param)));
    momenta.push_back(&states.back()->momentum);
  }
  StartMomenta(work, momenta, /*stationary=*/true);
  work.state.resize(2);
  for (size_t i = 0; i < states.size(); ++i) {
    if (!states[i]->thermostat.defined()) {
      states[i]->thermostat = ZeroState(work.params[i]);
    }
    work.state[0].push_back(states[i]->momentum);
    work.state[1].push_back(states[i]->thermostat);
  }
  start_masters(work);
}

void SGNHT::update(const Work& work) {
  const auto& options = OptionsOfWork<SGNHTOptions>(work);
  const double rate = options.thermostat_rate().value_or(
      options.lr() * options.temperature() / options.num_data());
  const NoiseKey key = KeyOf(work);
  sgnht_step_(work.params,
              work.grads,
              work.state[0],
              work.state[1],
              work.masters,
              options.lr(),
              options.momentum(),
              options.num_data(),
              options.prior_precision(),
              options.temperature(),
              rate,
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
