// Options that nobody set say what the table of hyperparameters does.
#include "host/settings.h"

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "torch_sgmcmc/torch_sgmcmc.h"

namespace torch_sgmcmc {
namespace {

TEST(Defaults, AreTheTables) {
  EXPECT_TRUE(std::isnan(SGLDOptions().num_data()));
  EXPECT_EQ(SGLDOptions().num_chains(), std::nullopt);
  EXPECT_EQ(SGHMCOptions().momentum(), 0.9);
  EXPECT_EQ(SGHMCOptions().noise_estimate(), SGHMCOptions::NoiseEstimate(0.0));
  EXPECT_EQ(SGHMCOptions().initial_momentum(), "stationary");
  EXPECT_FALSE(SBPSOptions().preconditioned());
}

TEST(SettingsOf, ThereAreNoneOfOthers) {
  EXPECT_THROW(SettingsOf("Adam"), std::out_of_range);
}

}  // namespace
}  // namespace torch_sgmcmc
