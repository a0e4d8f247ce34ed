// MNIST or digits as tensors: the same images, split and order as in the Python
// example.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace bnn {

/// Images as rows of floats in [0, 1), and labels.
struct Images {
  std::string name;
  at::Tensor train_x;
  at::Tensor train_y;
  at::Tensor test_x;
  at::Tensor test_y;
  /// Images of something else (Fashion-MNIST), undefined where not at hand.
  at::Tensor other_x;

  /// All tensors on another device.
  Images to(c10::Device device) const;
};

/// MNIST from data_root/MNIST/raw, and Fashion-MNIST if it is beside it. Throws
/// std::runtime_error that says which file is missing or of the wrong size.
Images LoadImages(const std::filesystem::path& data_root);

/// scikit-learn's 8x8 digits, from its unpacked digits.csv. Throws
/// std::runtime_error that says what is wrong with the file.
Images LoadDigits(const std::filesystem::path& csv);

using Minibatch = std::pair<at::Tensor, at::Tensor>;

/// One shuffled pass; a pure function of seed and epoch, hence resumable.
std::vector<Minibatch> Minibatches(const at::Tensor& x,
                                   const at::Tensor& y,
                                   int64_t size,
                                   int64_t seed,
                                   int64_t epoch);

}  // namespace bnn
