// Comparison of state dicts.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <algorithm>

namespace torch_sgmcmc {

// Equality to the bit of nests of tensors and values; NaN equals NaN.
inline bool SameValues(const c10::IValue& a, const c10::IValue& b) {
  if (a.isTensor() && b.isTensor()) {
    const at::Tensor x = a.toTensor();
    const at::Tensor y = b.toTensor();
    if (!x.defined() || !y.defined()) return x.defined() == y.defined();
    return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
           x.equal(y);
  }
  if (a.isGenericDict() && b.isGenericDict()) {
    const auto x = a.toGenericDict();
    const auto y = b.toGenericDict();
    if (x.size() != y.size()) return false;
    for (const auto& entry : x) {
      const auto other = y.find(entry.key());
      if (other == y.end() || !SameValues(entry.value(), other->value())) {
        return false;
      }
    }
    return true;
  }
  const auto is_row = [](const c10::IValue& value) {
    return value.isList() || value.isTuple();
  };
  if (is_row(a) && is_row(b)) {
    const auto elements = [](const c10::IValue& value) {
      return value.isList() ? value.toListRef()
                            : value.toTupleRef().elements().asArrayRef();
    };
    const auto x = elements(a);
    const auto y = elements(b);
    return a.isList() == b.isList() &&
           std::equal(x.begin(), x.end(), y.begin(), y.end(), SameValues);
  }
  if (a.isDouble() && b.isDouble()) {
    const double x = a.toDouble();
    const double y = b.toDouble();
    return x == y || (x != x && y != y);
  }
  return a.tagKind() == b.tagKind() && (a.isNone() || a == b);
}

}  // namespace torch_sgmcmc
