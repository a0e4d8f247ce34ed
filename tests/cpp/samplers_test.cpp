// SGHMC in C++, beyond what tests/cpp/test_cpp_chains.py compares with Python.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cmath>

#include "host/settings.h"
#include "same_values.h"
#include "testing.h"
#include "torch_sgmcmc/torch_sgmcmc.h"

namespace torch_sgmcmc {
namespace {

std::vector<at::Tensor> Parameters() {
  std::vector<at::Tensor> params = {torch::zeros({2}, at::kDouble),
                                    torch::zeros({3}, at::kDouble)};
  for (at::Tensor& param : params) {
    param.requires_grad_(true);
    param.mutable_grad() = torch::ones_like(param);
  }
  return params;
}

TEST(SGHMC, RefusesToCaptureAnOnlineEstimate) {
  const auto options =
      SGHMCOptions(0.01).num_data(50).noise_estimate("online").capturable(true);
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { const SGHMC sampler(Parameters(), options); }),
            "Invalid noise_estimate: 'online' is checked on the host at every "
            "step and excludes capturable");
}

TEST(SGHMC, LoadsAnEstimateThatWasRescaled) {
  // 0.2 exceeds the friction of the last settings, 0.1 of it does not.
  const auto options =
      SGHMCOptions(0.1).momentum(0.5).noise_estimate(0.2).num_data(10).seed(1);
  const std::vector<at::Tensor> params = Parameters();
  SGHMC one(params, options);
  one.options().lr(0.01).momentum(0.9);
  one.step();
  const std::vector<at::Tensor> others = Parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    others[i].detach().copy_(params[i]);
  }
  SGHMC other(others, options);
  other.load_state_dict(one.state_dict());
  one.step();
  other.step();
  EXPECT_TRUE(torch::equal(torch::cat(params), torch::cat(others)));
  EXPECT_TRUE(SameValues(other.state_dict(), one.state_dict()));
}

TEST(GammaPrecision, RefusesAStateDictOfSomeGroups) {
  SGLD sampler(Parameters(), SGLDOptions(0.1).num_data(10).seed(1));
  GammaPrecision precision(sampler);
  StateDict state = precision.state_dict();
  state.set("groups", std::vector<int64_t>{0});
  const std::string message = MessageOf<std::invalid_argument>(
      [&] { precision.load_state_dict(state); });
  EXPECT_EQ(message,
            "Invalid state_dict: it is of some param groups, which C++ cannot "
            "choose (must be a GammaPrecision's without groups)");
}

TEST(MCLMC, EnergyErrorsForgetAMoveInWhichThePosteriorChanges) {
  const at::Tensor p = torch::zeros({2000}).set_requires_grad(true);
  MCLMC sampler({p}, MCLMCOptions(0.3).num_data(1).momentum(0.6).seed(1));
  const auto error = [&] {
    for (int i = 0; i < 40; ++i) {
      p.mutable_grad() = p.detach().clone();
      sampler.step();
    }
    return sampler.energy_error();
  };
  {
    const torch::NoGradGuard guard;
    p.normal_(0, 1, torch::make_generator<torch::CPUGeneratorImpl>(5));
  }
  const double first = error();
  EXPECT_LT(first, 2e-3);
  sampler.options().lr(0.01);
  EXPECT_LT(error(), first);
  sampler.options().temperature(2.0);
  EXPECT_LT(error(), first);
}

TEST(MCLMC, EnergyErrorsForgetAMoveInWhichPriorMeansChange) {
  const at::Tensor p = torch::zeros({2000}).set_requires_grad(true);
  p.mutable_grad() = torch::zeros_like(p);
  const auto options = MCLMCOptions(0.1).num_data(1).prior_precision(1).seed(1);
  MCLMC sampler({p}, MCLMCOptions(options).prior_mean({torch::zeros({2000})}));
  const auto error = [&] {
    for (int i = 0; i < 40; ++i) sampler.step();
    return sampler.energy_error();
  };
  const double first = error();
  sampler.options().prior_mean({torch::full({2000}, 0.3)});
  EXPECT_LT(error(), 2 * first);
}

TEST(MCLMC, AFailedStepChangesNothing) {
  const at::Tensor few = torch::zeros({1}).set_requires_grad(true);
  const at::Tensor many = torch::zeros({9}).set_requires_grad(true);
  MCLMC sampler({few, many}, MCLMCOptions(0.1).num_data(10).seed(1));
  const auto expect_nothing = [&] {
    few.mutable_grad() = torch::ones_like(few);
    many.mutable_grad() = at::Tensor();
    const double error = sampler.energy_error();
    const c10::IValue state = c10::IValue(sampler.state_dict()).deepcopy();
    EXPECT_NE(MessageOf([&] { sampler.step(); }), "");
    EXPECT_TRUE(SameValues(sampler.state_dict(), state));
    EXPECT_TRUE(sampler.energy_error() == error || std::isnan(error));
  };
  expect_nothing();
  for (int i = 0; i < 5; ++i) {
    for (const at::Tensor& p : {few, many}) {
      p.mutable_grad() = torch::ones_like(p);
    }
    sampler.step();
  }
  ASSERT_FALSE(std::isnan(sampler.energy_error()));
  expect_nothing();
}

TEST(MCLMC, StepsOnlyWithEqualSettingsOfAllGroups) {
  const std::vector<at::Tensor> params = Parameters();
  const std::vector<ParamGroup> groups = {ParamGroup({params[0]}),
                                          ParamGroup({params[1]})};
  MCLMC sampler(groups, MCLMCOptions(0.1).num_data(10).seed(1));
  sampler.step();
  const MCLMCOptions kept = sampler.options(1);
  const at::Tensor theta = torch::cat(params).detach();
  const c10::IValue state = c10::IValue(sampler.state_dict()).deepcopy();
  const auto expect = [&](const MCLMCOptions& other, const char* what) {
    sampler.options(1) = other;
    EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); }),
              c10::str("Invalid ", what,
                       " in the param groups (must be equal: "
                       "the direction is one unit vector over all groups)"));
    sampler.options(1) = kept;
    EXPECT_TRUE(torch::equal(torch::cat(params), theta));
    EXPECT_TRUE(SameValues(sampler.state_dict(), state));
  };
  expect(MCLMCOptions(kept).lr(0.05), "lr: [0.1, 0.05]");
  expect(MCLMCOptions(kept).lr(0), "lr: [0.1, 0.0]");
  expect(MCLMCOptions(kept).num_data(20), "num_data: [10, 20]");
  expect(MCLMCOptions(kept).temperature(2), "temperature: [1.0, 2.0]");
  expect(MCLMCOptions(kept).momentum(0.5), "momentum: [0.9, 0.5]");
  sampler.step();
  EXPECT_EQ(sampler.num_steps(), 2);
}

// PSGLD's preconditioner that stays: it is that of the present V and eps.

TEST(PSGLD, TheRootIsThatOfThePresentVAndEps) {
  const at::Tensor p = torch::ones({7}).set_requires_grad(true);
  PSGLD sampler({p},
                PSGLDOptions(0.5).num_data(10).temperature(0).eps(0.1).seed(1));
  p.mutable_grad() = torch::rand({7});
  sampler.step();
  sampler.options().adapt(false);
  const auto expect = [&](double eps) {
    const at::Tensor v = sampler.state_of(p)["square_average"];
    const at::Tensor wanted = p.detach() - 0.5 * p.grad() / (v.sqrt() + eps);
    sampler.step();
    EXPECT_TRUE(torch::allclose(p.detach(), wanted, 1e-5, 1e-6));
  };
  expect(0.1);
  expect(0.1);  // as it was kept
  sampler.options().eps(0.3);
  expect(0.3);
  sampler.own_state_of(p)["square_average"].add_(1);
  expect(0.3);
  sampler.own_state_of(p)["square_average"] = torch::rand({7});
  expect(0.3);
}

// SBPS in C++, beyond what tests/cpp/test_cpp_chains.py compares with Python.

SBPSOptions Bouncing() {
  return SBPSOptions().num_data(50).prior_precision(20).num_std(3).seed(5);
}

at::Tensor Parameter(at::IntArrayRef shape) {
  return torch::zeros(shape, at::kDouble).set_requires_grad(true);
}

// Losses |theta - x_i|^2 / 2 of 10 examples, other ones at every call.
struct Minibatches {
  at::Tensor param;
  int64_t calls = 0;

  at::Tensor operator()() {
    ++calls;
    const at::Tensor index = torch::arange(10, at::kDouble) + 10 * (calls % 5);
    const at::Tensor x =
        torch::sin(index.unsqueeze(1) + torch::arange(param.numel()));
    return 0.5 * (param.flatten() - x).square().sum(1);
  }
};

TEST(SBPS, RefusesLossesThatItCannotUseAndMovesNothing) {
  const at::Tensor param = Parameter({3});
  SBPS sampler({param}, Bouncing());
  Minibatches draws{param};
  for (int i = 0; i < 7; ++i) sampler.step(draws);
  const at::Tensor place = param.detach().clone();
  const auto message = [&](const std::function<at::Tensor()>& closure) {
    const std::string text = MessageOf([&] { sampler.step(closure); });
    EXPECT_TRUE(torch::equal(param, place)) << text;
    EXPECT_FALSE(param.grad().defined()) << text;
    return text;
  };
  EXPECT_EQ(message([&] { return draws().mean(); }),
            "SBPS got losses of shape [] from the closure (must be the "
            "examples' losses, of shape [n]: use reduction(torch::kNone))");
  EXPECT_EQ(message([&] { return draws().slice(0, 0, 1); }),
            "SBPS got the loss of 1 example from the closure (must be of 2 at "
            "least, to estimate the noise of a minibatch)");
  EXPECT_EQ(message([&] { return draws().repeat(6); }),
            "SBPS got the losses of 60 examples from the closure, and num_data "
            "= 50 (must not be more; if examples are drawn with replacement, "
            "set replacement(true))");
  EXPECT_EQ(message([&] {
              const double infinity = std::numeric_limits<double>::infinity();
              at::Tensor bad = torch::zeros(10, at::kDouble);
              bad[1] = infinity;
              bad[4] = -infinity;
              return draws() + bad;
            }),
            "SBPS got 2 of 10 losses from the closure that are not finite");
  EXPECT_EQ(message([&] {
              at::Tensor losses = draws();
              losses.sum().backward({}, /*retain_graph=*/true);
              return losses;
            }),
            "SBPS found gradients after the closure: it must return the losses "
            "of the examples and not call backward()");
  EXPECT_EQ(message([&] { return draws().detach(); }),
            "SBPS got losses from the closure that do not depend on its "
            "parameters (were they computed under a torch::NoGradGuard?)");
  EXPECT_EQ(message([&] { return draws().to(torch::kComplexFloat); }),
            "SBPS got complex losses from the closure (must be real numbers)");
  sampler.step(draws);
  EXPECT_FALSE(torch::equal(param, place));
}

TEST(SBPS, ForgetsWhatItObservedWithOtherPriorMeans) {
  const at::Tensor param = Parameter({3});
  SBPS sampler({param}, Bouncing().prior_mean({torch::zeros({3})}));
  Minibatches draws{param};
  for (int i = 0; i < 7; ++i) sampler.step(draws);
  const auto is_known = [&] {
    const StateDict state = sampler.state_dict();
    const StateDict group(state.at("param_groups").toListRef()[0]);
    return !group.at("observed_target").toListRef().empty();
  };
  EXPECT_TRUE(is_known());
  sampler.options().prior_mean({torch::full({3}, 0.5)});
  EXPECT_FALSE(is_known());
  sampler.step(draws);
  EXPECT_TRUE(is_known());
}

TEST(SettingsOf, ThereAreNoneOfOthers) {
  EXPECT_THROW(SettingsOf("Adam"), std::out_of_range);
  EXPECT_FALSE(IsSampler("Adam"));
}

// A class of options, as somebody may write it, for a sampler of Python alone.
class HMCOptions : public OptionsOf<HMCOptions> {
 public:
  static constexpr const char* kSampler = "HMC";
  double lr() const { return value("lr").toDouble(); }
};

TEST(Registry, NamesWhatItKnows) {
  EXPECT_EQ(MessageOf<std::logic_error>(
                [] { SamplerOf<HMCOptions>({torch::zeros(2)}, HMCOptions()); }),
            "no sampler is registered for options of HMC (must be of BAOA, "
            "EWSG, MCLMC, PSGLD, SBPS, SGHMC, SGLD, SGLRW, SGNHT)");
  EXPECT_EQ(MessageOf<std::out_of_range>([] { HMCOptions().lr(); }),
            "'lr' is not known for HMC");
}

}  // namespace
}  // namespace torch_sgmcmc
