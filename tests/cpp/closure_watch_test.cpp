// Minibatches that are none.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/index_chain.h"

namespace torch_sgmcmc {
namespace {

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
