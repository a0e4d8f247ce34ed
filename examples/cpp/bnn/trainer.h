// What a run trains and what trains it: the paper's network, and an optimizer
// or a sampler on its parameters.
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/optimizer.h>
#include <torch_sgmcmc/state_dict.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "bnn/config.h"

namespace bnn {

/// The paper's network, 784-100-10 with sigmoid units, weights N(0, 0.01²).
torch::nn::Sequential BuildModel(int64_t inputs,
                                 int64_t seed,
                                 c10::Device device);

/// What trains the model.
class Trainer {
 public:
  virtual ~Trainer() = default;

  virtual torch::optim::Optimizer& optimizer() = 0;
  /// The optimizer's step; of samplers it may store a draw.
  virtual void step() = 0;
  /// Ends an epoch. Returns the new prior precisions, where they are drawn.
  virtual std::vector<double> end_epoch() = 0;
  /// Writes all state to a checkpoint, under the Python example's keys.
  virtual void save(torch_sgmcmc::StateDict& checkpoint) = 0;
  virtual void load(const torch_sgmcmc::StateDict& checkpoint) = 0;
};

/// The optimizer or sampler of a run, with the hyperprior where there is one,
/// and what stores the network after each epoch that is not burn-in.
std::unique_ptr<Trainer> BuildTrainer(const RunConfig& config,
                                      const torch::nn::Sequential& model,
                                      int64_t num_data,
                                      const std::filesystem::path& store);

}  // namespace bnn
