// A piece of work as a sampler sees it that knows the type of its options.
#pragma once

#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

template <class Options>
const Options& OptionsOfWork(const Work& work) {
  return static_cast<const Options&>(*work.options);
}

}  // namespace torch_sgmcmc
