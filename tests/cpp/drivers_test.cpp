// Whole operators, without the dispatcher, on the CPU driver and on the CUDA
// driver's arithmetic: equal bit for bit. ctest runs this with one and with two
// threads and with every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "apply/cpu.h"
#include "cuda_on_host.h"
#include "samplers/control_variate_op.h"
#include "samplers/gaussian_op.h"
#include "samplers/hmc_op.h"
#include "samplers/psgld_op.h"
#include "samplers/sghmc_op.h"
#include "samplers/sgld_op.h"
#include "samplers/sgnht_op.h"
#include "tensors.h"

namespace torch_sgmcmc {
namespace {

// A list of tensors that owns its memory; a copy has memory of its own.
class Memory {
 public:
  template <class T>
  void Add(int64_t numel, std::mt19937& random, bool positive) {
    std::normal_distribution<float> normal;
    std::vector<char> bytes(static_cast<size_t>(numel) * sizeof(T));
    for (size_t i = 0; i < bytes.size(); i += sizeof(T)) {
      const float x = normal(random);
      const T value = static_cast<T>(positive ? std::abs(x) : x);
      std::memcpy(bytes.data() + i, &value, sizeof value);
    }
    bytes_.push_back(std::move(bytes));
    make_.push_back([](std::vector<char>& b) {
      return View(reinterpret_cast<T*>(b.data()),
                  {static_cast<int64_t>(b.size() / sizeof(T))},
                  {1});
    });
  }

  TensorList Tensors() {
    TensorList result;
    for (size_t i = 0; i < bytes_.size(); ++i) {
      result.push_back(make_[i](bytes_[i]));
    }
    return result;
  }

  friend bool operator==(const Memory& a, const Memory& b) {
    return a.bytes_ == b.bytes_;
  }

 private:
  std::vector<std::vector<char>> bytes_;
  std::vector<Tensor (*)(std::vector<char>&)> make_;
};

// The state of a sampler for a model with `count` parameters of all dtypes.
struct State {
  Memory params, grads, momenta, variances, previous;
  std::vector<int64_t> offsets;

  explicit State(int count) {
    std::mt19937 random(17);
    int64_t offset = 0;
    for (int i = 0; i < count; ++i) {
      constexpr int64_t kSizes[] = {1, 4100, 33, 257, 20000, 5, 128};
      const int64_t numel = kSizes[i % 7];
      switch (i % 4) {
        case 0:
          Add<float>(numel, random);
          break;
        case 1:
          Add<double>(numel, random);
          break;
        case 2:
          Add<BFloat16>(numel, random);
          break;
        default:
          Add<Half>(numel, random);
      }
      offsets.push_back(offset);
      // Mostly aligned to the noise block, as samplers do it; not always.
      offset += i % 5 == 4
                    ? numel
                    : (numel + kNoiseBlock - 1) / kNoiseBlock * kNoiseBlock;
    }
  }

  template <class T>
  void Add(int64_t numel, std::mt19937& random) {
    params.Add<T>(numel, random, false);
    grads.Add<T>(numel, random, false);
    momenta.Add<Arithmetic<T>>(numel, random, false);
    variances.Add<Arithmetic<T>>(numel, random, true);
    previous.Add<Arithmetic<T>>(numel, random, false);
  }

  friend bool operator==(const State&, const State&) = default;
};

class Drivers : public testing::Test {
 protected:
  // Runs `step` on both drivers from the same state and compares the outcomes.
  // 7 tensors fit in one table of the CUDA driver, 230 need several a dtype.
  template <class OnCpu, class OnCuda>
  void ExpectEqual(const OnCpu& on_cpu, const OnCuda& on_cuda) {
    for (const int count : {1, 7, 230}) {
      const State before(count);
      State cpu = before;
      State cuda = before;
      on_cpu(cpu);
      on_cuda(cuda);
      EXPECT_TRUE(cpu == cuda) << count << " tensors";
      EXPECT_FALSE(cpu == before) << count << " tensors";
    }
  }
};

#define SG_EXPECT_DRIVERS_EQUAL(operation)                \
  ExpectEqual([&](State& s) { operation<CpuDriver>(s); }, \
              [&](State& s) { operation<cuda_on_host::Driver>(s); })

template <class Driver>
void StepSGLD(State& s, int64_t step, std::optional<Tensor> device_step) {
  SGLDStep<Driver>(s.params.Tensors(),
                   s.grads.Tensors(),
                   /*lr=*/0.1,
                   /*num_data=*/100,
                   /*prior_precision=*/2,
                   /*temperature=*/1,
                   s.offsets,
                   /*seed=*/-5,
                   step,
                   std::move(device_step));
}

template <class Driver>
void StepPlainSGLD(State& s) {
  StepSGLD<Driver>(s, 77, std::nullopt);
}

TEST_F(Drivers, SGLDAgrees) { SG_EXPECT_DRIVERS_EQUAL(StepPlainSGLD); }

template <class Driver>
void StepSGLDOnDeviceStep(State& s) {
  std::vector<int64_t> device_step = {75};
  StepSGLD<Driver>(s, 2, View(device_step));
}

TEST_F(Drivers, DeviceStepAgreesAndIsAddedToStep) {
  SG_EXPECT_DRIVERS_EQUAL(StepSGLDOnDeviceStep);
  State a(7);
  State b(7);
  StepPlainSGLD<CpuDriver>(a);
  StepSGLDOnDeviceStep<CpuDriver>(b);
  EXPECT_TRUE(a == b);
}

// The parts of a state as an operator takes them.
struct Lists {
  TensorList params, grads, momenta, variances;
  std::vector<int64_t> offsets;

  explicit Lists(State& s)
      : params(s.params.Tensors()),
        grads(s.grads.Tensors()),
        momenta(s.momenta.Tensors()),
        offsets(s.offsets) {}
};

template <class Driver>
void StepSGHMC(const Lists& lists, int64_t resample_every, int64_t step) {
  SGHMCStep<Driver>(lists.params,
                    lists.grads,
                    lists.momenta,
                    lists.variances,
                    /*lr=*/0.1,
                    /*momentum=*/0.9,
                    /*num_data=*/10,
                    /*prior_precision=*/2,
                    /*temperature=*/1,
                    /*noise_estimate=*/0.01,
                    resample_every,
                    lists.offsets,
                    /*seed=*/9,
                    step,
                    /*device_step=*/std::nullopt);
}

template <class Driver>
void StepPlainSGHMC(State& s) {
  StepSGHMC<Driver>(Lists(s), 0, 3);
}

TEST_F(Drivers, SGHMCAgrees) { SG_EXPECT_DRIVERS_EQUAL(StepPlainSGHMC); }

template <class Driver>
void StepNoiseAwareSGHMC(State& s) {
  Lists lists(s);
  lists.variances = s.variances.Tensors();
  StepSGHMC<Driver>(lists, 0, 3);
}

TEST_F(Drivers, NoiseAwareSGHMCAgrees) {
  SG_EXPECT_DRIVERS_EQUAL(StepNoiseAwareSGHMC);
}

template <class Driver>
void StepResamplingSGHMC(State& s) {
  StepSGHMC<Driver>(Lists(s), 5, 10);
}

TEST_F(Drivers, ResamplingSGHMCAgrees) {
  SG_EXPECT_DRIVERS_EQUAL(StepResamplingSGHMC);
}

template <class Driver>
void StepPSGLD(State& s, bool corrected) {
  TensorList sensitivities, curvatures;
  if (corrected) {
    sensitivities = s.momenta.Tensors();
    curvatures = s.grads.Tensors();
  }
  PSGLDStep<Driver>(s.params.Tensors(),
                    s.grads.Tensors(),
                    s.variances.Tensors(),
                    sensitivities,
                    curvatures,
                    /*lr=*/0.1,
                    /*num_data=*/10,
                    /*prior_precision=*/2,
                    /*temperature=*/1,
                    /*decay=*/0.9,
                    /*eps=*/1e-3,
                    s.offsets,
                    /*seed=*/9,
                    /*step=*/3,
                    /*device_step=*/std::nullopt);
}

template <class Driver>
void StepFrozenPSGLD(State& s) {
  PSGLDFrozenStep<Driver>(s.params.Tensors(),
                          s.grads.Tensors(),
                          s.variances.Tensors(),
                          /*lr=*/0.1,
                          /*num_data=*/10,
                          /*prior_precision=*/2,
                          /*temperature=*/1,
                          s.offsets,
                          /*seed=*/9,
                          /*step=*/3,
                          /*device_step=*/std::nullopt);
}
template <class Driver>
void StepAdaptingPSGLD(State& s) {
  StepPSGLD<Driver>(s, false);
}
template <class Driver>
void StepCorrectedPSGLD(State& s) {
  StepPSGLD<Driver>(s, true);
}

TEST_F(Drivers, FrozenPSGLDAgrees) { SG_EXPECT_DRIVERS_EQUAL(StepFrozenPSGLD); }
TEST_F(Drivers, AdaptingPSGLDAgrees) {
  SG_EXPECT_DRIVERS_EQUAL(StepAdaptingPSGLD);
}
TEST_F(Drivers, CorrectedPSGLDAgrees) {
  SG_EXPECT_DRIVERS_EQUAL(StepCorrectedPSGLD);
}

template <class Driver>
void StepSGNHT(State& s) {
  SGNHTStep<Driver>(s.params.Tensors(),
                    s.grads.Tensors(),
                    s.momenta.Tensors(),
                    s.variances.Tensors(),
                    /*lr=*/0.1,
                    /*momentum=*/0.9,
                    /*num_data=*/10,
                    /*prior_precision=*/2,
                    /*temperature=*/1,
                    /*thermostat_rate=*/0.01,
                    s.offsets,
                    /*seed=*/9,
                    /*step=*/3,
                    /*device_step=*/std::nullopt);
}

TEST_F(Drivers, SGNHTAgrees) { SG_EXPECT_DRIVERS_EQUAL(StepSGNHT); }

// Draws momenta and makes a leapfrog step by one gradient.
template <class Driver>
void Leapfrog(State& s, bool has_mass) {
  TensorList masses;
  if (has_mass) masses = s.variances.Tensors();
  HMCMomenta<Driver>(s.momenta.Tensors(),
                     masses,
                     /*temperature=*/0.7,
                     s.offsets,
                     /*seed=*/9,
                     /*step=*/3);
  for (const double drift : {0.2, 0.0}) {
    HMCLeapfrog<Driver>(s.params.Tensors(),
                        s.grads.Tensors(),
                        s.momenta.Tensors(),
                        masses,
                        /*kick=*/0.1,
                        drift,
                        /*num_data=*/10,
                        /*prior_precision=*/2);
  }
}
template <class Driver>
void PlainLeapfrog(State& s) {
  Leapfrog<Driver>(s, false);
}
template <class Driver>
void MassiveLeapfrog(State& s) {
  Leapfrog<Driver>(s, true);
}

TEST_F(Drivers, LeapfrogAgrees) { SG_EXPECT_DRIVERS_EQUAL(PlainLeapfrog); }
TEST_F(Drivers, MassiveLeapfrogAgrees) {
  SG_EXPECT_DRIVERS_EQUAL(MassiveLeapfrog);
}

// Old momenta are forgotten in the steps that resample and only in those.
TEST_F(Drivers, MomentumIsResampledOnMultiplesOfTheInterval) {
  for (int64_t step = 0; step <= 10; ++step) {
    State plain(7);
    State resampling(7);
    State other_momentum(7);
    Gaussian<CpuDriver>(other_momentum.momenta.Tensors(),
                        /*std=*/1.0,
                        other_momentum.offsets,
                        /*seed=*/1,
                        step,
                        /*purpose=*/5,
                        /*device_step=*/std::nullopt);
    StepSGHMC<CpuDriver>(Lists(plain), 0, step);
    StepSGHMC<CpuDriver>(Lists(resampling), 5, step);
    StepSGHMC<CpuDriver>(Lists(other_momentum), 5, step);
    EXPECT_EQ(plain == resampling, step % 5 != 0) << "step " << step;
    EXPECT_EQ(other_momentum == resampling, step % 5 == 0) << "step " << step;
  }
}

template <class Driver>
void UpdateGradientVariance(State& s) {
  GradientVarianceStep<Driver>(s.grads.Tensors(),
                               s.variances.Tensors(),
                               s.previous.Tensors(),
                               /*weight=*/0.05);
}

TEST_F(Drivers, GradientVarianceAgrees) {
  SG_EXPECT_DRIVERS_EQUAL(UpdateGradientVariance);
}

template <class Driver>
void CombineGradients(State& s) {
  ControlVariate<Driver>(
      s.params.Tensors(), s.grads.Tensors(), s.variances.Tensors());
}

TEST_F(Drivers, ControlVariateAgrees) {
  SG_EXPECT_DRIVERS_EQUAL(CombineGradients);
}

template <class Driver>
void FillGaussian(State& s) {
  Gaussian<Driver>(s.params.Tensors(),
                   /*std=*/0.5,
                   s.offsets,
                   /*seed=*/1,
                   /*step=*/2,
                   /*purpose=*/3,
                   std::nullopt);
}

TEST_F(Drivers, GaussianAgrees) { SG_EXPECT_DRIVERS_EQUAL(FillGaussian); }

// One call on all tensors, or one call a tensor, in any order.
TEST_F(Drivers, SplittingIntoCallsChangesNothing) {
  State together(9);
  StepPlainSGHMC<CpuDriver>(together);
  State apart(9);
  const Lists all(apart);
  for (size_t i = all.params.size(); i-- > 0;) {
    Lists one = all;
    one.params = {all.params[i]};
    one.grads = {all.grads[i]};
    one.momenta = {all.momenta[i]};
    one.offsets = {all.offsets[i]};
    StepSGHMC<CpuDriver>(one, 0, 3);
  }
  EXPECT_TRUE(together == apart);
}

}  // namespace
}  // namespace torch_sgmcmc
