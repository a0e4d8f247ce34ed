// Update functors against the papers' formulas in long double, from the
// hyperparameters themselves, so that the coefficients' algebra is tested too:
// what tests/operators/test_fused_updates.py does not compare with a reference.
//
// Tolerances are proved, not tuned: with u half an ulp of 1, each rounding of a
// coefficient or an operation adds u times the sum of the magnitudes of all
// terms; the number of roundings is that of the longest chain of them.
#include "numbers.h"
#include "ops/baoa.h"
#include "ops/psgld.h"
#include "ops/sghmc.h"
#include "ops/sgnht.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

struct Hyperparameters {
  double lr, momentum, num_data, prior_precision, temperature, noise_estimate;
};

const Hyperparameters kHyperparameters[] = {
    {0.1, 0.99, 50000, 1, 1, 0},    {0.1, 0.99, 50000, 1, 1, 0.004},
    {0.02, 0.9, 1, 0, 1, 0.05},     {1.7, 0, 3, 25, 0.3, 0},
    {1e-4, 0.5, 1000, 0.5, 7, 0.5},  // noise_estimate takes all the friction
    {0.1, 0.9, 10, 1, 0, 0},         // T = 0
    {0, 0.9, 10, 1, 1, 0},           // lr = 0
};

Numbers NumbersOf(const Hyperparameters& h) {
  return Numbers({{"lr", h.lr},
                  {"momentum", h.momentum},
                  {"num_data", h.num_data},
                  {"prior_precision", h.prior_precision},
                  {"temperature", h.temperature},
                  {"noise_estimate", h.noise_estimate}});
}

struct Inputs {
  double theta, grad, v, statistic, xi, mean;
};

// Inputs that are exact in float, so that both types see the same numbers.
std::vector<Inputs> RandomInputs() {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  const auto draw = [&](float scale) {
    return static_cast<double>(scale * normal(random));
  };
  std::vector<Inputs> result;
  for (int i = 0; i < 2000; ++i) {
    const float scale = std::exp2(static_cast<float>(i % 21 - 10));
    result.push_back({draw(scale), draw(1), draw(0.1f), std::abs(draw(scale)),
                      draw(1), draw(scale)});
  }
  return result;
}

template <class Real>
long double UnitRoundoff() {
  return std::numeric_limits<Real>::epsilon() / 2;
}

// A number, and the sum of the magnitudes of all terms that it is made of.
struct Sum {
  long double value;
  long double size;

  Sum(long double x) : value(x), size(std::abs(x)) {}
  Sum(long double x, long double s) : value(x), size(s) {}
};

Sum operator+(const Sum& a, const Sum& b) {
  return {a.value + b.value, a.size + b.size};
}
Sum operator-(const Sum& a, const Sum& b) {
  return {a.value - b.value, a.size + b.size};
}
Sum operator*(const Sum& a, const Sum& b) {
  return {a.value * b.value, a.size * b.size};
}

// What gradient and prior take from a parameter or a momentum in a step.
struct Pull {
  long double lr, decay;

  Pull(const Hyperparameters& h)
      : lr(h.lr),
        decay(static_cast<long double>(h.prior_precision) / h.num_data) {}
  Sum operator()(const Inputs& in) const {
    return lr * (in.grad + decay * (Sum(in.theta) - in.mean));
  }
};

template <class Real>
class Updates : public testing::Test {};
using RealTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(Updates, RealTypes);

// 1.5 units in the last place, over every exponent.
TYPED_TEST(Updates, ReciprocalRoot) {
  using Real = TypeParam;
  std::mt19937 random(5);
  std::uniform_real_distribution<double> mantissa(1, 4);
  for (int exponent = -126; exponent < 126; ++exponent) {
    for (int i = 0; i < 500; ++i) {
      const Real x = static_cast<Real>(std::ldexp(mantissa(random), exponent));
      const long double want = 1 / std::sqrt(static_cast<long double>(x));
      ASSERT_LE(std::abs(ReciprocalRoot(x) / want - 1),
                3 * UnitRoundoff<Real>());
    }
  }
  EXPECT_TRUE(std::isfinite(ReciprocalRoot(Real(0))));
}

// The variance of a step's noise.
long double InjectedBy(const Hyperparameters& h) {
  const long double alpha = 1 - static_cast<long double>(h.momentum);
  return 2 * (alpha - h.noise_estimate) * h.lr * h.temperature / h.num_data;
}

// Factors of momenta and thermostats are those of what is read.
TYPED_TEST(Updates, StateOfOtherSettings) {
  using Real = TypeParam;
  constexpr Real kMomentumScale(0.5);
  constexpr Real kThermostatScale(0.25);
  const Numbers same =
      NumbersOf({0.1, 0.75, 50, 2, 1, 0.01}).With({{"thermostat_rate", 0.01}});
  const Numbers scaled = same.With({{"momentum_scale", kMomentumScale},
                                    {"thermostat_scale", kThermostatScale}});
  const SGHMCUpdate<Real> sghmc{SGHMCCoefficients(scaled)};
  const SGHMCUpdate<Real> same_sghmc{SGHMCCoefficients(same)};
  const BAOAUpdate<Real> baoa{scaled};
  const BAOAUpdate<Real> same_baoa{same};
  const SGNHTUpdate<Real> sgnht{scaled};
  const SGNHTUpdate<Real> same_sgnht{same};
  for (const Inputs& in : RandomInputs()) {
    const Real v(in.v);
    const Real delta(in.statistic / 1024);
    const Real xi(in.xi);
    const auto compare = [&](const auto& update, const auto& same) {
      Real x[4] = {Real(in.theta), Real(in.grad), v, Real(in.mean)};
      Real y[4] = {x[0], x[1], kMomentumScale * v, x[3]};
      update(x, xi);
      same(y, xi);
      for (int i = 0; i < 4; ++i) ASSERT_EQ(x[i], y[i]);
    };
    compare(sghmc, same_sghmc);
    compare(baoa, same_baoa);
    Real x[5] = {Real(in.theta), Real(in.grad), v, delta, Real(in.mean)};
    Real y[5] = {x[0], x[1], kMomentumScale * v, kThermostatScale * delta,
                 x[4]};
    sgnht(x, xi);
    same_sgnht(y, xi);
    for (int i = 0; i < 5; ++i) ASSERT_EQ(x[i], y[i]);
  }
}

TYPED_TEST(Updates, SGHMCNoiseAware) {
  using Real = TypeParam;
  const long double u = UnitRoundoff<Real>();
  int clamped = 0;
  for (const Hyperparameters& h : kHyperparameters) {
    const SGHMCNoiseAwareUpdate<Real> update{SGHMCCoefficients(NumbersOf(h))};
    const Pull pull(h);
    const long double all = InjectedBy(h);
    for (const Inputs& in : RandomInputs()) {
      Real x[5] = {Real(in.theta), Real(in.grad), Real(in.v),
                   Real(in.statistic), Real(in.mean)};
      update(x, Real(in.xi));
      const long double taken = pull.lr * pull.lr * in.statistic;
      const long double variance = all - taken;
      const long double variance_error = 4 * u * (all + taken);
      if (std::abs(variance) < 4 * variance_error) continue;
      clamped += variance < 0;
      const long double noise = variance > 0 ? std::sqrt(variance) : 0;
      const long double noise_error = variance > 0 ? variance_error / noise : 0;
      const Sum v = h.momentum * Sum(in.v) - pull(in) + noise * in.xi;
      const long double bound = 7 * u * v.size + noise_error * std::abs(in.xi);
      ASSERT_LE(std::abs(x[2] - v.value), bound);
      const Sum theta = in.theta + v;
      ASSERT_LE(std::abs(x[0] - theta.value), bound + u * theta.size);
      ASSERT_EQ(x[1], Real(in.grad));
      ASSERT_EQ(x[3], Real(in.statistic));
    }
  }
  EXPECT_GT(clamped, 100);  // the clamp at zero was seen
}

}  // namespace
}  // namespace torch_sgmcmc
