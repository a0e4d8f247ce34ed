// Stable-ABI tensors around memory that a test owns.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <vector>

#include "launch/plan.h"

namespace torch_sgmcmc {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <class T>
inline constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
inline constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kScalarType<double> = ScalarType::Double;
template <>
inline constexpr ScalarType kScalarType<BFloat16> = ScalarType::BFloat16;
template <>
inline constexpr ScalarType kScalarType<Half> = ScalarType::Half;
template <>
inline constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;

// A view of `data`, which must outlive it.
template <class T>
Tensor View(T* data, const std::vector<int64_t>& sizes,
            const std::vector<int64_t>& strides) {
  return torch::stable::from_blob(
      data, {sizes.data(), sizes.size()}, {strides.data(), strides.size()},
      torch::stable::Device(torch::headeronly::DeviceType::CPU),
      kScalarType<T>);
}

// A one-dimensional view of a whole vector.
template <class T>
Tensor View(std::vector<T>& data) {
  return View(data.data(), {static_cast<int64_t>(data.size())}, {1});
}

}  // namespace torch_sgmcmc
