// The sum of squares: exact where it can be, accurate otherwise, and added in
// one order on the CPU (with any number of threads) and in the CUDA kernels.
#include "apply/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cuda_on_host.h"
#include "tensors.h"

namespace torch_sgmcmc {
namespace {

template <class T>
class Reduce : public testing::Test {};
using Types = testing::Types<float, double, BFloat16, Half>;
TYPED_TEST_SUITE(Reduce, Types);

TYPED_TEST(Reduce, SumOfSquaresIsAccurateAndEqualsTheCudaOrder) {
  std::mt19937 random(23);
  std::normal_distribution<float> normal;
  std::vector<std::vector<TypeParam>> data;
  std::vector<Segment> segments;
  long double exact = 0;
  size_t terms = 0;
  for (const int64_t numel :
       {1, 2, 15, 16, 17, 100, 4095, 4096, 4097, 8192, 100003}) {
    std::vector<TypeParam>& x = data.emplace_back();
    for (int64_t i = 0; i < numel; ++i) {
      x.push_back(static_cast<TypeParam>(normal(random)));
      const long double value = static_cast<double>(x.back());
      exact += value * value;
      ++terms;
    }
  }
  for (std::vector<TypeParam>& x : data) {
    Segment s{};
    s.data[0] = x.data();
    s.numel = static_cast<int64_t>(x.size());
    s.dtype = kScalarType<TypeParam>;
    segments.push_back(s);
    const double cpu = ReduceOnCpu(segments, Square());
    EXPECT_EQ(cpu, (cuda_on_host::Reduce<TypeParam>(Square(), segments)));
  }
  // A running sum of positive terms loses less than half an ulp a term; in
  // stretches and lanes the longest chain is a few hundred terms long.
  constexpr double kLongestChain = 256 + kLanes + 40 + 2;
  EXPECT_NEAR(ReduceOnCpu(segments, Square()),
              static_cast<double>(exact),
              kLongestChain * 0x1p-53 * static_cast<double>(exact));
}

TYPED_TEST(Reduce, SmallIntegersAreExact) {
  std::vector<TypeParam> x;
  double exact = 0;
  for (int i = 0; i < 20000; ++i) {
    x.push_back(static_cast<TypeParam>(static_cast<float>(i % 13 - 6)));
    exact += static_cast<double>((i % 13 - 6) * (i % 13 - 6));
  }
  Segment s{};
  s.data[0] = x.data();
  s.numel = static_cast<int64_t>(x.size());
  s.dtype = kScalarType<TypeParam>;
  EXPECT_EQ(ReduceOnCpu({s}, Square()), exact);
}

TEST(Reduce, OfNothingIsZero) { EXPECT_EQ(ReduceOnCpu({}, Square()), 0.0); }

}  // namespace
}  // namespace torch_sgmcmc
