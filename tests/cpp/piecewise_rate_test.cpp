// Arrivals at a rate that is a polygon, against closed forms.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "host/bounce_clock.h"

namespace torch_sgmcmc {
namespace {

PiecewiseRate Polygon(const std::vector<std::pair<double, double>>& nodes) {
  PiecewiseRate rate;
  for (const auto& [time, value] : nodes) rate.Add(time, value);
  return rate;
}

void ExpectArrival(const PiecewiseRate& rate, double area, double time,
                   double value) {
  const PiecewiseRate::Arrival arrival = rate.Find(area);
  EXPECT_TRUE(arrival.found);
  EXPECT_NEAR(arrival.time, time, 1e-14 * std::abs(time));
  EXPECT_NEAR(arrival.value, value, 1e-14 * value);
}

TEST(PiecewiseRate, ClosedForms) {
  // Zero slope.
  ExpectArrival(Polygon({{2, 4}, {5, 4}}), 3, 2.75, 4);
  // From 0 upwards: area s t^2 / 2; downwards from 6 to 0 in 3: 6 t - t^2.
  ExpectArrival(Polygon({{0, 0}, {10, 20}}), 9, 3, 6);
  ExpectArrival(Polygon({{0, 6}, {3, 0}}), 5, 1, 4);
  // A negative intercept: nothing happens before the crossing at 4.
  ExpectArrival(Polygon({{0, -8}, {10, 12}}), 9, 7, 6);
  // Past the crossing downwards, a stretch of zeros, and up again.
  ExpectArrival(Polygon({{0, 2}, {2, -2}, {3, -2}, {5, 2}, {9, 2}}), 1 + 1 + 3,
                6.5, 2);
  // A jump, and nodes at one time.
  ExpectArrival(Polygon({{0, 1}, {1, 1}, {1, 5}, {1, 3}, {4, 3}}), 4, 2, 3);
  // No area at all: the first moment of a positive rate.
  ExpectArrival(Polygon({{1, -1}, {3, 1}}), 0, 2, 0);
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

}  // namespace
}  // namespace torch_sgmcmc
