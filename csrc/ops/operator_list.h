// A list of operators with specs, as a type.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include "ops/op_spec.h"

namespace torch_sgmcmc {

template <class... Ops>
struct Operators {
  static constexpr size_t kCount = sizeof...(Ops);
  static constexpr std::array<const OpSpec*, kCount> kOpSpecs = {
      &Ops::kSpec...};

  // Calls `visit` with std::type_identity of each.
  template <class Visit>
  static void ForEach(Visit visit) {
    (visit(std::type_identity<Ops>()), ...);
  }
};

}  // namespace torch_sgmcmc
