// The operators behind the samplers as C++ functions, one line for each but
// updates, whose calls are made of their rows (method.cpp).
//
// They are what torch.ops.torch_sgmcmc.* are in Python, and take their
// arguments in the order of their schemas. Autograd is not told of what they
// change (see BumpVersions).
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/infer_schema.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ops/op_spec.h"
#include "ops/registry.h"

namespace torch_sgmcmc {

// A name as a template argument: what is looked up once is kept for each.
template <size_t kSize>
struct OperatorName {
  // Written as a literal.
  // cppcheck-suppress noExplicitConstructor
  // NOLINTNEXTLINE(google-explicit-constructor)
  constexpr OperatorName(const char (&literal)[kSize]) {
    std::copy_n(literal, kSize, text);
  }
  char text[kSize] = {};
};

template <OperatorName kName>
struct NameOfLiteral {
  static constexpr const char* kText = kName.text;
};

template <class Name, typename Signature>
struct OperatorOf;

template <class Name, typename Result, typename... Args>
struct OperatorOf<Name, Result(Args...)> {
  static constexpr const char* kText = Name::kText;

  // Its place in torch's dispatcher, looked up once. Throws c10::Error unless
  // the schema has these types, which torch does not check where a
  // kernel was registered without types, as all of ours.
  static const auto& handle() {
    static const auto found = [] {
      const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow(
          (std::string("torch_sgmcmc::") + kText).c_str(), "");
      const auto difference = c10::findSchemaDifferences(
          c10::inferFunctionSchemaFlattenedReturns<Result(Args...)>(),
          schema.schema());
      TORCH_CHECK(!difference, kText, " has another schema: ", *difference);
      return schema.template typed<Result(Args...)>();
    }();
    return found;
  }

  // Below autograd: the samplers need no graph, and every layer that is passed
  // by saves a good part of a small step's time.
  Result operator()(Args... args) const {
    const auto& found = handle();
    const at::AutoDispatchBelowADInplaceOrView guard;
    return found.call(args...);
  }
};

using SomeTensors = at::TensorList;
using OneTensor = const at::Tensor&;
using MaybeTensor = const std::optional<at::Tensor>&;
using MaybeTensors = std::optional<at::TensorList>;
using Integers = at::IntArrayRef;
using MaybeIntegers = at::OptionalIntArrayRef;

// The signature that a spec makes, by kinds of arguments in their order.
template <Kind kKind>
using TypeOf = std::tuple_element_t<
    static_cast<size_t>(kKind),
    std::tuple<SomeTensors, double, int64_t, Integers, int64_t, int64_t,
               int64_t, MaybeTensor, double, MaybeTensors, MaybeIntegers,
               int64_t>>;

template <class Op, size_t... kIndex>
auto SignatureOf(std::index_sequence<kIndex...> /*slots*/) {
  using Result = std::conditional_t<Op::kSpec.sums == 0, void, at::Tensor>;
  return std::type_identity<Result(
      TypeOf<ArgLayoutOf(Op::kSpec).items[kIndex].kind>...)>();
}

template <class Op>
struct NameOfRow {
  static constexpr const char* kText = Op::kSpec.op;
};

template <class Op>
using RowOperator = OperatorOf<
    NameOfRow<Op>,
    typename decltype(SignatureOf<Op>(
        std::make_index_sequence<ArgLayoutOf(Op::kSpec).count>()))::type>;

template <OperatorName kName, typename Signature>
using Operator = OperatorOf<NameOfLiteral<kName>, Signature>;

// Of rows, and the others:
// clang-format off
inline constexpr RowOperator<GradientVarianceStep> gradient_variance_;
inline constexpr RowOperator<Gaussian> gaussian_;
inline constexpr RowOperator<SquareRoots> square_root_;
inline constexpr RowOperator<EWSGLogRatios> ewsg_log_ratio;
inline constexpr RowOperator<SBPSPlace> sbps_place_;
inline constexpr RowOperator<SBPSReflect> sbps_reflect_;
inline constexpr RowOperator<SBPSAdapt> sbps_adapt_;
inline constexpr RowOperator<SBPSPrecondition> sbps_precondition_;
inline constexpr RowOperator<SBPSReflectSums> sbps_reflect_sums_;
inline constexpr RowOperator<SBPSPreconditionSums> sbps_precondition_sums_;
inline constexpr RowOperator<SBPSSumsOfLine> sbps_line_sums;
inline constexpr RowOperator<SBPSSumsOfReflection> sbps_reflection_sums;
inline constexpr RowOperator<SBPSSumOfPreconditioner> sbps_preconditioner_sum;
inline constexpr RowOperator<SumOfSquares> sum_of_squares;
inline constexpr RowOperator<MCLMCSums> mclmc_sums;
inline constexpr Operator<"mclmc_turn", std::tuple<at::Tensor, at::Tensor>(
    OneTensor, OneTensor, double, double, double, double)> mclmc_turn;
inline constexpr Operator<"metropolis_decide", at::Tensor(OneTensor, int64_t,
    int64_t, int64_t, int64_t)> metropolis_decide;
inline constexpr Operator<"select_chains_", void(SomeTensors, SomeTensors,
    OneTensor)> select_chains_;
inline constexpr Operator<"any_nonfinite", bool(SomeTensors)> any_nonfinite;
inline constexpr Operator<"count_nonfinite", at::Tensor(SomeTensors)>
    count_nonfinite;
inline constexpr Operator<"step_or_nothing", at::Tensor(OneTensor, int64_t,
    MaybeTensor)> step_or_nothing;
// clang-format on

}  // namespace torch_sgmcmc
