// A step's arguments, except tensors, packed into integers.
//
// torch matches each argument by name, which would take most of a step's time.
// Python packs a step again only if a hyperparameter has changed
// (torch_sgmcmc/core/step_plan.py).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace torch_sgmcmc {

// The update of one param group.
struct PackedCall {
  int64_t op = 0;         // its place in the list of operators
  int64_t has_means = 0;  // whether tensors of the prior's means come last
  std::vector<int64_t> lengths;  // of the lists of state, in the op's order
  std::vector<int64_t> offsets;  // one for each parameter
  std::vector<int64_t> rows;     // of shards; empty: all parameters are whole
  // In the op's order, integers included, then the common ones.
  std::vector<double> numbers;

  template <class Call, class Visitor>
  static void Visit(Call& call, Visitor visit) {
    visit(call.op);
    visit(call.has_means);
    visit(call.lengths);
    visit(call.offsets);
    visit(call.rows);
    visit(call.numbers);
  }
};

struct PackedStep {
  int64_t checks = 0;  // whether gradients must be finite
  int64_t seed = 0;
  int64_t num_chains = 0;
  std::vector<PackedCall> calls;

  std::vector<int64_t> Pack() const {
    std::vector<int64_t> words;
    Visit(*this, [&](const auto& item) { Put(item, words); });
    return words;
  }

  // Throws std::runtime_error unless this is a packed step.
  static PackedStep Unpack(const int64_t* words, size_t count) {
    PackedStep step;
    const int64_t* end = words + count;
    Visit(step, [&](auto& item) { Take(item, words, end); });
    if (words != end) FailToUnpack();
    return step;
  }

 private:
  template <class Step, class Visitor>
  static void Visit(Step& step, Visitor visit) {
    visit(step.checks);
    visit(step.seed);
    visit(step.num_chains);
    visit(step.calls);
  }

  static void Put(int64_t item, std::vector<int64_t>& words) {
    words.push_back(item);
  }
  static void Put(double item, std::vector<int64_t>& words) {
    words.push_back(std::bit_cast<int64_t>(item));
  }
  static void Put(const PackedCall& call, std::vector<int64_t>& words) {
    PackedCall::Visit(call, [&](const auto& item) { Put(item, words); });
  }
  template <class T>
  static void Put(const std::vector<T>& items, std::vector<int64_t>& words) {
    words.push_back(static_cast<int64_t>(items.size()));
    for (const T& item : items) Put(item, words);
  }

  [[noreturn]] static void FailToUnpack() {
    throw std::runtime_error("these are not the words of a packed step");
  }
  static void Take(int64_t& item, const int64_t*& words, const int64_t* end) {
    if (words == end) FailToUnpack();
    item = *words++;
  }
  static void Take(double& item, const int64_t*& words, const int64_t* end) {
    int64_t bits = 0;
    Take(bits, words, end);
    item = std::bit_cast<double>(bits);
  }
  static void Take(PackedCall& call, const int64_t*& words,
                   const int64_t* end) {
    PackedCall::Visit(call, [&](auto& item) { Take(item, words, end); });
  }
  template <class T>
  static void Take(std::vector<T>& items, const int64_t*& words,
                   const int64_t* end) {
    int64_t count = 0;
    Take(count, words, end);
    if (count < 0 || count > end - words) FailToUnpack();
    items.resize(static_cast<size_t>(count));
    for (T& item : items) Take(item, words, end);
  }
};

}  // namespace torch_sgmcmc
