// The samplers as a LibTorch program uses them. That a chain has the same bits
// as in Python, and that messages are the same, is tested from Python
// (tests/cpp/test_cpp_chains.py); here is what belongs to C++: options of
// groups, torch's schedulers, and that a failure changes nothing.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <variant>

#include "small_chains.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

using torch::optim::OptimizerParamGroup;

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
  EXPECT_EQ(sampler.num_steps(), 1);
  const StateDict saved = sampler.state_dict();
  const StateDict group = saved.at("param_groups").toListRef()[1];
  EXPECT_EQ(group.at("offsets").toListRef()[0].toInt(), 512);
  EXPECT_EQ(group.at("next_offset").toTensor().item<int64_t>(), 640);
  sampler.step();
  EXPECT_EQ(sampler.num_steps(), 2);
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
            "Invalid prior_mean: number 1 has shape [5] (must be [4], "
            "its parameter's shape)");
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
  groups.emplace_back(std::vector{Param(4)}, std::make_unique<SGLDOptions>(
                                                 SGLDOptions().prior_mean(0)));
  SGLD sampler(groups, Langevin().prior_mean(1.5));
  EXPECT_EQ(sampler.options(0).prior_mean(), 1.5);
  EXPECT_EQ(sampler.options(1).prior_mean(), 0);
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
  EXPECT_EQ(
      MessageOf<std::invalid_argument>(
          [] { SGLD({torch::zeros({2}, torch::kLong)}, Langevin()); }),
      "Invalid parameter: SGLD cannot sample torch::kLong, number 0 of "
      "group 0 (must be torch::kFloat, kDouble, kBFloat16 or kHalf; a complex parameter "
      "can be kept as torch::view_as_real of it)");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [] { SGLD({Param(2) * 2}, Langevin()); }),
            "can't optimize a non-leaf Tensor");
  // A parameter of tied modules counts once.
  const auto twice = Param(2);
  SGLD tied({twice, twice}, Langevin());
  EXPECT_EQ(tied.param_groups()[0].params().size(), 1U);
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

// The cases and messages of tests/contract/test_param_groups.py.
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

  params[1].set_data(torch::zeros({5, 1}));
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(); }),
            "SGHMC got a gradient of torch::kFloat and shape [5] on cpu for a "
            "parameter of torch::kFloat and shape [5, 1] on cpu (must be "
            "equal)");
  params[1].mutable_grad() = torch::ones({5, 1});
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(); }),
            "SGHMC has a momentum of torch::kFloat and shape [5] on cpu for a "
            "parameter of shape [5, 1] (must be of torch::kFloat, "
            "torch::kStrided and of its shape on cpu, without shared elements)"
            ": was the parameter replaced?");
  params[1].set_data(before[1]);
  params[1].mutable_grad() = grad;

  ExpectEqual(params, before);
  EXPECT_EQ(sampler.num_steps(), 1);
}

TEST(Sampler, StateIsLookedAtAndChangedByName) {
  const auto param = Param(3);
  SGHMC sampler({param}, Hamiltonian().lr(1e-30));
  EXPECT_FALSE(sampler.state_of(param)["momentum"].defined());
  EXPECT_TRUE(sampler.state().empty());  // looking begins nothing
  sampler.own_state_of(param)["momentum"] = torch::full({3}, 2.0F);
  sampler.step();
  EXPECT_TRUE(torch::allclose(sampler.state_of(param)["momentum"],
                              torch::full({3}, 1.8F)));
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

// The numbers that tests/posterior/test_data.py expects of Python's samplers.
TEST(Minibatch, IsThatOfPython) {
  using Indices = std::vector<int64_t>;
  EXPECT_EQ(draw_minibatch(10, 4, /*seed=*/-1, /*step=*/2),
            Indices({6, 0, 2, 5}));
  EXPECT_EQ(draw_minibatch(10, 4, -1, 2, /*replacement=*/true),
            Indices({6, 3, 0, 5}));
  // And those of two ranks.
  EXPECT_EQ(draw_minibatch(10, 4, -1, 2, false, 2, 0), Indices({6, 2}));
  EXPECT_EQ(draw_minibatch(10, 4, -1, 2, false, 2, 1), Indices({0, 5}));
  EXPECT_EQ(draw_minibatch(10, 4, -1, 2, true, 2, 1), Indices({3, 5}));
}

// The numbers that tests/contract/test_seeds.py expects of Python.
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
