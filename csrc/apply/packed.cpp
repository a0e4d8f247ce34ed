#include "apply/packed.h"

#include <cmath>
#include <cstddef>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace torch_sgmcmc {
namespace {

// Hands out the lists of state one after another.
class Lists {
 public:
  Lists(const char* op, const TensorList& tensors)
      : op_(op), tensors_(tensors) {}

  TensorList Next(int64_t length) {
    const auto begin = tensors_.begin() + taken_;
    if (length < 0 || length > tensors_.end() - begin) {
      Fail(op_, "state has fewer tensors than packed says");
    }
    taken_ += length;
    return {begin, begin + length};
  }
  bool is_empty() const {
    return taken_ == static_cast<int64_t>(tensors_.size());
  }

 private:
  const char* op_;
  const TensorList& tensors_;
  int64_t taken_ = 0;
};

}  // namespace

PackedCall Unpacked(const char* op, const char* name, const Tensor& packed) {
  if (!packed.defined() || packed.scalar_type() != ScalarType::Long ||
      !packed.is_contiguous() || !packed.is_cpu()) {
    Fail(op,
         std::string(name) + " must be contiguous, of int64 and on the CPU");
  }
  try {
    return PackedCall::Unpack(static_cast<const int64_t*>(packed.data_ptr()),
                              static_cast<size_t>(packed.numel()));
  } catch (const std::exception& error) {
    Fail(op, std::string(name) + ": " + error.what());
  }
}

Call CallOf(const char* op,
            const Row& row,
            const PackedCall& packed,
            TensorList params,
            TensorList grads,
            const TensorList& state,
            int64_t step) {
  constexpr size_t kFirst = 2;  // params, grads
  size_t count = row.numbers.count;
  for (const CommonNumber& each : kCommonNumbers) {
    if (Has(row, each)) ++count;
  }
  if (packed.lengths.size() + kFirst != row.lists.count ||
      packed.numbers.size() != count) {
    Fail(op, std::string("packed is not a call of ") + row.op);
  }
  Call call(row);
  Lists lists(op, state);
  for (size_t i = 0; i < packed.lengths.size(); ++i) {
    call.lists[kFirst + i] = lists.Next(packed.lengths[i]);
  }
  if (packed.has_means != 0) {
    call.prior_means = lists.Next(static_cast<int64_t>(params.size()));
  }
  if (!lists.is_empty()) Fail(op, "state has more tensors than packed says");
  call.lists[0] = std::move(params);
  call.lists[1] = std::move(grads);
  for (size_t i = 0; i < row.numbers.count; ++i) {
    const double number = packed.numbers[i];
    if (!IsInteger(row.numbers[i].domain)) {
      call.numbers[i] = number;
    } else if (std::fabs(number) < 0x1p53) {
      call.integers[i] = static_cast<int64_t>(number);
    } else {
      Fail(op,
           std::string("packed has a ") + row.numbers[i].name +
               " that is no whole number");
    }
  }
  call.offsets = packed.offsets;
  call.seed = packed.seed;
  call.step = step;
  size_t next = row.numbers.count;
  for (const CommonNumber& each : kCommonNumbers) {
    if (Has(row, each)) call.common.*each.place = packed.numbers[next++];
  }
  call.num_chains = packed.num_chains;
  return call;
}

}  // namespace torch_sgmcmc
