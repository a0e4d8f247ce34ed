// Losses that change where the parameters do not.
#include "host/closure_watch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace torch_sgmcmc {
namespace {

int64_t After(int64_t before, std::vector<double> known, double first) {
  std::vector<double> now = known;
  now[0] = first;
  return ChangesRunning(
      before, known, now, /*temperature=*/2, /*num_data=*/100);
}

TEST(ClosureWatch, CountsChangesRunning) {
  EXPECT_EQ(After(0, {5, 7}, 5), 0);
  EXPECT_EQ(After(0, {5, 7}, 6), 1);
  EXPECT_EQ(After(2, {5, 7}, 4), 3);
  EXPECT_EQ(After(2, {5, 7}, 5), 0);
}

TEST(ClosureWatch, AChangeIsBeyondRoundingAndMatters) {
  // Of small losses 0.1 T / N = 0.002, and of large ones a thousandth.
  EXPECT_EQ(After(1, {0.5}, 0.5019), 0);
  EXPECT_EQ(After(1, {0.5}, 0.5021), 2);
  EXPECT_EQ(After(1, {-0.5}, -0.5021), 2);
  EXPECT_EQ(After(1, {-1000}, -1000.9), 0);
  EXPECT_EQ(After(1, {-1000}, -1001.1), 2);
  // Any chain's is enough.
  EXPECT_EQ(ChangesRunning(0, {1, 1, 1}, {1, 1, 2}, 1, 1), 1);
  // Other chains are not to be compared.
  EXPECT_EQ(ChangesRunning(2, {1}, {5, 6}, 1, 1), 0);
  EXPECT_EQ(ChangesRunning(2, {5, 6}, {1}, 1, 1), 0);
}

TEST(ClosureWatch, SaysWhatItHasSeen) {
  EXPECT_NE(ChangedTarget().find("start of 3 trajectories running"),
            std::string::npos);
}

TEST(ClosureWatch, CountsMinibatchesThatAreNone) {
  const auto after = [](std::optional<int64_t> before, bool equal, bool zero) {
    return EqualRunning(before, equal, zero, " (so)", "none");
  };
  EXPECT_EQ(after(0, true, false), 1);
  EXPECT_EQ(after(98, true, false), 99);
  EXPECT_EQ(after(99, true, true), 99);
  EXPECT_EQ(after(99, false, false), std::nullopt);
  EXPECT_EQ(after(std::nullopt, true, false), std::nullopt);
  try {
    after(99, true, false);
    FAIL();
  } catch (const std::runtime_error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("from 100 calls"), std::string::npos);
    EXPECT_NE(message.find("at each call (so). If each"), std::string::npos);
  }
}

}  // namespace
}  // namespace torch_sgmcmc
