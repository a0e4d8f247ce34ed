// The regression of the bounce clock, against the normal equations.
#include "host/line_regression.h"

#include "host/bounce_clock.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

constexpr double kFloor = 1e-3;

// Posterior mean and covariance of (b0, b1) from the normal equations.
struct Posterior {
  double mean[2];
  double cov[2][2];
};

double FloorOf(const std::vector<Observation>& data) {
  double largest = 0;
  for (const auto& o : data) largest = std::max(largest, std::abs(o.value));
  return kFloor * kFloor * largest * largest;
}

Posterior Solve(const std::vector<Observation>& data, double m, double s2) {
  double a[2][2] = {{0, 0}, {0, 1 / s2}};
  double b[2] = {0, m / s2};
  for (const auto& o : data) {
    const double w = 1 / (o.variance + FloorOf(data));
    a[0][0] += w;
    a[0][1] += w * o.time;
    a[1][1] += w * o.time * o.time;
    b[0] += w * o.value;
    b[1] += w * o.time * o.value;
  }
  const double det = a[0][0] * a[1][1] - a[0][1] * a[0][1];
  const double c[2][2] = {{a[1][1] / det, -a[0][1] / det},
                          {-a[0][1] / det, a[0][0] / det}};
  return {{c[0][0] * b[0] + c[0][1] * b[1], c[0][1] * b[0] + c[1][1] * b[1]},
          {{c[0][0], c[0][1]}, {c[1][0], c[1][1]}}};
}

std::vector<Observation> SomeData(uint64_t seed, int count) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<Observation> data;
  double time = 0;
  for (int i = 0; i < count; ++i) {
    data.push_back({time, -2 + 3 * time + 0.5 * normal(random),
                    0.1 + 0.3 * std::abs(normal(random))});
    time += 0.1 + 0.2 * std::abs(normal(random));
  }
  return data;
}

void ExpectPredictions(const LineFit& fit, const Posterior& p, double last,
                       double tolerance) {
  for (const double t : {0.0, 0.3, 1.0, 40.0}) {
    const double mean = p.mean[0] + p.mean[1] * t;
    const double rho2 =
        p.cov[0][0] + 2 * t * p.cov[0][1] + t * t * p.cov[1][1] + last;
    EXPECT_NEAR(fit.Mean(t), mean, tolerance * (1 + std::abs(mean)));
    EXPECT_NEAR(fit.Variance(t), rho2, tolerance * rho2);
  }
}

TEST(LineRegression, IsThePosteriorOfTheNormalEquations) {
  for (int count = 1; count < 12; ++count) {
    const std::vector<Observation> data = SomeData(7, count);
    const LineRegression regression(data, {1.5, 0.7, 3, 0, 0});
    const Posterior p = Solve(data, 1.5, 0.7);
    const double last = data.back().variance + FloorOf(data);
    ExpectPredictions(regression.Fit(), p, last, 1e-12);
  }
}

TEST(LineRegression, ALocalOneForgets) {
  constexpr double kObservationDecay = 0.8;
  for (const double lines : {0, 3}) {
    for (int count = 1; count < 12; ++count) {
      std::vector<Observation> data = SomeData(7, count);
      const SlopePrior prior = {-1.5, 0.7, lines, 0, 0};
      LineRegression regression(data, prior);
      regression.set_observation_decay(kObservationDecay);
      double square = 0;
      for (const auto& o : data) {
        square = std::max(square, o.value * o.value + o.variance);
      }
      // Weights that are e times smaller are of variances e times larger.
      const double slope = lines > 0 ? 1.5 + std::sqrt(0.7) : square;
      const double floor = FloorOf(data);
      const double last = data.back().variance + floor;
      for (auto& o : data) {
        const double past = data.back().time - o.time;
        o.variance = (o.variance + floor) *
                         std::exp(kObservationDecay * std::sqrt(slope) * past) -
                     floor;
      }
      const Posterior p = lines > 0 ? Solve(data, -1.5, 0.7)
                                    : Solve(data, -1.5, square * square);
      ExpectPredictions(regression.Fit(), p, last, 1e-11);
    }
  }
}

TEST(LineRegression, ExactObservationsHaveFiniteWeights) {
  LineRegression regression;
  regression.Add({0, -2, 0});
  regression.Add({1, 1, 0});
  const LineFit fit = regression.Fit();
  EXPECT_NEAR(fit.slope, 3, 1e-4);
  EXPECT_NEAR(fit.Mean(1), 1, 1e-4);
  EXPECT_NEAR(std::sqrt(fit.Variance(1)), kFloor * 2 * std::sqrt(2), 1e-4);
}

TEST(LineRegression, TheLastObservationIsNeverForgotten) {
  for (const double observation_decay : {1e10, 1e300}) {
    LineRegression regression;
    regression.set_observation_decay(observation_decay);
    for (const double time : {0, 1, 2}) regression.Add({time, 3 * time, 0});
    EXPECT_EQ(regression.Fit().Mean(2), 6);
  }
}

TEST(LineRegression, HistoryIsBounded) {
  LineRegression regression;
  for (int i = 0; i < 100; ++i) {
    regression.Add({0.1 * i, std::sin(0.1 * i), 1e-4});
  }
  ASSERT_EQ(regression.history().size(), LineRegression::kHistory);
  EXPECT_EQ(regression.history()[0].time, 0.1 * 68);
  EXPECT_EQ(regression.last_time(), 0.1 * 99);
}

// log p(G | m, s^2) for the flat prior on b0, by integrals over b0 and b1 in
// closed form: what is left after projection is N(m, s^2 + 1 / square).
double LogMarginal(const std::vector<Observation>& data, double m, double s2) {
  double weight = 0;
  double centre = 0;
  double mean = 0;
  for (const auto& o : data) {
    const double w = 1 / (o.variance + FloorOf(data));
    weight += w;
    centre += w * o.time;
    mean += w * o.value;
  }
  centre /= weight;
  mean /= weight;
  double square = 0;
  double product = 0;
  for (const auto& o : data) {
    const double w = 1 / (o.variance + FloorOf(data));
    square += w * (o.time - centre) * (o.time - centre);
    product += w * (o.time - centre) * (o.value - mean);
  }
  const double spread = s2 + 1 / square;
  const double error = product / square - m;
  return -0.5 * (std::log(spread) + error * error / spread);
}

TEST(LineRegression, PriorClimbsTheMarginalLikelihood) {
  constexpr double kLines = 4;
  for (const uint64_t seed : {1, 2, 3, 4, 5}) {
    const std::vector<Observation> data = SomeData(seed, 6);
    const double m = 1.5;
    const double s2 = 0.7;
    LineRegression regression(data, {m, s2, kLines, 0, 0});
    regression.Restart();
    constexpr double kStep = 1e-5;
    const double by_m =
        (LogMarginal(data, m + kStep, s2) - LogMarginal(data, m - kStep, s2)) /
        (2 * kStep);
    const double by_s2 =
        (LogMarginal(data, m, s2 + kStep) - LogMarginal(data, m, s2 - kStep)) /
        (2 * kStep);
    const double w = 1 / (kLines + 1);
    EXPECT_NEAR(regression.prior().mean, m + w * s2 * by_m, 1e-7);
    EXPECT_NEAR(regression.prior().variance, s2 + w * 2 * s2 * s2 * by_s2,
                1e-7);
    EXPECT_EQ(regression.prior().lines, kLines + 1);
    EXPECT_TRUE(regression.empty());
  }
}

TEST(LineRegression, OneObservationTeachesNothing) {
  LineRegression regression({{0, 3, 1}}, {1, 2, 5, 0, 0});
  regression.Restart();
  EXPECT_EQ(regression.prior().mean, 1);
  EXPECT_EQ(regression.prior().variance, 2);
  EXPECT_EQ(regression.prior().lines, 5);
}

TEST(LineRegression, BendingIsLearntAndAStraightLineHasNone) {
  std::mt19937_64 random(6);
  std::normal_distribution<double> normal;
  for (const double bend : {0.0, 2.0}) {
    LineRegression regression;
    double sum = 0;
    constexpr int kLines = 3000;
    for (int line = 0; line < kLines; ++line) {
      for (int i = 0; i < 6; ++i) {
        const double t = 0.5 * i;
        regression.Add({t, t + bend * t * t + 0.3 * normal(random), 0.09});
      }
      regression.Restart();
      sum += regression.prior().curvature() / kLines;
    }
    if (bend == 0) {
      EXPECT_LT(sum, 0.05);  // of the variance of the observations
    } else {
      EXPECT_GT(sum, 1);
    }
  }
}

// The rate of SBPS by the examples of a minibatch.

const std::vector<double> kLosses = {1, 2, 3, 4};
const std::vector<double> kDerivatives = {1, 3, 5, 7};  // 4, and 20 / 3

Moments Of(const std::vector<double>& losses) {
  return MomentsOf(losses.data(), kDerivatives.data(), 4);
}

TEST(RateOf, IsOfTheWholeEnergy) {
  const RateEstimate rate = RateOf(Of(kLosses), 100, 2, true, 6);
  EXPECT_EQ(rate.value, 100 * 4 / 2.0 + 6 / 2.0);
  // Of a mean of 4, and 50 of these.
  EXPECT_DOUBLE_EQ(rate.variance, 20 / 3.0 / 4 * 50 * 50);
  EXPECT_TRUE(rate.finite());
}

TEST(RateOf, VariesLessWithoutReplacement) {
  const double with = RateOf(Of(kLosses), 16, 1, true, 0).variance;
  EXPECT_DOUBLE_EQ(RateOf(Of(kLosses), 16, 1, false, 0).variance,
                   with * 12 / 16);
  EXPECT_EQ(RateOf(Of(kLosses), 4, 1, false, 0).variance, 0);
}

TEST(RateOf, SaysWhatIsNotFinite) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(RateOf(Of(kLosses), 16, 1, true, kInfinity).finite());
  EXPECT_FALSE(RateOf({0, 4, 1, kInfinity}, 16, 1, true, 0).finite());
  EXPECT_FALSE(RateOf({3, 5, kInfinity, 1}, 16, 1, true, 0).finite());
  EXPECT_EQ(Of({1, kInfinity, 3, -kInfinity}).bad, 2);
}

}  // namespace
}  // namespace torch_sgmcmc
