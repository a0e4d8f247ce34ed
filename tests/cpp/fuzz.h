// Random choices for fuzz tests, and what they have in common.
//
// Call number n is made of the seed n alone. TORCH_SGMCMC_FUZZ_CALLS is the
// number of calls and TORCH_SGMCMC_FUZZ_SEED that of the first. With
// TORCH_SGMCMC_FUZZ_TRACE=1 calls are printed before they are made: the one
// that crashes is the last.
#pragma once

#include <ATen/ATen.h>

#include <cctype>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <iostream>

#include "testing.h"

namespace torch_sgmcmc {

inline int64_t NumberFromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

// What can be copied and viewed.
inline bool IsPlain(const at::Tensor& t) {
  return t.defined() && t.device().is_cpu() && t.layout() == at::kStrided;
}

inline bool IsTraced() {
  return NumberFromEnvironment("TORCH_SGMCMC_FUZZ_TRACE", 0) != 0;
}

class Choices {
 public:
  explicit Choices(int64_t seed) : bits_(static_cast<uint64_t>(seed)) {}

  int64_t below(int64_t end) {
    return static_cast<int64_t>(bits_() % static_cast<uint64_t>(end));
  }
  int64_t any() { return static_cast<int64_t>(bits_()); }
  bool one_in(int64_t n) { return below(n) == 0; }
  // In (0, 1/2), which most hyperparameters may be.
  double fraction() {
    return 0.25 * static_cast<double>(1 + below(1000)) / 501;
  }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }

  double bad_number() {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    return of({std::nan(""), kInfinity, -kInfinity, -1.0, -0.0, 0.0, 1.0, 1e308,
               -1e308, 5e-324, 1e19, 0x1p63});
  }
  int64_t bad_integer() {
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    return of({int64_t{-1}, int64_t{1} << 16, int64_t{1} << 24,
               int64_t{1} << 32, (int64_t{1} << 48) - 1, int64_t{1} << 48, kMax,
               kMax - 127, -kMax - 1});
  }

  // A shape of at most 60 elements.
  std::vector<int64_t> shape() {
    std::vector<int64_t> sizes(static_cast<size_t>(below(4)));
    for (int64_t& size : sizes) size = one_in(8) ? 0 : 1 + below(4);
    if (sizes.empty() && one_in(2)) sizes = {1 + below(60)};
    return sizes;
  }

  // Positive numbers, which variances and masses should be.
  at::Tensor tensor(c10::IntArrayRef sizes, at::ScalarType dtype) {
    at::Tensor result = at::empty(sizes, at::kDouble);
    double* data = result.mutable_data_ptr<double>();
    for (int64_t i = 0; i < result.numel(); ++i) data[i] = fraction();
    return result.to(dtype);
  }

  // The same elements elsewhere in memory: not aligned, with gaps, transposed.
  at::Tensor relaid(const at::Tensor& tensor) {
    if (tensor.dim() >= 2 && one_in(2)) {
      return tensor.transpose(0, 1).contiguous().transpose(0, 1);
    }
    const int64_t gap = 1 + below(3);
    std::vector<int64_t> strides = tensor.contiguous().strides().vec();
    for (int64_t& stride : strides) stride *= gap;
    const at::Tensor memory =
        at::zeros({gap * tensor.numel() + 3}, tensor.options());
    return memory.as_strided(tensor.sizes(), strides, 1 + below(3))
        .copy_(tensor);
  }

  // What is nearly the tensor that was wanted.
  at::Tensor spoiled(const at::Tensor& tensor) {
    if (!IsPlain(tensor)) return tensor;
    switch (below(12)) {
      case 0:
        return tensor.to(
            of({at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
                at::kInt, at::kByte, at::kBool, at::kComplexFloat, at::kChar}));
      case 1:
        return this->tensor(shape(), tensor.scalar_type());
      case 2:
        return tensor.to(at::kMeta);
      case 3:
        return tensor.detach().to_sparse();
      case 4:
        return tensor.dim() == 0 || tensor.size(0) == 0
                   ? at::Tensor()
                   : tensor.slice(0, 0, 1).expand(tensor.sizes());
      case 5:  // neighbours overlap
        return at::ones({1000}, tensor.options())
            .as_strided(tensor.sizes(),
                        std::vector<int64_t>(tensor.sizes().size(), 1));
      case 6:
        return {};
      case 7:
        return tensor.is_floating_point() ? tensor.clone().requires_grad_()
                                          : tensor;
      case 8:
        return tensor.flatten().slice(0, 0, 0);
      case 9:
        return at::full(tensor.sizes(), bad_number(), at::kDouble)
            .to(tensor.scalar_type());
      case 10: {
        const c10::InferenceMode inference;
        return tensor.clone();
      }
      default:
        return relaid(tensor);
    }
  }

 private:
  std::mt19937_64 bits_;
};

// Makes the calls, each of which tells its seed if it fails.
inline void ForEachCall(int64_t calls,
                        const std::function<void(int64_t seed)>& call) {
  calls = NumberFromEnvironment("TORCH_SGMCMC_FUZZ_CALLS", calls);
  const int64_t first = NumberFromEnvironment("TORCH_SGMCMC_FUZZ_SEED", 0);
  for (int64_t seed = first; seed < first + calls; ++seed) {
    SCOPED_TRACE("TORCH_SGMCMC_FUZZ_SEED=" + std::to_string(seed));
    if (IsTraced()) std::cerr << "seed " << seed << std::endl;
    try {
      call(seed);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "the test itself failed: " << error.what();
    }
    if (testing::Test::HasFailure()) return;
  }
}

// How many calls of one kind were made, and how many of them succeeded.
struct Tally {
  int64_t made = 0;
  int64_t succeeded = 0;

  // Of many calls, some must be right and some wrong.
  void check(const std::string& name) const {
    if (made < 100) return;
    EXPECT_GT(10 * succeeded, made) << name << " is hardly ever called right";
    EXPECT_GT(10 * (made - succeeded), made)
        << name << " is hardly ever called wrong";
  }
};

// Whether the text has this as a word.
inline bool Names(const std::string& text, const std::string& word) {
  const auto is_part = [&](size_t i) {
    return i < text.size() && (std::isalnum(text[i]) != 0 || text[i] == '_');
  };
  for (size_t i = text.find(word); i != std::string::npos;
       i = text.find(word, i + 1)) {
    if ((i == 0 || !is_part(i - 1)) && !is_part(i + word.size())) return true;
  }
  return false;
}

// The memory behind tensors on the CPU.
class Memory {
 public:
  explicit Memory(std::vector<at::Tensor> tensors)
      : tensors_(std::move(tensors)) {
    for (const at::Tensor& t : tensors_) bytes_.push_back(BytesOf(t));
  }
  bool is_unchanged() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (BytesOf(tensors_[i]) != bytes_[i]) return false;
    }
    return true;
  }

 private:
  static std::string BytesOf(const at::Tensor& t) {
    if (!IsPlain(t)) return {};
    const at::Storage& memory = t.storage();
    return {static_cast<const char*>(memory.data()), memory.nbytes()};
  }

  std::vector<at::Tensor> tensors_;
  std::vector<std::string> bytes_;
};

}  // namespace torch_sgmcmc
