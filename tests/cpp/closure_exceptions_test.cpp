// A closure may fail at any of its calls: the step is as if it had not been
// begun. tests/faults/test_closure_exceptions.py is the same in Python.
//
// Every call of every step fails in turn, once before the closure has done
// anything and once when it has done everything. After each failure the sampler
// must be as before the step, and the chain that goes on must be the one that
// was never interrupted.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "same_values.h"

namespace torch_sgmcmc {
namespace {

using torch::Tensor;

struct Broken {};  // no std::exception, as an interrupt may be none

// The calls of a closure, one of which may fail.
class Calls {
 public:
  void begin(int64_t fails_at = 0, bool late = false) {
    count_ = 0;
    fails_at_ = fails_at;
    late_ = late;
  }

  // Does work, which is told the number of the call in the chain.
  Tensor call(const std::function<Tensor(int64_t)>& work) {
    const bool fails = ++count_ == fails_at_;
    if (fails && !late_) throw Broken();
    const Tensor result = work(before_ + count_);
    if (fails) throw Broken();
    return result;
  }

  int64_t count() const { return count_; }
  void end_step() { before_ += count_; }

 private:
  int64_t before_ = 0;
  int64_t count_ = 0;
  int64_t fails_at_ = 0;
  bool late_ = false;
};

struct Chain {
  std::vector<Tensor> params;
  std::shared_ptr<Sampler> sampler;
  std::shared_ptr<Calls> calls;
  std::function<void()> step;
  std::function<void(int64_t)> warmup = nullptr;
};

std::vector<Tensor> TwoParams() {
  return {torch::linspace(-1, 1, 4).set_requires_grad(true),
          torch::linspace(-0.5, 0.7, 8, torch::kDouble)
              .view({4, 2})
              .set_requires_grad(true)};
}

// Of 6 examples, other ones at every draw.
Tensor Losses(const std::vector<Tensor>& params, int64_t draw) {
  const Tensor x =
      torch::sin(10.0 * draw + torch::arange(6, torch::kDouble)).unsqueeze(1);
  Tensor losses = torch::zeros(6, torch::kDouble);
  for (const Tensor& p : params) {
    losses = losses + (p.to(torch::kDouble).flatten() - x).square().sum(1);
  }
  return losses;
}

// The mean loss of each of 4 chains.
Tensor LossesOfChains(const std::vector<Tensor>& params, int64_t draw) {
  const Tensor x = torch::sin(10.0 * draw + torch::arange(6, torch::kDouble));
  Tensor losses = torch::zeros(4, torch::kDouble);
  for (const Tensor& p : params) {
    const Tensor sums = p.to(torch::kDouble).reshape({4, -1}).sum(1, true);
    losses = losses + (0.1 * sums - x).square().mean(1);
  }
  return losses;
}

void ZeroGrad(const std::vector<Tensor>& params) {
  for (const Tensor& p : params) p.mutable_grad().reset();
}

template <typename Method, typename Options>
Chain Minibatched(const Options& options, bool create_graph = false) {
  Chain chain = {TwoParams(), nullptr, std::make_shared<Calls>(), nullptr};
  auto sampler = std::make_shared<Method>(chain.params, options);
  chain.sampler = sampler;
  chain.step = [=, params = chain.params, calls = chain.calls] {
    sampler->step([&] {
      return calls->call([&](int64_t draw) {
        ZeroGrad(params);
        const Tensor loss = Losses(params, draw).mean();
        loss.backward({}, /*retain_graph=*/std::nullopt, create_graph);
        return loss;
      });
    });
  };
  return chain;
}

Chain WeightedChains() {
  Chain chain = {TwoParams(), nullptr, std::make_shared<Calls>(), nullptr};
  auto sampler = std::make_shared<EWSG>(
      chain.params, EWSGOptions(0.1).num_data(50).seed(5).num_chains(4));
  chain.sampler = sampler;
  chain.step = [=, params = chain.params, calls = chain.calls] {
    sampler->step([&] {
      return calls->call([&](int64_t draw) {
        ZeroGrad(params);
        const Tensor loss = LossesOfChains(params, draw);
        loss.sum().backward();
        return loss;
      });
    });
  };
  return chain;
}

Chain Hamiltonian(const HMCOptions& options, bool chains = false) {
  Chain chain = {TwoParams(), nullptr, std::make_shared<Calls>(), nullptr};
  HMCOptions all = options;
  all.num_data(50).seed(5);
  auto sampler = std::make_shared<HMC>(chain.params, all);
  chain.sampler = sampler;
  const auto closure = [params = chain.params, calls = chain.calls, chains] {
    return calls->call([&](int64_t) {  // all data
      ZeroGrad(params);
      const Tensor loss =
          chains ? LossesOfChains(params, 0) : Losses(params, 0).mean();
      loss.sum().backward();
      return loss;
    });
  };
  chain.step = [=] { sampler->step(closure); };
  chain.warmup = [=](int64_t steps) { sampler->warmup(closure, steps); };
  return chain;
}

Chain Subsampled(const HMCECSOptions& options) {
  constexpr int64_t kNumData = 50;
  Chain chain = {
      {torch::full({3}, 0.2, torch::kDouble).set_requires_grad(true)},
      nullptr,
      std::make_shared<Calls>(),
      nullptr};
  HMCECSOptions all = options;
  all.num_data(kNumData).subsample_size(8).num_blocks(4).seed(5);
  all.prior_precision(1);
  auto sampler = std::make_shared<HMCECS>(chain.params, all);
  chain.sampler = sampler;
  const HMCECS::Closure closure = [p = chain.params.front(),
                                   calls = chain.calls](const Tensor& indices) {
    return calls->call([&](int64_t) {
      const Tensor i = indices.to(torch::kDouble);
      const Tensor x =
          torch::sin(i.unsqueeze(1) * 1.7 + torch::arange(p.numel()));
      const Tensor eta = x.matmul(p);
      return torch::remainder(i, 3) * eta - eta.exp();
    });
  };
  chain.step = [=] { sampler->step(closure); };
  chain.warmup = [=](int64_t steps) {
    HMCECSWarmup settings;
    settings.anchor_every = 2;
    settings.target_variance = 0.5;
    sampler->warmup(closure, steps, settings);
  };
  return chain;
}

Chain Bouncy(bool preconditioned) {
  Chain chain = {TwoParams(), nullptr, std::make_shared<Calls>(), nullptr};
  auto sampler = std::make_shared<SBPS>(chain.params,
                                        SBPSOptions()
                                            .num_data(50)
                                            .prior_precision(20)
                                            .preconditioned(preconditioned)
                                            .seed(5));
  chain.sampler = sampler;
  chain.step = [=, params = chain.params, calls = chain.calls] {
    sampler->step([&] {
      return calls->call([&](int64_t draw) { return Losses(params, draw); });
    });
  };
  return chain;
}

template <typename Options>
Options Common(Options options) {
  return options.num_data(50).seed(5);
}

using Maker = std::function<Chain()>;

const std::map<std::string, Maker>& Makers() {
  static const std::map<std::string, Maker> makers = {
      {"SGLD", [] { return Minibatched<SGLD>(Common(SGLDOptions(0.1))); }},
      {"SGHMC",
       [] {
         return Minibatched<SGHMC>(
             Common(SGHMCOptions(0.1)).noise_estimate("online"));
       }},
      {"PSGLD",
       [] { return Minibatched<PSGLD>(Common(PSGLDOptions(0.1)), true); }},
      {"SGNHT", [] { return Minibatched<SGNHT>(Common(SGNHTOptions(0.1))); }},
      {"EWSG",
       [] {
         return Minibatched<EWSG>(
             Common(EWSGOptions(0.1)).index_chain_length(3));
       }},
      {"EWSG, overdamped",
       [] { return Minibatched<EWSG>(Common(EWSGOptions(0.1)).momentum(0)); }},
      {"EWSG, many chains", WeightedChains},
      {"HMC", [] { return Hamiltonian(HMCOptions(0.05).num_steps(3)); }},
      {"HMC, momenta kept",
       [] {
         return Hamiltonian(
             HMCOptions(0.05).num_steps(2).resample_momentum_every(2));
       }},
      {"HMC, many chains",
       [] {
         return Hamiltonian(HMCOptions(0.1).num_steps(3).num_chains(4), true);
       }},
      {"HMC-ECS", [] { return Subsampled(HMCECSOptions()); }},
      {"HMC-ECS, order 1",
       [] { return Subsampled(HMCECSOptions().control_variate(1)); }},
      {"HMC-ECS, signed",
       [] {
         return Subsampled(HMCECSOptions().variant("signed").num_products(9));
       }},
      {"SBPS", [] { return Bouncy(false); }},
      {"pSBPS", [] { return Bouncy(true); }},
  };
  return makers;
}

c10::IValue Copied(const c10::IValue& value) { return value.deepcopy(); }

c10::IValue Params(const Chain& chain) {
  c10::impl::GenericList params(c10::AnyType::get());
  for (const Tensor& p : chain.params) params.push_back(p.detach());
  return Copied(params);
}

// All but the number of evaluations, which counts those in vain too.
c10::IValue Snapshot(const Chain& chain) {
  const c10::IValue copy = Copied(chain.sampler->state_dict());
  const c10::IValue groups = StateDict(copy).at("param_groups");
  for (const c10::IValue& group : groups.toListRef()) {
    StateDict options(group);
    if (options.contains("num_evaluations")) {
      options.set("num_evaluations", int64_t{0});
    }
  }
  return StateDict({{"params", Params(chain)}, {"sampler", copy}});
}

TEST(ClosureExceptions, AStepThatFailsWasNotBegun) {
  for (const auto& [name, make] : Makers()) {
    SCOPED_TRACE(name);
    const Chain whole = make();
    const Chain broken = make();
    if (name.find("ECS") != std::string::npos) {
      // What a first step chooses, it keeps.
      whole.step();
      broken.step();
    }
    for (int step = 0; step < 3; ++step) {
      whole.calls->begin();
      whole.step();
      const int64_t calls = whole.calls->count();
      const c10::IValue before = Snapshot(broken);
      for (int64_t at = 1; at <= calls; ++at) {
        for (const bool late : {false, true}) {
          broken.calls->begin(at, late);
          EXPECT_THROW(broken.step(), Broken) << at;
          ASSERT_TRUE(SameValues(Snapshot(broken), before)) << at << late;
        }
      }
      broken.calls->begin();
      broken.step();
      EXPECT_EQ(broken.calls->count(), calls);
      ASSERT_TRUE(SameValues(Snapshot(broken), Snapshot(whole)));
      whole.calls->end_step();
      broken.calls->end_step();
      EXPECT_TRUE(calls > 1 || (name[0] != 'E' && name[0] != 'H'));
    }
    // A gradient with a graph, of PSGLD, holds its parameter.
    ZeroGrad(whole.params);
    ZeroGrad(broken.params);
  }
}

TEST(ClosureExceptions, AWarmUpThatFailsKeepsItsWholeSteps) {
  constexpr int64_t kSteps = 6;
  for (const auto& [name, make] : Makers()) {
    SCOPED_TRACE(name);
    const Chain whole = make();
    if (!whole.warmup) continue;
    const bool subsampled = name.find("ECS") != std::string::npos;
    whole.warmup(kSteps);
    const int64_t calls = whole.calls->count();
    whole.step();
    std::map<int64_t, c10::IValue> places;
    for (int64_t at = 1; at <= calls; ++at) {
      for (const bool late : {false, true}) {
        const Chain broken = make();
        broken.calls->begin(at, late);
        EXPECT_THROW(broken.warmup(kSteps), Broken) << at;
        const c10::IValue groups =
            broken.sampler->state_dict().at("param_groups");
        const int64_t done =
            StateDict(groups.toListRef()[0]).at("step").toInt();
        // Between two steps HMC-ECS may have chosen an anchor and a step size.
        const c10::IValue place =
            subsampled ? Params(broken) : Snapshot(broken);
        ASSERT_TRUE(
            SameValues(place, places.try_emplace(done, place).first->second))
            << at << late;
        broken.calls->begin();
        // HMC is told how many are left, HMC-ECS knows.
        broken.warmup(subsampled ? kSteps : kSteps - done);
        broken.step();
        ASSERT_TRUE(SameValues(Snapshot(broken), Snapshot(whole)))
            << at << late;
      }
    }
    // Steps without data in the subsample call no closure.
    EXPECT_GT(places.size(), static_cast<size_t>(kSteps / 2));
  }
}

}  // namespace
}  // namespace torch_sgmcmc
