// A call of an operator with a spec: its schema, and the arguments on torch's
// stack.
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
  // The number of chains with sums of their own.
  int64_t chains() const;

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

}  // namespace torch_sgmcmc
