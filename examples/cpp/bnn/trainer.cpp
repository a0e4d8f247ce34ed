#include "bnn/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <utility>

#include "bnn/sgd_state.h"

namespace bnn {

using torch::optim::OptimizerParamGroup;
using torch_sgmcmc::StateDict;

namespace {

// SGD, with or without momentum: a point estimate under a Gaussian prior.
class PointEstimate : public Trainer {
 public:
  PointEstimate(const std::vector<OptimizerParamGroup>& groups,
                const torch::optim::SGDOptions& options)
      : sgd_(groups, options) {}

  torch::optim::Optimizer& optimizer() override { return sgd_; }
  void step() override { sgd_.step(); }
  std::vector<double> end_epoch() override { return {}; }
  void save(StateDict& checkpoint) override {
    checkpoint.set("optimizer", SGDStateDict(sgd_));
    checkpoint.set("collectors", StateDict());
  }
  void load(const StateDict& checkpoint) override {
    LoadSGDStateDict(sgd_, checkpoint.at("optimizer"));
  }

 private:
  torch::optim::SGD sgd_;
};

// A sampler, with a hyperprior on each layer's precision, and its draws.
class Posterior : public Trainer {
 public:
  Posterior(std::unique_ptr<torch_sgmcmc::Sampler> sampler,
            const torch::nn::Sequential& model,
            const std::filesystem::path& store,
            const torch_sgmcmc::CollectorOptions& options)
      : sampler_(std::move(sampler)),
        precision_(*sampler_),
        collector_(*sampler_, *model, store.string(), options) {}

  torch::optim::Optimizer& optimizer() override { return *sampler_; }
  void step() override { collector_.step(); }
  std::vector<double> end_epoch() override { return precision_.step(); }
  void save(StateDict& checkpoint) override {
    checkpoint.set("optimizer", sampler_->state_dict());
    checkpoint.set("precision", precision_.state_dict());
    StateDict collectors;  // the Python example's chains may be several
    collectors.set("0", collector_.state_dict());
    checkpoint.set("collectors", std::move(collectors));
  }
  void load(const StateDict& checkpoint) override {
    sampler_->load_state_dict(checkpoint.at("optimizer"));
    precision_.load_state_dict(checkpoint.at("precision"));
    const StateDict collectors(checkpoint.at("collectors"));
    collector_.load_state_dict(collectors.at("0"));
  }

 private:
  std::unique_ptr<torch_sgmcmc::Sampler> sampler_;
  torch_sgmcmc::GammaPrecision precision_;
  torch_sgmcmc::Collector collector_;
};

}  // namespace

torch::nn::Sequential BuildModel(int64_t inputs,
                                 int64_t seed,
                                 c10::Device device) {
  torch::nn::Sequential model(torch::nn::Linear(inputs, 100),
                              torch::nn::Sigmoid(),
                              torch::nn::Linear(100, 10));
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const torch::NoGradGuard no_grad;
  for (auto& p : model->named_parameters()) {
    if (p.key().ends_with("weight")) {
      p.value().normal_(0.0, 0.01, generator);
    } else {
      p.value().zero_();
    }
  }
  model->to(device);
  return model;
}

std::unique_ptr<Trainer> BuildTrainer(const RunConfig& config,
                                      const torch::nn::Sequential& model,
                                      int64_t num_data,
                                      const std::filesystem::path& store) {
  // A group for each layer: each has a prior precision of its own.
  std::vector<OptimizerParamGroup> groups;
  for (const auto& layer : model->children()) {
    if (layer->as<torch::nn::Linear>())
      groups.emplace_back(layer->parameters());
  }
  const auto n = static_cast<double>(num_data);
  const double lr = Get(config.settings, "lr");
  const auto posterior = [&](std::unique_ptr<torch_sgmcmc::Sampler> sampler) {
    const int64_t epoch =
        (num_data + config.batch_size - 1) / config.batch_size;
    return std::make_unique<Posterior>(std::move(sampler),
                                       model,
                                       store,
                                       torch_sgmcmc::CollectorOptions()
                                           .burn_in(config.burn_in * epoch)
                                           .every(epoch));
  };
  if (config.method == "sgld") {
    return posterior(std::make_unique<torch_sgmcmc::SGLD>(
        std::move(groups),
        torch_sgmcmc::SGLDOptions(lr).num_data(n).prior_precision(1).seed(
            config.seed)));
  }
  if (config.method == "sghmc") {
    return posterior(std::make_unique<torch_sgmcmc::SGHMC>(
        std::move(groups),
        torch_sgmcmc::SGHMCOptions(lr)
            .momentum(Get(config.settings, "momentum"))
            .num_data(n)
            .prior_precision(1)
            .seed(config.seed)));
  }
  torch::optim::SGDOptions options(lr);
  options.weight_decay(Get(config.settings, "precision") / n);
  if (config.method == "sgdm") {
    options.momentum(Get(config.settings, "momentum"));
  }
  return std::make_unique<PointEstimate>(groups, options);
}

}  // namespace bnn
