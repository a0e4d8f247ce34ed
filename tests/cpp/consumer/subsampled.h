// The chain of HMC-ECS that a file describes: a regression, with a weight and a
// bias in param groups of their own (tests/test_cpp_hmcecs.py has the same in
// Python).
#pragma once

#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace subsampled {

namespace sg = torch_sgmcmc;

// The log-likelihoods of the data with these indices, and what a test has them
// spoiled to.
class Regression {
 public:
  explicit Regression(const sg::StateDict& job)
      : x_(job.at("x").toTensor()),
        y_(job.at("y").toTensor()),
        weight_(Parameter(job, "weight")),
        bias_(Parameter(job, "bias")),
        kind_(job.at("kind").toStringRef()),
        fault_(job.at("fault").toStringRef()) {}

  std::vector<torch::Tensor> params() const { return {weight_, bias_}; }

  torch::Tensor operator()(const torch::Tensor& indices) const {
    const torch::Tensor x = x_.index({indices});
    const torch::Tensor y = y_.index({indices});
    const torch::Tensor eta = predictor(x);
    if (fault_ == "shape") return eta.sum();
    if (fault_ == "graph") return eta.detach();
    if (fault_ == "infinite") return eta / 0.0;
    if (kind_ != "tanh") return y * eta - torch::softplus(eta);
    return -0.5 * (y - eta.tanh() * bias_).pow(2);  // Hessians of rank two
  }

  // One that says what its rows are, of the kind "rows"; else this.
  sg::HMCECS::Closure closure() const {
    if (kind_ != "rows") return *this;
    const auto outputs = [*this](const torch::Tensor& indices) {
      const torch::Tensor eta = predictor(x_.index({indices}));
      return eta.slice(0, fault_ == "outputs" ? 1 : 0);
    };
    const auto of_outputs = [*this](const torch::Tensor& eta,
                                    const torch::Tensor& indices) {
      return y_.index({indices}) * eta - torch::softplus(eta);
    };
    const auto rows = [*this](const torch::Tensor& indices) {
      const torch::Tensor x = x_.index({indices});
      if (fault_ == "columns") return x;
      const torch::Tensor padded = torch::constant_pad_nd(x, {0, 1}, 1.0);
      return fault_ == "rows" ? 2 * padded : padded;
    };
    return sg::LogLikelihood(outputs, of_outputs, rows);
  }

 private:
  torch::Tensor predictor(const torch::Tensor& x) const {
    return x.matmul(weight_) + bias_;
  }

  static torch::Tensor Parameter(const sg::StateDict& job, const char* name) {
    const sg::StateDict model = job.at("model");
    return model.at(name).toTensor().clone().set_requires_grad(true);
  }

  torch::Tensor x_;
  torch::Tensor y_;
  torch::Tensor weight_;
  torch::Tensor bias_;
  std::string kind_;
  std::string fault_;
};

// Of one group: its prior is its own, all else is the sampler's.
inline sg::HMCECSOptions OptionsAt(const sg::StateDict& job, size_t index) {
  sg::HMCECSOptions options;
  options.read(job.at("groups").toListRef()[index],
               static_cast<int64_t>(index));
  return options;
}

inline void Run(const sg::StateDict& job, const std::string& result_path) {
  const Regression regression(job);
  const sg::HMCECS::Closure closure = regression.closure();
  const std::vector<torch::Tensor> params = regression.params();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const torch::Tensor& param : params) {
    const sg::HMCECSOptions read = OptionsAt(job, groups.size());
    auto prior = sg::HMCECSOptions()
                     .prior_precision(read.prior_precision())
                     .prior_mean(read.prior_mean());
    if (groups.empty() && job.contains("mean")) {
      prior.prior_mean({job.at("mean").toTensor()});
    }
    groups.emplace_back(std::vector<torch::Tensor>{param},
                        std::make_unique<sg::HMCECSOptions>(prior));
  }
  sg::HMCECS sampler(groups, OptionsAt(job, 0).seed(job.at("seed").toInt()));
  const std::vector<torch::Tensor> centers = {
      torch::full_like(params[0], 0.125), torch::full_like(params[1], 0.125)};
  const sg::Gauges gauges(sampler,
                          sg::GaugesOptions().every(3).centers(centers));
  if (job.contains("weights")) {
    sampler.set_sampling_weights(job.at("weights").toTensor());
  }
  if (job.contains("state")) sampler.load_state_dict(job.at("state"));
  if (job.contains("warmup")) {
    const sg::StateDict dict = job.at("warmup");
    sg::HMCECSWarmup settings;
    settings.target_acceptance = dict.at("target_acceptance").toDouble();
    settings.anchor_every = dict.at("anchor_every").toInt();
    if (!dict.at("target_variance").isNone()) {
      settings.target_variance = dict.at("target_variance").toDouble();
    }
    sampler.warmup(closure, dict.at("steps").toInt(), settings);
  }
  std::vector<torch::Tensor> draws;
  for (int64_t i = 0; i < job.at("steps").toInt(); ++i) {
    const torch::Tensor loss = sampler.step(closure);
    std::vector<torch::Tensor> draw = {
        loss.reshape({1}),
        torch::full({1}, sampler.sign(), torch::kDouble),
        torch::full({1}, sampler.estimator_variance(), torch::kDouble)};
    for (const torch::Tensor& param : params) {
      draw.push_back(param.detach().reshape({-1}).to(torch::kDouble));
    }
    draws.push_back(torch::cat(draw));
  }
  const sg::StateDict model = {{"weight", params[0].detach()},
                               {"bias", params[1].detach()}};
  sg::save({{"model", model},
            {"state", sampler.state_dict()},
            {"draws", torch::stack(draws)},
            {"rates",
             torch::tensor({sampler.acceptance_rate(),
                            sampler.subsample_acceptance_rate()},
                           torch::kDouble)},
            {"counts",
             torch::tensor(std::vector<int64_t>{sampler.num_divergences(),
                                                sampler.num_evaluations()})},
            {"summary", sampler.target_summary()},
            {"gauges", gauges.state_dict()},
            {"temperatures", gauges.summary()}},
           result_path);
}

}  // namespace subsampled
