// Gradients that are not finite, in a LibTorch program.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include "libtorch/sampler_impl.h"
#include "small_chains.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

using torch::optim::OptimizerParamGroup;

// A step with a gradient that is not finite, at its last element.
template <typename Method>
void BadStep(Method& sampler, std::vector<torch::Tensor>& params, float value) {
  const torch::Tensor good = params[1].grad().clone();
  params[1].mutable_grad()[-1] = value;
  try {
    sampler.step();
  } catch (...) {
    params[1].mutable_grad() = good;
    throw;
  }
  params[1].mutable_grad() = good;
}

constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()};

TEST(Nonfinite, AStepIsRefusedOrLeftOut) {
  auto params = Params();
  auto skipped = Params();
  auto others = Params();
  SGHMC raises(params, Hamiltonian().noise_estimate("online").momentum(0.5));
  SGHMC skips(
      skipped,
      Hamiltonian().noise_estimate("online").momentum(0.5).nonfinite("skip"));
  SGHMC unbroken(others, Hamiltonian().noise_estimate("online").momentum(0.5));
  int64_t count = 0;
  for (int i = 0; i < 4; ++i) {
    for (const float value : kBad) {
      const auto before = Copies(params);
      std::string message = "SGHMC got a gradient that is not finite: ";
      message += std::isnan(value) ? "1 NaN and 0" : "0 NaN and 1";
      message +=
          " infinite of 5 elements, for parameter 1 of group 0, of shape [5]. "
          "The step was not made. If losses have grown, the chain has diverged "
          "and needs a smaller lr; where it is rare, nonfinite(\"skip\") skips "
          "such steps";
      EXPECT_EQ(MessageOf([&] { BadStep(raises, params, value); }), message);
      ExpectEqual(params, before);
      EXPECT_EQ(raises.num_steps(), i);
      BadStep(skips, skipped, value);
      EXPECT_EQ(skips.num_skipped(), ++count);
    }
    raises.step();
    skips.step();
    unbroken.step();
    ExpectEqual(params, others);
    ExpectEqual(skipped, others);
  }
  EXPECT_EQ(raises.num_skipped(), 0);
}

TEST(Nonfinite, AllowDoesNotLook) {
  auto params = Params();
  SGLD sampler(params, Langevin().nonfinite("ignore"));
  BadStep(sampler, params, kBad[0]);
  EXPECT_TRUE(params[1][-1].isnan().item<bool>());
  EXPECT_EQ(sampler.num_skipped(), 0);
}

// Has the host read later what was found, as on a GPU.
class Deferred {
 public:
  Deferred() { DeferFiniteChecksOnCpu(true); }
  ~Deferred() { DeferFiniteChecksOnCpu(false); }
  Deferred(const Deferred&) = delete;
  Deferred& operator=(const Deferred&) = delete;
};

TEST(Nonfinite, WhatTheDeviceFindsIsThrownLater) {
  const Deferred deferred;
  auto params = Params();
  auto others = Params();
  SGHMC sampler(params, Hamiltonian());
  SGHMC unbroken(others, Hamiltonian());
  sampler.step();
  unbroken.step();
  for (const float value : kBad) {
    for (const bool looks : {false, true}) {
      const auto before = Copies(params);
      BadStep(sampler, params, value);
      ExpectEqual(params, before);
      if (looks) {
        sampler.state_dict();
        EXPECT_EQ(sampler.num_steps(), 1);
      }
      bool called = false;
      const std::string message = MessageOf([&] {
        sampler.step([&] {
          called = true;
          return torch::Tensor();
        });
      });
      EXPECT_NE(message.find("SGHMC got in its last step a gradient that is"),
                std::string::npos)
          << message;
      EXPECT_FALSE(called);
      ExpectEqual(params, before);
      EXPECT_EQ(sampler.num_steps(), 1);
    }
  }
  for (int i = 0; i < 3; ++i) {
    sampler.step();
    unbroken.step();
  }
  ExpectEqual(params, others);
}

TEST(Nonfinite, WhatTheDeviceLeavesOutIsCounted) {
  const Deferred deferred;
  for (const bool capturable : {false, true}) {
    auto params = Params();
    auto others = Params();
    SGHMC sampler(params,
                  Hamiltonian().nonfinite("skip").capturable(capturable));
    SGHMC unbroken(others, Hamiltonian().capturable(capturable));
    for (int64_t i = 0; i < 5; ++i) {
      BadStep(sampler, params, kBad[i % 3]);
      if (i % 2 == 0) {
        EXPECT_EQ(sampler.num_skipped(), i + 1);
      }
      sampler.step();
      unbroken.step();
      ExpectEqual(params, others);
    }
    EXPECT_EQ(sampler.num_skipped(), 5);
    const StateDict group =
        sampler.state_dict().at("param_groups").toListRef()[0];
    EXPECT_EQ(group.at("step").toTensor().item<int64_t>(), 5);
  }
}

TEST(Nonfinite, IsSavedAndMayBeMissing) {
  auto params = Params();
  SGLD sampler(params, Langevin().nonfinite("skip"));
  BadStep(sampler, params, kBad[1]);
  StateDict dict = sampler.state_dict();
  SGLD twin(Params(), Langevin());
  twin.load_state_dict(dict);
  EXPECT_EQ(twin.num_skipped(), 1);
  EXPECT_EQ(twin.options().nonfinite(), "skip");
}

TEST(Nonfinite, RefusesOtherWords) {
  EXPECT_EQ(MessageOf([] { SGLD(Params(), Langevin().nonfinite("warn")); }),
            "Invalid nonfinite: 'warn' (must be 'raise', 'skip' or 'ignore')");
  EXPECT_EQ(MessageOf([] {
              SBPS(Params(), SBPSOptions().num_data(5).nonfinite("ignore"));
            }),
            "Invalid nonfinite: 'ignore' (must be 'raise' or 'skip')");
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(
      Params(), std::make_unique<SGLDOptions>(SGLDOptions().nonfinite("skip")));
  EXPECT_EQ(MessageOf([&] { SGLD(groups, Langevin()); }),
            "Invalid param group: 'nonfinite' is managed by SGLD and cannot be "
            "set for a group");
}

}  // namespace
}  // namespace torch_sgmcmc
