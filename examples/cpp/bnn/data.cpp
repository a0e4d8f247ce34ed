#include "bnn/data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>
#include <torch/data/datasets/mnist.h>

#include <charconv>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace bnn {

namespace fs = std::filesystem;
using torch::Tensor;
using torch::data::datasets::MNIST;

namespace {

// The split into training and validation is part of the task, not of a run. The
// validation set is for choosing settings, which the Python example does.
constexpr uint64_t kSplitSeed = 2014;

struct IdxFile {
  const char* name;
  uintmax_t size;
};

constexpr uintmax_t kPixels = 28 * 28;
constexpr IdxFile kFiles[] = {
    {"train-images-idx3-ubyte", 16 + 60'000 * kPixels},
    {"train-labels-idx1-ubyte", 8 + 60'000},
    {"t10k-images-idx3-ubyte", 16 + 10'000 * kPixels},
    {"t10k-labels-idx1-ubyte", 8 + 10'000},
};

// What is wrong with a folder of idx files, nothing if it is complete. torch's
// reader would take what is left of a truncated file for images.
std::string Problem(const fs::path& folder) {
  for (const auto& [name, size] : kFiles) {
    const fs::path path = folder / name;
    const fs::path packed = path.string() + ".gz";
    if (!fs::is_regular_file(path)) {
      return fs::exists(packed)
                 ? path.string() + " is missing; unpack it: gunzip -k " +
                       packed.string()
                 : path.string() + " is missing";
    }
    if (fs::file_size(path) != size) {
      return path.string() + " has " + std::to_string(fs::file_size(path)) +
             " bytes, expected " + std::to_string(size);
    }
  }
  return "";
}

MNIST Read(const fs::path& folder, MNIST::Mode mode) {
  try {
    return MNIST(folder, mode);
  } catch (const c10::Error& error) {
    throw std::runtime_error("Cannot read the images in " + folder.string() +
                             ": " + error.what_without_backtrace());
  }
}

Tensor Rows(const Tensor& images) {
  // torch divides the bytes by 255, the SGHMC authors by 256.
  return images.flatten(1).mul(255).round_().div_(256);
}

Tensor Permutation(int64_t n, uint64_t seed) {
  return torch::randperm(n, at::make_generator<at::CPUGeneratorImpl>(seed));
}

// Takes the images that are not for validation.
void SetTrain(Images& images,
              const Tensor& x,
              const Tensor& y,
              int64_t validation) {
  const Tensor kept = Permutation(y.size(0), kSplitSeed).slice(0, validation);
  images.train_x = x.index_select(0, kept);
  images.train_y = y.index_select(0, kept);
}

}  // namespace

Images Images::to(c10::Device device) const {
  Images moved = *this;
  for (Tensor* tensor : {&moved.train_x,
                         &moved.train_y,
                         &moved.test_x,
                         &moved.test_y,
                         &moved.other_x}) {
    if (tensor->defined()) *tensor = tensor->to(device);
  }
  return moved;
}

Images LoadImages(const fs::path& data_root) {
  const fs::path folder = data_root / "MNIST" / "raw";
  if (const std::string problem = Problem(folder); !problem.empty()) {
    throw std::runtime_error("No MNIST in --data-root " + data_root.string() +
                             ": " + problem);
  }
  const MNIST train = Read(folder, MNIST::Mode::kTrain);
  const MNIST test = Read(folder, MNIST::Mode::kTest);

  Images images;
  images.name = "MNIST";
  SetTrain(images, Rows(train.images()), train.targets(), 10'000);
  images.test_x = Rows(test.images());
  images.test_y = test.targets();
  const fs::path other = data_root / "FashionMNIST" / "raw";
  if (Problem(other).empty()) {
    images.other_x = Rows(Read(other, MNIST::Mode::kTest).images());
  }
  return images;
}

Images LoadDigits(const fs::path& csv) {
  constexpr int64_t kDigits = 1797;
  constexpr int64_t kColumns = 8 * 8 + 1;
  constexpr int64_t kTrain = 1400;
  std::ifstream file(csv);
  std::vector<float> numbers;
  for (std::string text; std::getline(file, text);) {
    std::istringstream line(text);
    for (std::string number; std::getline(line, number, ',');) {
      int value = -1;
      const char* end = number.data() + number.size();
      const auto [rest, error] = std::from_chars(number.data(), end, value);
      if (error != std::errc() || rest != end || value < 0 || value > 16) break;
      numbers.push_back(static_cast<float>(value));
    }
  }
  if (static_cast<int64_t>(numbers.size()) != kDigits * kColumns) {
    throw std::runtime_error(
        "No digits in --digits " + csv.string() + ": it has " +
        std::to_string(numbers.size()) + " integers in [0, 16], expected " +
        std::to_string(kDigits * kColumns) +
        " (unpack scikit-learn's datasets/data/digits.csv.gz)");
  }
  const Tensor table = torch::tensor(numbers)
                           .reshape({kDigits, kColumns})
                           .index_select(0, Permutation(kDigits, 0));
  const Tensor x = table.slice(1, 0, kColumns - 1).div(17).contiguous();
  const Tensor y = table.select(1, kColumns - 1).to(torch::kLong);

  Images images;
  images.name = "digits (8x8)";
  SetTrain(images, x.slice(0, 0, kTrain), y.slice(0, 0, kTrain), 200);
  images.test_x = x.slice(0, kTrain);
  images.test_y = y.slice(0, kTrain);
  return images;
}

std::vector<Minibatch> Minibatches(const Tensor& x,
                                   const Tensor& y,
                                   int64_t size,
                                   int64_t seed,
                                   int64_t epoch) {
  const auto key = static_cast<uint64_t>(seed * 1'000'003 + epoch);
  const Tensor order = Permutation(y.size(0), key).to(x.device());
  std::vector<Minibatch> batches;
  for (const Tensor& rows : order.split(size)) {
    batches.emplace_back(x.index_select(0, rows), y.index_select(0, rows));
  }
  return batches;
}

}  // namespace bnn
