// A chain whose gradients have a control variate: the network of chain.cpp,
// with the estimator that a file describes (tests/test_cpp_control_variates.py
// has the same in Python).
#pragma once

#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace anchored {

namespace nn = torch::nn;
namespace sg = torch_sgmcmc;

// The indices of a minibatch.
using Batch = torch::Tensor;

// The mean loss of a minibatch, and what a test has it spoiled to.
class Loss {
 public:
  Loss(const sg::StateDict& job, nn::SequentialImpl& net, int64_t& calls)
      : x_(job.at("x").toTensor()),
        y_(job.at("y").toTensor()),
        fault_(job.at("fault").toStringRef()),
        hidden_(net.at<nn::LinearImpl>(0)),
        output_(net.at<nn::LinearImpl>(2)),
        calls_(calls) {}

  torch::Tensor operator()(const Batch& batch) const {
    ++calls_;
    const torch::Tensor hidden = hidden_.forward(x_.index({batch})).tanh();
    // Some minibatches do not reach the bias.
    const bool reached = batch.min().item<int64_t>() < 10;
    const torch::Tensor logits = torch::linear(
        hidden, output_.weight, reached ? output_.bias : torch::Tensor());
    const auto y = y_.index({batch});
    auto loss = nn::functional::cross_entropy(logits, y);
    if (fault_ == "backward") loss.backward();
    if (fault_ == "graph") return loss.detach();
    if (fault_ == "infinite") return loss / 0.0;
    return fault_ == "shape" ? loss.expand({2, 3}) : loss;
  }

 private:
  torch::Tensor x_;
  torch::Tensor y_;
  std::string fault_;
  nn::LinearImpl& hidden_;
  nn::LinearImpl& output_;
  int64_t& calls_;
};

inline sg::StateDict Run(const sg::StateDict& job,
                         nn::SequentialImpl& net,
                         sg::Sampler& sampler) {
  const std::string fault = job.at("fault").toStringRef();
  const torch::Tensor batches = job.at("batches").toTensor();
  const auto weights = job.at("weights").toList().vec();
  const bool create_graph = job.at("create_graph").toBool();
  if (job.at("frozen").toBool()) {
    net.at<nn::LinearImpl>(0).bias.set_requires_grad(false);
  }
  std::vector<Batch> loader;
  for (const auto& batch : job.at("loader").toList().vec()) {
    loader.push_back(batch.toTensor());
  }

  int64_t calls = 0;
  const Loss loss_fn(job, net, calls);
  sg::ControlVariatesOptions<Batch> options;
  options.order = job.at("order").toInt();
  if (fault == "size") options.batch_size = [](const Batch&) { return 0; };
  const int64_t refresh_every = job.at("refresh_every").toInt();
  std::unique_ptr<sg::ControlVariates<Batch>> estimator;
  if (job.at("estimator").toStringRef() == "SVRG") {
    estimator = std::make_unique<sg::SVRG<Batch>>(
        sampler, loss_fn, loader, refresh_every, options);
  } else {
    estimator =
        std::make_unique<sg::ControlVariates<Batch>>(sampler, loss_fn, options);
  }
  if (job.contains("estimated")) {
    sampler.load_state_dict(job.at("state"));
    estimator->load_state_dict(job.at("estimated"));
  } else if (refresh_every == 0 && fault != "anchor") {
    estimator->set_anchor(loader);
  }
  if (fault == "frozen") {
    net.at<nn::LinearImpl>(2).bias.set_requires_grad(false);
  }

  std::vector<torch::Tensor> losses;
  int64_t draws = 0;
  for (int64_t step = 0; step < job.at("steps").toInt(); ++step) {
    sampler.step([&] {
      sampler.zero_grad();
      const torch::Tensor batch = batches[draws++];
      torch::Tensor loss;
      for (size_t i = 0; i < weights.size(); ++i) {
        const auto part = batch.chunk(static_cast<int64_t>(weights.size()))[i];
        loss = estimator->backward(part, weights[i].toDouble(), create_graph);
      }
      losses.push_back(loss.detach());
      return loss;
    });
  }
  c10::impl::GenericList grads(c10::AnyType::get());
  for (const auto& param : net.parameters()) {
    const torch::Tensor& grad = param.grad();
    grads.push_back(grad.defined() ? c10::IValue(grad.detach())
                                   : c10::IValue());
  }
  return {{"model", sg::state_dict(net)},
          {"state", sampler.state_dict()},
          {"estimated", estimator->state_dict()},
          {"grads", grads},
          {"losses", torch::stack(losses)},
          {"calls", calls}};
}

}  // namespace anchored
