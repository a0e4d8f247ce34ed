// The operators behind the samplers as C++ functions, one line for each.
//
// They are what torch.ops.torch_sgmcmc.* are in Python, and take their
// arguments in the order of their schemas, csrc/library.cpp. Autograd is not
// told of what they change (see versions.h).
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

template <OperatorName kName, typename Signature>
struct Operator;

template <OperatorName kName, typename Result, typename... Args>
struct Operator<kName, Result(Args...)> {
  static constexpr const char* kText = kName.text;

  // Its place in torch's dispatcher, looked up once. Throws c10::Error unless
  // the schema is that of these types, which torch does not look at where a
  // kernel was registered without types, as all of ours.
  static const auto& handle() {
    static const auto found = [] {
      const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow(
          (std::string("torch_sgmcmc::") + kName.text).c_str(), "");
      const auto difference = c10::findSchemaDifferences(
          c10::inferFunctionSchemaFlattenedReturns<Result(Args...)>(),
          schema.schema());
      TORCH_CHECK(
          !difference, kName.text, " has another schema: ", *difference);
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

// A table:
// clang-format off
inline constexpr Operator<"sgld_step_", void(SomeTensors, SomeTensors,
    SomeTensors, double, double, double, double, Integers, int64_t, int64_t,
    MaybeTensor, double, MaybeTensors, MaybeIntegers, int64_t)> sgld_step_;
inline constexpr Operator<"sghmc_step_", void(SomeTensors, SomeTensors,
    SomeTensors, SomeTensors, SomeTensors, double, double, double, double,
    double, double, int64_t, Integers, int64_t, int64_t, MaybeTensor, double,
    MaybeTensors, MaybeIntegers, int64_t)> sghmc_step_;
inline constexpr Operator<"sghmc_by_coordinate_step_", void(SomeTensors,
    SomeTensors, SomeTensors, SomeTensors, SomeTensors, SomeTensors,
    SomeTensors, double, double, double, double, double, double, int64_t,
    Integers, int64_t, int64_t, MaybeTensor, double, MaybeTensors,
    MaybeIntegers, int64_t)> sghmc_by_coordinate_step_;
inline constexpr Operator<"psgld_step_", void(SomeTensors, SomeTensors,
    SomeTensors, SomeTensors, SomeTensors, SomeTensors, double, double, double,
    double, double, double, Integers, int64_t, int64_t, MaybeTensor, double,
    MaybeTensors, MaybeIntegers, int64_t)> psgld_step_;
inline constexpr Operator<"psgld_frozen_step_", void(SomeTensors, SomeTensors,
    SomeTensors, SomeTensors, double, double, double, double, Integers, int64_t,
    int64_t, MaybeTensor, double, MaybeTensors, MaybeIntegers, int64_t)> psgld_frozen_step_;
inline constexpr Operator<"sgnht_step_", void(SomeTensors, SomeTensors,
    SomeTensors, SomeTensors, SomeTensors, double, double, double, double,
    double, double, Integers, int64_t, int64_t, MaybeTensor, double,
    MaybeTensors, MaybeIntegers, int64_t)> sgnht_step_;
inline constexpr Operator<"gradient_variance_", void(SomeTensors, SomeTensors,
    SomeTensors, double)> gradient_variance_;
inline constexpr Operator<"gaussian_", void(SomeTensors, double, Integers,
    int64_t, int64_t, int64_t, MaybeTensor, MaybeIntegers, int64_t)> gaussian_;
inline constexpr Operator<"ewsg_log_ratio", at::Tensor(SomeTensors, SomeTensors,
    SomeTensors, SomeTensors, double, double, double, double, double, int64_t,
    int64_t, double, MaybeTensors)> ewsg_log_ratio;
inline constexpr Operator<"metropolis_decide", at::Tensor(OneTensor, int64_t,
    int64_t, int64_t, int64_t)> metropolis_decide;
inline constexpr Operator<"select_chains_", void(SomeTensors, SomeTensors,
    OneTensor)> select_chains_;
inline constexpr Operator<"hmc_momenta_", void(SomeTensors, SomeTensors, double,
    Integers, int64_t, int64_t, MaybeIntegers)> hmc_momenta_;
inline constexpr Operator<"hmc_leapfrog_", void(SomeTensors, SomeTensors,
    SomeTensors, SomeTensors, SomeTensors, double, double, double, double,
    double, MaybeTensors)> hmc_leapfrog_;
inline constexpr Operator<"hmc_energy", at::Tensor(SomeTensors, SomeTensors,
    SomeTensors, double, int64_t, double, MaybeTensors)> hmc_energy;
inline constexpr Operator<"sbps_place_", void(SomeTensors, SomeTensors,
    SomeTensors, double)> sbps_place_;
inline constexpr Operator<"sbps_reflect_", void(SomeTensors, SomeTensors,
    SomeTensors, SomeTensors, double, double, double, double, MaybeTensors)>
    sbps_reflect_;
inline constexpr Operator<"sbps_adapt_", void(SomeTensors, SomeTensors,
    SomeTensors, double, double, double, MaybeTensors)> sbps_adapt_;
inline constexpr Operator<"sbps_precondition_", void(SomeTensors, SomeTensors,
    SomeTensors, SomeTensors, double, double)> sbps_precondition_;
inline constexpr Operator<"sbps_reflect_sums_", at::Tensor(SomeTensors,
    SomeTensors, SomeTensors, SomeTensors, double, double, double, double,
    MaybeTensors)> sbps_reflect_sums_;
inline constexpr Operator<"sbps_precondition_sums_", at::Tensor(SomeTensors,
    SomeTensors, SomeTensors, SomeTensors, SomeTensors, double, double, double,
    MaybeTensors)> sbps_precondition_sums_;
inline constexpr Operator<"sbps_line_sums", at::Tensor(SomeTensors, SomeTensors,
    double, MaybeTensors)> sbps_line_sums;
inline constexpr Operator<"sbps_reflection_sums", at::Tensor(SomeTensors,
    SomeTensors, SomeTensors, SomeTensors, double, double, MaybeTensors)>
    sbps_reflection_sums;
inline constexpr Operator<"sbps_preconditioner_sum", at::Tensor(SomeTensors,
    double)> sbps_preconditioner_sum;
inline constexpr Operator<"sum_of_squares", at::Tensor(SomeTensors)>
    sum_of_squares;
inline constexpr Operator<"gauge_sums", at::Tensor(SomeTensors, SomeTensors,
    SomeTensors, SomeTensors, SomeTensors, int64_t, double, double, double,
    double, MaybeTensors)> gauge_sums;
inline constexpr Operator<"any_nonfinite", bool(SomeTensors)> any_nonfinite;
inline constexpr Operator<"count_nonfinite", at::Tensor(SomeTensors)>
    count_nonfinite;
inline constexpr Operator<"step_or_nothing", at::Tensor(OneTensor, int64_t,
    MaybeTensor)> step_or_nothing;
// clang-format on

}  // namespace torch_sgmcmc
