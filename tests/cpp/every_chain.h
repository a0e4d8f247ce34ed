// Short chains of every sampler, with all that steps call counted.
#pragma once

#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include "same_values.h"  // IWYU pragma: export
#include "testing.h"

namespace torch_sgmcmc {

using torch::Tensor;

struct Broken {};  // no std::exception, as an interrupt may be none

// The calls of a closure, one of which may fail.
class Calls {
 public:
  void begin(int64_t fails_at = 0, bool late = false) {
    count_ = 0;
    fails_at_ = fails_at;
    late_ = late;
  }

  // Does work, which is told the number of the call in the chain.
  Tensor call(const std::function<Tensor(int64_t)>& work) {
    const bool fails = ++count_ == fails_at_;
    if (fails && !late_) throw Broken();
    const Tensor result = work(before_ + count_);
    if (fails) throw Broken();
    return result;
  }

  int64_t count() const { return count_; }
  void end_step() { before_ += count_; }

 private:
  int64_t before_ = 0;
  int64_t count_ = 0;
  int64_t fails_at_ = 0;
  bool late_ = false;
};

struct Chain {
  std::vector<Tensor> params;
  std::shared_ptr<Sampler> sampler;
  std::shared_ptr<Calls> calls;
  std::function<void()> step;
};

// Makes a chain of parameters that are `width` times as large as the smallest.
using Maker = std::function<Chain(int64_t width)>;
const std::map<std::string, Maker>& Makers();

// Lets gradients go.
void ZeroGrad(const std::vector<Tensor>& params);

c10::IValue Snapshot(const Chain& chain);

}  // namespace torch_sgmcmc
