// The command line: the Python example's options where a C++ program has them.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace bnn {

struct Options {
  /// Names of methods, in the order given.
  std::vector<std::string> methods;
  int64_t epochs = 0;
  int64_t burn_in = 0;
  int64_t seeds = 0;
  int64_t first_seed = 0;
  int64_t batch_size = 0;
  std::optional<double> lr;
  std::optional<double> momentum;
  std::filesystem::path data_root = "data";
  /// A file of scikit-learn's digits, to use in place of MNIST.
  std::optional<std::filesystem::path> digits;
  c10::Device device = c10::kCPU;
  std::optional<int64_t> threads;
  std::filesystem::path out = "runs/mnist_bnn";
  bool help = false;
};

/// What is wrong with a command line.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Reads the arguments of main(), `--name value` or `--name=value`; a name may
/// be cut short. Throws UsageError.
Options ParseOptions(int argc, char** argv);

/// What --help prints.
const char* Help();

}  // namespace bnn
