// All operators with a spec.
#pragma once

#include "ops/op_spec.h"
#include "ops/other_operators.h"
#include "ops/sampler_operators.h"

namespace torch_sgmcmc {

template <class... A, class... B, class... C>
constexpr auto Joined(Operators<A...> /*a*/, Operators<B...> /*b*/,
                      Operators<C...> /*c*/) {
  return Operators<A..., B..., C...>();
}
using AllOperators =
    decltype(Joined(SamplerOperators(), UpdateOperators(), SumOperators()));
inline constexpr auto& kOpSpecs = AllOperators::kOpSpecs;

}  // namespace torch_sgmcmc
