// A call of an operator that has a row: its schema, and its arguments, taken
// from torch's stack, checked, and laid out in a plan.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apply/plan.h"
#include "core/counter.h"
#include "core/row.h"

namespace torch_sgmcmc {

// "sgld_step_(Tensor(a!)[] params, Tensor[] grads, ..., *, float lr, ..."
std::string SchemaOf(const Row& row);

struct Call {
  // Takes what torch has put on the stack.
  Call(const Row& row, const StableIValue* stack);
  explicit Call(const Row& row) : row(row) {}

  // Throws std::runtime_error, naming what is not in its range.
  void CheckNumbers() const;
  NoiseStream Stream() const;
  // The lists that there are, in their order, with the means of the prior
  // before masters; `lead`, if given, is the role of the first.
  std::vector<Argument> Arguments(std::optional<Role> lead) const;
  Plan MakePlan(const std::vector<Argument>& arguments) const;
  // How many chains tensors hold of what sums for each.
  int64_t chains() const;

  // The coefficients of an update: its row's numbers in their order, but for
  // integers, which come last, and the common ones.
  template <class Op>
  typename Op::Coefficients CoefficientsOf() const {
    constexpr size_t kReal = [] {
      size_t real = 0;
      for (const Scalar& n : Op::kRow.numbers) real += !IsInteger(n.domain);
      return real;
    }();
    static_assert(kReal == Op::kRow.numbers.count ||
                  IsInteger(Op::kRow.numbers[kReal].domain));
    return CoefficientsOf<Op>(std::make_index_sequence<kReal>());
  }

  const TensorList& list(size_t i) const { return lists[i]; }
  double number(size_t i) const { return numbers[i]; }
  int64_t integer(size_t i) const { return integers[i]; }

  const Row& row;
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

 private:
  template <class Op, size_t... kIndex>
  typename Op::Coefficients CoefficientsOf(
      std::index_sequence<kIndex...> /*indices*/) const {
    if constexpr (Op::kRow.has_prior_mean) {
      return {numbers[kIndex]..., common};
    } else {
      return {numbers[kIndex]...};
    }
  }
};

}  // namespace torch_sgmcmc
