// The update functors against the papers' formulas in long double, from the
// hyperparameters themselves, so that the coefficients' algebra is tested too.
//
// Tolerances are proved, not tuned: with u half an ulp of 1, each rounding of a
// coefficient or an operation adds u times the sum of the magnitudes of all
// terms; the number of roundings is that of the longest chain of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "methods/baoa.h"
#include "methods/control_variate.h"
#include "methods/gaussian.h"
#include "methods/gradient_variance.h"
#include "methods/hmc.h"
#include "methods/psgld.h"
#include "methods/sghmc.h"
#include "methods/sgld.h"
#include "methods/sgnht.h"

namespace torch_sgmcmc {
namespace {

struct Hyperparameters {
  double lr, momentum, num_data, prior_precision, temperature, noise_estimate;
};

const Hyperparameters kHyperparameters[] = {
    {0.1, 0.99, 50000, 1, 1, 0},
    {0.1, 0.99, 50000, 1, 1, 0.004},
    {0.02, 0.9, 1, 0, 1, 0.05},
    {1.7, 0, 3, 25, 0.3, 0},
    {1e-4, 0.5, 1000, 0.5, 7, 0.5},  // noise_estimate takes all the friction
    {0.1, 0.9, 10, 1, 0, 0},         // T = 0
    {0, 0.9, 10, 1, 1, 0},           // lr = 0
};

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
    result.push_back({draw(scale),
                      draw(1),
                      draw(0.1f),
                      std::abs(draw(scale)),
                      draw(1),
                      draw(scale)});
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
Sum operator/(const Sum& a, long double b) {
  return {a.value / b, a.size / std::abs(b)};
}

template <class Real>
void ExpectRounded(Real x, const Sum& want, long double roundings) {
  ASSERT_LE(std::abs(x - want.value),
            roundings * UnitRoundoff<Real>() * want.size);
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

TYPED_TEST(Updates, SGLD) {
  using Real = TypeParam;
  for (const Hyperparameters& h : kHyperparameters) {
    const SGLDUpdate<Real> update(
        SGLDCoefficients(h.lr, h.num_data, h.prior_precision, h.temperature));
    const Pull pull(h);
    const long double noise =
        std::sqrt(2 * pull.lr * h.temperature / h.num_data);
    for (const Inputs& in : RandomInputs()) {
      Real x[3] = {Real(in.theta), Real(in.grad), Real(in.mean)};
      update(x, Real(in.xi));
      ExpectRounded(x[0], in.theta - pull(in) + noise * in.xi, 6);
      ASSERT_EQ(x[1], Real(in.grad));
    }
    EXPECT_EQ(update.needs_noise(), h.lr > 0 && h.temperature > 0);
    EXPECT_FALSE(update.skips(0));
    EXPECT_FALSE(update.skips(1));
  }
}

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

// Two reciprocal roots of three roundings each; G holds the second one twice,
// G^2 four times and 1 / sqrt(V) the first.
TYPED_TEST(Updates, PSGLD) {
  using Real = TypeParam;
  constexpr int kRoundings = 25;
  constexpr double kDecay = 0.9;
  constexpr double kEps = 0.01;
  for (const Hyperparameters& h : kHyperparameters) {
    const PSGLDCoefficients c(
        h.lr, h.num_data, h.prior_precision, h.temperature, kDecay, kEps);
    const PSGLDFrozenUpdate<Real> frozen(c);
    const PSGLDAdaptingUpdate<Real> adapting(c);
    const PSGLDCorrectedUpdate<Real> corrected(c);
    const Pull pull(h);
    const long double lr = h.lr;
    const long double heat = lr * h.temperature / h.num_data;
    const long double a = kDecay;
    for (const Inputs& in : RandomInputs()) {
      const Real xi = Real(in.xi);
      const long double grad = in.grad;
      const auto preconditioner = [](long double v) {
        return 1 / (std::sqrt(v) + kEps);
      };
      const auto moved = [&](long double v) {
        const long double g = preconditioner(v);
        return in.theta - g * pull(in) + std::sqrt(2 * heat * g) * in.xi;
      };
      const long double old = in.statistic;
      const Real root = Real(std::sqrt(preconditioner(old)));
      Real x[4] = {Real(in.theta), Real(in.grad), root, Real(in.mean)};
      frozen(x, xi);
      ExpectRounded(x[0], moved(old), kRoundings);
      ASSERT_EQ(x[1], Real(in.grad));
      ASSERT_EQ(x[2], root);

      const long double v = a * old + (1 - a) * grad * grad;
      Real y[4] = {Real(in.theta), Real(in.grad), Real(old), Real(in.mean)};
      adapting(y, xi);
      ExpectRounded(y[0], moved(v), kRoundings);
      ExpectRounded(y[2], v, 4);

      // in.v is the curvature, 0.25 is J W.
      const long double curvature = in.v;
      const Sum w = a * Sum(0.25L) + 2 * (1 - a) * grad * curvature;
      const long double g = preconditioner(v);
      const long double slope = heat * g * g / (2 * std::sqrt(v));
      const long double jacobian = std::min(
          std::max(1 - lr * g * (curvature + pull.decay), 0.0L), 1 / a);
      Real z[6] = {Real(in.theta),
                   Real(in.grad),
                   Real(old),
                   Real(0.25),
                   Real(in.v),
                   Real(in.mean)};
      corrected(z, xi);
      ExpectRounded(z[0], moved(v) - slope * w, kRoundings);
      ASSERT_EQ(z[2], y[2]);
      const long double change = lr * g * (std::abs(curvature) + pull.decay);
      ExpectRounded(
          z[3], Sum(w.value * jacobian, w.size * (2 + change)), kRoundings);
      ASSERT_EQ(z[4], Real(in.v));
    }
    const bool noisy = h.lr > 0 && h.temperature > 0;
    EXPECT_EQ(frozen.needs_noise(), noisy);
    EXPECT_EQ(adapting.needs_noise(), noisy);
    EXPECT_EQ(corrected.needs_noise(), noisy);
    EXPECT_FALSE(corrected.skips(0));
  }
}

TYPED_TEST(Updates, Leapfrog) {
  using Real = TypeParam;
  constexpr int kRoundings = 9;
  constexpr double kKick = 0.03;
  for (const double drift : {0.05, 0.0}) {
    for (const Hyperparameters& h : kHyperparameters) {
      const LeapfrogCoefficients c(kKick, drift, h.num_data, h.prior_precision);
      const LeapfrogUpdate<Real> update(c);
      const LeapfrogMassUpdate<Real> massive(c);
      const KickUpdate<Real> kick(c);
      for (const Inputs& in : RandomInputs()) {
        const auto expect = [&](const Real* x, double mass) {
          const Sum decay =
              kKick * h.prior_precision * (Sum(in.theta) - in.mean);
          const Sum r = in.v - Sum(kKick * h.num_data * in.grad) - decay;
          ExpectRounded(x[2], r, kRoundings);
          ExpectRounded(x[0], in.theta + drift * r / mass, kRoundings);
          ASSERT_EQ(x[1], Real(in.grad));
        };
        const double mass = 0.25 + in.statistic;
        const Real from[4] = {
            Real(in.theta), Real(in.grad), Real(in.v), Real(mass)};
        const Real mu = Real(in.mean);
        Real x[4] = {from[0], from[1], from[2], mu};
        update(x, 0);
        expect(x, 1);
        Real y[5] = {from[0], from[1], from[2], from[3], mu};
        massive(y, 0);
        expect(y, static_cast<double>(from[3]));
        ASSERT_EQ(y[3], from[3]);
        if (drift != 0) continue;
        Real z[4] = {from[0], from[1], from[2], mu};
        kick(z, 0);
        expect(z, 1);
        ASSERT_EQ(z[0], from[0]);
      }
    }
  }
}

TYPED_TEST(Updates, SGNHT) {
  using Real = TypeParam;
  constexpr int kRoundings = 9;
  constexpr double kRate = 0.02;
  for (const Hyperparameters& h : kHyperparameters) {
    const SGNHTUpdate<Real> update(SGNHTCoefficients(
        h.lr, h.momentum, h.num_data, h.prior_precision, h.temperature, kRate));
    const Pull pull(h);
    const long double heat = pull.lr * h.temperature / h.num_data;
    const long double carry_0 = h.momentum;
    const long double noise = std::sqrt(2 * (1 - carry_0) * heat);
    for (const Inputs& in : RandomInputs()) {
      const double delta = in.statistic / 1024;
      Real x[5] = {Real(in.theta),
                   Real(in.grad),
                   Real(in.v),
                   Real(delta),
                   Real(in.mean)};
      update(x, Real(in.xi));
      const Sum v = (Sum(carry_0) - delta) * in.v - pull(in) + noise * in.xi;
      ExpectRounded(x[2], v, kRoundings);
      ExpectRounded(x[0], in.theta + v, kRoundings);
      ASSERT_EQ(x[1], Real(in.grad));
      if (heat == 0) {  // the thermostat rests
        ASSERT_EQ(x[3], Real(delta));
        continue;
      }
      const Sum mean = (in.v + v) / 2;
      const long double m = mean.value;
      ExpectRounded(
          x[3],
          Sum(delta + kRate * (m * m / heat - 1),
              delta + kRate + 2 * kRate * std::abs(m) * mean.size / heat),
          kRoundings);
    }
    EXPECT_EQ(update.needs_noise(), heat > 0);
    EXPECT_FALSE(update.skips(0));
  }
}

SGHMCCoefficients CoefficientsOf(const Hyperparameters& h) {
  return SGHMCCoefficients(h.lr,
                           h.momentum,
                           h.num_data,
                           h.prior_precision,
                           h.temperature,
                           h.noise_estimate);
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
  const SGHMCUpdate<Real> sghmc(
      SGHMCCoefficients(0.1, 0.75, 50, 2, 1, 0.01, kMomentumScale));
  const SGHMCUpdate<Real> same_sghmc(
      SGHMCCoefficients(0.1, 0.75, 50, 2, 1, 0.01));
  const BAOAUpdate<Real> baoa(
      BAOACoefficients(0.1, 0.75, 50, 2, 1, 0.01, kMomentumScale));
  const BAOAUpdate<Real> same_baoa(BAOACoefficients(0.1, 0.75, 50, 2, 1, 0.01));
  const SGNHTUpdate<Real> sgnht(SGNHTCoefficients(
      0.1, 0.75, 50, 2, 1, 0.01, kMomentumScale, kThermostatScale));
  const SGNHTUpdate<Real> same_sgnht(
      SGNHTCoefficients(0.1, 0.75, 50, 2, 1, 0.01));
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
    Real y[5] = {
        x[0], x[1], kMomentumScale * v, kThermostatScale * delta, x[4]};
    sgnht(x, xi);
    same_sgnht(y, xi);
    for (int i = 0; i < 5; ++i) ASSERT_EQ(x[i], y[i]);
  }
}

TYPED_TEST(Updates, SGHMC) {
  using Real = TypeParam;
  constexpr int kRoundings = 7;
  for (const Hyperparameters& h : kHyperparameters) {
    const SGHMCUpdate<Real> update(CoefficientsOf(h));
    const Pull pull(h);
    const long double noise = std::sqrt(InjectedBy(h));
    for (const Inputs& in : RandomInputs()) {
      Real x[4] = {Real(in.theta), Real(in.grad), Real(in.v), Real(in.mean)};
      update(x, Real(in.xi));
      const Sum v = h.momentum * Sum(in.v) - pull(in) + noise * in.xi;
      ExpectRounded(x[2], v, kRoundings);
      // The position moves with the new momentum.
      ExpectRounded(x[0], in.theta + v, kRoundings);
      ASSERT_EQ(x[1], Real(in.grad));
    }
    const bool noisy =
        h.lr > 0 && h.temperature > 0 && h.noise_estimate < 1 - h.momentum;
    EXPECT_EQ(update.needs_noise(), noisy);
    EXPECT_FALSE(update.skips(1));
  }
}

TYPED_TEST(Updates, SGHMCNoiseAware) {
  using Real = TypeParam;
  const long double u = UnitRoundoff<Real>();
  int clamped = 0;
  for (const Hyperparameters& h : kHyperparameters) {
    const SGHMCNoiseAwareUpdate<Real> update(CoefficientsOf(h));
    const Pull pull(h);
    const long double all = InjectedBy(h);
    for (const Inputs& in : RandomInputs()) {
      Real x[5] = {Real(in.theta),
                   Real(in.grad),
                   Real(in.v),
                   Real(in.statistic),
                   Real(in.mean)};
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

// METHODS: beta = lr N Var(grad) / (2 T), so a known variance must do the same
// as the noise_estimate that it amounts to.
TYPED_TEST(Updates, KnownVarianceEqualsItsNoiseEstimate) {
  using Real = TypeParam;
  constexpr double kLr = 0.05, kMomentum = 0.9, kN = 20, kT = 1.5, kV = 0.1;
  const double beta = kLr * kN * kV / (2 * kT);
  const SGHMCUpdate<Real> plain(
      SGHMCCoefficients(kLr, kMomentum, kN, 2, kT, beta));
  const SGHMCNoiseAwareUpdate<Real> aware(
      SGHMCCoefficients(kLr, kMomentum, kN, 2, kT, 0));
  Real x[4] = {Real(0.7), Real(-0.2), Real(0.01), Real(0.3)};
  Real y[5] = {x[0], x[1], x[2], Real(kV), x[3]};
  plain(x, Real(1.25));
  aware(y, Real(1.25));
  const double tolerance = 20 * static_cast<double>(UnitRoundoff<Real>());
  EXPECT_NEAR(x[0], y[0], tolerance);
  EXPECT_NEAR(x[2], y[2], tolerance);
}

// Note [Momentum drawn afresh]: a part 1 / (1 + m) of the gradient, and of its
// noise, at unchanged injected heat.
TYPED_TEST(Updates, SGHMCAfterADraw) {
  using Real = TypeParam;
  constexpr double kLr = 0.05, kMomentum = 0.75, kN = 20, kT = 1.5;
  constexpr double kBeta = 0.1, kHeat = 2 * kLr * kT / kN;
  const SGHMCCoefficients usual(kLr, kMomentum, kN, 2, kT, kBeta);
  const SGHMCUpdate<Real> update(usual.AfterDraw(3));
  for (uint64_t step = 0; step < 9; ++step) {
    EXPECT_EQ(update.skips(step), step % 3 != 0);
    EXPECT_EQ(SGHMCUpdate<Real>(usual.WithoutDraw(3)).skips(step),
              step % 3 == 0);
    EXPECT_FALSE(SGHMCUpdate<Real>(usual).skips(step));
  }
  const double part = 1 / (1 + kMomentum);
  const double noise = std::sqrt((1 - kMomentum - part * part * kBeta) * kHeat);
  Real x[4] = {Real(0.75), Real(-0.25), Real(0.5), Real(0.25)};
  update(x, Real(1.25));
  const double v =
      kMomentum * 0.5 - part * kLr * (-0.25 + 2 / kN * 0.5) + noise * 1.25;
  const double tolerance = 20 * static_cast<double>(UnitRoundoff<Real>());
  EXPECT_NEAR(x[2], v, tolerance);
  EXPECT_NEAR(x[0], 0.75 + v, tolerance);
  EXPECT_NEAR(usual.DrawStd(), std::sqrt(part * kHeat), 1e-15);
}

TYPED_TEST(Updates, ControlVariate) {
  using Real = TypeParam;
  const ControlVariateUpdate<Real> update(ControlVariateCoefficients{});
  EXPECT_FALSE(update.needs_noise());
  for (const Inputs& in : RandomInputs()) {
    Real x[3] = {Real(in.grad), Real(in.v), Real(in.statistic)};
    update(x, Real(0));
    ExpectRounded(x[0], Sum(in.grad) - in.v + in.statistic, 2);
    ASSERT_EQ(x[1], Real(in.v));
    ASSERT_EQ(x[2], Real(in.statistic));
    // At the anchor: the full gradient to the last bit, whatever its size.
    Real y[3] = {x[1], x[1], x[2]};
    update(y, Real(0));
    ASSERT_EQ(y[0], y[2]);
  }
}

TYPED_TEST(Updates, GradientVariance) {
  using Real = TypeParam;
  for (const double weight : {0.0, 0.01, 0.5, 1.0}) {
    const GradientVarianceUpdate<Real> update(
        GradientVarianceCoefficients{weight});
    EXPECT_FALSE(update.needs_noise());
    for (const Inputs& in : RandomInputs()) {
      Real x[3] = {Real(in.grad), Real(in.statistic), Real(in.v)};
      update(x, Real(0));
      const long double d = static_cast<long double>(in.grad) - in.v;
      const Sum want = in.statistic + weight * (Sum(d * d / 2) - in.statistic);
      ExpectRounded(x[1], want, 6);
      ASSERT_EQ(x[0], Real(in.grad));
      ASSERT_EQ(x[2], Real(in.grad));
    }
  }
}

TYPED_TEST(Updates, GaussianFill) {
  using Real = TypeParam;
  for (const double std : {0.0, 1.0, 0.3, 1e-6}) {
    const GaussianFill<Real> update(GaussianCoefficients{std});
    EXPECT_EQ(update.needs_noise(), std != 0);
    for (const Inputs& in : RandomInputs()) {
      Real x[1] = {Real(99)};
      update(x, Real(in.xi));
      ExpectRounded(x[0], std * Sum(in.xi), 2.5L);
    }
  }
}

TYPED_TEST(Updates, GaussianFillEveryFewSteps) {
  const GaussianFill<TypeParam> always(GaussianCoefficients{1.0});
  const GaussianFill<TypeParam> every(GaussianCoefficients{1.0, {5, true}});
  for (uint64_t step = 0; step < 20; ++step) {
    EXPECT_FALSE(always.skips(step));
    EXPECT_EQ(every.skips(step), step % 5 != 0);
  }
}

}  // namespace
}  // namespace torch_sgmcmc
