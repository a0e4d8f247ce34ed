// What is done with samplers as with torch's own optimizers, and by mistake:
// options put back and exchanged, objects copied, moved and outlived, warnings.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include "same_values.h"
#include "small_chains.h"
#include "testing.h"
#include "warnings_of.h"

namespace torch_sgmcmc {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamGroup;

template <typename Kind>
void MakeSteps(Kind& sampler, const Tensor& p, int count) {
  for (int i = 0; i < count; ++i) {
    sampler.step([&] {
      p.mutable_grad() = Tensor();
      const Tensor losses =
          (p.reshape({-1, 1}) - torch::sin(torch::arange(6) + i))
              .square()
              .sum(0);
      if constexpr (std::is_same_v<Kind, SBPS>) return losses;
      losses.mean().backward();
      return losses.mean().detach();
    });
  }
}

// ---- Options ----------------------------------------------------------------

TEST(Misuse, AGroupThatIsNotThere) {
  SGLD sampler(std::vector{Param(5)}, SGLDOptions(0.1).num_data(10).seed(3));
  EXPECT_EQ(MessageOf([&] { sampler.options(3); }),
            "Invalid group: 3 (the sampler has 1 param groups)");
}

TEST(Misuse, AnArchiveOfSomethingElse) {
  const Tensor p = Param(5);
  SGLD sampler({p}, SGLDOptions(0.1).num_data(10).seed(3));
  std::stringstream file;
  torch::save(p, file);
  EXPECT_EQ(MessageOf([&] { torch::load(sampler, file); }),
            "Invalid archive: it has no state dict of a sampler");
}

TEST(Misuse, NoiseThatOverflows) {
  const Tensor p = Param(5);
  SGLD sampler({p}, SGLDOptions(0.1).num_data(1).seed(3));
  sampler.options().lr(1e70).temperature(1e70);
  const Tensor before = p.detach().clone();
  p.mutable_grad() = torch::ones_like(p);
  EXPECT_NE(MessageOf([&] { sampler.step(); }).find("float32 cannot hold"),
            std::string::npos);
  EXPECT_TRUE(torch::equal(p, before));
}

// A chain whose options are put back, replaced by a copy, or set to another
// sampler's between steps is the chain in which nobody did.
template <typename Kind, typename Options>
void ExpectNoRewind(const Options& options) {
  const auto run = [&](int how) {
    const Tensor p = Param(5);
    Kind sampler(std::vector{p}, Options(options).seed(3));
    Kind other(std::vector{Param(5)}, Options(options).seed(4));
    const Options saved = sampler.options();
    for (int i = 0; i < 4; ++i) {
      MakeSteps(sampler, p, 1);
      if (how == 1) sampler.options() = saved;
      if (how == 2) {
        sampler.param_groups()[0].set_options(std::make_unique<Options>(saved));
      }
      if (how == 3) sampler.options() = other.options();
    }
    EXPECT_EQ(sampler.seed(), 3);
    EXPECT_EQ(sampler.num_steps(), 4);
    return c10::IValue(sampler.state_dict()).deepcopy();
  };
  const c10::IValue whole = run(0);
  for (const int how : {1, 2, 3}) EXPECT_TRUE(SameValues(run(how), whole));
}

TEST(PutBack, OptionsRewindNothing) {
  ExpectNoRewind<SGLD>(SGLDOptions(0.1).num_data(50));
  ExpectNoRewind<SGHMC>(SGHMCOptions(0.1).num_data(50));
  ExpectNoRewind<EWSG>(
      EWSGOptions(0.1).num_data(50).index_chain_length(2).momentum(0.5));
  ExpectNoRewind<SBPS>(SBPSOptions().num_data(50));
}

TEST(LateOptions, AreTakenOrRefused) {
  const std::vector<Tensor> params = {Param(3)};
  const auto after = [&](auto change) {
    SGLD sampler(params, Langevin());
    change(sampler.options());
    const auto before = Copies(params);
    const std::string message =
        MessageOf<std::invalid_argument>([&] { sampler.step(); });
    if (message != "no error") {
      ExpectEqual(params, before);
      EXPECT_EQ(sampler.num_steps(), message == "no error" ? 1 : 0);
    }
    return message;
  };
  EXPECT_EQ(after([](SGLDOptions& o) { o.seed(5); }),
            "Invalid seed: 5 in the options of group 0 (SGLD has seed 7; "
            "give it to the sampler's constructor)");
  EXPECT_EQ(after([](SGLDOptions& o) { o.capturable(true); }),
            "Invalid capturable: true in the options of group 0 (SGLD has "
            "false; give it to the sampler's constructor)");
  EXPECT_EQ(after([](SGLDOptions& o) { o.num_chains(3); }),
            "Invalid num_chains: 3 in the options of group 0 (SGLD has 0; "
            "give it to the sampler's constructor)");
  EXPECT_EQ(after([](SGLDOptions& o) { o.prior_mean({torch::ones({4})}); }),
            "Invalid prior_mean: number 0 has shape [4] (must be [3], "
            "its parameter's shape)");
  EXPECT_EQ(after([](SGLDOptions& o) { o.lr(-1); }),
            "Invalid lr: -1.0 (must be finite and >= 0)");

  SGLD sampler(params, Langevin());
  sampler.param_groups()[0].set_options(
      std::make_unique<SGHMCOptions>(Hamiltonian()));
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); }),
            "Invalid options: those of group 0 are not of class SGLDOptions");
  EXPECT_THROW(sampler.options(), std::invalid_argument);
}

TEST(LateOptions, PriorMeansAreThoseGivenAtOnce) {
  const Tensor mean = torch::tensor({1.0F, 2.0F, 3.0F});
  const auto run = [&](const auto& begin, const auto& change) {
    const Tensor p = Param(3);
    SGLD sampler(std::vector{p}, begin);
    change(sampler.options());
    sampler.step();
    sampler.step();
    return p.detach();
  };
  const auto nothing = [](SGLDOptions&) {};
  const SGLDOptions with = Langevin().prior_precision(30);
  const Tensor at_once = run(SGLDOptions(with).prior_mean({mean}), nothing);
  EXPECT_TRUE(torch::equal(
      run(with, [&](SGLDOptions& o) { o.prior_mean({mean}); }), at_once));
  const Tensor number = run(SGLDOptions(with).prior_mean(0.5), nothing);
  EXPECT_TRUE(torch::equal(run(SGLDOptions(with).prior_mean({mean}),
                               [](SGLDOptions& o) { o.prior_mean(0.5); }),
                           number));
  // What is left open stays.
  EXPECT_TRUE(torch::equal(
      run(SGLDOptions(with).prior_mean({mean}),
          [](SGLDOptions& o) { o = SGLDOptions(0.1).prior_precision(30); }),
      at_once));
  // A copy does not have the tensors.
  SGLD one(std::vector{Param(3)}, SGLDOptions(with).prior_mean({mean}));
  SGLD two(std::vector{Param(3)}, SGLDOptions(with).seed(8));
  two.options() = one.options();
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { two.step(); }),
            "Invalid prior_mean: the options of group 0 are of a group with "
            "tensors, which are its sampler's (give this group its own, or a "
            "number)");
}

TEST(Idioms, OptionsOfGroupsAreCopiedAndExchanged) {
  const std::vector<Tensor> params = {Param(3), Param(4)};
  SGHMC sampler(
      {params[0]},
      Hamiltonian().momentum(0.5).nonfinite("skip").num_chains(std::nullopt));
  sampler.add_param_group(
      OptimizerParamGroup({params[1]}, sampler.options().clone()));
  EXPECT_EQ(sampler.options(1).momentum(), 0.5);
  sampler.step();
  sampler.options() = SGHMCOptions(0.2);  // what it leaves open is as before
  sampler.param_groups()[1].set_options(std::make_unique<SGHMCOptions>(0.3));
  sampler.step();
  for (const size_t group : {0, 1}) {
    EXPECT_EQ(sampler.options(group).momentum(), 0.5);
    EXPECT_EQ(sampler.options(group).num_data(), 50);
    EXPECT_EQ(sampler.options(group).nonfinite(), "skip");
  }
  EXPECT_EQ(sampler.options(0).lr(), 0.2);
  EXPECT_EQ(sampler.options(1).lr(), 0.3);
  EXPECT_EQ(sampler.num_steps(), 2);

  EWSG ewsg({params[0]}, EWSGOptions(0.1).num_data(5).seed(12));
  EXPECT_NO_THROW(ewsg.add_param_group(
      OptimizerParamGroup({params[1]}, ewsg.options().clone())));
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] {
              ewsg.add_param_group(OptimizerParamGroup(
                  {Param(2)}, std::make_unique<EWSGOptions>(
                                  EWSGOptions(0.2).index_chain_length(2))));
            }),
            "Invalid param group: 'index_chain_length' is managed by EWSG and "
            "cannot be set for a group");
}

// ---- Objects ----------------------------------------------------------------

static_assert(!std::is_copy_constructible_v<GammaPrecision>);
static_assert(std::is_move_constructible_v<GammaPrecision>);

TEST(Moved, SamplersAreFollowed) {
  const auto run = [](bool moves) {
    const Tensor p = Param(5);
    auto sampler = std::make_unique<SGLD>(std::vector{p}, Langevin());
    GammaPrecision precision(*sampler);
    std::vector<double> drawn;
    for (int i = 0; i < 6; ++i) {
      MakeSteps(*sampler, p, 1);
      drawn.push_back(precision.step()[0]);
      if (moves && i == 2) {
        sampler = std::make_unique<SGLD>(std::move(*sampler));
      }
      if (moves && i == 4) {
        SGLD other({Param(2)}, Langevin().seed(1));
        other = std::move(*sampler);
        sampler = std::make_unique<SGLD>(std::move(other));
      }
    }
    return drawn;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(Moved, SBPSAndItsHooksAreFollowed) {
  const Tensor p = Param(5);
  SBPS first({p}, SBPSOptions().num_data(50).sample_interval(1e-5).seed(1));
  int64_t samples = 0;
  first.register_sample_hook([&](SBPS&, double) { ++samples; });
  MakeSteps(first, p, 3);
  const int64_t before = samples;
  SBPS second = std::move(first);
  MakeSteps(second, p, 3);
  EXPECT_GT(samples, before);
}

TEST(Moved, SamplersSayWhatTheyAre) {
  const std::string moved =
      "this sampler was moved from: use the one that has its parameters now";
  const auto check = [&](auto& sampler) {
    auto other = std::move(sampler);
    const auto says = [&](const std::function<void()>& call) {
      EXPECT_EQ(MessageOf<std::logic_error>(call), moved);
    };
    const StateDict dict = other.state_dict();
    says([&] { sampler.step([] { return torch::zeros({}); }); });
    says([&] { sampler.state_dict(); });
    says([&] { sampler.load_state_dict(dict); });
    says([&] { sampler.num_steps(); });
    says([&] { sampler.num_skipped(); });
    says([&] { sampler.seed(); });
    says([&] { sampler.add_param_group(OptimizerParamGroup({Param(2)})); });
    EXPECT_THROW(sampler.options(), std::exception);
    EXPECT_THROW(GammaPrecision(sampler).step(), std::exception);
    sampler.zero_grad();
    sampler = std::move(other);  // and is one again
    EXPECT_EQ(sampler.num_steps(), 0);
  };
  SGLD sgld({Param(3)}, Langevin());
  check(sgld);
  SGHMC sghmc({Param(3)}, Hamiltonian());
  check(sghmc);
  SBPS sbps({Param(3)}, SBPSOptions().num_data(5).seed(5));
  check(sbps);
}

TEST(Destroyed, SamplersAreNotReferredTo) {
  std::optional<GammaPrecision> precision;
  {
    SBPS sampler({Param(3)}, SBPSOptions().num_data(5).seed(6));
    precision.emplace(sampler);
  }
  EXPECT_EQ(MessageOf<std::logic_error>([&] { precision->step(); }),
            "the sampler that this belongs to has been destroyed");
}

template <typename Options>
concept TakesLr = requires(Options options) {
  options.lr(0.1);
};

TEST(SBPSOptions, HaveNoLr) {
  static_assert(TakesLr<SGLDOptions> && !TakesLr<SBPSOptions>);
  SBPS sampler({Param(3)}, SBPSOptions().num_data(5).seed(8));
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { sampler.register_sample_hook(nullptr); }),
            "Invalid hook: none (must be something to call at each sample)");
  torch::optim::StepLR scheduler(sampler, 1, 0.5);
  EXPECT_EQ(MessageOf<std::logic_error>([&] { scheduler.step(); }),
            "SBPS has no lr: its particle has unit speed, and a scheduler of "
            "learning rates would do nothing (change temperature or "
            "refresh_rate by hand)");
}

TEST(Misuse, AForeignStateOfAParameter) {
  const Tensor p = Param(3);
  SGHMC sampler({p}, Hamiltonian());
  sampler.state()[p.unsafeGetTensorImpl()] =
      std::make_unique<torch::optim::SGDParamState>();
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(); }),
            "SGHMC has an object of another class in state() (must be "
            "torch_sgmcmc::SamplerParamState: use own_state_of())");
}

TEST(Misuse, TheVersionIsAMacro) {
  EXPECT_EQ(std::string(TORCH_SGMCMC_VERSION)
                .rfind(std::to_string(TORCH_SGMCMC_VERSION_MAJOR) + "." +
                           std::to_string(TORCH_SGMCMC_VERSION_MINOR) + ".",
                       0),
            0U);
}

// ---- Warnings ---------------------------------------------------------------

TEST(Warned, OnceOfStepsWithoutAnyGradient) {
  const Tensor p = Param(3);
  SGLD sampler({p}, Langevin().seed(20));
  p.mutable_grad() = Tensor();
  const auto before = Copies({p});
  const Warnings warnings;
  for (int i = 0; i < 3; ++i) sampler.step();
  ExpectEqual({p}, before);
  EXPECT_EQ(sampler.num_steps(), 3);
  ASSERT_EQ(warnings.messages.size(), 1U);
  EXPECT_EQ(warnings.messages[0],
            "SGLD has counted a step in which no parameter had a gradient (of "
            "those that require one): nothing has moved. Was backward() "
            "forgotten, or zero_grad() called after it?");
}

}  // namespace
}  // namespace torch_sgmcmc
