// EWSG as a LibTorch program uses it: its closure, its index chain, its chains.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include "small_chains.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

using torch::optim::OptimizerParamGroup;

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
                .find("EWSG::step() needs a closure, since it draws several "
                      "minibatches a step:"),
            0U);
  EXPECT_EQ(sampler.num_steps(), 0);
}

// A closure whose n-th call makes gradients that depend on which(n) alone.
torch::optim::Optimizer::LossClosure Which(
    const torch::Tensor& param, int& calls,
    const std::function<double(int)>& which) {
  return [=, &calls] {
    param.mutable_grad() = torch::full_like(param, which(calls++));
    return torch::zeros({});
  };
}

TEST(EWSG, RefusesOtherWaysWithNonfiniteGradientsOfItsGroups) {
  const auto params = Params();
  EWSG sampler(
      {OptimizerParamGroup({params[0]}), OptimizerParamGroup({params[1]})},
      EWSGOptions(0.1).num_data(50).seed(7));
  sampler.options(1).nonfinite("skip");
  bool is_called = false;
  const auto closure = [&] {
    is_called = true;
    return torch::zeros({});
  };
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(closure); }),
            "Invalid nonfinite: ['raise', 'skip'] in the param groups (must be "
            "equal: a step is skipped as a whole)");
  EXPECT_FALSE(is_called);
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
    const int64_t steps = sampler.num_steps();
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(closure); }),
              message);
    EXPECT_TRUE(torch::equal(param, before));
    EXPECT_EQ(sampler.num_steps(), steps);
  }
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
    EXPECT_EQ(sampler.num_steps(), 0);
    EXPECT_TRUE(std::isnan(sampler.acceptance_rate()));
    return message;
  };
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
                      "the previous minibatch's"),
            0U);
  EXPECT_TRUE(sampler.state().empty());
}

}  // namespace
}  // namespace torch_sgmcmc
