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

}  // namespace
}  // namespace torch_sgmcmc
