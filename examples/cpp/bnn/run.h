// One run of one method with one seed: an ordinary training loop, resumable.
//
// A checkpoint is written after every epoch, by rename: a run that is killed at
// any moment continues from its last epoch to the same bits. The file is the
// Python example's, so that either program continues the other's runs.
#pragma once

#include <filesystem>

#include "bnn/config.h"
#include "bnn/data.h"
#include "bnn/state.h"

namespace bnn {

/// Runs to the last epoch, from the checkpoint in folder if there is one.
/// Throws std::runtime_error if that is one of other settings.
RunState Run(const RunConfig& config,
             const Images& images,
             const std::filesystem::path& folder);

}  // namespace bnn
