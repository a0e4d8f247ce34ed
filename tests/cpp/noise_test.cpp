// The transform from random words to normals, against the formulas that
// random/noise.inl documents, in double precision. lanes_test.cpp extends what
// is proved here for the portable lanes to all others.
#include "host/draws.h"
#include "lane_probes.h"
#include "random/counter.h"
#include "random/portable_noise.h"
#include "statistics.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

struct Pair {
  double z0;
  double z1;
};

Pair Reference(double radius, uint32_t w1) {
  const double angle =
      static_cast<double>(static_cast<int32_t>(w1)) * 0x1p-31 * std::atan(1.0);
  const double sine = radius * std::sin(angle);
  const double cosine = radius * std::cos(angle) * (w1 % 2 == 0 ? 1 : -1);
  return w1 & 2 ? Pair{sine, cosine} : Pair{cosine, sine};
}

double Radius(double u) { return std::sqrt(-2 * std::log(u)); }

// The uniform that word w0 stands for.
double Uniform(uint32_t w0) {
  return (static_cast<double>(w0 >> 1) + 0.5) * 0x1p-31;
}

// The same, rounded to float as the transform must.
double RoundedUniform(uint32_t w0) {
  const double k = static_cast<double>(static_cast<float>(w0 >> 1));
  return static_cast<double>(static_cast<float>((k + 0.5) * 0x1p-31));
}

struct Words {
  std::vector<uint32_t> w0;
  std::vector<uint32_t> w1;

  void Add(uint32_t a, uint32_t b) {
    w0.push_back(a);
    w1.push_back(b);
  }
};

// Words with one, two or all bits alike, their neighbours, and those around the
// places where the logarithm changes its exponent (2/3 of a power of two).
std::vector<uint32_t> SpecialWords() {
  std::vector<uint32_t> result;
  for (int bit = 0; bit <= 32; ++bit) {
    const uint64_t power = uint64_t{1} << bit;
    for (const uint64_t center : {power, power / 3 * 2, power + power / 2}) {
      for (int d = -40; d <= 40; ++d) {
        result.push_back(
            static_cast<uint32_t>(center + static_cast<uint64_t>(d)));
      }
    }
  }
  return result;
}

// Special words for the radius and the angle, and an even sweep of both.
Words Sweep() {
  Words words;
  const uint32_t some_angles[] = {
      0,          1,          2,          3,          0x7fffffff, 0x80000000,
      0x80000003, 0xffffffff, 0x40000001, 0xc0000002, 0x12345678};
  const uint32_t some_radii[] = {0,          1,          0xffffffff, 0xfffffffe,
                                 0x80000000, 0x55555555, 0x12345678};
  for (const uint32_t special : SpecialWords()) {
    for (const uint32_t angle : some_angles) words.Add(special, angle);
    for (const uint32_t radius : some_radii) words.Add(radius, special);
  }
  std::mt19937 random(7);
  constexpr uint32_t kStride = 4093;  // a prime, so all low bits occur
  for (uint64_t w = 0; w < uint64_t{1} << 32; w += kStride) {
    words.Add(static_cast<uint32_t>(w), static_cast<uint32_t>(random()));
    words.Add(static_cast<uint32_t>(random()), static_cast<uint32_t>(w));
  }
  while (words.w0.size() % 16 != 0) words.Add(0, 0);
  return words;
}

class BoxMullerTest : public testing::Test {
 protected:
  void SetUp() override {
    words_ = Sweep();
    z0_.resize(words_.w0.size());
    z1_.resize(words_.w0.size());
    LaneProbes()[0].box_muller(words_.w0.data(), words_.w1.data(),
                               static_cast<int64_t>(z0_.size()), z0_.data(),
                               z1_.data());
  }

  Words words_;
  std::vector<float> z0_, z1_;
};

// The largest error relative to the radius: 3.2e-7 over all 2^31 radii at angle
// 0, and another 1.6e-7 over all 2^32 angles.
constexpr double kMaxError = 4.8e-7;

TEST_F(BoxMullerTest, IsAccurateGivenTheRoundedUniform) {
  for (size_t i = 0; i < z0_.size(); ++i) {
    const uint32_t w0 = words_.w0[i];
    const uint32_t w1 = words_.w1[i];
    const double radius = Radius(RoundedUniform(w0));
    const Pair want = Reference(radius, w1);
    ASSERT_LE(std::abs(z0_[i] - want.z0), kMaxError * radius)
        << std::hex << w0 << " " << w1;
    ASSERT_LE(std::abs(z1_[i] - want.z1), kMaxError * radius)
        << std::hex << w0 << " " << w1;
  }
}

// Rounding u to 24 bits moves it by at most 2^-24 relatively: a shift of r by
// at most 2^-24 / r, and never by more than r where r is as small as that.
TEST_F(BoxMullerTest, IsAccurateGivenTheExactUniform) {
  for (size_t i = 0; i < z0_.size(); ++i) {
    const double radius = Radius(Uniform(words_.w0[i]));
    const double bound =
        kMaxError * radius + std::min(0x1p-24 / radius, std::sqrt(0x1p-23));
    const Pair want = Reference(radius, words_.w1[i]);
    ASSERT_LE(std::abs(z0_[i] - want.z0), bound) << std::hex << words_.w0[i];
    ASSERT_LE(std::abs(z1_[i] - want.z1), bound) << std::hex << words_.w0[i];
  }
}

// Gamma variates: their distribution against theory.

constexpr int kDraws = 400000;

NoiseStream Stream(uint64_t seed, uint64_t step) {
  return {seed, step, static_cast<uint32_t>(Purpose::kPrecision)};
}

std::vector<double> Draws(double shape) {
  std::vector<double> x(kDraws);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = DrawGamma(shape, Stream(20240607, 3), i);
  }
  return x;
}

// Shapes whose distribution function is elementary.
double Cdf(double shape, double x) {
  if (shape == 0.5) return std::erf(std::sqrt(x));
  if (shape == 1) return -std::expm1(-x);
  if (shape == 1.5) {
    return std::erf(std::sqrt(x)) - 2 * std::sqrt(x / M_PI) * std::exp(-x);
  }
  if (shape == 3) return 1 - std::exp(-x) * (1 + x + x * x / 2);
  throw std::logic_error("no formula for this shape");
}

class GammaDistribution : public testing::TestWithParam<double> {};

TEST_P(GammaDistribution, KolmogorovSmirnov) {
  std::vector<double> x = Draws(GetParam());
  for (double& each : x) each = Cdf(GetParam(), each);
  EXPECT_LT(Kolmogorov(x), kMaxKolmogorov);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GammaDistribution,
                         testing::Values(0.5, 1, 1.5, 3));

TEST(Gamma, RejectsInvalidShapes) {
  for (const double shape :
       {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    EXPECT_THROW(DrawGamma(shape, Stream(0, 0), 0), std::invalid_argument);
  }
  try {
    DrawGamma(-1, Stream(0, 0), 0);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(),
                 "Invalid shape: -1.000000 (must be finite and > 0)");
  }
}

}  // namespace
}  // namespace torch_sgmcmc
