// What determines a run. Two runs with equal configs are the same chain, in
// this program and in the Python example, which writes the same keys.
#pragma once

#include <torch_sgmcmc/state_dict.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bnn {

/// Hyperparameters by name.
using Settings = std::vector<std::pair<std::string, double>>;

/// The value of a setting; throws std::out_of_range if there is none.
double Get(const Settings& settings, const std::string& name);

struct RunConfig {
  std::string method;
  int64_t seed = 0;
  Settings settings;
  int64_t epochs = 0;
  int64_t burn_in = 0;
  int64_t batch_size = 0;
  std::string dataset;
  /// Whether the validation set is reported instead of the test set. Such runs
  /// are made by the Python example only.
  bool validate = false;

  /// A file name.
  std::string name() const;
  /// Whether predictions are averaged over the posterior.
  bool samples() const;
  /// Whether the other is the same chain: equal in all but its length.
  bool continues(const RunConfig& other) const;

  torch_sgmcmc::StateDict to_dict() const;
  static RunConfig FromDict(const torch_sgmcmc::StateDict& dict);
};

}  // namespace bnn
