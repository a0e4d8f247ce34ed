#include "bnn/state.h"

namespace bnn {

using torch_sgmcmc::StateDict;

StateDict Epoch::to_dict() const {
  StateDict dict = {{"error", scores.error},
                    {"nll", scores.nll},
                    {"ece", scores.ece},
                    {"epoch", epoch}};
  if (!precisions.empty()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const double precision : precisions) list.push_back(precision);
    dict.set("precisions", list);
  }
  return dict;
}

Epoch Epoch::FromDict(const StateDict& dict) {
  Epoch epoch;
  epoch.epoch = dict.at("epoch").toInt();
  epoch.scores = {dict.at("error").toDouble(),
                  dict.at("nll").toDouble(),
                  dict.at("ece").toDouble()};
  if (dict.contains("precisions")) {
    const c10::IValue precisions = dict.at("precisions");
    for (const auto& precision : precisions.toListRef()) {
      epoch.precisions.push_back(precision.toDouble());
    }
  }
  return epoch;
}

c10::IValue HistoryToList(const std::vector<Epoch>& history) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const Epoch& epoch : history) list.push_back(epoch.to_dict());
  return list;
}

StateDict RunState::to_dict() const {
  StateDict sums;
  for (const auto& [name, predictive] : predictions) {
    sums.set(name, predictive.state_dict());
  }
  return {{"config", config.to_dict()},
          {"epoch", epoch},
          {"samples", samples},
          {"predictions", sums},
          {"history", HistoryToList(history)},
          {"seconds", seconds}};
}

RunState RunState::FromDict(const StateDict& dict, c10::Device device) {
  RunState state;
  state.config = RunConfig::FromDict(dict.at("config"));
  state.epoch = dict.at("epoch").toInt();
  state.samples = dict.at("samples").toInt();
  const StateDict sums = dict.at("predictions");
  for (const auto& entry : sums.entries()) {
    state.predictions.emplace_back(entry.key().toStringRef(),
                                   torch_sgmcmc::Predictive());
    state.predictions.back().second.load_state_dict(entry.value(), device);
  }
  const c10::IValue history = dict.at("history");
  for (const auto& epoch : history.toListRef()) {
    state.history.push_back(Epoch::FromDict(epoch));
  }
  state.seconds = dict.at("seconds").toDouble();
  return state;
}

}  // namespace bnn
