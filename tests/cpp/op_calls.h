// Calls of operators as their specs say, on tensors of all dtypes that a test
// owns: by the library, or by a driver of the test's own.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "launch/boxed.h"
#include "launch/call.h"
#include "ops/op_spec.h"
#include "ops/registry.h"
#include "tensors.h"
#include "testing.h"

#if !defined(STABLE_TORCH_ERROR_CODE_CHECK)  // torch 2.11
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace torch_sgmcmc {

// A list of tensors that owns its memory; a copy has memory of its own.
class Memory {
 public:
  // With chains, the tensors have a leading dimension of so many.
  explicit Memory(int64_t num_chains) : num_chains_(num_chains) {}

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
    make_.push_back(&MakeView<T>);
  }

  // A master for each element of the last tensor of parameters. Every third is
  // not what the parameter is the rounded value of.
  template <class T>
  void AddMasters(const Memory& params) {
    const std::vector<char>& visible = params.bytes_.back();
    std::vector<char> bytes(visible.size() / sizeof(T) * sizeof(float));
    for (size_t i = 0; i < visible.size() / sizeof(T); ++i) {
      T value;
      std::memcpy(&value, visible.data() + i * sizeof value, sizeof value);
      const float master =
          static_cast<float>(value) * (i % 3 == 0 ? 1.5f : 1 + 0x1p-13f);
      std::memcpy(bytes.data() + i * sizeof master, &master, sizeof master);
    }
    bytes_.push_back(std::move(bytes));
    make_.push_back(&MakeView<float>);
  }

  // Four numbers for each chain.
  void AddRows(std::mt19937& random) {
    Add<double>(4 * (num_chains_ == 0 ? 1 : num_chains_), random, true);
    make_.back() = [](std::vector<char>& b, int64_t /*chains*/) {
      const auto rows = static_cast<int64_t>(b.size() / (4 * sizeof(double)));
      return View(reinterpret_cast<double*>(b.data()), {rows, 4}, {4, 1});
    };
  }

  TensorList Tensors() {
    TensorList result;
    for (size_t i = 0; i < bytes_.size(); ++i) {
      result.push_back(make_[i](bytes_[i], num_chains_));
    }
    return result;
  }

  friend bool operator==(const Memory& a, const Memory& b) {
    return a.bytes_ == b.bytes_;
  }

 private:
  template <class T>
  static Tensor MakeView(std::vector<char>& b, int64_t num_chains) {
    T* data = reinterpret_cast<T*>(b.data());
    const auto numel = static_cast<int64_t>(b.size() / sizeof(T));
    if (num_chains == 0) return View(data, {numel}, {1});
    const int64_t each = numel / num_chains;
    return View(data, {num_chains, each}, {each, 1});
  }

  int64_t num_chains_;
  std::vector<std::vector<char>> bytes_;
  std::vector<Tensor (*)(std::vector<char>&, int64_t)> make_;
};

// The state of a sampler for a model with `count` parameters of all dtypes.
struct State {
  Memory params, grads, masters, means;
  Memory turns;              // the numbers of each chain, for each parameter
  std::vector<Memory> kept;  // in the type of arithmetic, positive
  std::vector<int64_t> offsets;
  Rows rows;  // of a third of them; without chains alone
  int64_t num_chains;

  explicit State(int count, int64_t chains = 0)
      : params(chains),
        grads(chains),
        masters(chains),
        means(chains),
        turns(chains),
        kept(4, Memory(chains)),
        num_chains(chains) {
    if (chains == 0) rows.emplace();
    const int64_t times = chains == 0 ? 1 : chains;
    std::mt19937 random(17);
    int64_t offset = 0;
    for (int i = 0; i < count; ++i) {
      constexpr int64_t kSizes[] = {1, 4100, 33, 257, 200, 5, 128};
      // A large one of each dtype: more would take most of the test's time.
      const bool is_large = chains == 0 && i < 28 && i % 7 == 4;
      const int64_t numel = is_large ? 20000 : kSizes[i % 7];
      switch (i % 4) {
        case 0:
          Add<float>(times * numel, random);
          break;
        case 1:
          Add<double>(times * numel, random);
          break;
        case 2:
          Add<BFloat16>(times * numel, random);
          break;
        default:
          Add<Half>(times * numel, random);
      }
      offsets.push_back(offset);
      if (rows) {
        const auto row = i % 3 == 1 ? RowOf(numel) : 0;
        rows->insert(rows->end(), {row, row == 0 ? 0 : row + i});
      }
      // Mostly aligned to the noise block, as samplers do it; not always.
      offset += i % 5 == 4
                    ? numel
                    : (numel + kNoiseBlock - 1) / kNoiseBlock * kNoiseBlock;
    }
  }

  static int64_t RowOf(int64_t numel) {
    for (const int64_t row : {1000, 100, 64, 11}) {
      if (numel % row == 0) return row;
    }
    return numel;
  }

  template <class T>
  void Add(int64_t numel, std::mt19937& random) {
    params.Add<T>(numel, random, false);
    if constexpr (kHasMaster<Role::kParameter, T>) {
      masters.AddMasters<T>(params);
    }
    grads.Add<T>(numel, random, false);
    for (Memory& each : kept) each.Add<Arithmetic<T>>(numel, random, true);
    means.Add<Arithmetic<T>>(numel, random, false);
    turns.AddRows(random);
  }

  friend bool operator==(const State&, const State&) = default;
};

struct How {
  bool has_all = false;  // what may be left out, a list of means too
  int64_t every = 0;     // integers
  int64_t step = 10;
  std::optional<Tensor> device_step = std::nullopt;
};

// A call as an operator's spec says: lists of their roles, numbers in their
// ranges.
inline Call CallOf(const OpSpec& spec, State& s, const How& how) {
  Call call(spec);
  size_t kept = 0;
  for (size_t i = 0; i < spec.lists.count; ++i) {
    const TensorListArg& list = spec.lists[i];
    if (list.is_optional && !how.has_all) continue;
    Memory& from = list.role == Role::kMaster         ? s.masters
                   : list.role == Role::kGradient     ? s.grads
                   : list.role == Role::kChainNumbers ? s.turns
                   : IsInArithmeticType(list.role)    ? s.kept.at(kept++)
                                                      : s.params;
    call.lists[i] = from.Tensors();
  }
  for (size_t i = 0; i < spec.numbers.count; ++i) {
    switch (spec.numbers[i].domain) {
      case Domain::kNotNegative:
        call.numbers[i] = 0.05;
        break;
      case Domain::kPositive:
        call.numbers[i] = 10;
        break;
      default:
        call.numbers[i] = 0.9;
        call.integers[i] = how.every;
    }
  }
  call.seed = -5;
  call.step = how.step;
  call.purpose = 3;
  call.common.prior_mean = 0.7;
  if (spec.has_prior_mean && how.has_all) call.prior_means = s.means.Tensors();
  if (spec.noise == Noise::kNone) return call;
  call.offsets = s.offsets;
  call.rows = s.rows;
  if (spec.noise == Noise::kMomenta) return call;
  call.device_step = how.device_step;
  call.num_chains = s.num_chains;
  return call;
}

// What the kernel of a spec finds on the stack.
inline std::vector<StableIValue> StackOf(const Call& call) {
  const ArgLayout slots = ArgLayoutOf(call.spec);
  std::vector<StableIValue> stack;
  for (size_t i = 0; i < slots.count; ++i) {
    Call::VisitAt(slots.items[i], call, [&](const auto& argument) {
      stack.push_back(torch::stable::detail::from(argument));
    });
  }
  return stack;
}

// As any program finds it: by name in torch's dispatcher, in the library.
inline std::vector<StableIValue> Dispatch(const std::string& op,
                                          std::vector<StableIValue> stack) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(
      ("torch_sgmcmc::" + op).c_str(), "", stack.data(), TORCH_ABI_VERSION));
  return stack;
}

template <class... T>
std::vector<StableIValue> Dispatch(const std::string& op,
                                   const std::tuple<T...>& arguments) {
  return Dispatch(op, std::apply(
                          [](const T&... a) {
                            return std::vector<StableIValue>{
                                torch::stable::detail::from(a)...};
                          },
                          arguments));
}

// In the place of a driver: what the library has on the CPU.
struct Library;

template <class Op, class Driver>
void PerformBy(const Call& call) {
  if constexpr (std::is_same_v<Driver, Library>) {
    Dispatch(call.spec.op, StackOf(call));
  } else {
    Update<Op, Driver>(call).Apply();
  }
}

template <class Op, class Driver>
void PerformOn(State& s, const How& how) {
  PerformBy<Op, Driver>(CallOf(Op::kSpec, s, how));
}

// All that return nothing.
template <class Test>
void ForEachUpdate(const Test& test) {
  AllOperators::ForEach([&](auto each) {
    using Op = typename decltype(each)::type;
    if constexpr (Op::kSpec.sums == 0) {
      SCOPED_TRACE(Op::kSpec.op);
      test(each);
    }
  });
}

}  // namespace torch_sgmcmc
