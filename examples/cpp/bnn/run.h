// One run of one method with one seed: an ordinary training loop, resumable.
//
// A checkpoint is written after every epoch, all of it or nothing: a run that
// is killed at any moment continues from its last epoch to the same bits, its
// stored draws among them. The files are the Python example's, so that either
// program continues the other's runs.
#pragma once

#include <filesystem>

#include "bnn/config.h"
#include "bnn/data.h"
#include "bnn/state.h"

namespace bnn {

/// Throws std::runtime_error if there is a checkpoint in folder from which the
/// run cannot continue: damaged, or of other settings.
void CheckCheckpoint(const RunConfig& config,
                     const Images& images,
                     const std::filesystem::path& folder);

/// Runs to the last epoch, from the checkpoint in folder if there is one.
/// Throws as CheckCheckpoint() does.
RunState Run(const RunConfig& config,
             const Images& images,
             const std::filesystem::path& folder);

}  // namespace bnn
