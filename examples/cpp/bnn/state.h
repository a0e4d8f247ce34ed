// How far a run is: what is in its checkpoint besides model and optimizer,
// under the Python example's keys.
#pragma once

#include <c10/core/Device.h>
#include <torch_sgmcmc/predictive.h>
#include <torch_sgmcmc/state_dict.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bnn/config.h"
#include "bnn/metrics.h"

namespace bnn {

/// What is predicted for images, by their name, in order.
using NamedPredictives =
    std::vector<std::pair<std::string, torch_sgmcmc::Predictive>>;

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
  /// That predictions are the mean over, after burn-in.
  int64_t samples = 0;
  NamedPredictives predictions;
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
