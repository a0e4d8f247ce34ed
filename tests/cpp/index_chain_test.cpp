// The logarithm in the index chain's decisions.
#include "host/index_chain.h"

#include "testing.h"

namespace torch_sgmcmc {
namespace {

constexpr int kDraws = 200000;

NoiseStream Stream(uint64_t seed, uint64_t step) {
  return {seed, step, static_cast<uint32_t>(Purpose::kIndexChain)};
}

void ExpectLog(double u) {
  const long double exact = std::log(static_cast<long double>(u));
  const double ulp = 0x1p-52 * static_cast<double>(std::abs(exact));
  EXPECT_NEAR(LogOfUniform(u), static_cast<double>(exact), 4 * ulp) << u;
  EXPECT_LT(LogOfUniform(u), 0);
}

TEST(IndexChain, LogarithmIsAccurate) {
  for (uint64_t k = 0; k < kDraws; ++k) {
    ExpectLog(IndexUniform(Stream(1, 2), k, 0));
  }
  // Every power of two, its neighbours, and those of the cuts at 2^e / sqrt 2.
  for (int e = -53; e < 0; ++e) {
    for (const double m : {1.0, std::sqrt(0.5), std::sqrt(2.0), 1.5}) {
      const double u = std::ldexp(m, e);
      ExpectLog(u);
      ExpectLog(std::nextafter(u, 0));
      if (u < 1) ExpectLog(std::nextafter(u, 1));
    }
  }
  ExpectLog(1 - 0x1p-53);  // the largest and the smallest uniform
  ExpectLog(0x1p-53);
}

}  // namespace
}  // namespace torch_sgmcmc
