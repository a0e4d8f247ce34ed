// The streaming predictive against plain averages over kept outputs.
#include "torch_sgmcmc/predictive.h"

#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include "testing.h"

namespace {

using torch_sgmcmc::Link;
using torch_sgmcmc::MessageOf;
using torch_sgmcmc::Prediction;
using torch_sgmcmc::Predictive;

constexpr double kTiny = 1e-6;

struct Draws {
  explicit Draws(std::vector<double> of_draws) : weights(std::move(of_draws)) {
    torch::manual_seed(0);
    outputs = 3 * torch::randn({static_cast<int64_t>(weights.size()), 5, 4});
  }
  Prediction Predicted(Link link) const {
    Predictive predictive(link);
    for (size_t i = 0; i < weights.size(); ++i) {
      predictive.update(outputs[static_cast<int64_t>(i)], weights[i]);
    }
    return predictive.result();
  }
  // Of values [draws, ...].
  torch::Tensor Mean(const torch::Tensor& values) const {
    const auto w = torch::tensor(weights, torch::kDouble);
    return torch::tensordot(w, values.to(torch::kDouble), {0}, {0}) / w.sum();
  }

  std::vector<double> weights;
  torch::Tensor outputs;
};

bool Near(const torch::Tensor& found, const torch::Tensor& wanted) {
  return found.scalar_type() == torch::kFloat &&
         torch::allclose(found.to(torch::kDouble), wanted, kTiny, kTiny);
}

torch::Tensor EntropyOf(const torch::Tensor& p) {
  return -torch::xlogy(p, p).sum(-1);
}

TEST(PredictiveTest, IsTheWeightedAverage) {
  // The last ones are signs.
  for (const std::vector<double>& weights : {std::vector<double>{1, 1, 1, 1, 1},
                                             {0.5, 2, 0, 1, 3},
                                             {1, 1, -1, 1, 1}}) {
    const Draws draws(weights);
    const torch::Tensor p = draws.outputs.to(torch::kDouble).softmax(-1);
    const Prediction found = draws.Predicted(Link::kSoftmax);
    const torch::Tensor mean = draws.Mean(p);
    EXPECT_TRUE(Near(found.mean, mean));
    EXPECT_TRUE(Near(found.variance, draws.Mean((p - mean).square())));
    EXPECT_TRUE(Near(found.aleatoric, draws.Mean(EntropyOf(p))));
    if (mean.min().item<double>() >= 0) {
      EXPECT_TRUE(Near(found.total, EntropyOf(mean)));
      EXPECT_TRUE(
          Near(found.epistemic, EntropyOf(mean) - draws.Mean(EntropyOf(p))));
    }
    EXPECT_EQ(found.num_draws, 5);
  }
  const Prediction found = Draws({0.5, 2, 0, 1, 3}).Predicted(Link::kSoftmax);
  EXPECT_DOUBLE_EQ(found.weight, 6.5);
  EXPECT_DOUBLE_EQ(found.effective_draws, 6.5 * 6.5 / 14.25);
}

TEST(PredictiveTest, OtherLinks) {
  const Draws draws({1, 2, 3});
  const torch::Tensor exact = draws.outputs.to(torch::kDouble);
  const Prediction outputs = draws.Predicted(Link::kIdentity);
  EXPECT_TRUE(Near(outputs.mean, draws.Mean(exact)));
  EXPECT_FALSE(outputs.total.defined());
  const torch::Tensor p = exact.sigmoid();
  const torch::Tensor both = -torch::xlogy(p, p) - torch::xlogy(1 - p, 1 - p);
  const Prediction found = draws.Predicted(Link::kSigmoid);
  EXPECT_TRUE(Near(found.mean, draws.Mean(p)));
  EXPECT_TRUE(Near(found.aleatoric, draws.Mean(both)));
}

TEST(PredictiveTest, VariancesFarFromZeroKeepTheirDigits) {
  Predictive predictive(Link::kIdentity);
  for (const double x : {1e8, 1e8 + 1, 1e8 + 2}) {
    predictive.update(torch::full({1}, x, torch::kDouble));
  }
  EXPECT_DOUBLE_EQ(predictive.result().variance.item<double>(), 2.0 / 3);
}

TEST(PredictiveTest, NegativeProbabilitiesHaveNoEntropy) {
  Predictive predictive(Link::kSigmoid);
  predictive.update(torch::tensor({-4.0, 1.0}), 1);
  predictive.update(torch::tensor({4.0, 1.1}), -0.5);
  const Prediction found = predictive.result();
  EXPECT_LT(found.mean[0].item<double>(), 0);
  EXPECT_TRUE(std::isnan(found.total[0].item<double>()));
  EXPECT_FALSE(std::isnan(found.total[1].item<double>()));
}

TEST(PredictiveTest, RefusesAndChangesNothing) {
  Predictive predictive;
  EXPECT_NE(MessageOf([&] { predictive.result(); }).find("no draw was added"),
            std::string::npos);
  const torch::Tensor x = torch::randn({3, 4});
  predictive.update(x);
  const torch::Tensor before = predictive.result().mean;
  EXPECT_EQ(MessageOf([&] {
              predictive.update(torch::randn({2, 4}));
            }),
            "Invalid outputs: shape [2, 4] (earlier draws gave [3, 4])");
  EXPECT_EQ(MessageOf([&] {
              predictive.update(torch::randn({3, 1}));
            }),
            "Invalid outputs: shape [3, 1] (its last dimension must be that of "
            "two classes or more)");
  for (const torch::Tensor& other :
       {torch::Tensor(), torch::ones({3, 4}, torch::kLong)}) {
    EXPECT_NE(MessageOf([&] { predictive.update(other); }), "");
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(MessageOf([&] { predictive.update(x, nan); }), "");
  EXPECT_TRUE(torch::equal(predictive.result().mean, before));
  EXPECT_EQ(predictive.result().num_draws, 1);
  predictive.update(x, -1);
  EXPECT_EQ(MessageOf([&] { predictive.result(); }),
            "Invalid weights: they sum to 0");
}

TEST(PredictiveTest, GoesOnFromAStateDict) {
  for (const Link link : {Link::kSoftmax, Link::kSigmoid, Link::kIdentity}) {
    const Draws draws({1, 2, -0.5, 3});
    Predictive one(link);
    for (int64_t i = 0; i < 4; ++i) {
      Predictive next(link);
      next.load_state_dict(one.state_dict());
      EXPECT_EQ(next.num_draws(), i);
      next.update(draws.outputs[i], draws.weights[static_cast<size_t>(i)]);
      EXPECT_EQ(one.num_draws(), i);
      one = next;
    }
    const Prediction found = one.result();
    const Prediction wanted = draws.Predicted(link);
    EXPECT_TRUE(torch::equal(found.mean, wanted.mean));
    EXPECT_TRUE(torch::equal(found.variance, wanted.variance));
    if (link != Link::kIdentity) {
      EXPECT_TRUE(torch::equal(found.aleatoric, wanted.aleatoric));
    }
    EXPECT_EQ(found.effective_draws, wanted.effective_draws);
    for (const Link another :
         {Link::kSoftmax, Link::kSigmoid, Link::kIdentity}) {
      if (another == link) continue;
      Predictive other(another);
      EXPECT_EQ(
          MessageOf<std::invalid_argument>(
              [&] { other.load_state_dict(one.state_dict()); }),
          "Invalid state_dict: it has other averages, or quantiles (must be "
          "of a Predictive with the same link, and no functions)");
      EXPECT_EQ(other.num_draws(), 0);
    }
  }
}

TEST(PredictiveTest, RefusesStateDictsOfOtherThings) {
  Predictive predictive(Link::kIdentity);
  predictive.update(torch::ones({2, 2}));
  const torch_sgmcmc::StateDict state = predictive.state_dict();
  for (const char* key : {"link", "origin", "kept", "means", "dtype"}) {
    torch_sgmcmc::StateDict sums(state.at("sums"));
    const c10::IValue kept = sums.at(key);
    sums.set(key, 7);
    EXPECT_NE(MessageOf<std::invalid_argument>([&] {
                predictive.load_state_dict(
                    {{"weights", state.at("weights")}, {"sums", sums}});
              }),
              "");
    sums.set(key, kept);
  }
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] {
        predictive.load_state_dict({{"weights", 3}, {"sums", c10::IValue()}});
      }),
      "Invalid weights in a state dict: a Int (must be a list of "
      "numbers)");
  EXPECT_EQ(predictive.num_draws(), 1);
}

TEST(PredictiveTest, KeepsNoGraphAndNoAlias) {
  Predictive predictive(Link::kIdentity);
  torch::Tensor outputs = torch::ones({2}, torch::kDouble).requires_grad_();
  predictive.update(outputs);
  {
    const torch::NoGradGuard no_graph;
    outputs.fill_(7);
  }
  EXPECT_FALSE(predictive.result().mean.requires_grad());
  EXPECT_EQ(predictive.result().mean.sum().item<double>(), 2);
  Predictive low;
  low.update(torch::randn({3, 4}).to(torch::kBFloat16));
  EXPECT_EQ(low.result().mean.scalar_type(), torch::kFloat);
}

}  // namespace
