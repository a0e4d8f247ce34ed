#include "bnn/report.h"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "bnn/json.h"
#include "bnn/methods.h"

namespace bnn {

using torch_sgmcmc::StateDict;

namespace {

std::string Format(const char* format, int digits, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, digits, value);
  return text;
}

template <typename Value>
std::string Spread(const std::vector<RunState>& runs, int digits, Value value) {
  const auto n = static_cast<double>(runs.size());
  double sum = 0;
  for (const RunState& run : runs) sum += value(run);
  const double mean = sum / n;
  double squares = 0;
  for (const RunState& run : runs) squares += std::pow(value(run) - mean, 2);
  const std::string text = Format("%.*f", digits, mean);
  if (runs.size() == 1) return text;
  return text + " ± " + Format("%.*f", digits, std::sqrt(squares / (n - 1)));
}

double SecondsPerEpoch(const RunState& run) {
  return run.seconds / static_cast<double>(run.epoch);
}

std::string Row(const std::vector<RunState>& runs) {
  std::string settings;
  for (const auto& [name, value] : runs.front().config.settings) {
    if (!settings.empty()) settings += ", ";
    settings += name + " " + Format("%.*g", 6, value);
  }
  const auto score = [](double Scores::*member) {
    return [member](const RunState& run) {
      return run.history.back().scores.*member;
    };
  };
  const auto percent = [](const RunState& run) {
    return 100 * run.history.back().scores.error;
  };
  return "| " + FindMethod(runs.front().config.method).label + " | " +
         settings + " | " + std::to_string(runs.size()) + " | " +
         Spread(runs, 2, percent) + " % | " +
         Spread(runs, 4, score(&Scores::nll)) + " | " +
         Spread(runs, 4, score(&Scores::ece)) + " | " +
         Spread(runs, 2, SecondsPerEpoch) + " |";
}

}  // namespace

std::string Table(const Runs& runs) {
  std::string table =
      "| method | settings | seeds | test error | NLL | ECE | s / epoch |\n"
      "| --- | --- | --- | --- | --- | --- | --- |";
  for (const auto& of_method : runs) table.append("\n").append(Row(of_method));
  return table;
}

void WriteJson(const Runs& runs,
               const StateDict& environment,
               const std::filesystem::path& path) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const auto& of_method : runs) {
    for (const RunState& run : of_method) {
      list.push_back(StateDict({{"config", run.config.to_dict()},
                                {"digest", run.digest},
                                {"seconds_per_epoch", SecondsPerEpoch(run)},
                                {"samples", run.samples},
                                {"final", run.history.back().to_dict()},
                                {"history", HistoryToList(run.history)}}));
    }
  }
  std::ofstream file(path);
  file << ToJson(StateDict({{"environment", environment}, {"runs", list}}))
       << "\n";
  file.close();
  if (!file) throw std::runtime_error("Cannot write " + path.string());
}

}  // namespace bnn
