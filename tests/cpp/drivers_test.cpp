// Whole operators, of the library on the CPU and on the CUDA driver's
// arithmetic: equal bit for bit. ctest runs this with one and with two threads
// and with every instruction set.
#include "cuda_on_host.h"
#include "op_calls.h"
#include "tensors.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

// Whether the device may add to the step.
constexpr bool HasDeviceStep(const OpSpec& row) {
  return row.noise == Noise::kUpdate || row.noise == Noise::kGiven;
}

// From the same state, on both drivers. 7 tensors fit in one table of the CUDA
// driver, 230 need several a dtype.
TEST(Drivers, Agree) {
  const auto compare = [](const State& before, const auto& run) {
    State cpu = before;
    State cuda = before;
    run(cpu, std::type_identity<Library>());
    run(cuda, std::type_identity<cuda_on_host::Driver>());
    const size_t count = before.offsets.size();
    EXPECT_TRUE(cpu == cuda) << count << " tensors, " << before.num_chains;
    EXPECT_FALSE(cpu == before) << count << " tensors, " << before.num_chains;
  };
  ForEachUpdate([&](auto each) {
    using Op = typename decltype(each)::type;
    // With all there is, the 10th step draws momenta afresh.
    for (const How& how : {How{}, How{.has_all = true, .every = 5}}) {
      const auto run = [&](State& s, auto driver) {
        PerformOn<Op, typename decltype(driver)::type>(s, how);
      };
      for (const int count : {1, 7, 230}) compare(State(count), run);
      compare(State(8, /*chains=*/3), run);
    }
  });
}

// The last half step of a trajectory, which moves nothing.
TEST(Drivers, AgreeOnAKickAlone) {
  State cpu(7);
  State cuda(7);
  const auto kick = [](State& s) {
    Call call = CallOf(HMCLeapfrog::kSpec, s, {});
    call.numbers[1] = 0;
    return call;
  };
  PerformBy<HMCLeapfrog, Library>(kick(cpu));
  PerformBy<HMCLeapfrog, cuda_on_host::Driver>(kick(cuda));
  EXPECT_TRUE(cpu == cuda);
  EXPECT_TRUE(cpu.params == State(7).params);
  EXPECT_FALSE(cpu == State(7));
}

TEST(Drivers, DeviceStepIsAddedToStep) {
  std::vector<int64_t> device_step = {75};
  ForEachUpdate([&](auto each) {
    using Op = typename decltype(each)::type;
    if (!HasDeviceStep(Op::kSpec)) return;
    How how{.has_all = true, .every = 2, .step = 78};
    State a(7);
    PerformOn<Op, Library>(a, how);
    how.step = 3;
    how.device_step = View(device_step);
    State b(7);
    PerformOn<Op, Library>(b, how);
    EXPECT_TRUE(a == b);
  });
}

// Old momenta are forgotten in the steps that resample and only in those.
TEST(Drivers, MomentumIsResampledOnMultiplesOfTheInterval) {
  for (int64_t step = 0; step <= 10; ++step) {
    State plain(7);
    State resampling(7);
    State other_momentum(7);
    Call fill(Gaussian::kSpec);
    fill.lists[0] = other_momentum.kept[0].Tensors();
    fill.numbers[0] = 1;
    fill.offsets = other_momentum.offsets;
    fill.seed = 1;
    fill.step = step;
    fill.purpose = 5;
    PerformBy<Gaussian, Library>(fill);
    PerformOn<SGHMCStep, Library>(plain, {.step = step});
    PerformOn<SGHMCStep, Library>(resampling, {.every = 5, .step = step});
    PerformOn<SGHMCStep, Library>(other_momentum, {.every = 5, .step = step});
    EXPECT_EQ(plain == resampling, step % 5 != 0) << "step " << step;
    EXPECT_EQ(other_momentum == resampling, step % 5 == 0) << "step " << step;
  }
}

TEST(Drivers, ANegativeDeviceStepLeavesEverythingAsItIs) {
  std::vector<int64_t> left_out = {kLeftOut};
  const State before(230);
  ForEachUpdate([&](auto each) {
    using Op = typename decltype(each)::type;
    if (!HasDeviceStep(Op::kSpec)) return;
    for (const int64_t every : {0, 1, 2}) {
      const How how{.every = every, .step = 3, .device_step = View(left_out)};
      State after = before;
      PerformOn<Op, Library>(after, how);
      PerformOn<Op, cuda_on_host::Driver>(after, how);
      EXPECT_TRUE(after == before);
    }
  });
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
TEST(Drivers, SplittingIntoCallsChangesNothing) {
  const How how{.has_all = true};
  State together(9);
  PerformOn<SGHMCStep, Library>(together, how);
  State apart(9);
  const Call all = CallOf(SGHMCStep::kSpec, apart, how);
  constexpr size_t kMasterList = SGHMCStep::kSpec.lists.count - 1;
  size_t masters = all.lists[kMasterList].size();
  for (size_t i = all.lists[0].size(); i-- > 0;) {
    Call one = all;
    for (size_t k = 0; k < kMasterList; ++k) one.lists[k] = {all.lists[k][i]};
    one.prior_means = TensorList{(*all.prior_means)[i]};
    const ScalarType type = all.lists[0][i].scalar_type();
    one.lists[kMasterList].clear();
    if (type == ScalarType::BFloat16 || type == ScalarType::Half) {
      one.lists[kMasterList].push_back(all.lists[kMasterList][--masters]);
    }
    one.offsets = {all.offsets[i]};
    const std::vector<int64_t>& rows = *all.rows;
    one.rows = std::vector<int64_t>{rows[2 * i], rows[2 * i + 1]};
    PerformBy<SGHMCStep, Library>(one);
  }
  EXPECT_TRUE(together == apart);
}

// SGHMC's row in another order.
struct Reordered {
  static constexpr OpSpec kSpec = {
      .op = "reordered_",
      .lists = {args::kGrads, args::kParams},
      .numbers = {args::kResampleEvery, args::kMomentumScale,
                  args::kTemperature, args::kNumData, args::kNoiseEstimate,
                  args::kLr, args::kPriorPrecision, args::kMomentum},
      .has_prior_mean = true};
};

TEST(NamedCall, FindsArgumentsByTheirNames) {
  Call call(Reordered::kSpec);
  call.numbers = {0, 0.5, 2, 10, 0.25, 0.125, 40, 0.75};
  call.integers[0] = 7;
  call.common.prior_mean = 3;
  std::vector<float> data = {1};
  call.lists[1] = {View(data)};
  const NamedCall<Reordered> named(call);
  const SGHMCCoefficients c(named);
  EXPECT_EQ(c.lr, 0.125);
  EXPECT_EQ(c.momentum, 0.75);
  EXPECT_EQ(c.scaled_temperature, 2 * 0.125 * 2 / 10);
  EXPECT_EQ(c.weight_decay, 40.0 / 10);
  EXPECT_EQ(c.noise_estimate, 0.25);
  EXPECT_EQ(c.momentum_scale, 0.5);
  EXPECT_EQ(c.prior_mean, 3);
  EXPECT_EQ(named.integer("resample_momentum_every"), 7);
  EXPECT_EQ(named.list("params").size(), 1U);
  EXPECT_TRUE(named.list("grads").empty());
}

}  // namespace
}  // namespace torch_sgmcmc
