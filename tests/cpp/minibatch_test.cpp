// Numbers below a huge bound. That minibatches are uniform, independent and
// shared by ranks: tests/posterior/test_data.py.
#include "host/minibatch.h"

#include "random/counter.h"
#include "statistics.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

// A bound of 3/4 of the range: without rejection the lower third of the numbers
// would be twice as likely as the rest.
TEST(DrawBelow, HasNoBiasForHugeBounds) {
  constexpr uint64_t kBound = uint64_t{3} << 62;
  constexpr int kDraws = 100000;
  const NoiseStream stream{3, 4, static_cast<uint32_t>(Purpose::kMinibatch)};
  int counts[3] = {};
  for (uint64_t i = 0; i < kDraws; ++i) {
    const uint64_t x = DrawBelow(kBound, stream, i);
    ASSERT_LT(x, kBound);
    ++counts[x >> 62];
  }
  for (const int count : counts) {
    EXPECT_LT(ZOfShare(count, kDraws, 1.0 / 3), kMaxZ);
  }
}

}  // namespace
}  // namespace torch_sgmcmc
