// The table and the JSON of a set of runs, with the Python example's columns
// and keys.
#pragma once

#include <torch_sgmcmc/state_dict.h>

#include <filesystem>
#include <string>
#include <vector>

#include "bnn/run.h"

namespace bnn {

/// The runs of each method, one for each seed.
using Runs = std::vector<std::vector<RunState>>;

/// A markdown table: mean ± standard deviation over seeds.
std::string Table(const Runs& runs);

/// Writes all figures behind the table. Throws std::runtime_error if the file
/// cannot be written.
void WriteJson(const Runs& runs,
               const torch_sgmcmc::StateDict& environment,
               const std::filesystem::path& path);

}  // namespace bnn
