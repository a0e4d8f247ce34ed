#include "bnn/sgd_state.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace bnn {

using torch::optim::SGDParamState;
using torch_sgmcmc::StateDict;

StateDict SGDStateDict(const torch::optim::SGD& sgd) {
  StateDict state;
  c10::impl::GenericList groups(c10::AnyType::get());
  int64_t index = 0;
  for (const auto& group : sgd.param_groups()) {
    c10::impl::GenericList params(c10::AnyType::get());
    for (const auto& p : group.params()) {
      const auto entry = sgd.state().find(p.unsafeGetTensorImpl());
      if (entry != sgd.state().end()) {
        const auto& of_p = static_cast<const SGDParamState&>(*entry->second);
        state.set(index,
                  StateDict({{"momentum_buffer", of_p.momentum_buffer()}}));
      }
      params.push_back(index++);
    }
    const auto& options =
        static_cast<const torch::optim::SGDOptions&>(group.options());
    groups.push_back(StateDict({{"lr", options.lr()},
                                {"momentum", options.momentum()},
                                {"dampening", options.dampening()},
                                {"weight_decay", options.weight_decay()},
                                {"nesterov", options.nesterov()},
                                {"maximize", false},
                                {"foreach", c10::IValue()},
                                {"differentiable", false},
                                {"fused", c10::IValue()},
                                {"params", params}}));
  }
  return {{"state", state}, {"param_groups", groups}};
}

void LoadSGDStateDict(torch::optim::SGD& sgd, const StateDict& dict) {
  const StateDict state = dict.at("state");
  int64_t index = 0;
  for (auto& group : sgd.param_groups()) {
    for (auto& p : group.params()) {
      const int64_t key = index++;
      if (!state.contains(key)) continue;
      const auto momentum = StateDict(state.at(key)).at("momentum_buffer");
      if (!momentum.isTensor() || momentum.toTensor().sizes() != p.sizes()) {
        throw std::invalid_argument(
            "Invalid state_dict: it has no momentum_buffer of the shape of "
            "parameter " +
            std::to_string(key));
      }
      auto of_p = std::make_unique<SGDParamState>();
      of_p->momentum_buffer(momentum.toTensor().to(p.device()));
      sgd.state()[p.unsafeGetTensorImpl()] = std::move(of_p);
    }
  }
}

}  // namespace bnn
