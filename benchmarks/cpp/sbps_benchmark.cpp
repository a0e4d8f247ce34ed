// What a step of the C++ class SBPS costs beyond the network's own passes
// (Google Benchmark).
//
//   cmake -S . -B build -DTORCH_SGMCMC_BENCHMARKS=ON && cmake --build build
//   build/benchmarks/cpp/sbps_benchmark
//
// On the 784-100-10 network for MNIST, and on one tensor of 10^7 parameters.
// The closure hands out stored observations: autograd finds losses, gradients
// and derivatives along the direction that are there already. What autograd
// itself takes for that is measured in turns with the steps and taken off, so
// that what is left is the clock, the move, the reductions, and all bookkeeping
// of the class. Steps that bounce are left out; the first one after a bounce is
// shown by itself. In microseconds on one thread, medians and, for a machine
// with other work, the quantile of 10 % (`_low`):
//
//   passes               the stored observation
//   first, later         step() on a line, less passes
//   add                  a plain in-place add of two tensors of that size
//   first_adds, ...      medians in units of the median of the add
#include <ATen/core/grad_mode.h>
#include <benchmark/benchmark.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch_sgmcmc {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int64_t kBatch = 100;
constexpr size_t kStored = 20;

struct Stored {
  at::Tensor losses;
  at::Tensor derivatives;
  variable_list grads;
};

const Stored& StoredOf(AutogradContext* ctx) {
  return *reinterpret_cast<const Stored*>(ctx->saved_data["stored"].toInt());
}

// Torch writes into what a function returns: other tensors of the same memory.
variable_list Aliases(const variable_list& tensors) {
  variable_list result;
  for (const at::Tensor& t : tensors) result.push_back(t.detach());
  return result;
}

// The gradient of the weighted losses, and, as its own gradient by the weights,
// the derivatives.
struct StoredGradient : Function<StoredGradient> {
  static variable_list forward(AutogradContext* ctx,
                               const Variable& /*weights*/, int64_t stored) {
    ctx->saved_data["stored"] = stored;
    return Aliases(StoredOf(ctx).grads);
  }
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& /*along*/) {
    return {StoredOf(ctx).derivatives.detach(), Variable()};
  }
};

struct StoredLosses : Function<StoredLosses> {
  static Variable forward(AutogradContext* ctx, at::TensorList /*params*/,
                          int64_t stored) {
    ctx->saved_data["stored"] = stored;
    return StoredOf(ctx).losses.detach();
  }
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& weights) {
    variable_list grads =
        StoredGradient::apply(weights[0], ctx->saved_data["stored"].toInt());
    grads.emplace_back();
    return grads;
  }
};

// A chain whose gradients are noise: of every line's proposals some bounce.
class Chain {
 public:
  explicit Chain(const std::vector<std::vector<int64_t>>& shapes)
      : sampler_(
            MakeParams(shapes),
            SBPSOptions().num_data(50000).prior_precision(1).num_std(3).seed(
                0)) {
    for (Stored& stored : stored_) {
      stored.losses = torch::rand({kBatch});
      stored.derivatives = 0.01 * torch::randn({kBatch});
      for (const at::Tensor& p : params()) {
        stored.grads.push_back(torch::randn_like(p));
      }
    }
  }

  const variable_list& params() { return sampler_.param_groups()[0].params(); }

  void Step() {
    sampler_.step([this] { return Losses(); });
    current_ = (current_ + 1) % stored_.size();
  }

  // What the next step has autograd do.
  void Passes() {
    const at::AutoGradMode enable_grad(true);
    const at::Tensor losses = Losses();
    const at::Tensor weights =
        torch::full_like(losses.detach(), 1.0 / kBatch).requires_grad_();
    const variable_list grads =
        torch::autograd::grad({losses}, params(), {weights},
                              /*retain_graph=*/std::nullopt,
                              /*create_graph=*/true);
    benchmark::DoNotOptimize(
        torch::autograd::grad(grads, {weights}, stored_[current_].grads));
  }

  int64_t bounces() const { return sampler_.diagnostics().bounces; }

 private:
  static variable_list MakeParams(
      const std::vector<std::vector<int64_t>>& shapes) {
    variable_list params;
    for (const auto& shape : shapes) {
      params.push_back(torch::randn(shape).set_requires_grad(true));
    }
    return params;
  }

  at::Tensor Losses() {
    return StoredLosses::apply(at::TensorList(params()),
                               reinterpret_cast<int64_t>(&stored_[current_]));
  }

  SBPS sampler_;
  std::vector<Stored> stored_ = std::vector<Stored>(kStored);
  size_t current_ = 0;
};

double Microseconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double, std::micro> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count();
}

class Times {
 public:
  void Add(double time) { times_.push_back(time); }
  double Quantile(double q) {
    if (times_.empty()) return 0;
    std::sort(times_.begin(), times_.end());
    return times_[static_cast<size_t>(q *
                                      static_cast<double>(times_.size() - 1))];
  }

 private:
  std::vector<double> times_;
};

void Proposal(benchmark::State& state,
              const std::vector<std::vector<int64_t>>& shapes) {
  torch::manual_seed(0);
  Chain chain(shapes);
  int64_t numel = 0;
  for (const at::Tensor& p : chain.params()) numel += p.numel();
  const at::Tensor one = torch::randn({numel});
  const at::Tensor other = torch::randn({numel});
  for (int i = 0; i < 20; ++i) chain.Step();
  Times passes;
  Times first;
  Times later;
  Times add;
  bool bounced = false;
  for (auto _ : state) {
    one.add_(other, 1e-3);
    add.Add(Microseconds([&] { one.add_(other, 1e-3); }));
    chain.Passes();
    const double bare = Microseconds([&] { chain.Passes(); });
    passes.Add(bare);
    const int64_t before = chain.bounces();
    const double whole = Microseconds([&] { chain.Step(); });
    const bool bounces = chain.bounces() > before;
    if (!bounces) (bounced ? first : later).Add(whole);
    bounced = bounces;
    state.SetIterationTime(1e-6 * whole);
  }
  const auto report = [&](const std::string& suffix, double q) {
    const double bare = passes.Quantile(q);
    state.counters["passes" + suffix] = bare;
    state.counters["add" + suffix] = add.Quantile(q);
    state.counters["first" + suffix] = first.Quantile(q) - bare;
    state.counters["later" + suffix] = later.Quantile(q) - bare;
  };
  report("", 0.5);
  report("_low", 0.1);
  for (const std::string name : {"first", "later"}) {
    state.counters[name + "_adds"] =
        state.counters[name] / state.counters["add"];
  }
}

using Shapes = std::vector<std::vector<int64_t>>;
BENCHMARK_CAPTURE(Proposal, mnist, Shapes{{100, 784}, {100}, {10, 100}, {10}})
    ->UseManualTime()
    ->Iterations(5000);
BENCHMARK_CAPTURE(Proposal, ten_million, Shapes{{10'000'000}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(100);

}  // namespace
}  // namespace torch_sgmcmc

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
