// Options that nobody set say what the table of hyperparameters does.
#include "host/settings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "torch_sgmcmc/torch_sgmcmc.h"

namespace torch_sgmcmc {
namespace {

template <typename Options>
class Settings : public testing::Test {};

using AllOptions = testing::Types<SGLDOptions,
                                  SGHMCOptions,
                                  PSGLDOptions,
                                  SGNHTOptions,
                                  EWSGOptions,
                                  HMCOptions,
                                  SBPSOptions>;
TYPED_TEST_SUITE(Settings, AllOptions);

TYPED_TEST(Settings, HaveTheTablesDefaults) {
  const TypeParam options;
  StateDict values;
  options.write(values);
  for (const Setting& row : SettingsOf(options.sampler())) {
    const c10::IValue value = values.at(row.name);
    if (row.optional) {
      EXPECT_TRUE(value.isNone()) << row.name;
    } else if (row.kind == SettingKind::kWord) {
      EXPECT_EQ(value.toStringRef(), row.words[0]) << row.name;
    } else if (row.kind == SettingKind::kFlag) {
      EXPECT_EQ(value.toBool(), row.fallback == 1) << row.name;
    } else if (!std::isnan(row.fallback)) {
      EXPECT_EQ(value.toScalar().toDouble(), row.fallback) << row.name;
    } else {  // not set
      EXPECT_TRUE(std::isnan(value.toDouble())) << row.name;
    }
  }
}

TYPED_TEST(Settings, AreAll) {
  const TypeParam options;
  const auto all = SamplerKeys();
  for (const std::string& key : options.keys()) {
    EXPECT_NE(std::find(all.begin(), all.end(), key), all.end()) << key;
  }
}

TEST(SettingsOf, ThereAreNoneOfOthers) {
  EXPECT_THROW(SettingsOf("Adam"), std::out_of_range);
}

}  // namespace
}  // namespace torch_sgmcmc
