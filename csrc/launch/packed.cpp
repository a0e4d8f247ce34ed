#include "launch/packed.h"

#include <cmath>
#include <cstddef>
#include <exception>
#include <string>
#include <vector>

namespace torch_sgmcmc {

PackedStep Unpacked(const char* op, const char* name, const Tensor& packed) {
  if (!packed.defined() || packed.scalar_type() != ScalarType::Long ||
      !packed.is_contiguous() || !packed.is_cpu()) {
    Fail(op, name, " must be contiguous, of int64 and on the CPU");
  }
  try {
    return PackedStep::Unpack(static_cast<const int64_t*>(packed.data_ptr()),
                              static_cast<size_t>(packed.numel()));
  } catch (const std::exception& error) {
    Fail(op, name, ": ", error.what());
  }
}

PackedTensors::PackedTensors(const char* op, const TensorList& params,
                             const TensorList& grads, const TensorList& state)
    : op_(op), params_(params), grads_(grads), state_(state) {}

TensorList PackedTensors::Take(const TensorList& tensors, int64_t& taken,
                               int64_t length) {
  const auto begin = tensors.begin() + taken;
  if (length < 0 || length > tensors.end() - begin) {
    const char* name = "state";
    if (&tensors == &params_) name = "params";
    if (&tensors == &grads_) name = "grads";
    Fail(op_, name, " has fewer tensors than packed says");
  }
  taken += length;
  return {begin, begin + length};
}

Call PackedTensors::Next(const OpSpec& spec, const PackedCall& packed) {
  constexpr size_t kFirst = 2;  // params, grads
  size_t count = spec.numbers.count;
  for (const CommonNumber& each : kCommonNumbers) {
    if (Has(spec, each)) ++count;
  }
  if (packed.lengths.size() + kFirst != spec.lists.count ||
      packed.numbers.size() != count) {
    Fail(op_, "packed is not a call of ", spec.op);
  }
  Call call(spec);
  const auto length = static_cast<int64_t>(packed.offsets.size());
  call.lists[0] = Take(params_, num_params_, length);
  call.lists[1] = Take(grads_, num_grads_, length);
  for (size_t i = 0; i < packed.lengths.size(); ++i) {
    call.lists[kFirst + i] = Take(state_, num_state_, packed.lengths[i]);
  }
  if (packed.has_means != 0) {
    call.prior_means = Take(state_, num_state_, length);
  }
  for (size_t i = 0; i < spec.numbers.count; ++i) {
    const double number = packed.numbers[i];
    if (!IsInteger(spec.numbers[i].domain)) {
      call.numbers[i] = number;
    } else if (std::fabs(number) < 0x1p53) {
      call.integers[i] = static_cast<int64_t>(number);
    } else {
      Fail(op_, "packed has a ", spec.numbers[i].name,
           " that is no whole number");
    }
  }
  size_t next = spec.numbers.count;
  for (const CommonNumber& each : kCommonNumbers) {
    if (Has(spec, each)) call.common.*each.place = packed.numbers[next++];
  }
  call.offsets = packed.offsets;
  if (!packed.rows.empty()) call.rows = packed.rows;
  return call;
}

void PackedTensors::CheckIsEmpty() const {
  const auto check = [&](const TensorList& tensors, int64_t taken,
                         const char* name) {
    if (taken == static_cast<int64_t>(tensors.size())) return;
    Fail(op_, name, " has more tensors than packed says");
  };
  check(params_, num_params_, "params");
  check(grads_, num_grads_, "grads");
  check(state_, num_state_, "state");
}

}  // namespace torch_sgmcmc
