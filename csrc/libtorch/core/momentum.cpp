#include "libtorch/core/momentum.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>

#include "core/counter.h"
#include "libtorch/core/noise_key.h"
#include "libtorch/core/operators.h"

namespace torch_sgmcmc {

at::ScalarType StateDtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor ZeroState(const at::Tensor& param) {
  return at::zeros_like(param, at::TensorOptions(StateDtype(param)));
}

bool HasMaster(const at::Tensor& param) {
  return param.scalar_type() == at::kBFloat16 ||
         param.scalar_type() == at::kHalf;
}

void StartState(const Work& work,
                const std::vector<at::Tensor*>& tensors,
                Start how) {
  std::vector<at::Tensor> fresh;
  std::vector<size_t> places;
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i]->defined()) continue;
    fresh.push_back(ZeroState(work.params[i]));
    places.push_back(i);
    offsets.push_back(work.offsets[i]);
  }
  if (fresh.empty()) return;
  if (how == Start::kStationary) {
    const SamplerOptions& options = *work.options;
    NoiseKey key = KeyOf(work);
    key.offsets = offsets;
    gaussian_(
        fresh,
        // All momenta are multiplied by the update, if those of others are.
        std::sqrt(options.lr() * options.temperature() / options.num_data()) /
            work.momentum_scale,
        key.offsets,
        key.seed,
        key.step,
        static_cast<int64_t>(Purpose::kMomentum),
        key.device_step,
        /*rows=*/std::nullopt,
        key.num_chains);
  }
  for (size_t i = 0; i < places.size(); ++i) *tensors[places[i]] = fresh[i];
}

}  // namespace torch_sgmcmc
