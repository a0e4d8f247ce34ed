// Operators called with arguments of C++, in the order of their schemas, on any
// driver: what their boxed kernels do with torch's stack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "apply/boxed.h"
#include "apply/call.h"

namespace torch_sgmcmc {

template <class T>
void Put(Call& call, const Slot& slot, T&& value) {
  using Value = std::decay_t<T>;
  if constexpr (std::is_arithmetic_v<Value>) {
    switch (slot.kind) {
      case Kind::kNumber:
        call.numbers[slot.index] = static_cast<double>(value);
        return;
      case Kind::kInteger:
        call.integers[slot.index] = static_cast<int64_t>(value);
        return;
      case Kind::kSeed:
        call.seed = static_cast<int64_t>(value);
        return;
      case Kind::kStep:
        call.step = static_cast<int64_t>(value);
        return;
      case Kind::kPurpose:
        call.purpose = static_cast<int64_t>(value);
        return;
      case Kind::kPriorMean:
        call.prior_mean = static_cast<double>(value);
        return;
      case Kind::kNumChains:
        call.num_chains = static_cast<int64_t>(value);
        return;
      default:
        break;
    }
  }
  if constexpr (std::is_convertible_v<T, TensorList>) {
    if (slot.kind == Kind::kList) {
      call.lists[slot.index] = std::forward<T>(value);
      return;
    }
  }
  if constexpr (std::is_convertible_v<T, std::vector<int64_t>>) {
    if (slot.kind == Kind::kOffsets) {
      call.offsets = std::forward<T>(value);
      return;
    }
  }
  if constexpr (std::is_convertible_v<T, std::optional<Tensor>>) {
    if (slot.kind == Kind::kDeviceStep) {
      call.device_step = std::forward<T>(value);
      return;
    }
  }
  if constexpr (std::is_convertible_v<T, std::optional<TensorList>>) {
    if (slot.kind == Kind::kPriorMeans) {
      call.prior_means = std::forward<T>(value);
      return;
    }
  }
  if constexpr (std::is_convertible_v<T, Rows>) {
    if (slot.kind == Kind::kRows) {
      call.rows = std::forward<T>(value);
      return;
    }
  }
  throw std::logic_error("an argument of another kind than the row's");
}

template <class Op, class Driver>
struct On {
  template <class... Args>
  void operator()(Args&&... args) const {
    constexpr Slots kSlots = SlotsOf(Op::kRow);
    static_assert(sizeof...(args) == kSlots.count);
    Call call(Op::kRow);
    size_t next = 0;
    (Put(call, kSlots.items[next++], std::forward<Args>(args)), ...);
    Perform<Op, Driver>(call);
  }
};

}  // namespace torch_sgmcmc
