// Steps of the C++ classes and the operators under them (Google Benchmark).
//
//   cmake -S . -B build -DTORCH_SGMCMC_BENCHMARKS=ON && cmake --build build
//   build/benchmarks/cpp/step_benchmark
//
// Operator and Class time one call each, on lists of small tensors (where what
// a call costs besides arithmetic shows) and on the 784-100-10 network for
// MNIST. Overhead takes both in turns and reports, in microseconds, what the
// class adds to the operator (`added`) and what it may add (`allowed`: 2 µs
// plus 50 ns a tensor). Times are minima over short rounds: machines are noisy.
#include <benchmark/benchmark.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "libtorch/operators.h"

namespace torch_sgmcmc {
namespace {

constexpr double kLr = 0.1;
constexpr double kMomentum = 0.9;
constexpr double kNumData = 50000;
constexpr int64_t kSmall = 16;

struct Lists {
  explicit Lists(const std::vector<std::vector<int64_t>>& shapes) {
    int64_t offset = 0;
    for (const auto& shape : shapes) {
      auto param = torch::randn(shape).set_requires_grad(true);
      param.mutable_grad() = torch::randn(shape);
      params.push_back(param);
      grads.push_back(param.grad());
      momenta.push_back(torch::zeros(shape));
      offsets.push_back(offset);
      offset += (param.numel() + 127) / 128 * 128;
    }
  }

  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> momenta;
  std::vector<int64_t> offsets;
};

// 0 stands for the MNIST network, n for n small tensors.
Lists MakeLists(int64_t n) {
  if (n == 0) return Lists({{100, 784}, {100}, {10, 100}, {10}});
  return Lists(
      std::vector<std::vector<int64_t>>(static_cast<size_t>(n), {kSmall}));
}

// Each method: its operator on lists, and its class on parameters.
struct Langevin {
  using Method = SGLD;
  static SGLDOptions Options() {
    return SGLDOptions(kLr).num_data(kNumData).seed(0);
  }
  static void Operator(const Lists& lists, int64_t step) {
    RowOperator<SGLDStep>()(lists.params, lists.grads, {}, kLr, kNumData, 0, 1,
                            lists.offsets,
                            /*seed=*/0, step,
                            /*device_step=*/std::nullopt,
                            /*prior_mean=*/0,
                            /*prior_means=*/std::nullopt,
                            /*rows=*/std::nullopt,
                            /*num_chains=*/0);
  }
};

struct Hamiltonian {
  using Method = SGHMC;
  static SGHMCOptions Options() {
    return SGHMCOptions(kLr).momentum(kMomentum).num_data(kNumData).seed(0);
  }
  static void Operator(const Lists& lists, int64_t step) {
    RowOperator<SGHMCStep>()(lists.params, lists.grads, lists.momenta, {}, {},
                             kLr, kMomentum, kNumData,
                             /*prior_precision=*/0,
                             /*temperature=*/1,
                             /*noise_estimate=*/0,
                             /*momentum_scale=*/1,
                             /*resample_momentum_every=*/0, lists.offsets,
                             /*seed=*/0, step,
                             /*device_step=*/std::nullopt,
                             /*prior_mean=*/0,
                             /*prior_means=*/std::nullopt,
                             /*rows=*/std::nullopt,
                             /*num_chains=*/0);
  }
};

template <typename Sampler>
void Operator(benchmark::State& state) {
  const torch::NoGradGuard no_grad;
  const Lists lists = MakeLists(state.range(0));
  int64_t step = 0;
  for (auto _ : state) Sampler::Operator(lists, step++);
}

template <typename Sampler>
void Class(benchmark::State& state) {
  const Lists lists = MakeLists(state.range(0));
  typename Sampler::Method sampler(lists.params, Sampler::Options());
  for (auto _ : state) sampler.step();
}

template <typename Function>
double SecondsPerCall(int calls, Function function) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) function();
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count() / calls;
}

template <typename Sampler>
void Overhead(benchmark::State& state) {
  constexpr int kCalls = 200;
  const torch::NoGradGuard no_grad;
  const Lists lists = MakeLists(state.range(0));
  typename Sampler::Method sampler(lists.params, Sampler::Options());
  double bare = std::numeric_limits<double>::infinity();
  double whole = bare;
  int64_t step = 0;
  for (auto _ : state) {
    bare = std::min(bare, SecondsPerCall(kCalls, [&] {
                      Sampler::Operator(lists, step++);
                    }));
    const double seconds = SecondsPerCall(kCalls, [&] { sampler.step(); });
    whole = std::min(whole, seconds);
    state.SetIterationTime(seconds);
  }
  state.counters["operator"] = 1e6 * bare;
  state.counters["class"] = 1e6 * whole;
  state.counters["added"] = 1e6 * (whole - bare);
  state.counters["allowed"] =
      2 + 0.05 * static_cast<double>(lists.params.size());
}

BENCHMARK(Operator<Langevin>)->Arg(0)->Arg(1)->Arg(100);
BENCHMARK(Class<Langevin>)->Arg(0)->Arg(1)->Arg(100);
BENCHMARK(Operator<Hamiltonian>)->Arg(0)->Arg(1)->Arg(100);
BENCHMARK(Class<Hamiltonian>)->Arg(0)->Arg(1)->Arg(100);
BENCHMARK(Overhead<Langevin>)
    ->Arg(1)
    ->Arg(10)
    ->Arg(100)
    ->UseManualTime()
    ->Iterations(200);
BENCHMARK(Overhead<Hamiltonian>)
    ->Arg(1)
    ->Arg(10)
    ->Arg(100)
    ->UseManualTime()
    ->Iterations(200);

}  // namespace
}  // namespace torch_sgmcmc

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
