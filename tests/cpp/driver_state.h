// The state of a sampler in plain memory, for drivers without torch's
// allocator.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "apply/plan.h"
#include "core/counter.h"
#include "core/roles.h"
#include "tensors.h"

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
  Memory params, grads, momenta, variances, previous, masters, means;
  std::vector<int64_t> offsets;
  Rows rows;  // of a third of them; without chains alone
  int64_t num_chains;

  explicit State(int count, int64_t chains = 0)
      : params(chains),
        grads(chains),
        momenta(chains),
        variances(chains),
        previous(chains),
        masters(chains),
        means(chains),
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
    momenta.Add<Arithmetic<T>>(numel, random, false);
    variances.Add<Arithmetic<T>>(numel, random, true);
    previous.Add<Arithmetic<T>>(numel, random, false);
    means.Add<Arithmetic<T>>(numel, random, false);
  }

  friend bool operator==(const State&, const State&) = default;
};

}  // namespace torch_sgmcmc
