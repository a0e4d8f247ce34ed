#include <span>

#include "ops/registry.h"

std::span<const torch_sgmcmc::OpSpec* const> torch_sgmcmc::OpSpecs() {
  return kOpSpecs;
}
