// Gauges from C++: what they refuse, and when they look. Their numbers are
// compared with Python's by tests/cpp/test_cpp_chains.py.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "message_of.h"
#include "same_values.h"

namespace torch_sgmcmc {
namespace {

struct Chain {
  explicit Chain(
      SGHMCOptions options = SGHMCOptions(0.01).num_data(100).seed(1))
      : params{torch::full({40}, 0.1).set_requires_grad(true),
               torch::full({2, 3}, 0.1).set_requires_grad(true)},
        sampler(params, options) {}

  void step(int count) {
    for (int i = 0; i < count; ++i) {
      for (at::Tensor& p : params) p.mutable_grad() = p.detach() * 2;
      sampler.step();
    }
  }

  std::vector<at::Tensor> params;
  SGHMC sampler;
};

TEST(Gauges, LookAtEveryFewStepsUntilTheyAreDetached) {
  Chain chain;
  auto gauges = std::make_unique<Gauges>(
      chain.sampler, GaugesOptions().every(3).names({"a", "b"}));
  EXPECT_EQ(gauges->summary(), "No step was observed yet.");
  chain.step(100);
  EXPECT_EQ(gauges->num_observed(), 34);
  const auto all = gauges->all();
  EXPECT_GT(all.kinetic.mean, 0);
  EXPECT_NEAR(all.excess.mean,
              all.configurational.mean - all.kinetic.mean,
              1e-12 * std::abs(all.kinetic.mean));
  EXPECT_NE(gauges->summary().find("\n  b "), std::string::npos);
  EXPECT_GT(gauges->group(0).kinetic.mean, 0);
  EXPECT_GT(gauges->tensor(1).kinetic.half_width, 0);
  gauges->reset();
  EXPECT_EQ(gauges->num_observed(), 0);
  chain.step(3);
  gauges->detach();
  chain.step(10);
  EXPECT_EQ(gauges->num_observed(), 1);
  EXPECT_THROW(gauges->observe([] { return at::Tensor(); }),
               std::runtime_error);
  const Gauges others(chain.sampler);  // there is room for them now
  chain.step(1);
  gauges.reset();
  chain.step(40);
  EXPECT_EQ(others.num_observed(), 2);
}

// Among them the reading of the minibatches' noise, which compares two steps.
TEST(Gauges, AreTheSameWhereverTheyAreInterrupted) {
  const auto run = [](int interrupted) {
    auto chain = std::make_unique<Chain>();
    auto gauges =
        std::make_unique<Gauges>(chain->sampler, GaugesOptions().every(1));
    for (int i = 0; i < 24; ++i) {
      if (i == interrupted) {
        const c10::IValue sampler = chain->sampler.state_dict();
        const c10::IValue observed = c10::IValue(gauges->state_dict());
        auto other = std::make_unique<Chain>();
        for (size_t p = 0; p < 2; ++p) {
          other->params[p].set_data(chain->params[p].detach().clone());
        }
        other->sampler.load_state_dict(sampler.deepcopy());
        auto anew = std::make_unique<Gauges>(other->sampler);
        anew->load_state_dict(observed.deepcopy());
        gauges = std::move(anew);
        chain = std::move(other);
      }
      for (at::Tensor& p : chain->params) {
        p.mutable_grad() = p.detach() * 2 + std::sin(i);
      }
      chain->sampler.step();
    }
    EXPECT_TRUE(std::isfinite(gauges->all().minibatch_heating.mean));
    return c10::IValue(gauges->state_dict());
  };
  const c10::IValue whole = run(-1);
  for (int i = 0; i < 24; ++i) EXPECT_TRUE(SameValues(run(i), whole)) << i;
}

TEST(Gauges, RefusePreviousGradientsThatAreNone) {
  Chain chain;
  Gauges gauges(chain.sampler, GaugesOptions().every(1));
  chain.step(5);
  const c10::IValue saved = c10::IValue(gauges.state_dict());
  const auto refused = [&](int64_t number, const at::Tensor& gradient) {
    const StateDict dict(saved.deepcopy());
    const StateDict previous = dict.at("previous_gradients");
    EXPECT_EQ(previous.at("step").toInt(), 4);
    StateDict gradients = previous.at("gradients");
    gradients.set(number, gradient);
    return MessageOf<std::invalid_argument>(
        [&] { gauges.load_state_dict(dict); });
  };
  EXPECT_EQ(refused(2, torch::zeros({3})),
            "Invalid state_dict: previous_gradients (must be of the 2 "
            "parameters, by their numbers)");
  EXPECT_EQ(refused(1, torch::zeros({3})),
            "Invalid state_dict: previous gradient of parameter 1 has shape "
            "[3], expected [2, 3]");
  EXPECT_EQ(refused(0, torch::zeros({40}) / 0),
            "Invalid state_dict: previous gradient of parameter 0 has elements "
            "that are not finite");
  EXPECT_TRUE(SameValues(gauges.state_dict(), saved));
}

TEST(Gauges, ObserveWhereTheChainIs) {
  std::vector<at::Tensor> params = {
      torch::full({40}, 0.1).set_requires_grad(true),
      torch::full({2, 3}, 0.1).set_requires_grad(true)};
  SBPS sampler(params, SBPSOptions().num_data(100).seed(1));
  Gauges gauges(sampler);
  const at::Tensor grad = torch::ones({40});
  params[0].mutable_grad() = grad;
  gauges.observe([&] {
    at::Tensor loss;
    for (const at::Tensor& p : params) {
      loss = loss.defined() ? loss + p.square().sum() : p.square().sum();
    }
    loss.backward();
    return loss;
  });
  // N x.g / d with x = 0.1 and g = 0.2.
  EXPECT_NEAR(gauges.all().configurational.mean, 100 * 0.1 * 0.2, 1e-6);
  EXPECT_EQ(gauges.all().kinetic.mean, 1.0);
  EXPECT_TRUE(params[0].grad().is_same(grad));
  EXPECT_FALSE(params[1].grad().defined());
  EXPECT_THROW(
      gauges.observe([]() -> at::Tensor { throw std::logic_error(""); }),
      std::logic_error);
  EXPECT_TRUE(params[0].grad().is_same(grad));
}

TEST(Gauges, SeeTheTrajectoriesOfHMC) {
  std::vector<at::Tensor> params = {
      torch::full({40}, 0.1).set_requires_grad(true)};
  HMC sampler(
      params,
      HMCOptions(0.5).num_steps(1).num_data(1).metropolis(false).seed(1));
  const at::Tensor mass = torch::full({40}, 4.0);
  sampler.set_mass({mass});
  Gauges gauges(sampler, GaugesOptions().every(2));
  const auto closure = [&] {
    auto loss = params[0].square().sum();
    loss.backward();
    return loss;
  };
  const at::Tensor start = params[0].detach().clone();
  sampler.step(closure);
  EXPECT_EQ(gauges.num_observed(), 1);
  // By one step theta' = theta + eps / M h, h the momentum between the kicks.
  const at::Tensor h = (params[0].detach() - start) * mass / 0.5;
  EXPECT_NEAR(
      gauges.all().kinetic.mean, (h * h / mass).mean().item<double>(), 1e-5);
  EXPECT_NEAR(gauges.all().configurational.mean, 0.1 * 0.2, 1e-6);
  sampler.step(closure);  // in between
  EXPECT_EQ(gauges.num_observed(), 1);
  sampler.step(closure);
  EXPECT_EQ(gauges.num_observed(), 2);
}

TEST(Gauges, RefuseWhatIsNotAsItShouldBe) {
  Chain chain;
  const auto refused = [&](const GaugesOptions& options) {
    return MessageOf([&] { const Gauges gauges(chain.sampler, options); });
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(refused(GaugesOptions().every(0)), "every: 0"));
  EXPECT_TRUE(has(refused(GaugesOptions().names({"a"})), "names: 1"));
  EXPECT_TRUE(
      has(refused(GaugesOptions().centers({torch::zeros(40)})), "centers: 1"));
  EXPECT_TRUE(
      has(refused(GaugesOptions().centers({torch::zeros(40), torch::zeros(2)})),
          "number 1 has shape [2]"));
  EXPECT_TRUE(
      has(refused(GaugesOptions().centers(
              {torch::zeros(40),
               torch::full({2, 3}, std::numeric_limits<double>::infinity())})),
          "number 1 is not finite"));
  Chain captured(SGHMCOptions(0.01).num_data(100).seed(1).capturable(true));
  EXPECT_TRUE(has(MessageOf([&] { const Gauges gauges(captured.sampler); }),
                  "capturable"));
  Gauges gauges(chain.sampler);
  EXPECT_TRUE(has(refused(GaugesOptions()), "Gauges already"));
  const torch::optim::OptimizerParamGroup more(
      std::vector<at::Tensor>{torch::ones(3)});
  EXPECT_TRUE(has(MessageOf([&] { chain.sampler.add_param_group(more); }),
                  "Gauges observe the groups"));
  EXPECT_EQ(chain.sampler.param_groups().size(), 1);
  EXPECT_THROW(gauges.tensor(2), std::invalid_argument);
  EXPECT_THROW(gauges.tensor(-1), std::invalid_argument);
  EXPECT_THROW(gauges.group(1), std::invalid_argument);
  EXPECT_THROW(gauges.findings(0), std::invalid_argument);
  EXPECT_THROW(gauges.summary(0.05, 1), std::invalid_argument);

  chain.step(21);
  const StateDict state = gauges.state_dict();
  for (const StateDict& wrong :
       {StateDict{{"every", 20}, {"series", 3}},
        StateDict{{"every", 0}, {"series", state.at("series")}},
        StateDict{{"every", 1.5}, {"series", state.at("series")}},
        StateDict{{"every", 20},
                  {"series", c10::impl::GenericList(c10::AnyType::get())}}}) {
    EXPECT_THROW(gauges.load_state_dict(wrong), std::invalid_argument);
  }
  EXPECT_EQ(gauges.num_observed(), 2);
  gauges.load_state_dict(state);
  EXPECT_EQ(gauges.num_observed(), 2);
}

}  // namespace
}  // namespace torch_sgmcmc
