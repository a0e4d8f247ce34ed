// Kernels of operators on lists of tensors, made from their specs.
//
// An Op is a struct with a spec (ops/op_spec.h) and either Update, made of a
// call, or Apply(driver, plan, call, stream). Optional functions of a
// NamedCall:
//   Refusal(call)    a message if numbers do not fit together, else empty;
//   Lead(call)       the role of the first list, if it depends on the call;
//   Lists(call)      the arguments, if they are not the spec's lists.
// An operator of sums has Reduce(call, sums), and Sizes(call) of the result,
// unless the spec has them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/call.h"
#include "launch/plan.h"

namespace torch_sgmcmc {

template <class Op>
constexpr bool kHasLists = requires(const NamedCall<Op>& call) {
  Op::Lists(call);
};

template <class Op>
std::vector<Argument> ArgumentsOf(const Call& call) {
  const NamedCall<Op> named(call);
  if constexpr (kHasLists<Op>) {
    return Op::Lists(named);
  } else if constexpr (requires { Op::Lead(named); }) {
    return call.Arguments(Op::Lead(named));
  } else {
    return call.Arguments(std::nullopt);
  }
}

template <class Op>
void CheckCall(const Call& call) {
  call.CheckNumbers();
  const NamedCall<Op> named(call);
  if constexpr (requires { Op::Refusal(named); }) {
    const std::string refusal = Op::Refusal(named);
    if (!refusal.empty()) Fail(call.spec.op, refusal);
  }
}

class PreparedUpdate {
 public:
  virtual ~PreparedUpdate() = default;
  virtual void Apply() = 0;
};

// Refers to its call. If the constructor throws, nothing has changed.
template <class Op, class Driver>
class Update final : public PreparedUpdate {
 public:
  explicit Update(const Call& call)
      : call_(Checked(call)),
        stream_(call.Stream()),
        plan_(call.MakePlan(ArgumentsOf<Op>(call))),
        driver_(call.spec.op, plan_, call.device_step) {}

  void Apply() override {
    const NamedCall<Op> named(call_);
    if constexpr (requires { typename Op::template Update<float>; }) {
      driver_.template Apply<Op::template Update>(named, stream_);
    } else {
      Op::Apply(driver_, plan_, named, stream_);
    }
    plan_.Finish();
  }

 private:
  static const Call& Checked(const Call& call) {
    CheckCall<Op>(call);
    return call;
  }

  const Call& call_;
  NoiseStream stream_;
  Plan plan_;
  Driver driver_;
};

// Takes the sums of an operator's call by maps (launch/reduce.h).
template <class Op, class Reducer>
struct Sums {
  // All elements', of each chain.
  void operator()(const auto& map) const {
    Reducer::Reduce(plan, map, call->chains(), result);
  }
  // Each tensor's, in these rows of the result.
  void Each(const auto& map, const std::vector<int64_t>& rows) const {
    Reducer::ReduceEach(plan, map, rows, call->chains(), result);
  }
  // The same after an update without noise.
  template <template <class> class Update>
  void After(const auto& map) const {
    Reducer::template UpdateAndReduce<Update>(Op::kSpec.op, plan, call, map,
                                              result);
  }

  const Plan& plan;
  NamedCall<Op> call;
  Tensor& result;
};

// The call of an operator that sums.
template <class Op, class Reducer>
Tensor Sum(const Call& call) {
  CheckCall<Op>(call);
  const TensorList& first = call.lists[0];
  if (first.empty()) {
    Fail(call.spec.op, call.spec.lists[0].name, " is empty");
  }
  Plan plan = call.MakePlan(ArgumentsOf<Op>(call));
  std::vector<int64_t> sizes;
  if constexpr (requires { Op::Sizes(NamedCall<Op>(call)); }) {
    sizes = Op::Sizes(NamedCall<Op>(call));
  } else if constexpr (Op::kSpec.sums == kForEachChain) {
    constexpr size_t kLast = Op::kSpec.numbers.count - 1;
    static_assert(Op::kSpec.numbers[kLast].domain == Domain::kPositiveCount);
    sizes = {call.chains()};
  } else if constexpr (Op::kSpec.sums > 0) {
    sizes = {Op::kSpec.sums};
  }
  Tensor result = torch::stable::new_empty(first[0], sizes, ScalarType::Double);
  if constexpr (requires { Op::Sizes(NamedCall<Op>(call)); }) {
    torch::stable::zero_(result);
  }
  Op::Reduce(NamedCall<Op>(call),
             Sums<Op, Reducer>{plan, NamedCall<Op>(call), result});
  plan.Finish();
  return result;
}

template <class Op, class Driver>
void Boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  constexpr size_t kInputs = ArgLayoutOf(Op::kSpec).count;
  constexpr size_t kOutputs = Op::kSpec.sums == 0 ? 0 : 1;
  if (inputs != kInputs || outputs != kOutputs) {
    Fail(Op::kSpec.op, "is of another version than its schema");
  }
  const Call call(Op::kSpec, stack);
  if constexpr (Op::kSpec.sums != 0) {
    stack[0] = torch::stable::detail::from(Sum<Op, Driver>(call));
  } else {
    Update<Op, Driver>(call).Apply();
  }
}

// Registers the kernels of operators (ops/registry.h) on the device of a
// driver, or a reducer.
template <class Driver, template <class...> class List, class... Ops,
          class Library>
void Register(List<Ops...> /*operators*/, Library& library) {
  (library.impl(Ops::kSpec.op, &Boxed<Ops, Driver>), ...);
}

}  // namespace torch_sgmcmc
