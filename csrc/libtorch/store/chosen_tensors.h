// Which tensors of a model are stored.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "torch_sgmcmc/store.h"

namespace torch_sgmcmc {

// Names that are chosen once, and the tensors that have them at a time.
class ChosenTensors {
 public:
  // Of a model, or without one of these tensors.
  ChosenTensors(const torch::nn::Module* model,
                Collector::Tensors tensors,
                Sampler& sampler,
                const CollectorOptions& options);

  std::map<std::string, at::Tensor> Now() const;

 private:
  Collector::Tensors Parameters() const;

  const torch::nn::Module* model_;
  Collector::Tensors tensors_;
  std::vector<std::string> names_;
};

}  // namespace torch_sgmcmc
