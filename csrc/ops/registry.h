// All operators with a spec.
#pragma once

#include <array>
#include <cstddef>

#include "ops/op_spec.h"
#include "ops/other_operators.h"
#include "ops/sampler_operators.h"

namespace torch_sgmcmc {

template <class... Lists>
struct Joined {
  static constexpr auto kOpSpecs = [] {
    std::array<const OpSpec*, (Lists::kCount + ...)> specs = {};
    size_t count = 0;
    const auto add = [&](const auto& some) {
      for (const OpSpec* spec : some) specs[count++] = spec;
    };
    (add(Lists::kOpSpecs), ...);
    return specs;
  }();

  template <class Visit>
  static void ForEach(Visit visit) {
    (Lists::ForEach(visit), ...);
  }
};
using AllOperators = Joined<SamplerOperators, UpdateOperators, SumOperators>;
inline constexpr auto& kOpSpecs = AllOperators::kOpSpecs;

}  // namespace torch_sgmcmc
