// The update functors against the papers' formulas in long double, from the
// hyperparameters themselves, so that the coefficients' algebra is tested too.
//
// Tolerances are proved, not tuned: with u half an ulp of 1, each rounding of a
// coefficient or an operation adds u times the sum of the magnitudes of all
// terms; kRoundings counts the longest chain of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

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

template <class Real>
class Updates : public testing::Test {};
using RealTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(Updates, RealTypes);

TYPED_TEST(Updates, SGLD) {
  using Real = TypeParam;
  constexpr int kRoundings = 6;
  for (const Hyperparameters& h : kHyperparameters) {
    const SGLDUpdate<Real> update(
        SGLDCoefficients(h.lr, h.num_data, h.prior_precision, h.temperature));
    const long double lr = h.lr;
    const long double n = h.num_data;
    const long double decay = h.prior_precision / n;
    const long double noise = std::sqrt(2 * lr * h.temperature / n);
    for (const Inputs& in : RandomInputs()) {
      Real x[3] = {static_cast<Real>(in.theta),
                   static_cast<Real>(in.grad),
                   static_cast<Real>(in.mean)};
      update(x, static_cast<Real>(in.xi));
      const long double want = in.theta -
                               lr * (in.grad + decay * (in.theta - in.mean)) +
                               noise * in.xi;
      const long double terms =
          std::abs(in.theta) +
          lr * (std::abs(in.grad) +
                decay * (std::abs(in.theta) + std::abs(in.mean))) +
          noise * std::abs(in.xi);
      ASSERT_LE(std::abs(x[0] - want),
                kRoundings * UnitRoundoff<Real>() * terms);
      ASSERT_EQ(x[1], static_cast<Real>(in.grad));
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
    const long double lr = h.lr;
    const long double n = h.num_data;
    const long double decay = h.prior_precision / n;
    const long double a = kDecay;
    const long double u = kRoundings * UnitRoundoff<Real>();
    for (const Inputs& in : RandomInputs()) {
      const auto real = [](double x) { return static_cast<Real>(x); };
      const Real xi = real(in.xi);
      const long double grad = in.grad;
      const auto move = [&](long double v) {
        const long double g = 1 / (std::sqrt(v) + kEps);
        return lr * g * (grad + decay * (in.theta - in.mean));
      };
      const auto noise = [&](long double v) {
        const long double g = 1 / (std::sqrt(v) + kEps);
        return std::sqrt(2 * lr * h.temperature * g / n) * in.xi;
      };
      const auto terms = [&](long double v) {
        const long double g = 1 / (std::sqrt(v) + kEps);
        return std::abs(in.theta) +
               lr * g *
                   (std::abs(grad) +
                    decay * (std::abs(in.theta) + std::abs(in.mean))) +
               std::abs(noise(v));
      };
      const long double old = in.statistic;
      const Real root = real(1 / std::sqrt(std::sqrt(old) + kEps));
      Real x[4] = {real(in.theta), real(in.grad), root, real(in.mean)};
      frozen(x, xi);
      ASSERT_LE(std::abs(x[0] - (in.theta - move(old) + noise(old))),
                u * terms(old));
      ASSERT_EQ(x[1], real(in.grad));
      ASSERT_EQ(x[2], root);

      const long double v = a * old + (1 - a) * grad * grad;
      Real y[4] = {real(in.theta), real(in.grad), real(old), real(in.mean)};
      adapting(y, xi);
      ASSERT_LE(std::abs(y[0] - (in.theta - move(v) + noise(v))), u * terms(v));
      ASSERT_LE(std::abs(y[2] - v), 4 * UnitRoundoff<Real>() * v);

      // in.v is the curvature, 0.25 is J W.
      const long double curvature = in.v;
      const long double w = a * 0.25L + 2 * (1 - a) * grad * curvature;
      const long double w_size =
          a * 0.25L + 2 * (1 - a) * std::abs(grad * curvature);
      const long double g = 1 / (std::sqrt(v) + kEps);
      const long double slope =
          lr * h.temperature / n * g * g / (2 * std::sqrt(v));
      const long double jacobian =
          std::min(std::max(1 - lr * g * (curvature + decay), 0.0L), 1 / a);
      Real z[6] = {real(in.theta),
                   real(in.grad),
                   real(old),
                   real(0.25),
                   real(in.v),
                   real(in.mean)};
      corrected(z, xi);
      ASSERT_LE(std::abs(z[0] - (in.theta - move(v) + noise(v) - slope * w)),
                u * (terms(v) + slope * w_size));
      ASSERT_EQ(z[2], y[2]);
      ASSERT_LE(std::abs(z[3] - w * jacobian),
                u * w_size * (2 + lr * g * (std::abs(curvature) + decay)));
      ASSERT_EQ(z[4], real(in.v));
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
      const long double u = UnitRoundoff<Real>();
      for (const Inputs& in : RandomInputs()) {
        const auto expect = [&](const Real* x, double mass) {
          const long double pull = kKick * h.num_data * in.grad;
          const long double decay =
              kKick * h.prior_precision * (in.theta - in.mean);
          const long double decay_size =
              kKick * h.prior_precision *
              (std::abs(in.theta) + std::abs(in.mean));
          const long double r = in.v - pull - decay;
          const long double terms =
              std::abs(in.v) + std::abs(pull) + decay_size;
          ASSERT_LE(std::abs(x[2] - r), kRoundings * u * terms);
          ASSERT_LE(
              std::abs(x[0] - (in.theta + drift * r / mass)),
              kRoundings * u * (std::abs(in.theta) + drift * terms / mass));
          ASSERT_EQ(x[1], static_cast<Real>(in.grad));
        };
        const double mass = 0.25 + in.statistic;
        const Real from[4] = {static_cast<Real>(in.theta),
                              static_cast<Real>(in.grad),
                              static_cast<Real>(in.v),
                              static_cast<Real>(mass)};
        const Real mu = static_cast<Real>(in.mean);
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
    const long double lr = h.lr;
    const long double n = h.num_data;
    const long double heat = lr * h.temperature / n;
    const long double decay = h.prior_precision / n;
    const long double carry_0 = h.momentum;
    const long double noise = std::sqrt(2 * (1 - carry_0) * heat);
    const long double u = UnitRoundoff<Real>();
    for (const Inputs& in : RandomInputs()) {
      const double delta = in.statistic / 1024;
      Real x[5] = {static_cast<Real>(in.theta),
                   static_cast<Real>(in.grad),
                   static_cast<Real>(in.v),
                   static_cast<Real>(delta),
                   static_cast<Real>(in.mean)};
      update(x, static_cast<Real>(in.xi));
      const long double v = (carry_0 - delta) * in.v -
                            lr * (in.grad + decay * (in.theta - in.mean)) +
                            noise * in.xi;
      const long double terms =
          (carry_0 + delta) * std::abs(in.v) +
          lr * (std::abs(in.grad) +
                decay * (std::abs(in.theta) + std::abs(in.mean))) +
          noise * std::abs(in.xi);
      ASSERT_LE(std::abs(x[2] - v), kRoundings * u * terms);
      ASSERT_LE(std::abs(x[0] - (in.theta + v)),
                kRoundings * u * (std::abs(in.theta) + terms));
      ASSERT_EQ(x[1], static_cast<Real>(in.grad));
      if (heat == 0) {  // the thermostat rests
        ASSERT_EQ(x[3], static_cast<Real>(delta));
        continue;
      }
      const long double mean = (in.v + v) / 2;
      const long double size = (std::abs(in.v) + terms) / 2;
      const long double change = kRate * (mean * mean / heat - 1);
      ASSERT_LE(std::abs(x[3] - (delta + change)),
                kRoundings * u *
                    (delta + kRate + 2 * kRate * std::abs(mean) * size / heat));
    }
    EXPECT_EQ(update.needs_noise(), heat > 0);
    EXPECT_FALSE(update.skips(0));
  }
}

TYPED_TEST(Updates, SGHMC) {
  using Real = TypeParam;
  constexpr int kRoundings = 7;
  for (const Hyperparameters& h : kHyperparameters) {
    const SGHMCUpdate<Real> update(SGHMCCoefficients(h.lr,
                                                     h.momentum,
                                                     h.num_data,
                                                     h.prior_precision,
                                                     h.temperature,
                                                     h.noise_estimate));
    const long double lr = h.lr;
    const long double n = h.num_data;
    const long double decay = h.prior_precision / n;
    const long double alpha = 1 - static_cast<long double>(h.momentum);
    const long double noise =
        std::sqrt(2 * (alpha - h.noise_estimate) * lr * h.temperature / n);
    for (const Inputs& in : RandomInputs()) {
      Real x[4] = {static_cast<Real>(in.theta),
                   static_cast<Real>(in.grad),
                   static_cast<Real>(in.v),
                   static_cast<Real>(in.mean)};
      update(x, static_cast<Real>(in.xi));
      const long double v = (1 - alpha) * in.v -
                            lr * (in.grad + decay * (in.theta - in.mean)) +
                            noise * in.xi;
      const long double terms =
          (1 - alpha) * std::abs(in.v) +
          lr * (std::abs(in.grad) +
                decay * (std::abs(in.theta) + std::abs(in.mean))) +
          noise * std::abs(in.xi);
      const long double u = UnitRoundoff<Real>();
      ASSERT_LE(std::abs(x[2] - v), kRoundings * u * terms);
      // The position moves with the new momentum.
      ASSERT_LE(std::abs(x[0] - (in.theta + v)),
                kRoundings * u * (std::abs(in.theta) + terms));
      ASSERT_EQ(x[1], static_cast<Real>(in.grad));
    }
    const bool noisy =
        h.lr > 0 && h.temperature > 0 && h.noise_estimate < 1 - h.momentum;
    EXPECT_EQ(update.needs_noise(), noisy);
    EXPECT_FALSE(update.skips(1));
  }
}

TYPED_TEST(Updates, SGHMCNoiseAware) {
  using Real = TypeParam;
  constexpr int kRoundings = 7;
  int clamped = 0;
  for (const Hyperparameters& h : kHyperparameters) {
    const SGHMCNoiseAwareUpdate<Real> update(
        SGHMCCoefficients(h.lr,
                          h.momentum,
                          h.num_data,
                          h.prior_precision,
                          h.temperature,
                          h.noise_estimate));
    const long double lr = h.lr;
    const long double n = h.num_data;
    const long double decay = h.prior_precision / n;
    const long double alpha = 1 - static_cast<long double>(h.momentum);
    const long double all =
        2 * (alpha - h.noise_estimate) * lr * h.temperature / n;
    for (const Inputs& in : RandomInputs()) {
      Real x[5] = {static_cast<Real>(in.theta),
                   static_cast<Real>(in.grad),
                   static_cast<Real>(in.v),
                   static_cast<Real>(in.statistic),
                   static_cast<Real>(in.mean)};
      update(x, static_cast<Real>(in.xi));
      const long double taken = lr * lr * in.statistic;
      const long double variance = all - taken;
      const long double u = UnitRoundoff<Real>();
      const long double variance_error = 4 * u * (all + taken);
      if (std::abs(variance) < 4 * variance_error) continue;
      clamped += variance < 0;
      const long double noise = variance > 0 ? std::sqrt(variance) : 0;
      const long double noise_error = variance > 0 ? variance_error / noise : 0;
      const long double v = (1 - alpha) * in.v -
                            lr * (in.grad + decay * (in.theta - in.mean)) +
                            noise * in.xi;
      const long double terms =
          (1 - alpha) * std::abs(in.v) +
          lr * (std::abs(in.grad) +
                decay * (std::abs(in.theta) + std::abs(in.mean))) +
          noise * std::abs(in.xi);
      const long double bound =
          kRoundings * u * terms + noise_error * std::abs(in.xi);
      ASSERT_LE(std::abs(x[2] - v), bound);
      ASSERT_LE(std::abs(x[0] - (in.theta + v)),
                bound + u * (std::abs(in.theta) + terms));
      ASSERT_EQ(x[1], static_cast<Real>(in.grad));
      ASSERT_EQ(x[3], static_cast<Real>(in.statistic));
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

// Of each coordinate the update that a group has with lr / M, alpha C / M and
// beta / M, after a draw as well.
TYPED_TEST(Updates, SGHMCByCoordinate) {
  using Real = TypeParam;
  constexpr double kLr = 0.05, kMomentum = 0.75, kN = 20, kT = 1.5, kBeta = 0.1;
  const SGHMCCoefficients usual(kLr, kMomentum, kN, 2, kT, kBeta);
  std::mt19937 random(4);
  std::uniform_real_distribution<double> mass_of(0.7, 3);
  for (const Inputs& in : RandomInputs()) {
    const auto mass = static_cast<double>(static_cast<Real>(mass_of(random)));
    const double friction = in.xi > 0 ? mass : 1.25;
    const SGHMCCoefficients own(kLr / mass,
                                1 - (1 - kMomentum) * friction / mass,
                                kN,
                                2,
                                kT,
                                kBeta / mass);
    const double variance = 0.01 * std::min(in.statistic, 1.0);
    for (const bool is_drawn : {false, true}) {
      const SGHMCCoefficients to_own = is_drawn ? own.AfterDraw(3) : own;
      Real x[7] = {Real(in.theta),
                   Real(in.grad),
                   Real(in.v),
                   Real(variance),
                   Real(mass),
                   Real(friction),
                   Real(in.mean)};
      SGHMCByCoordinateCoefficients all{usual, false};
      if (is_drawn) all = all.AfterDraw(3);
      const double v = is_drawn ? own.DrawStd() * in.v : in.v;
      const double terms = std::abs(v) + kLr / mass * std::abs(in.grad) +
                           std::abs(in.theta) + std::abs(in.mean) + 1;
      const double bound =
          40 * static_cast<double>(UnitRoundoff<Real>()) * terms;
      Real y[4] = {x[0], x[1], Real(v), x[6]};
      SGHMCUpdate<Real>{to_own}(y, Real(in.xi));
      Real z[7];
      std::copy_n(x, 7, z);
      SGHMCByCoordinateUpdate<Real>{all}(z, Real(in.xi));
      ASSERT_NEAR(z[2], y[2], bound);
      ASSERT_NEAR(z[0], y[0], bound);
      for (int i = 3; i < 7; ++i) ASSERT_EQ(z[i], x[i]);

      // The same with a variance.
      Real w[5] = {x[0], x[1], Real(v), x[3], x[6]};
      SGHMCNoiseAwareUpdate<Real>{to_own}(w, Real(in.xi));
      all.has_variance = true;
      SGHMCByCoordinateUpdate<Real>{all}(x, Real(in.xi));
      ASSERT_NEAR(x[2], w[2], bound);
    }
  }
  const SGHMCByCoordinateCoefficients all{usual, false};
  for (uint64_t step = 0; step < 6; ++step) {
    EXPECT_EQ(SGHMCByCoordinateUpdate<Real>(all.AfterDraw(3)).skips(step),
              step % 3 != 0);
    EXPECT_EQ(SGHMCByCoordinateUpdate<Real>(all.WithoutDraw(3)).skips(step),
              step % 3 == 0);
  }
}

TYPED_TEST(Updates, ControlVariate) {
  using Real = TypeParam;
  constexpr int kRoundings = 2;
  const ControlVariateUpdate<Real> update(ControlVariateCoefficients{});
  EXPECT_FALSE(update.needs_noise());
  for (const Inputs& in : RandomInputs()) {
    Real x[3] = {static_cast<Real>(in.grad),
                 static_cast<Real>(in.v),
                 static_cast<Real>(in.statistic)};
    update(x, Real(0));
    const long double want =
        static_cast<long double>(in.grad) - in.v + in.statistic;
    const long double terms = std::abs(in.grad) + std::abs(in.v) + in.statistic;
    ASSERT_LE(std::abs(x[0] - want), kRoundings * UnitRoundoff<Real>() * terms);
    ASSERT_EQ(x[1], static_cast<Real>(in.v));
    ASSERT_EQ(x[2], static_cast<Real>(in.statistic));
    // At the anchor: the full gradient to the last bit, whatever its size.
    Real y[3] = {x[1], x[1], x[2]};
    update(y, Real(0));
    ASSERT_EQ(y[0], y[2]);
  }
}

TYPED_TEST(Updates, GradientVariance) {
  using Real = TypeParam;
  constexpr int kRoundings = 6;
  for (const double weight : {0.0, 0.01, 0.5, 1.0}) {
    const GradientVarianceUpdate<Real> update(
        GradientVarianceCoefficients{weight});
    EXPECT_FALSE(update.needs_noise());
    for (const Inputs& in : RandomInputs()) {
      Real x[3] = {static_cast<Real>(in.grad),
                   static_cast<Real>(in.statistic),
                   static_cast<Real>(in.v)};
      update(x, Real(0));
      const long double d = static_cast<long double>(in.grad) - in.v;
      const long double want =
          in.statistic + weight * (d * d / 2 - in.statistic);
      const long double terms =
          in.statistic + weight * (d * d / 2 + in.statistic);
      ASSERT_LE(std::abs(x[1] - want),
                kRoundings * UnitRoundoff<Real>() * terms);
      ASSERT_EQ(x[0], static_cast<Real>(in.grad));
      ASSERT_EQ(x[2], static_cast<Real>(in.grad));
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
      update(x, static_cast<Real>(in.xi));
      const long double want = static_cast<long double>(std) * in.xi;
      ASSERT_LE(std::abs(x[0] - want),
                2.5L * UnitRoundoff<Real>() * std::abs(want));
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
