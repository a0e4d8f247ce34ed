#include "torch_sgmcmc/seeds.h"

#include "host/draws.h"
#include "host/minibatch.h"
#include "libtorch/checks.h"
#include "random/counter.h"

namespace torch_sgmcmc {

int64_t fold_in(int64_t seed, int64_t stream) {
  CheckInteger("stream", stream);
  return FoldIn(seed, static_cast<uint64_t>(stream));
}

std::vector<int64_t> draw_minibatch(int64_t num_data, int64_t batch_size,
                                    int64_t seed, int64_t step,
                                    bool replacement, int64_t num_replicas,
                                    int64_t rank) {
  // A negative step becomes too large, and is refused.
  return DrawMinibatches(
      num_data, batch_size,
      /*count=*/1, replacement,
      KeyedStream(seed, static_cast<uint64_t>(step), Purpose::kMinibatch),
      {num_replicas, rank});
}

}  // namespace torch_sgmcmc
