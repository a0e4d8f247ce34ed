// A call of an operator with a spec: its schema, and its arguments on torch's
// stack or in a packed step.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/packed_step.h"
#include "launch/plan.h"
#include "ops/op_spec.h"
#include "random/counter.h"

namespace torch_sgmcmc {

// "sgld_step_(Tensor(a!)[] params, Tensor[] grads, ..., *, float lr, ..."
std::string SchemaOf(const OpSpec& spec);

struct Call {
  Call(const OpSpec& spec, const StableIValue* stack);
  explicit Call(const OpSpec& spec) : spec(spec) {}

  // Throws std::runtime_error if a number is out of range.
  void CheckNumbers() const;
  NoiseStream Stream() const;
  // The lists in their order, with prior means before masters; `lead` is the
  // role of the first.
  std::vector<Argument> Arguments(std::optional<Role> lead) const;
  Plan MakePlan(const std::vector<Argument>& arguments) const;
  // The number of chains with separate sums.
  int64_t chains() const;
  // Calls visit(argument) with the member of a call for a slot.
  static void VisitAt(const Slot& slot, auto& call, const auto& visit) {
    switch (slot.kind) {
      case Kind::kList:
        return visit(call.lists[slot.index]);
      case Kind::kNumber:
        return visit(call.numbers[slot.index]);
      case Kind::kInteger:
        return visit(call.integers[slot.index]);
      case Kind::kOffsets:
        return visit(call.offsets);
      case Kind::kSeed:
        return visit(call.seed);
      case Kind::kStep:
        return visit(call.step);
      case Kind::kPurpose:
        return visit(call.purpose);
      case Kind::kDeviceStep:
        return visit(call.device_step);
      case Kind::kCommon:
        return visit(call.common.*kCommonNumbers[slot.index].place);
      case Kind::kPriorMeans:
        return visit(call.prior_means);
      case Kind::kShardRows:
        return visit(call.rows);
      case Kind::kNumChains:
        return visit(call.num_chains);
    }
  }

  const OpSpec& spec;
  std::array<TensorList, kMaxArguments> lists;
  std::array<double, kMaxArguments> numbers = {};
  std::array<int64_t, kMaxArguments> integers = {};
  std::vector<int64_t> offsets;
  int64_t seed = 0;
  int64_t step = 0;
  int64_t purpose = 0;
  std::optional<Tensor> device_step;
  CommonNumbers common;
  std::optional<TensorList> prior_means;
  Rows rows;
  int64_t num_chains = 0;
};

// A call of the operator Op with arguments by name; unknown names do not
// compile.
template <class Op>
class NamedCall {
 public:
  explicit NamedCall(const Call& call) : call_(call) {}

  struct Number {
    // Written as a literal.
    // cppcheck-suppress noExplicitConstructor
    // NOLINTNEXTLINE(google-explicit-constructor)
    consteval Number(const char* name)
        : is_common(name == std::string_view(args::kPriorMean.name) &&
                    Op::kSpec.has_prior_mean),
          place(is_common ? 0 : PlaceOfName(Op::kSpec.numbers, name)) {
      if (!is_common && IsInteger(Op::kSpec.numbers[place].domain)) {
        throw "the number is an integer";
      }
    }
    bool is_common;
    size_t place;
  };
  struct Integer {
    // Written as a literal.
    // cppcheck-suppress noExplicitConstructor
    // NOLINTNEXTLINE(google-explicit-constructor)
    consteval Integer(const char* name)
        : place(PlaceOfName(Op::kSpec.numbers, name)) {
      if (!IsInteger(Op::kSpec.numbers[place].domain)) {
        throw "the number is not an integer";
      }
    }
    size_t place;
  };
  struct ListName {
    // Written as a literal.
    // cppcheck-suppress noExplicitConstructor
    // NOLINTNEXTLINE(google-explicit-constructor)
    consteval ListName(const char* name)
        : place(PlaceOfName(Op::kSpec.lists, name)) {}
    size_t place;
  };

  double operator()(Number number) const {
    return number.is_common ? call_.common.prior_mean
                            : call_.numbers[number.place];
  }
  int64_t integer(Integer name) const { return call_.integers[name.place]; }
  const TensorList& list(ListName name) const {
    return call_.lists[name.place];
  }
  const Call* operator->() const { return &call_; }

 private:
  const Call& call_;
};

// ---- Calls of a packed step -------------------------------------------------

// Throws std::runtime_error unless the argument is a packed step.
PackedStep Unpacked(const char* op, const char* name, const Tensor& packed);

// The tensors of a packed step, call by call.
class PackedTensors {
 public:
  PackedTensors(const char* op, const TensorList& params,
                const TensorList& grads, const TensorList& state)
      : op_(op),
        params_{"params", params},
        grads_{"grads", grads},
        state_{"state", state} {}

  // The next call: `state` has its lists after the first two, then prior means.
  // Throws std::runtime_error if these do not fit.
  Call Next(const OpSpec& spec, const PackedCall& packed);
  // Throws std::runtime_error if tensors are left over.
  void CheckIsEmpty() const;

 private:
  struct Source {
    TensorList Take(const char* op, int64_t length);
    void CheckIsEmpty(const char* op) const;

    const char* name;
    const TensorList& tensors;
    int64_t taken = 0;
  };

  const char* op_;
  Source params_;
  Source grads_;
  Source state_;
};

}  // namespace torch_sgmcmc
