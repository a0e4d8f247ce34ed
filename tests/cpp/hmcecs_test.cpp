// HMC-ECS as a class in C++: what does not show in chains that equal Python's
// (tests/test_cpp_hmcecs.py).
#include "torch_sgmcmc/hmcecs.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
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

constexpr int64_t kNumData = 50;

HMCECSOptions Options() {
  return HMCECSOptions()
      .num_data(kNumData)
      .subsample_size(8)
      .num_blocks(4)
      .prior_precision(1)
      .seed(5);
}

torch::Tensor Parameter(const std::vector<int64_t>& shape) {
  return torch::full(shape, 0.2, torch::kDouble).set_requires_grad(true);
}

// Poisson regression: every datum's Hessian is of rank one.
struct Counts {
  torch::Tensor param;
  int64_t calls = 0;
  int64_t fails_at = 0;

  torch::Tensor operator()(const torch::Tensor& indices) {
    if (++calls == fails_at) throw std::runtime_error("no data");
    const torch::Tensor i = indices.to(torch::kDouble);
    const torch::Tensor x =
        torch::sin(i.unsqueeze(1) * 1.7 + torch::arange(param.numel()));
    const torch::Tensor eta = x.matmul(param.flatten());
    return torch::remainder(i, 3) * eta - eta.exp();
  }
};

TEST(HMCECS, OptionsAreComplete) {
  const auto refused = [](const HMCECSOptions& options) {
    return MessageOf([&o = options] { HMCECS({Parameter({2})}, o); });
  };
  EXPECT_EQ(refused(HMCECSOptions().subsample_size(8)),
            "Invalid num_data: not set (HMCECS needs the number of data)");
  EXPECT_EQ(refused(HMCECSOptions().num_data(8)),
            "Invalid subsample_size: not set (HMCECS needs the number of data "
            "in a subsample)");
  EXPECT_EQ(refused(Options().capturable(true)),
            "Invalid capturable: true (HMCECS decides on the host, which a "
            "CUDA graph cannot)");
  HMCECS sampler({Parameter({2})}, Options().trajectory_length(3));
  EXPECT_EQ(sampler.options().step_size(), 0.5);
  sampler.options().set_lr(0.3);  // a schedule of torch's
  EXPECT_EQ(sampler.options().get_lr(), 0.3);
}

TEST(HMCECS, ValuesOutOfRangeAreRefused) {
  for (const auto& [options, message] : {
           std::pair(Options().num_data(0),
                     "Invalid num_data: 0 (must be >= 1)"),
           {Options().subsample_size(1),
            "Invalid subsample_size: 1 (must be >= 2)"},
           {Options().variant("signed").subsample_size(0),
            "Invalid subsample_size: 0 (must be >= 1)"},
           {Options().step_size(0),
            "Invalid step_size: 0.0 (must be finite and > 0)"},
           {Options().trajectory_length(-2),
            "Invalid trajectory_length: -2.0 (must be finite and > 0)"},
           {Options().num_blocks(0), "Invalid num_blocks: 0 (must be >= 1)"},
           {Options().control_variate(3),
            "Invalid control_variate: 3 (must be in [0, 2])"},
           {Options().mass_matrix("sparse"),
            "Invalid mass_matrix: 'sparse' (must be 'dense' or 'diagonal' or "
            "'identity')"},
           {Options().prior_precision(-1),
            "Invalid prior_precision: -1.0 (must be finite and >= 0)"},
           {Options().temperature(0),
            "Invalid temperature: 0.0 (must be finite and > 0)"},
           {Options().num_products(0),
            "Invalid num_products: 0 (must be >= 1)"},
           {Options().max_variance(std::nan("")),
            "Invalid max_variance: nan (must be finite and > 0)"},
           {Options().chunk_size(0), "Invalid chunk_size: 0 (must be >= 1)"},
       }) {
    EXPECT_EQ(MessageOf([&o = options] { HMCECS({Parameter({2})}, o); }),
              message);
  }
  HMCECS sampler({Parameter({2})}, Options());
  const auto refused = [&](int64_t steps, const HMCECSWarmup& settings) {
    return MessageOf([&] { sampler.warmup(nullptr, steps, settings); });
  };
  EXPECT_EQ(refused(0, {}), "Invalid steps: 0 (must be >= 1)");
  EXPECT_EQ(refused(9, {.target_acceptance = 1.0}),
            "Invalid target_acceptance: 1.0 (must be in (0, 1))");
  EXPECT_EQ(refused(9, {.anchor_every = 0}),
            "Invalid anchor_every: 0 (must be >= 1)");
  EXPECT_EQ(refused(9, {.target_variance = -1.0}),
            "Invalid target_variance: -1.0 (must be finite and > 0)");
  EXPECT_EQ(refused(9, {}).find("HMCECS.step() needs a closure"), 0U);
}

TEST(HMCECS, WeightsStayUntilTheyAreTakenBack) {
  const torch::Tensor param = Parameter({2});
  HMCECS sampler({param}, Options());
  const auto number = static_cast<int64_t>(sampler.options().num_data());
  const auto has = [&](const char* key) {
    const StateDict state = sampler.state_dict().at("state");
    return state.contains(key);
  };
  sampler.step(Counts{param});
  sampler.set_sampling_weights(std::nullopt);
  EXPECT_TRUE(has("subsample"));  // there were none
  const torch::Tensor weights = torch::arange(1, number + 1);
  sampler.set_sampling_weights(weights);
  EXPECT_FALSE(has("subsample"));
  sampler.step(Counts{param});
  const auto refused = [&](const torch::Tensor& bad) {
    return MessageOf([&] { sampler.set_sampling_weights(bad); });
  };
  EXPECT_EQ(refused(weights - 1),
            "Invalid sampling_weights: 0 at 0 (must be > 0 and finite, as "
            "their sum)");
  EXPECT_EQ(refused({}),
            "Invalid sampling_weights: got an undefined tensor (must be a "
            "tensor of real numbers, or std::nullopt)");
  EXPECT_TRUE(has("subsample"));  // nothing has changed
  sampler.add_param_group(OptimizerParamGroup({Parameter({3})}));
  EXPECT_TRUE(has("sampling"));
  sampler.set_sampling_weights(std::nullopt);
  EXPECT_FALSE(has("sampling"));
}

TEST(HMCECS, GroupsShareAllButThePrior) {
  const torch::Tensor param = Parameter({2});
  HMCECS sampler({param}, Options());
  sampler.step(Counts{param});
  const auto add = [&](const HMCECSOptions& options) {
    sampler.add_param_group(OptimizerParamGroup(
        {Parameter({3})}, std::make_unique<HMCECSOptions>(options)));
  };
  for (const auto& bad : {std::pair("variant", HMCECSOptions().variant("x")),
                          {"num_data", HMCECSOptions().num_data(11)},
                          {"num_blocks", HMCECSOptions().num_blocks(2)},
                          {"temperature", HMCECSOptions().temperature(2)}}) {
    EXPECT_EQ(MessageOf([&] { add(bad.second); }),
              "Invalid param group: '" + std::string(bad.first) +
                  "' is managed by HMCECS and cannot be set for a group");
  }
  const auto anchor = [&] {
    const StateDict state = sampler.state_dict().at("state");
    return state.contains("control_variates");
  };
  EXPECT_TRUE(anchor());
  add(HMCECSOptions().prior_precision(3));
  EXPECT_FALSE(anchor());  // it is chosen anew, of all parameters
  EXPECT_EQ(sampler.options(1).prior_precision(), 3);
  sampler.step(Counts{param});
  EXPECT_TRUE(anchor());
  // torch's own add_param_group passes the sampler's by.
  static_cast<torch::optim::Optimizer&>(sampler).add_param_group(
      OptimizerParamGroup({Parameter({1})}));
  EXPECT_EQ(MessageOf([&] {
              sampler.step(Counts{param});
            }).find("HMCECS does not know the parameters of group 2"),
            0U);
}

TEST(HMCECS, NeedsItsOwnClosure) {
  const torch::Tensor param = Parameter({2});
  HMCECS sampler({param}, Options());
  const std::string wanted =
      "HMCECS.step() needs a closure, which is called several times a step:";
  EXPECT_EQ(MessageOf([&] { sampler.step(); }).find(wanted), 0U);
  EXPECT_EQ(MessageOf([&] {
              sampler.step([&] { return param.sum(); });
            }).find(wanted),
            0U);
  EXPECT_EQ(
      MessageOf([&] { sampler.set_anchor(HMCECS::Closure()); }).find(wanted),
      0U);
  EXPECT_EQ(
      MessageOf([&] {
        sampler.step([](const torch::Tensor&) { return torch::Tensor(); });
      }),
      "Invalid log-likelihoods: the closure returned an undefined Tensor "
      "(must be a tensor, of one for each index)");
}

TEST(HMCECS, AClosureMayComputeAllDataAndIndexThem) {
  const torch::Tensor param = Parameter({3});
  HMCECS sampler({param}, Options());
  const torch::Tensor everything = torch::arange(kNumData);
  for (int i = 0; i < 3; ++i) {
    sampler.step([&](const torch::Tensor& indices) {
      return Counts{param}(everything).index({indices});
    });
  }
  const torch::Tensor other = Parameter({3});
  HMCECS twin({other}, Options());
  for (int i = 0; i < 3; ++i) twin.step(Counts{other});
  EXPECT_TRUE(torch::allclose(param, other, 1e-9));
}

TEST(LogLikelihood, RefusesPartsThatAreNone) {
  const auto some = [](const torch::Tensor& indices) { return indices; };
  const auto other = [](const torch::Tensor& f, const torch::Tensor&) {
    return f;
  };
  EXPECT_EQ(MessageOf([&] { LogLikelihood(nullptr, other); }),
            "Invalid outputs: empty (must be callable)");
  EXPECT_EQ(MessageOf([&] { LogLikelihood(some, nullptr); }),
            "Invalid log_likelihood: empty (must be callable)");
  const auto none = [](const torch::Tensor&) { return torch::Tensor(); };
  EXPECT_EQ(MessageOf([&] {
              LogLikelihood(some, other, none).rows(torch::arange(2), 3);
            }),
            "Invalid rows: got an undefined Tensor (must be a tensor)");
}

TEST(HMCECS, AFailedClosureChangesNothing) {
  const torch::Tensor param = Parameter({3});
  HMCECS sampler({param}, Options());
  Counts counts{param};
  for (int i = 0; i < 5; ++i) sampler.step(counts);
  const torch::Tensor place = param.detach().clone();
  const auto kept = [&] {
    const StateDict state = sampler.state_dict().at("state");
    const StateDict subsample = state.at("subsample");
    const StateDict anchor = state.at("control_variates");
    return std::pair(subsample.at("indices").toTensor(),
                     anchor.at("anchor").toTensor());
  };
  const auto before = kept();
  for (const int64_t ahead : {1, 2, 4}) {
    counts.fails_at = ahead;  // std::function takes a copy: counted from here
    EXPECT_EQ(MessageOf([&] { sampler.step(counts); }), "no data");
    EXPECT_TRUE(torch::equal(param, place));
    counts.fails_at = std::min<int64_t>(ahead, 2);
    EXPECT_EQ(MessageOf([&] { sampler.set_anchor(counts); }), "no data");
    EXPECT_TRUE(torch::equal(param, place));
    EXPECT_TRUE(kept().first.is_same(before.first));
    EXPECT_TRUE(kept().second.is_same(before.second));
    EXPECT_EQ(sampler.num_steps(), 5);
  }
  counts.fails_at = 0;
  {
    const torch::NoGradGuard no_grad;
    param.fill_(std::nan(""));
  }
  EXPECT_EQ(MessageOf([&] { sampler.step(counts); }),
            "HMCECS got log-likelihoods or parameters that are not finite at "
            "the start of a step");
}

TEST(HMCECS, WarmUpAdaptsAndTellsHowItComesAlong) {
  const torch::Tensor param = Parameter({3});
  HMCECS sampler({param}, Options().chunk_size(20));
  EXPECT_TRUE(std::isnan(sampler.acceptance_rate()));
  EXPECT_TRUE(std::isnan(sampler.estimator_variance()));
  std::vector<std::string> told;
  HMCECSWarmup settings;
  settings.anchor_every = 10;
  settings.progress = [&](const char* what, int64_t done, int64_t total) {
    told.push_back(std::string(what) + " " + std::to_string(done) + "/" +
                   std::to_string(total));
  };
  sampler.warmup(Counts{param}, 24, settings);
  // Two anchors, and at the end a look at all data.
  ASSERT_EQ(told.size(), 24U + 3 * 3);
  EXPECT_EQ(told[0], "control variates 20/50");
  EXPECT_EQ(told[2], "control variates 50/50");
  EXPECT_EQ(told[3], "warm-up 1/24");
  EXPECT_EQ(told[told.size() - 4], "warm-up 24/24");
  EXPECT_EQ(told.back(), "log posterior 50/50");
  EXPECT_TRUE(std::isnan(sampler.acceptance_rate()));
  EXPECT_EQ(sampler.num_divergences(), 0);
  EXPECT_NE(sampler.options().step_size(), 0.2);
  const double size = sampler.options().step_size();
  for (int i = 0; i < 40; ++i) sampler.step(Counts{param});
  EXPECT_EQ(sampler.options().step_size(), size);
  EXPECT_GT(sampler.acceptance_rate(), 0.4);
  EXPECT_GT(sampler.subsample_acceptance_rate(), 0.5);
  EXPECT_EQ(sampler.sign(), 1);
}

TEST(HMCECS, AWarmUpThatWasInterruptedGoesOn) {
  const torch::Tensor param = Parameter({3});
  const torch::Tensor other = Parameter({3});
  HMCECSWarmup settings;
  settings.anchor_every = 7;
  settings.target_variance = 0.5;
  HMCECS whole({param}, Options());
  whole.warmup(Counts{param}, 20, settings);

  HMCECS early({other}, Options());
  settings.progress = [](const char* what, int64_t done, int64_t) {
    if (std::string(what) == "warm-up" && done == 11) {
      throw std::runtime_error("enough");
    }
  };
  EXPECT_EQ(MessageOf([&] { early.warmup(Counts{other}, 20, settings); }),
            "enough");
  std::stringstream stream;
  torch::save(early, stream);
  HMCECS late({other}, Options().seed(9));
  torch::load(late, stream);
  settings.progress = nullptr;
  EXPECT_EQ(MessageOf([&] { late.warmup(Counts{other}, 21, settings); }),
            "Invalid steps: 21 (the warm-up in progress has 20; set_anchor() "
            "gives it up)");
  late.warmup(Counts{other}, 20, settings);
  EXPECT_TRUE(torch::equal(param, other));
  EXPECT_EQ(late.options().step_size(), whole.options().step_size());
  const StateDict state = late.state_dict().at("state");
  EXPECT_FALSE(state.contains("warmup"));
}

TEST(HMCECS, AGroupGivesUpTheWarmUpInProgress) {
  const torch::Tensor param = Parameter({3});
  const torch::Tensor more = Parameter({2});
  HMCECSWarmup settings;
  settings.anchor_every = 7;
  settings.progress = [](const char* what, int64_t done, int64_t) {
    if (std::string(what) == "warm-up" && done == 5) {
      throw std::runtime_error("enough");
    }
  };
  HMCECS sampler({param}, Options());
  EXPECT_EQ(MessageOf([&] { sampler.warmup(Counts{param}, 20, settings); }),
            "enough");
  static_cast<Sampler&>(sampler).add_param_group(OptimizerParamGroup({more}));
  EXPECT_FALSE(
      sampler.state_dict().at("state").toGenericDict().contains("warmup"));
  sampler.step(Counts{param});
  settings.progress = nullptr;
  sampler.warmup(Counts{param}, 20, settings);  // from its beginning
  EXPECT_EQ(sampler.num_steps(), 5 + 1 + 20);
}

TEST(HMCECS, WhatIsTooUncertainIsRejected) {
  // At theta* the expansions are exact, and nowhere else.
  for (const double highest : {1e-300, 1000.0}) {
    const torch::Tensor param = Parameter({3});
    const torch::Tensor before = param.detach().clone();
    HMCECS sampler({param}, Options().max_variance(highest));
    sampler.step(Counts{param});
    const bool bounded = highest < 1;
    EXPECT_EQ(sampler.num_divergences(), bounded ? 1 : 0);
    EXPECT_EQ(sampler.acceptance_rate(), bounded ? 0 : 1);
    EXPECT_EQ(torch::equal(param, before), bounded);
    EXPECT_EQ(sampler.estimator_variance() > 0, !bounded);
  }
}

TEST(HMCECS, TorchsOwnFilesContinueTheChain) {
  const torch::Tensor param = Parameter({3});
  const torch::Tensor other = Parameter({3});
  HMCECS sampler({param}, Options().variant("signed").num_products(7));
  for (int i = 0; i < 6; ++i) sampler.step(Counts{param});
  std::stringstream stream;
  torch::save(sampler, stream);
  {
    const torch::NoGradGuard no_grad;
    other.copy_(param);
  }
  HMCECS late({other}, Options().seed(99));
  torch::load(late, stream);
  for (int i = 0; i < 6; ++i) {
    EXPECT_TRUE(
        torch::equal(sampler.step(Counts{param}), late.step(Counts{other})));
  }
  EXPECT_TRUE(torch::equal(param, other));
}

TEST(HMCECS, RefusesStatesThatAreNone) {
  const torch::Tensor param = Parameter({3});
  HMCECS sampler({param}, Options());
  sampler.step(Counts{param});
  const StateDict dict = sampler.state_dict();
  const StateDict state = dict.at("state");
  const auto set = [&](const char* part, const char* key, c10::IValue value) {
    StateDict entry = state.at(part);
    const c10::IValue before = entry.at(key);
    entry.set(key, value);
    const std::string message =
        MessageOf([&] { sampler.load_state_dict(dict); });
    entry.set(key, before);
    return message;
  };
  EXPECT_EQ(set("control_variates", "gradient", 3),
            "Invalid state_dict: gradient is a Int (must be a Tensor)");
  EXPECT_EQ(set("control_variates", "value", c10::IValue()),
            "Invalid state_dict: value is a none (must be a Tensor)");
  EXPECT_EQ(set("control_variates", "form", 1.5),
            "Invalid form in a state dict: a Double (must be a string)");
  EXPECT_EQ(set("control_variates", "anchor", torch::zeros(2)),
            "Invalid state_dict: its control variates are those of 2 "
            "parameters, expected 3");
  EXPECT_EQ(set("subsample", "layout", 1),
            "Invalid state_dict: layout is not a list of 6 elements");
  EXPECT_EQ(
      set("subsample", "layout", c10::impl::GenericList(c10::AnyType::get())),
      "Invalid state_dict: layout is not a list of 6 elements");
  sampler.load_state_dict(dict);
}

TEST(HMCECS, GroupsMayBeEmptySoFar) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>());
  groups.emplace_back(std::vector<at::Tensor>());
  HMCECS sampler(groups, HMCECSOptions().num_data(50).subsample_size(4));
  sampler.load_state_dict(sampler.state_dict());
  const HMCECS::Closure same = [](const at::Tensor& indices) {
    return indices;
  };
  EXPECT_EQ(MessageOf([&] { sampler.step(same); }), "HMCECS has no parameters");
}

}  // namespace
}  // namespace torch_sgmcmc
