#include "bnn/config.h"

#include <algorithm>
#include <stdexcept>

namespace bnn {

using torch_sgmcmc::StateDict;

double Get(const Settings& settings, const std::string& name) {
  for (const auto& [key, value] : settings) {
    if (key == name) return value;
  }
  throw std::out_of_range("There is no setting " + name);
}

std::string RunConfig::name() const {
  return method + "-seed" + std::to_string(seed);
}

bool RunConfig::samples() const { return method != "sgd" && method != "sgdm"; }

bool RunConfig::continues(const RunConfig& other) const {
  // As in a dict, the order of the settings says nothing.
  const auto sorted = [](Settings settings) {
    std::sort(settings.begin(), settings.end());
    return settings;
  };
  return method == other.method && seed == other.seed &&
         sorted(settings) == sorted(other.settings) &&
         burn_in == other.burn_in && batch_size == other.batch_size &&
         dataset == other.dataset && validate == other.validate;
}

StateDict RunConfig::to_dict() const {
  StateDict values;
  for (const auto& [key, value] : settings) values.set(key, value);
  return {{"method", method},
          {"seed", seed},
          {"settings", values},
          {"epochs", epochs},
          {"burn_in", burn_in},
          {"batch_size", batch_size},
          {"dataset", dataset},
          {"validate", validate}};
}

RunConfig RunConfig::FromDict(const StateDict& dict) {
  RunConfig config;
  config.method = dict.at("method").toStringRef();
  config.seed = dict.at("seed").toInt();
  const StateDict settings = dict.at("settings");
  for (const auto& entry : settings.entries()) {
    config.settings.emplace_back(entry.key().toStringRef(),
                                 entry.value().toScalar().toDouble());
  }
  config.epochs = dict.at("epochs").toInt();
  config.burn_in = dict.at("burn_in").toInt();
  config.batch_size = dict.at("batch_size").toInt();
  config.dataset = dict.at("dataset").toStringRef();
  config.validate = dict.at("validate").toBool();
  return config;
}

}  // namespace bnn
