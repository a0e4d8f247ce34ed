// The bounce clock against closed forms, and its arrivals against its rates.
#include "host/bounce_clock.h"

#include "host/line_regression.h"
#include "random/counter.h"
#include "statistics.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

constexpr int kDraws = 200000;

NoiseStream Stream(uint64_t seed, uint64_t step) {
  return {seed, step, static_cast<uint32_t>(Purpose::kBounceClock)};
}

BounceClock ClockWith(const std::vector<Observation>& data,
                      const SlopePrior& prior = {1, 0.5, 9, 0, 0}) {
  std::vector<double> saved = {data.back().time, 1,
                               prior.mean,       prior.variance,
                               prior.lines,      prior.error_excess,
                               prior.error_time};
  for (const Observation& o : data) {
    saved.insert(saved.end(), {o.time, o.value, o.variance});
  }
  return BounceClock::Load(saved);
}

struct Case {
  std::string name;
  std::vector<Observation> data;
  SlopePrior prior = {1, 0.5, 9, 0, 0};
};

std::vector<Case> Cases() {
  return {
      {"after a bounce", {{0, -3, 0.5}}},
      {"uphill", {{0, 2, 0.1}}},
      {"one way", {{0, -3, 0.5}, {1, -2.2, 0.4}, {2.5, -0.3, 0.6}}},
      {"exact", {{0, -3, 0}, {1, -1, 0}}},
      {"never", {{0, -3, 1e-4}, {1, -5, 1e-4}, {2, -7, 1e-4}}},
      {"no prior yet", {{0, -3, 0.5}}, {}},
      {"zero slope", {{0, 2, 1e-8}}, {0, 1e-300, 9, 0, 0}},
      {"downwards", {{0, 4, 1e-4}, {1, 3, 1e-4}, {1.5, 2.5, 1e-4}}},
      {"bent", {{0, -1, 0.01}, {1, 1, 0.01}}, {1, 0.5, 9, 2, 3}},
      {"mostly noise", {{0, 1, 1e4}, {0.01, -30, 1e4}}},
      {"tiny", {{0, -3e-60, 1e-121}}, {1e-120, 1e-240, 9, 0, 0}},
      {"huge", {{0, -3e60, 1e119}}, {1e120, 1e240, 9, 0, 0}},
  };
}

class ClockCases : public testing::TestWithParam<Case> {};

TEST_P(ClockCases, TheRateIsTheUpperEndOfTheBand) {
  const BounceClock clock = ClockWith(GetParam().data, GetParam().prior);
  const LineFit fit = clock.regression().Fit();
  for (const double k : {0.5, 3.0, 8.0}) {
    const PiecewiseRate rate = clock.Rate(k);
    const double end = rate.Find(std::numeric_limits<double>::max()).time;
    for (int i = 0; i <= 5000; ++i) {
      const double t = clock.now() + (end - clock.now()) * i / 5000;
      const double band = k * std::sqrt(fit.Variance(t));
      const double excess = rate.Value(t) - (fit.Mean(t) + band);
      // Chords are never below, and at most 0.8 % of the band above.
      EXPECT_GE(excess, -1e-12 * (std::abs(fit.Mean(t)) + band));
      EXPECT_LE(excess, 0.008 * band + 1e-12 * std::abs(fit.Mean(t)));
    }
  }
}

// The integral of the rate up to an arrival is a unit exponential variable, cut
// off at the horizon.
TEST_P(ClockCases, ArrivalsFollowTheIntegratedRate) {
  const BounceClock clock = ClockWith(GetParam().data, GetParam().prior);
  const PiecewiseRate rate = clock.Rate(3);
  const double end = rate.Find(std::numeric_limits<double>::max()).time;
  const double total = rate.Integral(end);
  std::vector<double> u;
  int looks = 0;
  for (int i = 0; i < kDraws; ++i) {
    const NextEvent next = clock.Next(3, 0, Stream(17, i));
    ASSERT_GE(next.wait, 0);
    if (next.event == ClockEvent::kObserve) {
      EXPECT_EQ(clock.now() + next.wait, end);
      ++looks;
      continue;
    }
    ASSERT_EQ(next.event, ClockEvent::kProposal);
    const double time = clock.now() + next.wait;
    ASSERT_NEAR(next.rate, rate.Value(time), 1e-9 * next.rate);
    u.push_back(std::expm1(-rate.Integral(time)) / std::expm1(-total));
  }
  const double p = std::exp(-total);
  EXPECT_LT(std::abs(looks - kDraws * p),
            kMaxZ * std::sqrt(kDraws * p * (1 - p)) + 1e-6 * kDraws * p + 1e-9);
  if (!u.empty()) {
    EXPECT_LT(Kolmogorov(u), kMaxKolmogorov);
  }
}

INSTANTIATE_TEST_SUITE_P(Situations, ClockCases, testing::ValuesIn(Cases()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

TEST(BounceClock, RefreshmentsCompete) {
  // Rate 4 of proposals against 1 of refreshments.
  const BounceClock clock = ClockWith({{0, 4, 1e-12}}, {0, 1e-300, 9, 0, 0});
  int refreshments = 0;
  double sum = 0;
  int looks = 0;
  for (int i = 0; i < kDraws; ++i) {
    const NextEvent next = clock.Next(0, 1, Stream(2, i));
    refreshments += next.event == ClockEvent::kRefreshment;
    looks += next.event == ClockEvent::kObserve;
    sum += next.wait;
    EXPECT_EQ(next.rate > 0, next.event == ClockEvent::kProposal);
  }
  const double n = kDraws;
  EXPECT_LT(ZOfShare(refreshments, n, 0.2), kMaxZ);
  EXPECT_LT(std::abs(sum / n - 0.2) / (0.2 / std::sqrt(n)), kMaxZ);
  EXPECT_EQ(looks, 0);
}

// Whatever the lines do between: none, looks alone, or bounces in a potential
// that is quadratic along every line.
TEST(BounceClock, TimesBetweenRefreshmentsAreExponential) {
  constexpr double kRate = 0.7;
  std::mt19937_64 random(8);
  std::normal_distribution<double> normal;
  for (const double curvature : {0.0, -1.0, 1.0}) {
    BounceClock clock;
    double start = curvature;  // G where the line begins
    double wait = 0;
    int bounces = 0;
    std::vector<double> u;
    for (uint64_t step = 0; u.size() < kDraws / 10; ++step) {
      const NoiseStream stream = Stream(5, step);
      const NextEvent next = clock.Next(3, kRate, stream);
      wait += next.wait;
      const double value = start + curvature * (clock.now() + next.wait);
      if (next.event == ClockEvent::kRefreshment) {
        u.push_back(-std::expm1(-kRate * wait));
        wait = 0;
        start = curvature * (curvature > 0 ? normal(random) : 1);
        clock.Restart();
        clock.Observe(0, start, 0);
      } else if (next.event == ClockEvent::kProposal &&
                 BounceClock::Accepts(next.rate, value, stream)) {
        clock.Bounce(next.wait, value, 0, -value);
        start = -value;
        ++bounces;
      } else {
        clock.Observe(next.wait, value, 0);
      }
    }
    EXPECT_LT(Kolmogorov(u), kMaxKolmogorov);
    double sum = 0;
    for (const double each : u) sum -= std::log1p(-each);
    const double n = static_cast<double>(u.size());
    EXPECT_LT(std::abs(sum / n - 1) * std::sqrt(n), kMaxZ);
    EXPECT_EQ(bounces > n / 2, curvature > 0);
  }
}

TEST(BounceClock, AcceptsWithTheRatioAsProbability) {
  for (const double p : {0.02, 0.5, 0.97}) {
    int accepted = 0;
    for (int i = 0; i < kDraws; ++i) {
      accepted += BounceClock::Accepts(7, 7 * p, Stream(3, i));
    }
    EXPECT_LT(ZOfShare(accepted, kDraws, p), kMaxZ);
  }
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(BounceClock::Accepts(7, 7, Stream(3, i)));
    EXPECT_TRUE(BounceClock::Accepts(7, 1e9, Stream(3, i)));
    EXPECT_FALSE(BounceClock::Accepts(7, 0, Stream(3, i)));
    EXPECT_FALSE(BounceClock::Accepts(7, -5, Stream(3, i)));
    EXPECT_FALSE(BounceClock::Accepts(7, std::nan(""), Stream(3, i)));
  }
}

// The decision does not depend on when the proposal came.
TEST(BounceClock, DecisionsAreIndependentOfArrivals) {
  const BounceClock clock = ClockWith({{0, 4, 1}});
  double sum = 0;
  std::vector<double> waits;
  double mean = 0;
  for (int i = 0; i < kDraws; ++i) {
    waits.push_back(clock.Next(3, 0, Stream(4, i)).wait);
    mean += waits.back() / kDraws;
  }
  double variance = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double d = waits[static_cast<size_t>(i)] - mean;
    variance += d * d / kDraws;
    sum += d * (BounceClock::Accepts(1, 0.5, Stream(4, i)) - 0.5);
  }
  EXPECT_LT(std::abs(sum) / std::sqrt(0.25 * variance * kDraws), kMaxZ);
}

TEST(BounceClock, LooksFirst) {
  BounceClock clock;
  for (int i = 0; i < 2; ++i) {
    const NextEvent next = clock.Next(3, 1e9, Stream(0, i));
    EXPECT_EQ(next.event, ClockEvent::kObserve);
    EXPECT_EQ(next.wait, 0);
    clock.Observe(0, -2, 1);
    EXPECT_GT(clock.Next(3, 0, Stream(0, i)).wait, 0);
    clock.Observe(0.5, -1, 1);
    EXPECT_EQ(clock.now(), 0.5);
    clock.Restart();
    EXPECT_EQ(clock.now(), 0);
    EXPECT_TRUE(clock.regression().empty());
  }
}

TEST(BounceClock, ABounceStartsALineFromItsObservation) {
  BounceClock clock;
  clock.Observe(0, -2, 1);
  clock.Observe(1, 1, 1);
  clock.Bounce(0.5, 2, 0.25, -2);
  EXPECT_EQ(clock.now(), 0);
  ASSERT_EQ(clock.regression().history().size(), 1U);
  const Observation& o = clock.regression().history()[0];
  EXPECT_EQ(o.time, 0);
  EXPECT_EQ(o.value, -2);
  EXPECT_EQ(o.variance, 0.25);
  EXPECT_EQ(clock.regression().prior().lines, 1);
  EXPECT_GT(clock.regression().prior().mean, 1);
}

TEST(BounceClock, WarnsOfManyViolations) {
  // 3 * 0.135 % + 1 % are too many.
  EXPECT_EQ(BounceClock::Warning(0, 0, 3), "");
  EXPECT_EQ(BounceClock::Warning(999, 999, 3), "");
  EXPECT_EQ(BounceClock::Warning(10000, 140, 3), "");
  EXPECT_EQ(BounceClock::Warning(10000, 141, 3).substr(0, 104),
            "At 141 of 10000 proposals of SBPS (1.4%) the observed rate was "
            "above the proposed one; 0.1% are expected");
  EXPECT_EQ(BounceClock::Warning(1000, 1000, 0), "");  // half are expected
}

TEST(BounceClock, LoadRefusesWhatIsNoClock) {
  const double kNan = std::nan("");
  const std::string kSize = "Invalid clock: it has ";
  const auto message = [](const std::vector<double>& saved) {
    return MessageOf<std::invalid_argument>([&] { BounceClock::Load(saved); });
  };
  const std::string size =
      " numbers (must be 7, and 3 for each of at most 32 observations)";
  EXPECT_EQ(message({}), kSize + "0" + size);
  EXPECT_EQ(message(std::vector<double>(8, 1)), kSize + "8" + size);
  EXPECT_EQ(message(std::vector<double>(7 + 99, 1)), kSize + "106" + size);
  EXPECT_EQ(message({0, 1, 0, kNan, 0, 0, 0}),
            "Invalid clock: a number is not finite");
  const std::string order = "Invalid clock: its observations are not in order";
  EXPECT_EQ(message({1, 1, 0, 1, 1, 0, 0, 2, 0, 0}), order);
  EXPECT_EQ(message({1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0.5, 0, 0}), order);
  EXPECT_EQ(message({1, 1, 0, 1, 1, 0, 0, 1, 0, -1}), order);
  EXPECT_EQ(message({0, 1, 0, -1, 0, 0, 0}),
            "Invalid clock: a time, a variance or a count is negative");
  EXPECT_EQ(message({0, 1, 0, 1, 0, 0, 0}), "no error");
}

// Proposals thinned by the observed rate are a process of the true rate: here
// that of exact observations of G(t) = t - 1 after a bounce, whose first bounce
// has P(T > t) = exp(-[t - 1]^2 / 2).
TEST(BounceClock, ThinningGivesTheTrueRate) {
  std::vector<double> u;
  BounceClock clock;
  clock.Observe(0, -1, 0);
  uint64_t step = 0;
  int violations = 0;
  constexpr int kBounces = 40000;
  for (int bounce = 0; bounce < kBounces;) {
    const NextEvent next = clock.Next(3, 0, Stream(6, step));
    const double t = clock.now() + next.wait;
    const double g = t - 1;
    violations += next.event == ClockEvent::kProposal && g > next.rate;
    if (next.event == ClockEvent::kProposal &&
        BounceClock::Accepts(next.rate, g, Stream(6, step))) {
      u.push_back(std::exp(-0.5 * g * g));
      clock.Bounce(next.wait, g, 0, -1);
      ++bounce;
    } else {
      clock.Observe(next.wait, g, 0);
    }
    ++step;
  }
  EXPECT_LE(violations, 2);  // before the slope is known
  EXPECT_LT(step, 3 * kBounces);
  EXPECT_LT(Kolmogorov(u), kMaxKolmogorov);
}

// Arrivals at a rate that is a polygon, against closed forms.

PiecewiseRate Polygon(const std::vector<std::pair<double, double>>& nodes) {
  PiecewiseRate rate;
  for (const auto& [time, value] : nodes) rate.Add(time, value);
  return rate;
}

TEST(PiecewiseRate, WhatNeverArrives) {
  for (const auto& rate :
       {Polygon({{0, -1}, {7, -3}}), Polygon({{0, 0}, {7, 0}}),
        Polygon({{0, 2}, {1, -5}, {7, -1}}), Polygon({{0, 1}, {7, 0}})}) {
    const PiecewiseRate::Arrival arrival = rate.Find(3.6);
    EXPECT_FALSE(arrival.found);
    EXPECT_EQ(arrival.time, 7);
  }
}

TEST(PiecewiseRate, IsTheInverseOfItsIntegral) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  std::exponential_distribution<double> exponential;
  for (const double time_scale : {1e-100, 1e-9, 1.0, 1e9, 1e100}) {
    for (int trial = 0; trial < 2000; ++trial) {
      PiecewiseRate rate;
      double time = normal(random) * time_scale;
      double value = 0;
      for (int i = 0; i < 9; ++i) {
        // Slopes of all sizes, and none.
        if (trial % 3 != 0 || i % 2 == 0) value = 3 * normal(random);
        rate.Add(time, value / time_scale);
        if (i == 0) rate.Add(time, value / time_scale);
        time += exponential(random) * time_scale;
      }
      const double total = rate.Integral(time);
      for (const double part : {1e-12, 1e-3, 0.2, 0.7, 0.999}) {
        const PiecewiseRate::Arrival arrival = rate.Find(part * total);
        if (total == 0) {
          EXPECT_FALSE(arrival.found);
          continue;
        }
        ASSERT_TRUE(arrival.found);
        EXPECT_GE(arrival.value, 0);
        EXPECT_NEAR(rate.Integral(arrival.time), part * total, 1e-9 * total);
      }
      EXPECT_FALSE(rate.Find(1.001 * total + 1e-300).found);
    }
  }
}

// Which multiples of an interval a trajectory has passed.

// At the very times, and next to them, where quotients are rounded to either
// side.
TEST(SampleTimes, AreRightToTheLastBit) {
  int other = 0;
  for (const double interval : {0.1, 0.3, 0.7, 1e-3, 1.0 / 3, 49.0}) {
    for (int64_t k = 1; k < 5000; ++k) {
      const double time = static_cast<double>(k) * interval;
      const double before = std::nextafter(time, 0.0);
      ASSERT_EQ(SamplesBy(time, interval), k);
      ASSERT_EQ(SamplesBy(std::nextafter(time, 1e9), interval), k);
      ASSERT_EQ(SamplesBy(before, interval), k - 1);
      other += static_cast<int>(std::floor(before / interval) !=
                                static_cast<double>(k - 1));
    }
  }
  EXPECT_GT(other, 0);  // of the quotients
}

}  // namespace
}  // namespace torch_sgmcmc
