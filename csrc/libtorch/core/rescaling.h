// Momenta follow lr, T and N: Note [Rescaled momenta] of
// torch_sgmcmc/chain/rescaling.py.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "host/rescaling.h"
#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

// What a param group records of the settings that its state belongs to.
struct GroupRecords {
  // A noise estimate, and where it was given.
  struct Estimate {
    double value = 0;
    MomentumSettings settings;
  };

  // None until there are momenta, or a number.
  std::optional<MomentumSettings> momenta;
  std::optional<Estimate> estimate;
};

MomentumSettings MomentumSettingsOf(const SamplerOptions& options);

// Factors for a step with momenta of other settings.
struct Scales {
  double momentum = 1;
  double thermostat = 1;
};
Scales ScalesOf(const GroupRecords& records, const SamplerOptions& options);

// Whether the step begins with new momenta, after T = 0.
bool IsDrawn(const GroupRecords& records, const SamplerOptions& options);

// Whether the record of the momenta is not of these options.
bool HasChanged(const GroupRecords& records, const SamplerOptions& options);

// Records where a noise estimate was given, if it is a new number; returns its
// factor for these options.
double FollowEstimate(GroupRecords& records, const SamplerOptions& options);

// To and from a param group of a state dict. Reading throws
// std::invalid_argument if a record is one that no chain leaves.
void WriteRecords(const GroupRecords& records,
                  const SamplerOptions& options,
                  StateDict& group);
GroupRecords ReadRecords(const StateDict& group, const SamplerOptions& options);

// The keys of the records that a sampler with these options keeps.
std::vector<std::string> RecordKeys(const SamplerOptions& options);

}  // namespace torch_sgmcmc
