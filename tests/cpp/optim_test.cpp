// The samplers as a LibTorch program uses them. That a chain has the same bits
// as in Python, and that messages are the same, is tested from Python
// (tests/test_cpp_chains.py); here is what belongs to C++: options of groups,
// torch's schedulers and serialization, and that a failure changes nothing.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "message_of.h"

namespace torch_sgmcmc {
namespace {

using torch::optim::OptimizerParamGroup;

torch::Tensor Param(int64_t numel,
                    torch::Dtype dtype = torch::kFloat,
                    torch::Device device = torch::kCPU) {
  auto param = torch::linspace(-1, 1, numel, dtype).to(device);
  param.set_requires_grad(true);
  param.mutable_grad() = torch::ones_like(param).mul_(0.1);
  return param;
}

std::vector<torch::Tensor> Params() { return {Param(300), Param(5)}; }

std::vector<torch::Tensor> Copies(const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> copies;
  for (const auto& param : params) copies.push_back(param.detach().clone());
  return copies;
}

void ExpectEqual(const std::vector<torch::Tensor>& a,
                 const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i]));
}

void ExpectDifferent(const std::vector<torch::Tensor>& a,
                     const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_FALSE(torch::equal(a[i], b[i]));
}

SGLDOptions Langevin() { return SGLDOptions(0.1).num_data(50).seed(7); }
SGHMCOptions Hamiltonian() { return SGHMCOptions(0.1).num_data(50).seed(7); }

TEST(Options, GroupsInheritWhatTheyLeaveOpen) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{Param(3)});
  // Equal to the library's default, but set: it must not be inherited.
  groups.emplace_back(std::vector{Param(4)},
                      std::make_unique<SGHMCOptions>(
                          SGHMCOptions().momentum(0.9).temperature(0.5)));
  SGHMC sampler(
      groups,
      Hamiltonian().momentum(0.5).prior_precision(3).noise_estimate("online"));
  EXPECT_EQ(sampler.options(0).momentum(), 0.5);
  EXPECT_EQ(sampler.options(0).temperature(), 1);
  EXPECT_EQ(sampler.options(1).momentum(), 0.9);
  EXPECT_EQ(sampler.options(1).temperature(), 0.5);
  EXPECT_EQ(sampler.options(1).lr(), 0.1);
  EXPECT_EQ(sampler.options(1).num_data(), 50);
  EXPECT_EQ(sampler.options(1).prior_precision(), 3);
  EXPECT_EQ(std::get<std::string>(sampler.options(1).noise_estimate()),
            "online");
}

TEST(Options, OfAGroupAddedLaterAreKept) {
  SGHMC sampler(Params(), Hamiltonian());
  sampler.step();
  sampler.add_param_group(OptimizerParamGroup(
      {Param(4)},
      std::make_unique<SGHMCOptions>(SGHMCOptions(0.7).momentum(0.3))));
  EXPECT_EQ(sampler.options(1).lr(), 0.7);
  EXPECT_EQ(sampler.options(1).momentum(), 0.3);
  EXPECT_EQ(sampler.options(1).num_data(), 50);
  EXPECT_EQ(sampler.options(1).step(), 1);
  EXPECT_EQ(sampler.options(1).offsets(), std::vector<int64_t>{512});
  sampler.step();
  EXPECT_EQ(sampler.options(1).step(), 2);
}

TEST(Options, MustBeComplete) {
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([] { SGLD(Params(), SGLDOptions(1)); }),
      "Invalid num_data: not set (SGLD needs the number of training "
      "examples; 1 if the loss is U itself)");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [] { SGHMC(Params(), SGHMCOptions().num_data(1)); }),
            "Invalid lr: not set (SGHMC needs a step size, on SGD's scale)");
  // Every group may bring its own instead.
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(
      Params(), std::make_unique<SGLDOptions>(SGLDOptions(1).num_data(2)));
  EXPECT_EQ(SGLD(groups, SGLDOptions()).options().num_data(), 2);
}

TEST(PriorMean, IsCopiedAndKeptInTheState) {
  const std::vector<torch::Tensor> params = Params();
  std::vector<torch::Tensor> means;
  for (const torch::Tensor& p : params) {
    means.push_back(torch::full_like(p.detach(), 2, torch::kDouble));
  }
  SGLD sampler(params, Langevin().prior_precision(3).prior_mean(means));
  for (const torch::Tensor& mean : means) mean.fill_(-1);
  const StateDict state = sampler.state_dict().at("state");
  for (size_t i = 0; i < params.size(); ++i) {
    const StateDict kept = state.at(static_cast<int64_t>(i));
    EXPECT_TRUE(torch::equal(kept.at("prior_mean").toTensor(),
                             torch::full_like(params[i].detach(), 2)));
  }
  SGLD other(Params(), Langevin());
  other.load_state_dict(sampler.state_dict());
  EXPECT_NE(other.target_summary().find("N(μ, 0.3333)"), std::string::npos);
}

TEST(PriorMean, OfOtherShapesOrOfSeveralGroupsIsRefused) {
  const auto refused = [](const std::vector<torch::Tensor>& means) {
    return MessageOf<std::invalid_argument>([&] {
      SGLD(std::vector{Param(3), Param(4)}, Langevin().prior_mean(means));
    });
  };
  EXPECT_EQ(refused({torch::ones(3)}),
            "Invalid prior_mean: 1 tensors for a group of 2 parameters (must "
            "be one for each; of several groups each needs its own)");
  EXPECT_EQ(refused({torch::ones(3), torch::ones(5)}),
            "Invalid prior_mean: number 1 has shape [5] (must be [4], that of "
            "its parameter)");
  EXPECT_EQ(refused({torch::ones(3), torch::ones(4) / 0}),
            "Invalid prior_mean: number 1 has elements that are not finite");
  EXPECT_EQ(refused({torch::ones(3), torch::ones(4, torch::kLong)}),
            "Invalid prior_mean: number 1 is of torch::kLong and layout "
            "torch::kStrided (must be floating point, and torch::kStrided)");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [] { SGLD(Params(), Langevin().prior_mean(1.0 / 0.0)); }),
            "Invalid prior_mean: inf (must be finite)");
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{Param(3)});
  groups.emplace_back(std::vector{Param(3)});
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { SGLD(groups, Langevin().prior_mean({torch::ones(3)})); }),
            "Invalid prior_mean: tensors for a sampler of several param groups "
            "(give each group its own prior_mean)");
}

// Those that a group sets go before the sampler's, and 0 is a mean as any.
TEST(PriorMean, IsInherited) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{Param(3)});
  groups.emplace_back(
      std::vector{Param(4)},
      std::make_unique<SGLDOptions>(SGLDOptions().prior_mean(0)));
  SGLD sampler(groups, Langevin().prior_mean(1.5));
  EXPECT_EQ(sampler.options(0).prior_mean(), 1.5);
  EXPECT_EQ(sampler.options(1).prior_mean(), 0);
}

// State dicts of before there were any.
TEST(PriorMean, WasZero) {
  SGLD sampler(std::vector{Param(3)}, Langevin());
  const StateDict saved = sampler.state_dict();
  const StateDict group = saved.at("param_groups").toListRef()[0];
  StateDict old;
  for (const auto& entry : group.entries()) {
    const std::string& key = entry.key().toStringRef();
    if (key != "prior_mean") old.set(key.c_str(), entry.value());
  }
  c10::impl::GenericList groups(c10::AnyType::get());
  groups.push_back(old);
  SGLD other(std::vector{Param(3)}, Langevin().prior_mean(4));
  other.load_state_dict(
      {{"state", saved.at("state")}, {"param_groups", groups}});
  EXPECT_EQ(other.options().prior_mean(), 0);
}

TEST(Options, OfAnotherKindAreRefused) {
  SGLD sampler(Params(), Langevin());
  const auto add = [&](std::unique_ptr<torch::optim::OptimizerOptions> o) {
    return MessageOf<std::invalid_argument>([&] {
      sampler.add_param_group(OptimizerParamGroup({Param(2)}, std::move(o)));
    });
  };
  const std::string kind =
      "Invalid param group: its options are not of class SGLDOptions";
  EXPECT_EQ(add(std::make_unique<SGHMCOptions>(0.1)), kind);
  EXPECT_EQ(add(std::make_unique<torch::optim::SGDOptions>(0.1)), kind);
  EXPECT_EQ(add(std::make_unique<SGLDOptions>(SGLDOptions().seed(1))),
            "Invalid param group: 'seed' is managed by SGLD and cannot be set "
            "for a group");
  EXPECT_EQ(add(std::make_unique<SGLDOptions>(SGLDOptions().capturable(true))),
            "Invalid param group: 'capturable' is managed by SGLD and cannot "
            "be set for a group");
  EXPECT_EQ(add(std::make_unique<SGLDOptions>(SGLDOptions(-1))),
            "Invalid lr: -1.0 (must be finite and >= 0)");
  EXPECT_EQ(sampler.param_groups().size(), 1U);
}

TEST(Sampler, RefusesParametersThatItCannotSample) {
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [] { SGLD({torch::zeros({2}, torch::kLong)}, Langevin()); }),
            "Invalid parameter: SGLD cannot sample torch::kLong (must be "
            "torch::kFloat, kDouble, kBFloat16 or kHalf; a complex parameter "
            "can be kept as torch::view_as_real of it)");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [] { SGLD({Param(2) * 2}, Langevin()); }),
            "can't optimize a non-leaf Tensor");
  EXPECT_EQ(MessageOf<std::invalid_argument>([] {
              const auto p = Param(2);
              SGLD({p, p}, Langevin());
            }),
            "Invalid parameters: number 0 of group 0 and number 1 of group 0 "
            "overlap in memory (each must have its own)");
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([] {
        const auto p = Param(2);
        SGLD({OptimizerParamGroup({p}), OptimizerParamGroup({p})}, Langevin());
      }),
      "some parameters appear in more than one parameter group");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [] { SGLD(std::vector<torch::Tensor>{}, Langevin()); }),
            "optimizer got an empty parameter list");
}

// The cases and messages of tests/test_param_groups.py.
TEST(Sampler, RefusesParametersByTheirMemory) {
  const auto refused = [](const std::vector<torch::Tensor>& params) {
    return MessageOf<std::invalid_argument>([&] {
      SGHMC({OptimizerParamGroup({Param(3)}), OptimizerParamGroup(params)},
            Hamiltonian());
    });
  };
  const std::string cannot = "Invalid parameter: SGHMC cannot sample ";
  EXPECT_EQ(refused({torch::ones({3}, torch::kMeta)}),
            cannot +
                "on the device meta (must be cpu or cuda; a module on meta has "
                "no numbers before to_empty() and its initialisation)");
  EXPECT_EQ(refused({at::_neg_view(torch::ones({3}))}),
            cannot + "a negative view (take resolve_neg() of it)");
  EXPECT_EQ(refused({torch::ones({3}).to_sparse()}),
            cannot + "the layout torch::kSparse (must be torch::kStrided)");
  const std::string shared =
      "an expanded parameter (several elements share memory): shape ";
  EXPECT_EQ(refused({torch::ones({2, 1}).expand({2, 4})}),
            cannot + shared + "[2, 4], strides [1, 0]");
  EXPECT_EQ(refused({torch::ones({8}).unfold(0, 3, 2)}),
            cannot + shared + "[3, 3], strides [2, 1]");
  EXPECT_EQ(refused({torch::Tensor()}), cannot + "an undefined Tensor");

  const auto memory = torch::zeros({6, 7});
  const std::string overlap =
      "Invalid parameters: number 0 of group 1 and number 1 of group 1 overlap "
      "in memory (each must have its own)";
  EXPECT_EQ(refused({memory.slice(0, 0, 3), memory.slice(0, 2)}), overlap);
  EXPECT_EQ(refused({memory[1], memory.select(1, 2)}), overlap);

  auto side_by_side = memory.unbind(1);
  const auto flat = torch::zeros({20});
  for (const auto& part : flat.split_with_sizes({10, 0, 3, 7})) {
    side_by_side.push_back(part);
  }
  side_by_side.push_back(torch::empty_strided({1, 3}, {0, 1}).fill_(0.5));
  EXPECT_NO_THROW(SGHMC(side_by_side, Hamiltonian()));
}

TEST(Sampler, KnowsTheGroupsThatTorchAdded) {
  SGLD sampler(Params(), Langevin());
  static_cast<torch::optim::Optimizer&>(sampler).add_param_group(
      OptimizerParamGroup({Param(4)}));
  EXPECT_EQ(
      MessageOf<std::runtime_error>([&] { sampler.step(); }),
      "SGLD does not know the parameters of group 1: add groups with the "
      "add_param_group of torch_sgmcmc::Sampler, not through a reference to "
      "torch::optim::Optimizer");
}

TEST(Sampler, StepCallsTheClosureOnceWithGradients) {
  const auto params = Params();
  SGLD sampler(params, Langevin());
  const auto before = Copies(params);
  int calls = 0;
  const torch::NoGradGuard no_grad;
  const auto loss = sampler.step([&] {
    ++calls;
    sampler.zero_grad();
    auto sum = params[0].square().sum() + params[1].square().sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(loss.defined());
  EXPECT_TRUE(torch::allclose(params[0].grad(), 2 * before[0]));
  ExpectDifferent(params, before);
  EXPECT_FALSE(sampler.step().defined());
}

TEST(Sampler, AutogradSeesThatAStepChangedTheParameters) {
  auto param = Param(4);
  SGLD sampler({param}, Langevin());
  const auto loss = param.square().sum();
  sampler.step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(Sampler, NoiseDependsNeitherOnGroupsNorOnMissingGradients) {
  const auto together = Params();
  const auto apart = Params();
  std::vector<OptimizerParamGroup> groups;
  for (const auto& param : apart) groups.emplace_back(std::vector{param});
  SGHMC one(together, Hamiltonian());
  SGHMC two(groups, Hamiltonian());
  for (int i = 0; i < 5; ++i) {
    for (const auto& params : {together, apart}) {
      params[0].mutable_grad() =
          i == 2 ? torch::Tensor() : torch::full({300}, 0.1F);
    }
    one.step();
    two.step();
  }
  ExpectEqual(together, apart);
}

TEST(Sampler, ManualSeedMakesItRepeatable) {
  const auto draw = [] {
    torch::manual_seed(3);
    return SGLD(Params(), SGLDOptions(0.1).num_data(50)).seed();
  };
  EXPECT_EQ(draw(), draw());
  EXPECT_NE(SGLD(Params(), SGLDOptions(0.1).num_data(50)).seed(), draw());
}

TEST(Sampler, WorksWithTorchsSchedulers) {
  SGLD sampler(Params(), Langevin());
  torch::optim::StepLR scheduler(sampler, /*step_size=*/1, /*gamma=*/0.5);
  for (int i = 0; i < 3; ++i) {
    sampler.step();
    scheduler.step();
  }
  EXPECT_EQ(sampler.options().lr(), 0.025);
}

TEST(Sampler, AFailedStepChangesNothing) {
  const auto params = Params();
  std::vector<OptimizerParamGroup> groups;
  for (const auto& param : params) groups.emplace_back(std::vector{param});
  SGHMC sampler(groups, Hamiltonian());
  sampler.step();
  const auto before = Copies(params);

  sampler.options(1).momentum(1.5);
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); }),
            "Invalid momentum: 1.5 (must be in [0, 1))");
  sampler.options(1).momentum(0.9);

  const auto grad = params[1].grad();
  params[1].mutable_grad() = torch::ones({5}).to_sparse();
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(); }),
            "SGHMC does not support sparse gradients: got one of layout "
            "torch::kSparse for a parameter of shape [5] (for an Embedding, "
            "use sparse(false))");
  params[1].mutable_grad() = grad;

  params[1].set_data(torch::zeros({6}));
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(); }),
            "SGHMC got a gradient of torch::kFloat and shape [5] for a "
            "parameter of torch::kFloat and shape [6] (must be equal)");
  params[1].mutable_grad() = torch::ones({6});
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(); }),
            "SGHMC has a momentum of shape [5] for a parameter of shape [6]: "
            "was the parameter replaced?");
  params[1].set_data(before[1]);
  params[1].mutable_grad() = grad;

  ExpectEqual(params, before);
  EXPECT_EQ(sampler.options().step(), 1);
}

// ---- Gradients that are not finite ------------------------------------------

// A step with a gradient that is not finite, at its last element.
template <typename Method>
void BadStep(Method& sampler, std::vector<torch::Tensor>& params, float value) {
  const torch::Tensor good = params[1].grad().clone();
  params[1].mutable_grad()[-1] = value;
  try {
    sampler.step();
  } catch (...) {
    params[1].mutable_grad() = good;
    throw;
  }
  params[1].mutable_grad() = good;
}

constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()};

TEST(Nonfinite, AStepIsRefusedOrLeftOut) {
  auto params = Params();
  auto skipped = Params();
  auto others = Params();
  SGHMC raises(params, Hamiltonian().noise_estimate("online").momentum(0.5));
  SGHMC skips(
      skipped,
      Hamiltonian().noise_estimate("online").momentum(0.5).nonfinite("skip"));
  SGHMC unbroken(others, Hamiltonian().noise_estimate("online").momentum(0.5));
  int64_t count = 0;
  for (int i = 0; i < 4; ++i) {
    for (const float value : kBad) {
      const auto before = Copies(params);
      EXPECT_EQ(
          MessageOf([&] { BadStep(raises, params, value); }),
          std::string("SGHMC got a gradient that is not finite: ") +
              (std::isnan(value) ? "1 NaN and 0" : "0 NaN and 1") +
              " infinite of 5 elements, for parameter 1 of group 0, of shape "
              "[5]. The step was not made; nonfinite(\"skip\") leaves such steps "
              "out");
      ExpectEqual(params, before);
      EXPECT_EQ(raises.options().step(), i);
      BadStep(skips, skipped, value);
      EXPECT_EQ(skips.num_skipped(), ++count);
    }
    raises.step();
    skips.step();
    unbroken.step();
    ExpectEqual(params, others);
    ExpectEqual(skipped, others);
  }
  EXPECT_EQ(raises.num_skipped(), 0);
}

TEST(Nonfinite, AllowDoesNotLook) {
  auto params = Params();
  SGLD sampler(params, Langevin().nonfinite("allow"));
  BadStep(sampler, params, kBad[0]);
  EXPECT_TRUE(params[1][-1].isnan().item<bool>());
  EXPECT_EQ(sampler.num_skipped(), 0);
}

// Looks later, as on a GPU.
class Later : public SGHMC {
 public:
  using SGHMC::SGHMC;

 protected:
  bool looks_later(const std::vector<Work>& work) const override {
    return state_.count(work[0].params[0].unsafeGetTensorImpl()) > 0;
  }
};

TEST(Nonfinite, WhatTheDeviceFindsIsThrownLater) {
  auto params = Params();
  auto others = Params();
  Later sampler(params, Hamiltonian());
  SGHMC unbroken(others, Hamiltonian());
  sampler.step();
  unbroken.step();
  for (const float value : kBad) {
    for (const bool looks : {false, true}) {
      const auto before = Copies(params);
      BadStep(sampler, params, value);
      ExpectEqual(params, before);
      if (looks) {
        EXPECT_EQ(sampler.options().step(), 2);
        sampler.state_dict();
        EXPECT_EQ(sampler.options().step(), 1);
      }
      bool called = false;
      const std::string message = MessageOf([&] {
        sampler.step([&] {
          called = true;
          return torch::Tensor();
        });
      });
      EXPECT_NE(message.find("SGHMC got in its last step a gradient that is"),
                std::string::npos)
          << message;
      EXPECT_FALSE(called);
      ExpectEqual(params, before);
      EXPECT_EQ(sampler.options().step(), 1);
    }
  }
  for (int i = 0; i < 3; ++i) {
    sampler.step();
    unbroken.step();
  }
  ExpectEqual(params, others);
}

TEST(Nonfinite, WhatTheDeviceLeavesOutIsCounted) {
  for (const bool capturable : {false, true}) {
    auto params = Params();
    auto others = Params();
    Later sampler(params,
                  Hamiltonian().nonfinite("skip").capturable(capturable));
    SGHMC unbroken(others, Hamiltonian().capturable(capturable));
    for (int64_t i = 0; i < 5; ++i) {
      BadStep(sampler, params, kBad[i % 3]);
      if (i % 2 == 0) {
        EXPECT_EQ(sampler.num_skipped(), i + 1);
      }
      sampler.step();
      unbroken.step();
      ExpectEqual(params, others);
    }
    EXPECT_EQ(sampler.num_skipped(), 5);
    const StateDict group =
        sampler.state_dict().at("param_groups").toListRef()[0];
    const c10::IValue steps = group.at("step");
    EXPECT_EQ(capturable ? steps.toTensor().item<int64_t>() : steps.toInt(), 5);
  }
}

TEST(Nonfinite, IsSavedAndMayBeMissing) {
  auto params = Params();
  SGLD sampler(params, Langevin().nonfinite("skip"));
  BadStep(sampler, params, kBad[1]);
  StateDict dict = sampler.state_dict();
  SGLD twin(Params(), Langevin());
  twin.load_state_dict(dict);
  EXPECT_EQ(twin.num_skipped(), 1);
  EXPECT_EQ(twin.options().nonfinite(), "skip");
}

TEST(Nonfinite, RefusesOtherWords) {
  EXPECT_EQ(MessageOf([] { SGLD(Params(), Langevin().nonfinite("ignore")); }),
            "Invalid nonfinite: 'ignore' (must be 'raise', 'skip' or 'allow')");
  EXPECT_EQ(MessageOf([] {
              SBPS(Params(), SBPSOptions().num_data(5).nonfinite("allow"));
            }),
            "Invalid nonfinite: 'allow' (must be 'raise' or 'skip')");
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(
      Params(), std::make_unique<SGLDOptions>(SGLDOptions().nonfinite("skip")));
  EXPECT_EQ(MessageOf([&] { SGLD(groups, Langevin()); }),
            "Invalid param group: 'nonfinite' is managed by SGLD and cannot be "
            "set for a group");
}

TEST(Sampler, OnlineNoiseEstimateAboveTheFrictionIsAnError) {
  const auto param = Param(4);
  SGHMC sampler({param}, Hamiltonian().noise_estimate("online"));
  const auto noisy = [&](float scale) {
    for (int i = 0; i < 110; ++i) {
      param.mutable_grad() = torch::full({4}, i % 2 == 0 ? scale : -scale);
      sampler.step();
    }
  };
  noisy(1e-3F);
  EXPECT_NE(MessageOf<std::invalid_argument>([&] {
              noisy(10);
            }).find("in the noisiest coordinate"),
            std::string::npos);
}

// A closure that gives both parameters random gradients and counts its calls.
// (EWSG compares them by their memory, so they are fresh ones.)
torch::optim::Optimizer::LossClosure Draws(
    const std::vector<torch::Tensor>& params, int& calls) {
  return [params, &calls] {
    for (const auto& param : params) {
      const auto where = torch::linspace(0, 1, param.numel());
      param.mutable_grad() =
          torch::sin(where * static_cast<double>(7 + calls)).view_as(param);
    }
    ++calls;
    return torch::full({}, static_cast<double>(calls));
  };
}

EWSGOptions Weighted() { return EWSGOptions(0.1).num_data(5).seed(7); }

TEST(EWSG, NeedsAClosure) {
  EWSG sampler(Params(), Weighted());
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); })
                .find("EWSG.step() needs a closure, since it draws several "
                      "minibatches a step:"),
            0U);
  EXPECT_EQ(sampler.options().step(), 0);
}

TEST(EWSG, DrawsAndReturnsTheFirstLoss) {
  const auto params = Params();
  EWSG sampler(params, Weighted().index_chain_length(3));
  EXPECT_TRUE(std::isnan(sampler.acceptance_rate()));
  int calls = 0;
  const auto closure = Draws(params, calls);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(sampler.step(closure).item<double>(), 4 * i + 1);
  }
  EXPECT_EQ(calls, 80);
  EXPECT_GT(sampler.acceptance_rate(), 0);
  EXPECT_LT(sampler.acceptance_rate(), 1);
}

// A closure whose n-th call makes gradients that depend on which(n) alone.
torch::optim::Optimizer::LossClosure Which(
    const torch::Tensor& param,
    int& calls,
    const std::function<double(int)>& which) {
  return [=, &calls] {
    param.mutable_grad() = torch::full_like(param, which(calls++));
    return torch::zeros({});
  };
}

TEST(EWSG, RefusesMinibatchesThatAreAlwaysTheSame) {
  const std::string message =
      "EWSG got the gradient of the minibatch before from 100 calls of the "
      "closure running, which must draw a fresh minibatch at each call. If each "
      "minibatch is all data, there is nothing to choose from: use SGHMC, or "
      "index_chain_length(0)";
  for (const int length : {1, 3}) {
    const auto param = torch::zeros({4}).set_requires_grad(true);
    EWSG sampler({param}, Weighted().index_chain_length(length));
    int calls = 0;
    // One minibatch a step.
    const auto closure =
        Which(param, calls, [&](int n) { return 1 + n / (length + 1) % 5; });
    for (int step = 0; step < 99 / length; ++step) sampler.step(closure);
    const auto before = param.detach().clone();
    const int64_t steps = sampler.options().step();
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(closure); }),
              message);
    EXPECT_TRUE(torch::equal(param, before));
    EXPECT_EQ(sampler.options().step(), steps);
  }
}

TEST(EWSG, TakesMinibatchesThatAreOftenTheSame) {
  // One other gradient before the hundredth clears all doubts.
  const auto param = torch::zeros({4}).set_requires_grad(true);
  EWSG sampler({param}, Weighted());
  int calls = 0;
  auto closure = Which(param, calls, [](int n) { return n == 197 ? 2 : 1; });
  for (int step = 0; step < 300; ++step) sampler.step(closure);
  // Gradients of zero are those of a loss without data.
  EWSG flat({param}, Weighted());
  closure = Which(param, calls, [](int) { return 0; });
  for (int step = 0; step < 300; ++step) flat.step(closure);
}

TEST(EWSG, MakesManyChainsThatDecideAlone) {
  const auto param = torch::zeros({4, 6}).set_requires_grad(true);
  EWSG sampler({param}, Weighted().num_chains(4));
  int calls = 0;
  const auto closure = Draws({param}, calls);
  bool differed = false;
  for (int i = 0; i < 20; ++i) {
    sampler.step(closure);
    const auto where = torch::linspace(0, 1, 24);
    const auto first = torch::sin(where * (7.0 + 2 * i)).view({4, 6});
    const auto second = torch::sin(where * (8.0 + 2 * i)).view({4, 6});
    int accepted = 0;
    for (int64_t chain = 0; chain < 4; ++chain) {
      const bool is_first = torch::equal(param.grad()[chain], first[chain]);
      EXPECT_NE(is_first, torch::equal(param.grad()[chain], second[chain]));
      accepted += is_first ? 0 : 1;
    }
    differed = differed || (accepted > 0 && accepted < 4);
  }
  EXPECT_TRUE(differed);
  EXPECT_GT(sampler.acceptance_rate(), 0);
  EXPECT_LT(sampler.acceptance_rate(), 1);

  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [] { EWSG(Params(), Weighted().num_chains(300)); }),
            "Invalid parameter: shape [5] (must have a leading dimension of "
            "num_chains = 300)");
}

TEST(EWSG, APersistentIndexChainGoesOnFromItsMinibatch) {
  const auto param = torch::zeros({4}).set_requires_grad(true);
  EWSG sampler({param}, Weighted().persistent_index_chain(true));
  int64_t used = 0;
  int kept = 0;
  for (int64_t step = 0; step < 50; ++step) {
    std::vector<int64_t> asked;
    sampler.step([&] {
      asked.push_back(sampler.minibatches().item<int64_t>());
      const auto angle = static_cast<double>(asked.back());
      param.mutable_grad() = torch::full({4}, 5 * std::sin(angle));
      return torch::zeros({});
    });
    EXPECT_EQ(asked, (std::vector<int64_t>{used, step + 1}));
    const auto angle = static_cast<double>(step + 1);
    const auto fresh = torch::full({4}, 5 * std::sin(angle));
    if (torch::equal(param.grad(), fresh)) {
      used = step + 1;
    } else {
      ++kept;
    }
  }
  EXPECT_GT(kept, 5);
  EXPECT_LT(kept, 45);
}

TEST(EWSG, SaysWhatAPersistentIndexChainNeeds) {
  const auto params = Params();
  const auto persistent = Weighted().persistent_index_chain(true);
  EWSG sampler(params, persistent);
  int calls = 0;
  EXPECT_EQ(
      MessageOf<std::runtime_error>([&] { sampler.step(Draws(params, calls)); })
          .find("EWSG got gradients from a closure that did not ask which "
                "minibatch they are to be of"),
      0U);
  EXPECT_EQ(sampler.options().step(), 0);
  EXPECT_EQ(MessageOf<std::logic_error>([&] { sampler.minibatches(); }),
            "EWSG.minibatches is for the closure that step() calls");
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] {
              EWSG(Params(), EWSGOptions(persistent).index_chain_length(0));
            }),
            "Invalid index_chain_length: 0 (must be >= 1 with "
            "persistent_index_chain(true): the first minibatch would stay for "
            "ever)");
}

TEST(EWSG, AFailedClosureChangesNothing) {
  const auto params = Params();
  EWSG sampler(params, Weighted().index_chain_length(2));
  int calls = 0;
  const auto closure = Draws(params, calls);
  const auto fails = [&](int at, const std::function<void()>& spoil) {
    const int start = calls;
    const auto before = Copies(params);
    const auto message = MessageOf<std::runtime_error>([&] {
      sampler.step([&] {
        const auto loss = closure();
        if (calls - start == at) spoil();
        return loss;
      });
    });
    EXPECT_EQ(calls - start, at);
    ExpectEqual(params, before);
    EXPECT_TRUE(sampler.state().empty());
    EXPECT_EQ(sampler.options().step(), 0);
    EXPECT_TRUE(std::isnan(sampler.acceptance_rate()));
    return message;
  };
  for (const int at : {1, 2, 3}) {
    EXPECT_EQ(fails(at, [] { throw std::runtime_error("no data"); }),
              "no data");
  }
  EXPECT_EQ(fails(1,
                  [&] {
                    for (const auto& param : params) {
                      param.mutable_grad().reset();
                    }
                  }),
            "EWSG got no gradients from the closure (does it call "
            "backward()?)");
  EXPECT_EQ(fails(2, [&] { params[0].mutable_grad().reset(); }),
            "EWSG got gradients of other parameters from the closure than at "
            "its first call in this step: minibatches could not be compared");
  const auto reused = torch::ones({5});
  const auto reuse = [&] {
    params[1].mutable_grad() = reused;
    return torch::Tensor();
  };
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(reuse); })
                .find("EWSG got the gradients of a minibatch in the memory of "
                      "those of the minibatch before"),
            0U);
  EXPECT_TRUE(sampler.state().empty());
}

TEST(EWSG, MakesOneDecisionForAllGroups) {
  const auto group = [](const EWSGOptions& options) {
    return OptimizerParamGroup({Param(4)},
                               std::make_unique<EWSGOptions>(options));
  };
  EWSG sampler(Params(), Weighted());
  for (const auto& bad :
       {std::pair("index_chain_length", EWSGOptions().index_chain_length(1)),
        std::pair("num_chains", EWSGOptions().num_chains(4))}) {
    EXPECT_EQ(MessageOf<std::invalid_argument>(
                  [&] { sampler.add_param_group(group(bad.second)); }),
              "Invalid param group: '" + std::string(bad.first) +
                  "' is managed by EWSG and cannot be set for a group");
  }
  sampler.add_param_group(group(EWSGOptions(0.2).surrogate("zero")));
  EXPECT_EQ(sampler.options(1).momentum(), 0.9);
  sampler.options(1).index_chain_length(3);
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { sampler.step([] { return torch::Tensor(); }); }),
            "Invalid index_chain_length: [1, 3] in the param groups (must be "
            "equal: there is one decision for all)");
  sampler.options(1).index_chain_length(1).num_chains(1);
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { sampler.step([] { return torch::Tensor(); }); }),
            "Invalid num_chains: [none, 1] in the param groups (must be equal: "
            "there is one decision for all)");
}

TEST(EWSG, IsSavedAndLoadedByTorch) {
  const auto param = torch::zeros({4, 6}).set_requires_grad(true);
  const auto other_param = torch::zeros({4, 6}).set_requires_grad(true);
  EWSG sampler({param}, Weighted().num_chains(4));
  EWSG other({other_param}, EWSGOptions(0.3).num_data(1));
  int calls = 0;
  int other_calls = 20;
  for (int i = 0; i < 10; ++i) sampler.step(Draws({param}, calls));
  {
    const torch::NoGradGuard no_grad;
    other_param.copy_(param);
  }
  std::stringstream stream;
  torch::save(sampler, stream);
  torch::load(other, stream);
  EXPECT_EQ(other.acceptance_rate(), sampler.acceptance_rate());
  for (int i = 0; i < 10; ++i) {
    sampler.step(Draws({param}, calls));
    other.step(Draws({other_param}, other_calls));
  }
  ExpectEqual({param}, {other_param});
  EXPECT_EQ(other.acceptance_rate(), sampler.acceptance_rate());

  const auto dict = sampler.state_dict();
  StateDict group = dict.at("param_groups").toListRef()[0];
  group.set("num_accepted", torch::zeros({2}));
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { other.load_state_dict(dict); }),
      "Invalid num_accepted in a state dict: a Tensor (must be an int, "
      "or a Tensor of one int64)");
  group.set("num_accepted", 3);
  group.set("num_chains", 5);
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { other.load_state_dict(dict); }),
      "Invalid parameter: shape [4, 6] (must have a leading dimension of "
      "num_chains = 5)");
}

TEST(EWSG, RefusesWhatIsOutOfRange) {
  const auto refused = [](const EWSGOptions& options) {
    return MessageOf<std::invalid_argument>([&] { EWSG(Params(), options); });
  };
  EXPECT_EQ(refused(Weighted().index_chain_length(-1)),
            "Invalid index_chain_length: -1 (must be >= 0)");
  EXPECT_EQ(refused(Weighted().num_chains(0)),
            "Invalid num_chains: 0 (must be >= 1)");
  EXPECT_EQ(refused(Weighted().capturable(true)),
            "Invalid capturable: true (EWSG decides on the host, which a CUDA "
            "graph cannot)");
}

// Two samplers of different parameters, one of which has run.
template <typename Method, typename Options>
struct Pair {
  explicit Pair(const Options& options)
      : params(Params()),
        others(Params()),
        sampler(params, options),
        other(others, Options(0.3).num_data(1)) {
    for (int i = 0; i < 3; ++i) sampler.step();
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) others[i].copy_(params[i]);
  }

  void ExpectSameChain() {
    for (int i = 0; i < 3; ++i) {
      sampler.step();
      other.step();
    }
    ExpectEqual(params, others);
    EXPECT_EQ(sampler.target_summary(), other.target_summary());
  }

  std::vector<torch::Tensor> params;
  std::vector<torch::Tensor> others;
  Method sampler;
  Method other;
};

template <typename Method, typename Options>
void ExpectTorchSaves(const Options& options) {
  Pair<Method, Options> pair(options);
  std::stringstream stream;
  torch::save(pair.sampler, stream);
  torch::load(pair.other, stream);
  pair.ExpectSameChain();
}

TEST(Serialization, TorchSavesAndLoads) {
  ExpectTorchSaves<SGLD>(Langevin());
  ExpectTorchSaves<SGHMC>(Hamiltonian());
  ExpectTorchSaves<SGHMC>(Hamiltonian().noise_estimate("online"));
  ExpectTorchSaves<SGHMC>(Hamiltonian().capturable(true));
}

class Files : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("torch_sgmcmc_" + std::to_string(::getpid()));
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Path(const char* name) const { return folder_ / name; }

 private:
  std::filesystem::path folder_;
};

TEST_F(Files, HoldAStateDict) {
  Pair<SGHMC, SGHMCOptions> pair(Hamiltonian());
  save(pair.sampler.state_dict(), Path("sampler.pt"));
  pair.other.load_state_dict(load(Path("sampler.pt")));
  pair.ExpectSameChain();
  EXPECT_FALSE(std::filesystem::exists(Path("sampler.pt.unfinished")));
}

TEST_F(Files, HoldAModule) {
  torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  torch::nn::Sequential other(torch::nn::Linear(3, 2),
                              torch::nn::BatchNorm1d(2));
  net->forward(torch::randn({5, 3}));
  save(state_dict(*net), Path("net.pt"));
  load_state_dict(*other, load(Path("net.pt")));
  net->eval();
  other->eval();
  const auto x = torch::randn({4, 3});
  EXPECT_TRUE(torch::equal(net->forward(x), other->forward(x)));

  torch::nn::Sequential wide(torch::nn::Linear(3, 4),
                             torch::nn::BatchNorm1d(4));
  const auto before = wide[0]->parameters()[0].detach().clone();
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { load_state_dict(*wide, load(Path("net.pt"))); }),
            "Invalid state dict: 0.weight has shape [2, 3], expected [4, 3]");
  EXPECT_TRUE(torch::equal(wide[0]->parameters()[0], before));
  torch::nn::Sequential small(torch::nn::Linear(3, 2));
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { load_state_dict(*small, load(Path("net.pt"))); }),
            "Invalid state dict: the module has nothing named 1.weight");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { load_state_dict(*net, state_dict(*small)); }),
            "Invalid state dict: it has no key '1.weight'");
}

TEST_F(Files, ThatAreNotOnesOfTorchAreRefused) {
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { load(Path("none.pt")); }),
            "Cannot read " + Path("none.pt") + ": No such file or directory");
  std::ofstream(Path("text.pt")) << "text";
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { load(Path("text.pt")); }),
            "Cannot read " + Path("text.pt") +
                ": cut off, damaged, or not a file of torch.save (no directory "
                "at its end)");
  EXPECT_EQ(
      MessageOf<std::runtime_error>([&] { save({}, Path("no/folder.pt")); }),
      "Cannot write " + Path("no/folder.pt") + ": No such file or directory");
}

// What a file with such bytes is refused for; empty if it holds what `whole`
// does.
std::string Refusal(const std::string& path,
                    const std::vector<char>& bytes,
                    const torch::Tensor& whole) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  try {
    const StateDict dict = load(path);
    EXPECT_TRUE(torch::equal(dict.at("a").toTensor(), whole));
    EXPECT_EQ(dict.at("b").toDouble(), 0.5);
    EXPECT_EQ(dict.size(), 2U);
    return "";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("Cannot read " + path + ": "), 0U) << text;
    return text.substr(path.size() + 14);
  }
}

std::vector<char> Bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(Files, ThatAreCutOffAreRefused) {
  const torch::Tensor a = torch::randn({40});
  save({{"a", a}, {"b", 0.5}}, Path("x.pt"));
  const auto whole = Bytes(Path("x.pt"));
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(Refusal(Path("x.pt"), {whole.begin(), whole.begin() + size}, a),
              "")
        << size;
  }
  EXPECT_EQ(Refusal(Path("x.pt"), whole, a), "");
}

TEST_F(Files, WithAFlippedBitAreRefusedOrMeanTheSame) {
  const torch::Tensor a = torch::randn({40});
  save({{"a", a}, {"b", 0.5}}, Path("x.pt"));
  const auto whole = Bytes(Path("x.pt"));
  size_t noticed = 0;
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    auto damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    noticed += Refusal(Path("x.pt"), damaged, a).empty() ? 0 : 1;
    if (HasFailure()) FAIL() << "bit " << bit;
  }
  // All but those in what fills the space between parts.
  EXPECT_GT(noticed, 4 * whole.size());

  const auto* number = reinterpret_cast<const char*>(a.data_ptr());
  auto damaged = whole;
  auto at = std::search(damaged.begin(), damaged.end(), number, number + 160);
  ASSERT_NE(at, damaged.end());
  *at = static_cast<char>(*at ^ 1);
  EXPECT_EQ(Refusal(Path("x.pt"), damaged, a),
            "cut off, damaged, or not a file of torch.save (archive/data/0)");
}

TEST(StateDict, OfAnotherChainIsRefusedAndChangesNothing) {
  Pair<SGHMC, SGHMCOptions> pair(Hamiltonian());
  const auto good = pair.sampler.state_dict();
  const auto refused = [&](const StateDict& dict) {
    return MessageOf<std::invalid_argument>(
        [&] { pair.other.load_state_dict(dict); });
  };
  EXPECT_EQ(refused(StateDict()),
            "Invalid state dict: it has no key 'param_groups'");

  SGLD langevin(Params(), Langevin());
  EXPECT_EQ(refused(langevin.state_dict()),
            "Invalid state_dict: param group 0 lacks initial_momentum, "
            "momentum, noise_estimate, resample_momentum_every; it is not one "
            "of SGHMC");
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { langevin.load_state_dict(good); }),
      "Invalid state_dict: param group 0 has initial_momentum, momentum, "
      "noise_estimate, resample_momentum_every, which SGLD does not "
      "know; it is not one of SGLD");

  SGHMC fewer({Param(300)}, Hamiltonian());
  EXPECT_EQ(refused(fewer.state_dict()),
            "Invalid state_dict: param group 0 has 1 parameters, expected 2");

  SGHMC larger({Param(700), Param(5)}, Hamiltonian());
  EXPECT_EQ(refused(larger.state_dict()),
            "Invalid state_dict: param group 0 was saved for parameters of "
            "other sizes (noise offsets [0, 768], expected [0, 384])");

  SGHMC reshaped({Param(300), Param(6)}, Hamiltonian());
  reshaped.step();
  EXPECT_EQ(refused(reshaped.state_dict()),
            "Invalid state_dict: momentum of parameter 1 has shape [6], "
            "expected [5]");

  std::vector<OptimizerParamGroup> groups;
  for (const auto& param : Params()) groups.emplace_back(std::vector{param});
  EXPECT_EQ(refused(SGHMC(groups, Hamiltonian()).state_dict()),
            "Invalid state_dict: it has 2 param groups, expected 1");

  StateDict group = good.at("param_groups").toListRef()[0];
  group.set("momentum", 2.0);
  EXPECT_EQ(refused(good), "Invalid momentum: 2.0 (must be in [0, 1))");
  group.set("momentum", true);
  EXPECT_EQ(refused(good),
            "Invalid momentum in a state dict: a Bool (must be a number)");
  group.set("momentum", 0.9);

  EXPECT_EQ(pair.other.options().lr(), 0.3);
  EXPECT_TRUE(pair.other.state().empty());
  pair.other.load_state_dict(good);
  pair.ExpectSameChain();
}

TEST(StateDict, OfHalfPrecisionKeepsTheMomentumWide) {
  const auto param = Param(40, torch::kBFloat16);
  SGHMC sampler({param}, Hamiltonian());
  sampler.step();
  sampler.load_state_dict(sampler.state_dict());
  const auto& state = dynamic_cast<const SGHMCParamState&>(
      *sampler.state().at(param.unsafeGetTensorImpl()));
  EXPECT_EQ(state.momentum.scalar_type(), torch::kFloat);
}

TEST(StateDict, TakesThePrecisionThatTheParameterAsksFor) {
  for (const auto& [saved, loaded] :
       {std::pair(torch::kFloat, torch::kDouble),
        std::pair(torch::kDouble, torch::kFloat),
        std::pair(torch::kDouble, torch::kHalf)}) {
    SGHMC sampler({Param(40, saved)}, Hamiltonian());
    sampler.step();
    const auto param = Param(40, loaded);
    SGHMC other({param}, Hamiltonian());
    other.load_state_dict(sampler.state_dict());
    const auto& state = dynamic_cast<const SGHMCParamState&>(
        *other.state().at(param.unsafeGetTensorImpl()));
    EXPECT_EQ(state.momentum.scalar_type(),
              loaded == torch::kDouble ? torch::kDouble : torch::kFloat);
    other.step();
    EXPECT_EQ(other.options().step(), 2);
  }
}

TEST(StateDict, IsLoadedAgainAndAgain) {
  const auto params = Params();
  const auto start = Copies(params);
  SGHMC sampler(params, Hamiltonian());
  sampler.step();
  const auto saved = sampler.state_dict();
  SGHMC other(Params(), Hamiltonian().seed(1));
  other.load_state_dict(saved);  // which makes copies
  std::vector<std::vector<torch::Tensor>> ends;
  for (int i = 0; i < 3; ++i) {
    const torch::NoGradGuard no_grad;
    for (size_t j = 0; j < params.size(); ++j) params[j].copy_(start[j]);
    sampler.load_state_dict(other.state_dict());
    for (int step = 0; step < 3; ++step) sampler.step();
    ends.push_back(Copies(params));
    ExpectEqual(ends[0], ends.back());
  }
}

TEST(StateDict, GivesItsSeedToGroupsThatAreAddedLater) {
  SGLD sampler(Params(), Langevin());
  SGLD other(Params(), Langevin().seed(1));
  sampler.step();
  other.load_state_dict(sampler.state_dict());
  const auto p = Param(9);
  const auto q = Param(9);
  sampler.add_param_group(OptimizerParamGroup({p}));
  other.add_param_group(OptimizerParamGroup({q}));
  EXPECT_EQ(*other.options(1).seed(), 7);
  sampler.step();
  other.step();
  ExpectEqual({p}, {q});
}

TEST(GammaPrecision, DrawsEveryGroupsPrecision) {
  std::vector<OptimizerParamGroup> groups;
  for (const auto& param : Params()) groups.emplace_back(std::vector{param});
  SGLD sampler(groups, Langevin().prior_precision(1));
  GammaPrecision precision(sampler, GammaPrecisionOptions().shape(2).rate(0.5));
  const auto drawn = precision.step();
  ASSERT_EQ(drawn.size(), 2U);
  EXPECT_EQ(sampler.options(0).prior_precision(), drawn[0]);
  EXPECT_EQ(sampler.options(1).prior_precision(), drawn[1]);
  // 300 weights with mean square 1/3: Gamma(152, rate 50.7), sd 0.24.
  EXPECT_NEAR(drawn[0], 3, 1);

  GammaPrecision again(sampler);
  again.load_state_dict(precision.state_dict());
  EXPECT_EQ(again.step(), precision.step());
  EXPECT_NE(again.step(), drawn);
}

TEST(GammaPrecision, RefusesWhatIsOutOfRange) {
  SGLD sampler(Params(), Langevin().temperature(0));
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] {
              GammaPrecision(sampler, GammaPrecisionOptions().shape(0));
            }),
            "Invalid shape: 0.0 (must be finite and > 0)");
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] {
              GammaPrecision(sampler, GammaPrecisionOptions().rate(-1));
            }),
            "Invalid rate: -1.0 (must be finite and > 0)");
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { GammaPrecision(sampler).step(); }),
      "Invalid temperature: 0.0 (must be finite and > 0)");
  EXPECT_EQ(sampler.options().prior_precision(), 0);
}

// The numbers that tests/test_data.py expects of Python's samplers.
TEST(Minibatch, IsThatOfPython) {
  using Indices = std::vector<int64_t>;
  EXPECT_EQ(draw_minibatch(10, 4, /*seed=*/-1, /*step=*/2),
            Indices({6, 0, 2, 5}));
  EXPECT_EQ(draw_minibatch(10, 4, -1, 2, /*replacement=*/true),
            Indices({6, 3, 0, 5}));
  EXPECT_EQ(draw_stratified_minibatch({3, 10}, 4, -1, 2),
            Indices({2, 7, 4, 9}));
  // And those of two ranks.
  EXPECT_EQ(draw_minibatch(10, 4, -1, 2, false, 2, 0), Indices({6, 2}));
  EXPECT_EQ(draw_minibatch(10, 4, -1, 2, false, 2, 1), Indices({0, 5}));
  EXPECT_EQ(draw_minibatch(10, 4, -1, 2, true, 2, 1), Indices({3, 5}));
  EXPECT_EQ(draw_stratified_minibatch({3, 10}, 4, -1, 2, 2, 1),
            Indices({7, 9}));
}

TEST(Minibatch, RefusesWhatDoesNotFit) {
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([] { draw_minibatch(3, 4, 0, 0); }),
      "Invalid batch_size: 4 (must be in [1, 3])");
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([] { draw_minibatch(3, 1, 0, -1); }),
      "step + count must be in [0, 2^48]");
  EXPECT_EQ(MessageOf<std::invalid_argument>([] {
              draw_stratified_minibatch({3, 2}, 1, 0, 0);
            }),
            "Invalid ends: 2 (must be increasing and > 0)");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [] { draw_minibatch(9, 4, 0, 0, false, 3, 0); }),
            "Invalid batch_size: 4 (must be a multiple of num_replicas = 3: "
            "gradients of ranks enter their mean alike)");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [] { draw_stratified_minibatch({9}, 4, 0, 0, 2, 2); }),
            "Invalid rank: 2 (must be below num_replicas = 2)");
}

// The numbers that tests/test_seeds.py expects of Python.
TEST(Seeds, AreThoseOfPython) {
  constexpr auto kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(fold_in(0, 0), -751597713854386695);
  EXPECT_EQ(fold_in(0, 1), 8684763733977457676);
  EXPECT_EQ(fold_in(7, 3), 3823108546702731677);
  EXPECT_EQ(fold_in(-1, 0), -7754111745894394787);
  EXPECT_EQ(fold_in(-kMax - 1, kMax), -4926981086998153266);
  EXPECT_EQ(MessageOf<std::invalid_argument>([] { fold_in(0, -1); }),
            "Invalid stream: -1 (must be >= 0)");
}

TEST(Cuda, IsTheSameChain) {
  if (!torch::cuda::is_available() || !has_cuda()) {
    GTEST_SKIP() << "needs a CUDA device";
  }
  const auto on_cpu = Params();
  std::vector<torch::Tensor> on_gpu;
  for (const auto& param : on_cpu) {
    on_gpu.push_back(Param(param.numel(), torch::kFloat, torch::kCUDA));
  }
  SGHMC one(on_cpu, Hamiltonian());
  SGHMC two(on_gpu, Hamiltonian());
  for (int i = 0; i < 10; ++i) {
    one.step();
    two.step();
  }
  for (size_t i = 0; i < on_cpu.size(); ++i) {
    EXPECT_TRUE(torch::allclose(on_cpu[i], on_gpu[i].cpu(), 1e-5, 1e-6));
  }
}

}  // namespace
}  // namespace torch_sgmcmc
