#include "torch_sgmcmc/seeds.h"

#include "host/fold_in.h"
#include "libtorch/core/checks.h"

namespace torch_sgmcmc {

int64_t fold_in(int64_t seed, int64_t stream) {
  CheckInteger("stream", stream);
  return FoldIn(seed, static_cast<uint64_t>(stream));
}

}  // namespace torch_sgmcmc
