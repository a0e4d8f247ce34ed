// What a sampler keeps beside the options of its groups, which users may put
// back or exchange: its seed, what it has counted, and whose elements are which
// in the noise stream.
//
// Note [Numbers of elements]
// Noise is a function of (seed, step, purpose, element). Each parameter has a
// range of elements of its own, from its offset on and as long as its size;
// beyond next_offset nothing has ever been numbered. A parameter that grows
// would reach into its neighbour's range, and independent coordinates would
// share their noise: every step looks at sizes and refuses what has changed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "libtorch/core/method.h"
#include "libtorch/core/rescaling.h"
#include "torch_sgmcmc/count.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

struct Sampler::Ledger {
  // Of one param group.
  struct Group {
    std::vector<const void*> params;  // their TensorImpl, by which it is known
    std::vector<int64_t> offsets;
    std::vector<int64_t> sizes;
    Count step;
    Count num_skipped;
    // Whether the means of its priors are tensors.
    bool has_means = false;
    // Of what settings momenta and noise estimate are.
    GroupRecords records;

    // Numbers all parameters from `begin` on; returns where the next begin.
    int64_t number(const std::vector<at::Tensor>& all,
                   int64_t num_chains,
                   int64_t begin);
    // Counters on the device of these parameters, if capturable.
    void set_counters(int64_t steps,
                      int64_t skipped,
                      bool capturable,
                      const std::vector<at::Tensor>& all);
  };

  std::vector<Group> groups;
  int64_t next_offset = 0;
  int64_t seed = 0;
  bool capturable = false;
  // What the class of sampler counts besides; its hyperparameters mean nothing.
  std::unique_ptr<SamplerOptions> progress;

  // The parameters of the last step, all of which had a gradient and state that
  // fits.
  std::vector<const void*> moved;
  // Whether there are momenta that follow lr.
  bool keeps_momenta = false;
  // The operators that have made updates.
  std::vector<Method> methods;

  // Steps and, by group, what had no gradient in some: Note [Steps without a
  // gradient] in torch_sgmcmc/chain/absence.py.
  struct Absences {
    int64_t steps = 0;
    std::vector<std::vector<int64_t>> missed;
    std::vector<std::vector<int64_t>> later;  // after a step with one
    bool any = false;                         // is there one to look at
    bool said = false;
  } absences;
  bool said_nothing_moves = false;
};

// The first multiple of the noise block at or after offset + size.
int64_t NextOffset(int64_t offset, int64_t size);

// As SamplerOptions::chains_with_seeds() says: the elements of one chain.
int64_t SizeOf(const at::Tensor& param, int64_t num_chains);

}  // namespace torch_sgmcmc
