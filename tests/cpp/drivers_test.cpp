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

}  // namespace
}  // namespace torch_sgmcmc
