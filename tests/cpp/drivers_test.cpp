// Whole operators, without the dispatcher, on the CPU driver and on the CUDA
// driver's arithmetic: equal bit for bit. ctest runs this with one and with two
// threads and with every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "apply/cpu.h"
#include "call_of.h"
#include "cuda_on_host.h"
#include "driver_state.h"
#include "methods/control_variate.h"
#include "methods/gaussian.h"
#include "methods/gradient_variance.h"
#include "methods/hmc.h"
#include "methods/psgld.h"
#include "methods/sghmc.h"
#include "methods/sgld.h"
#include "methods/sglrw.h"
#include "methods/sgnht.h"
#include "tensors.h"

namespace torch_sgmcmc {
namespace {

class Drivers : public testing::Test {
 protected:
  // Runs `step` on both drivers from the same state and compares the outcomes.
  // 7 tensors fit in one table of the CUDA driver, 230 need several a dtype.
  template <class OnCpu, class OnCuda>
  void ExpectEqual(const OnCpu& on_cpu, const OnCuda& on_cuda) {
    for (const int count : {1, 7, 230}) {
      ExpectEqual(State(count), on_cpu, on_cuda);
    }
    ExpectEqual(State(8, /*chains=*/3), on_cpu, on_cuda);
  }

 private:
  template <class OnCpu, class OnCuda>
  void ExpectEqual(const State& before,
                   const OnCpu& on_cpu,
                   const OnCuda& on_cuda) {
    State cpu = before;
    State cuda = before;
    on_cpu(cpu);
    on_cuda(cuda);
    const size_t count = before.offsets.size();
    EXPECT_TRUE(cpu == cuda) << count << " tensors, " << before.num_chains;
    EXPECT_FALSE(cpu == before) << count << " tensors, " << before.num_chains;
  }
};

#define SG_EXPECT_DRIVERS_EQUAL(operation)                \
  ExpectEqual([&](State& s) { operation<CpuDriver>(s); }, \
              [&](State& s) { operation<cuda_on_host::Driver>(s); })

template <class Driver, class Op = SGLDStep>
void StepSGLD(State& s, int64_t step, std::optional<Tensor> device_step) {
  On<Op, Driver>()(s.params.Tensors(),
                   s.grads.Tensors(),
                   s.masters.Tensors(),
                   /*lr=*/0.1,
                   /*num_data=*/100,
                   /*prior_precision=*/2,
                   /*temperature=*/1,
                   s.offsets,
                   /*seed=*/-5,
                   step,
                   std::move(device_step),
                   /*prior_mean=*/0.7,
                   /*prior_means=*/std::nullopt,
                   s.rows,
                   s.num_chains);
}

template <class Driver>
void StepPlainSGLD(State& s) {
  StepSGLD<Driver>(s, 77, std::nullopt);
}

// With uniform noise.
template <class Driver>
void StepSGLRW(State& s) {
  StepSGLD<Driver, SGLRWStep>(s, 77, std::nullopt);
}

TEST_F(Drivers, SGLDAgrees) { SG_EXPECT_DRIVERS_EQUAL(StepPlainSGLD); }
TEST_F(Drivers, SGLRWAgrees) { SG_EXPECT_DRIVERS_EQUAL(StepSGLRW); }

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
  TensorList params, grads, momenta, variances, masters, means;
  std::vector<int64_t> offsets;
  Rows rows;
  int64_t num_chains;

  explicit Lists(State& s)
      : params(s.params.Tensors()),
        grads(s.grads.Tensors()),
        momenta(s.momenta.Tensors()),
        masters(s.masters.Tensors()),
        means(s.means.Tensors()),
        offsets(s.offsets),
        rows(s.rows),
        num_chains(s.num_chains) {}
};

template <class Driver>
void StepSGHMC(const Lists& lists,
               int64_t resample_every,
               int64_t step,
               std::optional<Tensor> device_step = std::nullopt) {
  On<SGHMCStep, Driver>()(lists.params,
                          lists.grads,
                          lists.momenta,
                          lists.variances,
                          lists.masters,
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
                          std::move(device_step),
                          /*prior_mean=*/0,
                          lists.means,
                          lists.rows,
                          lists.num_chains);
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
  On<PSGLDStep, Driver>()(
      s.params.Tensors(),
      s.grads.Tensors(),
      s.variances.Tensors(),
      sensitivities,
      curvatures,
      s.masters.Tensors(),
      /*lr=*/0.1,
      /*num_data=*/10,
      /*prior_precision=*/2,
      /*temperature=*/1,
      /*decay=*/0.9,
      /*eps=*/1e-3,
      s.offsets,
      /*seed=*/9,
      /*step=*/3,
      /*device_step=*/std::nullopt,
      /*prior_mean=*/0.7,
      corrected ? std::optional(s.means.Tensors()) : std::nullopt,
      s.rows,
      s.num_chains);
}

template <class Driver>
void StepFrozenPSGLD(State& s) {
  On<PSGLDFrozenStep, Driver>()(s.params.Tensors(),
                                s.grads.Tensors(),
                                s.variances.Tensors(),
                                s.masters.Tensors(),
                                /*lr=*/0.1,
                                /*num_data=*/10,
                                /*prior_precision=*/2,
                                /*temperature=*/1,
                                s.offsets,
                                /*seed=*/9,
                                /*step=*/3,
                                /*device_step=*/std::nullopt,
                                /*prior_mean=*/0,
                                s.means.Tensors(),
                                s.rows,
                                s.num_chains);
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
  On<SGNHTStep, Driver>()(s.params.Tensors(),
                          s.grads.Tensors(),
                          s.momenta.Tensors(),
                          s.variances.Tensors(),
                          s.masters.Tensors(),
                          /*lr=*/0.1,
                          /*momentum=*/0.9,
                          /*num_data=*/10,
                          /*prior_precision=*/2,
                          /*temperature=*/1,
                          /*thermostat_rate=*/0.01,
                          s.offsets,
                          /*seed=*/9,
                          /*step=*/3,
                          /*device_step=*/std::nullopt,
                          /*prior_mean=*/0,
                          s.means.Tensors(),
                          s.rows,
                          s.num_chains);
}

TEST_F(Drivers, SGNHTAgrees) { SG_EXPECT_DRIVERS_EQUAL(StepSGNHT); }

// Draws momenta and makes a leapfrog step by one gradient.
template <class Driver>
void Leapfrog(State& s, bool has_mass) {
  TensorList masses;
  if (has_mass) masses = s.variances.Tensors();
  On<HMCMomenta, Driver>()(s.momenta.Tensors(),
                           masses,
                           /*temperature=*/0.7,
                           s.offsets,
                           /*seed=*/9,
                           /*step=*/3,
                           /*rows=*/std::nullopt);
  for (const double drift : {0.2, 0.0}) {
    On<HMCLeapfrog, Driver>()(
        s.params.Tensors(),
        s.grads.Tensors(),
        s.momenta.Tensors(),
        masses,
        s.masters.Tensors(),
        /*kick=*/0.1,
        drift,
        /*num_data=*/10,
        /*prior_precision=*/2,
        /*prior_mean=*/0.7,
        has_mass ? std::optional(s.means.Tensors()) : std::nullopt);
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
    On<Gaussian, CpuDriver>()(other_momentum.momenta.Tensors(),
                              /*std=*/1.0,
                              other_momentum.offsets,
                              /*seed=*/1,
                              step,
                              /*purpose=*/5,
                              /*device_step=*/std::nullopt,
                              /*rows=*/std::nullopt,
                              /*num_chains=*/0);
    StepSGHMC<CpuDriver>(Lists(plain), 0, step);
    StepSGHMC<CpuDriver>(Lists(resampling), 5, step);
    StepSGHMC<CpuDriver>(Lists(other_momentum), 5, step);
    EXPECT_EQ(plain == resampling, step % 5 != 0) << "step " << step;
    EXPECT_EQ(other_momentum == resampling, step % 5 == 0) << "step " << step;
  }
}

template <class Driver>
void UpdateGradientVariance(State& s) {
  On<GradientVarianceStep, Driver>()(s.grads.Tensors(),
                                     s.variances.Tensors(),
                                     s.previous.Tensors(),
                                     /*weight=*/0.05);
}

TEST_F(Drivers, GradientVarianceAgrees) {
  SG_EXPECT_DRIVERS_EQUAL(UpdateGradientVariance);
}

template <class Driver>
void CombineGradients(State& s) {
  On<ControlVariate, Driver>()(
      s.params.Tensors(), s.grads.Tensors(), s.variances.Tensors());
}

TEST_F(Drivers, ControlVariateAgrees) {
  SG_EXPECT_DRIVERS_EQUAL(CombineGradients);
}

template <class Driver>
void FillGaussian(State& s) {
  On<Gaussian, Driver>()(s.params.Tensors(),
                         /*std=*/0.5,
                         s.offsets,
                         /*seed=*/1,
                         /*step=*/2,
                         /*purpose=*/3,
                         std::nullopt,
                         s.rows,
                         s.num_chains);
}

TEST_F(Drivers, GaussianAgrees) { SG_EXPECT_DRIVERS_EQUAL(FillGaussian); }

template <class Driver>
void LeaveOut(State& s) {
  std::vector<int64_t> left_out = {kLeftOut};
  const Lists lists(s);
  StepSGLD<Driver>(s, 2, View(left_out));
  On<Gaussian, Driver>()(lists.momenta,
                         0.5,
                         lists.offsets,
                         1,
                         2,
                         3,
                         View(left_out),
                         s.rows,
                         s.num_chains);
  for (const int64_t every : {0, 1, 2}) {
    StepSGHMC<Driver>(lists, every, 3, View(left_out));
  }
}

TEST_F(Drivers, ANegativeDeviceStepLeavesEverythingAsItIs) {
  const State before(230);
  State cpu = before;
  LeaveOut<CpuDriver>(cpu);
  EXPECT_TRUE(cpu == before);
  State cuda = before;
  LeaveOut<cuda_on_host::Driver>(cuda);
  EXPECT_TRUE(cuda == before);
}

// Puts a number at every stride-th place from `first` on.
template <class T>
void Put(const Tensor& t, int64_t first, int64_t stride, float value) {
  T* data = static_cast<T*>(t.data_ptr());
  for (int64_t i = first; i < t.numel(); i += stride) {
    data[i] = static_cast<T>(value);
  }
}

TEST(Nonfinite, ThreadsOfAGPUSeeEveryElementOnce) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  State s(230);
  const TensorList tensors = s.grads.Tensors();
  std::vector<int64_t> expected;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    const int64_t n = t.numel();
    int64_t nans = 0;
    int64_t infinities = 0;
    if (i % 3 == 0) {  // the last is NaN, and every seventh before an infinity
      const auto put = [&](auto zero) {
        using T = decltype(zero);
        Put<T>(t, 0, 7, i % 2 == 0 ? kInfinity : -kInfinity);
        Put<T>(t, n - 1, 1, std::numeric_limits<float>::quiet_NaN());
      };
      switch (t.scalar_type()) {
        case ScalarType::Double:
          put(double{});
          break;
        case ScalarType::BFloat16:
          put(BFloat16{});
          break;
        case ScalarType::Half:
          put(Half{});
          break;
        default:
          put(float{});
      }
      nans = 1;
      infinities = (n + 6) / 7 - ((n - 1) % 7 == 0 ? 1 : 0);
    }
    expected.push_back(nans);
    expected.push_back(infinities);
  }
  EXPECT_EQ(cuda_on_host::CountNonfinite(tensors), expected);
}

TEST(Nonfinite, AnyCountClosesTheGate) {
  const int64_t device_step = 40;
  for (size_t size : {1, 2, 255, 256, 257, 1000}) {
    std::vector<int64_t> counts(size);
    EXPECT_EQ(cuda_on_host::StepOrNothing(counts, 3, nullptr), 3);
    EXPECT_EQ(cuda_on_host::StepOrNothing(counts, 3, &device_step), 43);
    for (const size_t at : {size_t{0}, size / 2, size - 1}) {
      std::fill(counts.begin(), counts.end(), 0);
      counts[at] = 1;
      EXPECT_EQ(cuda_on_host::StepOrNothing(counts, 3, nullptr), kLeftOut);
      EXPECT_EQ(cuda_on_host::StepOrNothing(counts, 3, &device_step), kLeftOut);
    }
  }
}

// One call on all tensors, or one call a tensor, in any order.
TEST_F(Drivers, SplittingIntoCallsChangesNothing) {
  State together(9);
  StepPlainSGHMC<CpuDriver>(together);
  State apart(9);
  const Lists all(apart);
  size_t masters = all.masters.size();
  for (size_t i = all.params.size(); i-- > 0;) {
    Lists one = all;
    one.params = {all.params[i]};
    one.grads = {all.grads[i]};
    one.momenta = {all.momenta[i]};
    one.means = {all.means[i]};
    const ScalarType type = all.params[i].scalar_type();
    one.masters.clear();
    if (type == ScalarType::BFloat16 || type == ScalarType::Half) {
      one.masters.push_back(all.masters[--masters]);
    }
    one.offsets = {all.offsets[i]};
    const std::vector<int64_t>& rows = *all.rows;
    one.rows = std::vector<int64_t>{rows[2 * i], rows[2 * i + 1]};
    StepSGHMC<CpuDriver>(one, 0, 3);
  }
  EXPECT_TRUE(together == apart);
}

}  // namespace
}  // namespace torch_sgmcmc
