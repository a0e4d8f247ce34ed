// The operators as the samplers find them.
#include "libtorch/operators.h"
#include "ops/registry.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

template <class... Ops>
constexpr std::tuple<RowOperator<Ops>...> HandlesOf(
    Operators<Ops...> /*operators*/) {
  return {};
}

constexpr std::tuple kOthers{gradient_variance_,
                             gaussian_,
                             square_root_,
                             ewsg_log_ratio,
                             metropolis_decide,
                             select_chains_,
                             sbps_place_,
                             sbps_reflect_,
                             sbps_adapt_,
                             sbps_precondition_,
                             sbps_reflect_sums_,
                             sbps_precondition_sums_,
                             sbps_line_sums,
                             sbps_reflection_sums,
                             sbps_preconditioner_sum,
                             sum_of_squares,
                             mclmc_sums,
                             mclmc_turn,
                             any_nonfinite,
                             count_nonfinite,
                             step_or_nothing};
constexpr auto kAll = std::tuple_cat(HandlesOf(SamplerOperators()), kOthers);

TEST(OperatorHandles, EverySchemaHasOneOfItsTypes) {
  std::set<std::string> others;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.starts_with("torch_sgmcmc::")) others.insert(name.name);
  }
  const auto resolve = [&](const auto& each) {
    EXPECT_NO_THROW(each.handle()) << each.kText;
    EXPECT_EQ(others.erase(std::string("torch_sgmcmc::") + each.kText), 1);
  };
  std::apply([&](const auto&... each) { (resolve(each), ...); }, kAll);
  // Those of what Python alone has.
  EXPECT_EQ(
      others,
      (std::set<std::string>{
          "torch_sgmcmc::chain_product", "torch_sgmcmc::chain_turn",
          "torch_sgmcmc::noise_steps_", "torch_sgmcmc::control_variate_",
          "torch_sgmcmc::ecs_density", "torch_sgmcmc::ecs_estimate",
          "torch_sgmcmc::ecs_leapfrog_", "torch_sgmcmc::deferred_step_",
          "torch_sgmcmc::ewsg_step_", "torch_sgmcmc::temperature_sums",
          "torch_sgmcmc::hmc_energy", "torch_sgmcmc::hmc_leapfrog_",
          "torch_sgmcmc::hmc_momenta_", "torch_sgmcmc::fused_step_",
          "torch_sgmcmc::running_mean_", "torch_sgmcmc::step_if_finite"}));
}

TEST(OperatorHandles, RefusesOtherTypesThanTheSchemas) {
  constexpr Operator<"sum_of_squares", double(SomeTensors)> kOtherResult;
  constexpr Operator<"sum_of_squares", at::Tensor(SomeTensors, double)>
      kOneMore;
  constexpr Operator<"no_such_operator", void()> kNone;
  EXPECT_THROW(kOtherResult.handle(), c10::Error);
  EXPECT_THROW(kOneMore({}, 1.0), c10::Error);
  EXPECT_THROW(kNone(), c10::Error);
}

}  // namespace
}  // namespace torch_sgmcmc
