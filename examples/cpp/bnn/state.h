// How far a run is: what is in its checkpoint besides model and optimizer,
// under the Python example's keys.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch_sgmcmc/state_dict.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bnn/config.h"
#include "bnn/metrics.h"

namespace bnn {

/// Tensors by name, in order.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// What is reported of an epoch.
struct Epoch {
  int64_t epoch = 0;
  Scores scores;
  /// Prior precisions of the layers; none for point estimates.
  std::vector<double> precisions;

  torch_sgmcmc::StateDict to_dict() const;
  static Epoch FromDict(const torch_sgmcmc::StateDict& dict);
};

/// A run so far.
struct RunState {
  RunConfig config;
  int64_t epoch = 0;
  int64_t samples = 0;
  /// Running means of the softmax outputs, by the name of the images.
  NamedTensors predictions;
  std::vector<Epoch> history;
  double seconds = 0;
  /// A fingerprint of the final parameters and predictions.
  std::string digest;

  torch_sgmcmc::StateDict to_dict() const;
  static RunState FromDict(const torch_sgmcmc::StateDict& dict,
                           c10::Device device);
};

/// The epochs as plain values, for a checkpoint or for JSON.
c10::IValue HistoryToList(const std::vector<Epoch>& history);

}  // namespace bnn
