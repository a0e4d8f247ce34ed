// HMC as a class in C++: what does not show in chains that equal Python's
// (tests/cpp/test_cpp_chains.py).
#include "torch_sgmcmc/hmc.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "message_of.h"
#include "warnings_of.h"

namespace torch_sgmcmc {
namespace {

using torch::optim::OptimizerParamGroup;

torch::Tensor Doubles(torch::IntArrayRef shape) {
  const auto numel = c10::multiply_integers(shape);
  return torch::linspace(-1, 1, numel, torch::kDouble)
      .view(shape)
      .set_requires_grad(true);
}

HMCOptions Coarse() {
  return HMCOptions(0.2).num_steps(3).num_data(10).seed(7);
}

// The loss θ⁴ / 4, summed over all but the leading dimension for `chains`.
torch::optim::Optimizer::LossClosure Quartic(
    const std::vector<torch::Tensor>& params, bool chains = false) {
  return [params, chains] {
    torch::Tensor loss = torch::zeros({}, torch::kDouble);
    for (const auto& param : params) {
      const auto terms = param.pow(4) / 4;
      loss = loss + (chains ? terms.flatten(1).sum(1) : terms.sum());
    }
    loss.sum().backward();
    return loss;
  };
}

TEST(HMC, OptionsHaveNoLearningRate) {
  const auto refused = [](const HMCOptions& options) {
    return MessageOf<std::invalid_argument>(
        [&] { HMC({Doubles({4})}, options); });
  };
  EXPECT_EQ(refused(HMCOptions().num_steps(1).num_data(1)),
            "Invalid step_size: not set (HMC needs the leapfrog's step)");
  EXPECT_EQ(refused(HMCOptions(0.1).num_steps(1)),
            "Invalid num_data: not set (HMC needs the number of training "
            "examples; 1 if the loss is U itself)");
  EXPECT_EQ(refused(Coarse().capturable(true)),
            "Invalid capturable: true (HMC decides on the host, which a CUDA "
            "graph cannot)");
  HMC sampler({Doubles({4})}, Coarse());
  // A schedule of torch's moves the step size.
  sampler.options().set_lr(0.3);
  EXPECT_EQ(sampler.options().step_size(), 0.3);
  EXPECT_EQ(sampler.options().get_lr(), 0.3);
}

TEST(HMC, GroupsShareAllButThePrior) {
  HMC sampler({Doubles({4})}, Coarse());
  const auto add = [&](const HMCOptions& options) {
    sampler.add_param_group(OptimizerParamGroup(
        {Doubles({3})}, std::make_unique<HMCOptions>(options)));
  };
  for (const auto& bad :
       {std::pair("step_size", HMCOptions(0.3)),
        {"num_steps", HMCOptions().num_steps(4)},
        {"trajectory_length", HMCOptions().trajectory_length(1)},
        {"num_data", HMCOptions().num_data(11)},
        {"temperature", HMCOptions().temperature(2)},
        {"metropolis", HMCOptions().metropolis(false)},
        {"resample_momentum_every", HMCOptions().resample_momentum_every(2)},
        {"num_chains", HMCOptions().num_chains(1)}}) {
    EXPECT_EQ(MessageOf<std::invalid_argument>([&] { add(bad.second); }),
              "Invalid param group: '" + std::string(bad.first) +
                  "' is managed by HMC and cannot be set for a group");
  }
  sampler.options().step_size(0.1);
  add(HMCOptions().prior_precision(3));
  EXPECT_EQ(sampler.options(1).step_size(), 0.1);
  EXPECT_EQ(sampler.options(1).prior_precision(), 3);
  EXPECT_EQ(sampler.options(0).prior_precision(), 0);
  sampler.options(1).step_size(0.5);
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { sampler.step([] { return torch::Tensor(); }); }),
            "Invalid step_size: [0.1, 0.5] in the param groups (must be equal: "
            "there is one trajectory for all)");
}

TEST(HMC, NeedsAClosure) {
  HMC sampler({Doubles({4})}, Coarse());
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); })
                .find("HMC::step() needs a closure, since it computes several "
                      "gradients a step:"),
            0U);
}

TEST(HMC, AFailedClosureChangesNothing) {
  for (const int64_t every : {0, 1}) {
    const std::vector<torch::Tensor> params = {Doubles({5}), Doubles({3, 2})};
    HMC sampler(params, Coarse().resample_momentum_every(every));
    const auto fails = [&](int at,
                           const std::function<torch::Tensor()>& spoil) {
      int calls = 0;
      const auto closure = Quartic(params);
      const auto before = params[0].detach().clone();
      std::string message;
      try {
        sampler.step([&] {
          const auto loss = closure();
          return ++calls == at ? spoil() : loss;
        });
      } catch (const std::exception& error) {
        message = error.what();
      }
      EXPECT_TRUE(torch::equal(params[0], before));
      EXPECT_TRUE(sampler.state().empty());
      EXPECT_EQ(sampler.num_steps(), 0);
      EXPECT_TRUE(std::isnan(sampler.acceptance_rate()));
      return message;
    };
    for (const int at : {1, 4}) {
      EXPECT_EQ(fails(at, [] { return torch::Tensor(); }),
                "HMC got no loss from the closure, which must return it for "
                "the Metropolis test (metropolis(false) makes none)");
      EXPECT_EQ(fails(at,
                      [] {
                        return torch::ones({1, 2});
                      }),
                "Invalid loss: shape [1, 2] (must be a scalar)");
    }
    EXPECT_EQ(fails(1,
                    [] {
                      return torch::full(
                          {}, std::numeric_limits<double>::quiet_NaN());
                    }),
              "HMC got a loss or parameters that are not finite at the start "
              "of a trajectory");
    EXPECT_EQ(fails(1,
                    [&] {
                      for (const auto& p : params) p.mutable_grad().reset();
                      return torch::zeros({});
                    }),
              "HMC got no gradients from the closure (does it call "
              "backward()?)");
    EXPECT_EQ(fails(3,
                    [&] {
                      params[1].mutable_grad().reset();
                      return torch::zeros({});
                    }),
              "HMC got gradients of other parameters from the closure than at "
              "its first call in this step");
  }
}

TEST(HMC, RejectsBitForBitAndCountsDivergences) {
  const auto param = Doubles({3, 2});
  const auto before = param.detach().clone();
  HMC sampler({param}, Coarse().num_steps(1).num_chains(3));
  int calls = 0;
  sampler.step([&] {
    param.mutable_grad() = torch::zeros_like(param);
    const double end = ++calls == 2 ? std::nan("") : 0;
    const double worse = calls == 2 ? 1e9 : 0;
    return torch::tensor({0.0, end, worse});
  });
  EXPECT_EQ(sampler.num_divergences(), 1);
  EXPECT_EQ(sampler.acceptance_rate(), 1.0 / 3);
  EXPECT_FALSE(torch::equal(param[0], before[0]));
  EXPECT_TRUE(torch::equal(param.slice(0, 1), before.slice(0, 1)));
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] {
              sampler.step([&] {
                param.mutable_grad() = torch::zeros_like(param);
                return torch::zeros({});
              });
            }),
            "Invalid loss: shape [] (must be [3], the mean loss of each chain; "
            "call backward() on its sum)");
}

TEST(HMC, Masses) {
  const std::vector<torch::Tensor> params = {Doubles({4}), Doubles({3, 2})};
  HMC sampler(params, Coarse().resample_momentum_every(0));
  sampler.step(Quartic(params));
  EXPECT_EQ(sampler.state().size(), 2);
  const auto refused = [&](const torch::Tensor& mass) {
    return MessageOf<std::invalid_argument>([&] {
      sampler.set_mass({torch::ones({}), mass});
    });
  };
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { sampler.set_mass({torch::ones({})}); }),
            "Invalid masses: 1 (must be one for each of the 2 parameters)");
  EXPECT_EQ(refused(torch::ones({3})),
            "Invalid masses: number 1 has shape [3] (must broadcast to [3, "
            "2])");
  EXPECT_EQ(refused(torch::zeros({})),
            "Invalid masses: number 1 has elements out of range (must be "
            "finite and > 0)");
  sampler.set_mass({torch::full({}, 2), torch::tensor({0.5, 3.0})});
  const StateDict state = sampler.state_dict().at("state");
  const StateDict second = state.at(1);
  EXPECT_TRUE(
      torch::equal(second.at("mass").toTensor(),
                   torch::tensor({0.5, 3.0}, torch::kDouble).expand({3, 2})));
  EXPECT_FALSE(second.contains("momentum"));
  sampler.step(Quartic(params));
  sampler.set_mass(std::nullopt);
  EXPECT_TRUE(sampler.state().empty());
}

TEST(HMC, WarmUpIsSavedInTheMiddle) {
  const std::vector<torch::Tensor> params = {Doubles({4})};
  const std::vector<torch::Tensor> others = {Doubles({4})};
  const std::vector<torch::Tensor> thirds = {Doubles({4})};
  HMC sampler(params, Coarse());
  sampler.warmup(Quartic(params), 30);
  EXPECT_EQ(sampler.num_steps(), 30);
  EXPECT_TRUE(std::isnan(sampler.acceptance_rate()));

  HMC early(others, Coarse());
  early.warmup(Quartic(others), 11, 0.8, /*finish=*/false);
  std::stringstream stream;
  torch::save(early, stream);
  {
    const torch::NoGradGuard no_grad;
    thirds[0].copy_(others[0]);
  }
  HMC late(thirds, HMCOptions(9).trajectory_length(1).num_data(1));
  torch::load(late, stream);
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { late.warmup(Quartic(thirds), 1, 0.7); }),
            "Invalid target_acceptance: 0.7 (the warm-up in progress has 0.8)");
  late.warmup(Quartic(thirds), 19);
  EXPECT_EQ(late.options().step_size(), sampler.options().step_size());
  EXPECT_TRUE(torch::equal(thirds[0], params[0]));

  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { late.warmup(Quartic(thirds), 0); }),
            "Invalid steps: 0 (must be >= 1)");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { late.warmup(Quartic(thirds), 1, 1); }),
            "Invalid target_acceptance: 1.0 (must be in (0, 1))");
  late.options().metropolis(false);
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { late.warmup(Quartic(thirds), 1); }),
            "Invalid metropolis: false (warmup() adapts to the acceptance "
            "rate)");
}

TEST(HMC, WarnsOfLossesThatChange) {
  // θ⁴ / 4 with an offset of its own at each step: all that minibatches do to
  // the loss at one point.
  const auto changed = [](double change, bool moves, bool metropolis) {
    const std::vector<torch::Tensor> params = {Doubles({5})};
    HMC sampler(params, Coarse().metropolis(metropolis));
    const auto closure = Quartic(params);
    const Warnings warnings;
    for (int step = 0; step < 9; ++step) {
      sampler.step([&] { return closure() + step * change; });
      const torch::NoGradGuard no_grad;
      if (moves) params[0].add_(0.1);
    }
    return warnings.messages;
  };
  const auto messages = changed(0.1, false, true);
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_EQ(messages[0],
            "HMC got another loss at the start of 3 trajectories running than "
            "there was at the end of the one before, at the same parameters: "
            "the closure must compute the loss of all data, always the same "
            "(no minibatches, no dropout), unless what else it depends on is "
            "sampled in between");
  // A change of no account, parameters that the user moved, and no test.
  EXPECT_TRUE(changed(1e-3, false, true).empty());
  EXPECT_TRUE(changed(0.1, true, true).empty());
  EXPECT_TRUE(changed(0.1, false, false).empty());
}

// Inference tensors count no versions: neither is there one to bump, nor can
// what others write be told from a loss that changes.
TEST(HMC, SamplesInferenceTensors) {
  const auto chain = [](bool is_inference, bool in_mode, bool moves) {
    torch::Tensor param;
    {
      const c10::InferenceMode mode(is_inference);
      param = Doubles({4}).detach().clone().set_requires_grad(true);
    }
    const c10::InferenceMode mode(in_mode);
    const torch::NoGradGuard no_grad;
    HMC sampler({param}, Coarse());
    const auto closure = [&] {
      param.mutable_grad() = param.detach().pow(3);
      return param.detach().pow(4).sum() / 4;
    };
    for (int i = 0; i < 10; ++i) {
      sampler.step(closure);
      if (moves) param.mul_(1.5);
    }
    return param.clone();
  };
  const Warnings warnings;
  EXPECT_TRUE(chain(true, true, true).equal(chain(false, false, true)));
  EXPECT_TRUE(chain(true, false, false).equal(chain(false, false, false)));
  EXPECT_TRUE(warnings.messages.empty());
}

TEST(HMC, RefusesAnAdaptationThatIsNone) {
  HMC sampler({Doubles({4})}, Coarse());
  const auto dict = sampler.state_dict();
  StateDict group = dict.at("param_groups").toListRef()[0];
  const auto set = [&](const std::vector<double>& values) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const double value : values) list.push_back(value);
    group.set("dual_averaging", list);
    return MessageOf<std::invalid_argument>(
        [&] { sampler.load_state_dict(dict); });
  };
  const std::string message =
      "Invalid state of dual averaging (must be finite, with a whole count)";
  EXPECT_EQ(set({0.8, 0, -1, 0, 0, 0}), message);
  EXPECT_EQ(set({0.8, 0}), message);
  group.set("dual_averaging", 3);
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { sampler.load_state_dict(dict); }),
      "Invalid dual_averaging in a state dict: a Int (must be a list of "
      "numbers)");
}

}  // namespace
}  // namespace torch_sgmcmc
