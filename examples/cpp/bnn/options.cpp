#include "bnn/options.h"

#include <torch/cuda.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>

#include "bnn/methods.h"

namespace bnn {
namespace {

// The options as they are given: what is not given depends on --paper and
// --digits.
struct Given {
  Options options;
  std::optional<int64_t> epochs;
  std::optional<int64_t> burn_in;
  std::optional<int64_t> seeds;
  std::optional<int64_t> batch_size;
  bool paper = false;
};

// One option of the command line.
struct Option {
  std::string name;
  std::string value;  // what it takes, in words; empty for a flag
  std::string help;
  std::function<void(Given&, const std::string&)> set;
  bool several = false;  // takes one or several values
};

std::string Joined(const std::vector<std::string>& words) {
  std::string joined;
  for (const auto& word : words) joined += (joined.empty() ? "" : ", ") + word;
  return joined;
}

std::vector<std::string> MethodNames() {
  std::vector<std::string> names;
  for (const Method& method : Methods()) names.push_back(method.name);
  return names;
}

template <typename Number>
Number Parse(const std::string& text, const char* expected) {
  Number number{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc::result_out_of_range) {
    throw UsageError(text + " is out of range");
  }
  if (error != std::errc() || rest != end) {
    throw UsageError("'" + text + "' is not " + expected);
  }
  return number;
}

int64_t Integer(const std::string& text,
                int64_t low,
                int64_t high = std::numeric_limits<int32_t>::max()) {
  const auto value = Parse<int64_t>(text, "an integer");
  if (value < low || value > high) {
    throw UsageError(text + " must be in [" + std::to_string(low) + ", " +
                     std::to_string(high) + "]");
  }
  return value;
}

double Real(const std::string& text, bool below_one = false) {
  const auto value = Parse<double>(text, "a number");
  if (!std::isfinite(value) || value < 0 || (below_one && value >= 1)) {
    throw UsageError(text + " must be " +
                     (below_one ? "in [0, 1)" : "finite and >= 0"));
  }
  return value;
}

c10::Device ParseDevice(const std::string& text) {
  std::optional<c10::Device> device;
  try {
    device.emplace(text);
  } catch (const c10::Error&) {
    throw UsageError("'" + text + "' is not a device (cpu, cuda, cuda:1, ...)");
  }
  if (!device->is_cpu() && !device->is_cuda()) {
    throw UsageError("'" + text + "' is neither the CPU nor a CUDA device");
  }
  if (device->is_cuda() && std::max<int>(device->index(), 0) >=
                               static_cast<int>(torch::cuda::device_count())) {
    throw UsageError("there is no CUDA device for '" + text + "'");
  }
  return *device;
}

void AddMethod(Given& given, const std::string& name) {
  const auto names = MethodNames();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    throw UsageError("'" + name + "' is not one of " + Joined(names));
  }
  given.options.methods.push_back(name);
}

const std::vector<Option>& Table() {
  using Text = const std::string&;
  static const std::vector<Option> table = {
      {"--method",
       "NAME ...",
       "one or several of " + Joined(MethodNames()) + " (default: all)",
       AddMethod,
       true},
      {"--epochs",
       "N",
       "default: 60, of the digits 200, with --paper 800",
       [](Given& g, Text text) { g.epochs = Integer(text, 1); }},
      {"--burn-in",
       "N",
       "default: 10, of the digits 50, with --paper 50",
       [](Given& g, Text text) { g.burn_in = Integer(text, 0); }},
      {"--seeds",
       "N",
       "number of seeds (default: 2, with --paper 3)",
       [](Given& g, Text text) { g.seeds = Integer(text, 1); }},
      {"--first-seed",
       "N",
       "default: 0",
       [](Given& g, Text text) { g.options.first_seed = Integer(text, 0); }},
      {"--batch-size",
       "N",
       "default: 500, of the digits 100",
       [](Given& g, Text text) { g.batch_size = Integer(text, 1); }},
      {"--lr",
       "LR",
       "step size, instead of the tuned one",
       [](Given& g, Text text) { g.options.lr = Real(text); }},
      {"--momentum",
       "M",
       "momentum of sgdm and sghmc, instead of the tuned one",
       [](Given& g, Text text) { g.options.momentum = Real(text, true); }},
      {"--data-root",
       "DIR",
       "folder that holds MNIST/raw (default: data)",
       [](Given& g, Text text) { g.options.data_root = text; }},
      {"--digits",
       "FILE",
       "scikit-learn's 8x8 digits (digits.csv), not MNIST",
       [](Given& g, Text text) { g.options.digits = text; }},
      {"--device",
       "DEVICE",
       "default: cpu",
       [](Given& g, Text text) { g.options.device = ParseDevice(text); }},
      {"--threads",
       "N",
       "CPU threads (default: torch's)",
       [](Given& g, Text text) { g.options.threads = Integer(text, 1); }},
      {"--out",
       "DIR",
       "default: runs/mnist_bnn",
       [](Given& g, Text text) { g.options.out = text; }},
      {"--paper",
       "",
       "the paper's full length",
       [](Given& g, Text) { g.paper = true; }},
      {"--help",
       "",
       "show this and end",
       [](Given& g, Text) { g.options.help = true; }},
  };
  return table;
}

const Option& Find(const std::string& name) {
  for (const Option& option : Table()) {
    if (option.name == name) return option;
  }
  throw UsageError("unknown option " + name);
}

// Reads the option at position i, and leaves i behind its last value.
void ReadOption(const std::vector<std::string>& arguments,
                size_t& i,
                Given& given) {
  const std::string& argument = arguments[i++];
  if (!argument.starts_with("--")) {
    throw UsageError("unexpected argument '" + argument + "'");
  }
  const size_t equals = argument.find('=');
  const Option& option = Find(argument.substr(0, equals));
  std::vector<std::string> values;
  if (equals != std::string::npos) {
    values.push_back(argument.substr(equals + 1));
  } else {
    const size_t most = option.value.empty() ? 0
                        : option.several     ? SIZE_MAX
                                             : 1;
    while (values.size() < most && i < arguments.size() &&
           !arguments[i].starts_with("--")) {
      values.push_back(arguments[i++]);
    }
  }
  if (option.value.empty() != values.empty()) {
    throw UsageError(
        "argument " + option.name +
        (values.empty() ? ": expected " + option.value : " takes no value"));
  }
  if (option.several) given.options.methods.clear();
  if (values.empty()) values.emplace_back();
  for (const auto& value : values) {
    try {
      option.set(given, value);
    } catch (const UsageError& error) {
      throw UsageError("argument " + option.name + ": " + error.what());
    }
  }
}

void CheckTogether(const Options& options) {
  if (options.burn_in >= options.epochs) {
    throw UsageError("--burn-in " + std::to_string(options.burn_in) +
                     " must be in [0, --epochs " +
                     std::to_string(options.epochs) + ")");
  }
  if (options.momentum) {
    for (const auto& name : options.methods) {
      if (name == "sgdm" || name == "sghmc") return;
    }
    throw UsageError("--momentum is for sgdm and sghmc, not for " +
                     Joined(options.methods));
  }
}

}  // namespace

Options ParseOptions(const std::vector<std::string>& arguments) {
  Given given;
  given.options.methods = MethodNames();
  for (size_t i = 0; i < arguments.size();) ReadOption(arguments, i, given);
  Options options = given.options;
  const bool digits = options.digits.has_value();
  options.epochs = given.epochs.value_or(given.paper ? 800 : digits ? 200 : 60);
  options.burn_in = given.burn_in.value_or(given.paper || digits ? 50 : 10);
  options.seeds = given.seeds.value_or(given.paper ? 3 : 2);
  // The 1,200 digits need smaller minibatches and more epochs for as many
  // updates.
  options.batch_size = given.batch_size.value_or(digits ? 100 : 500);
  if (!options.help) CheckTogether(options);
  return options;
}

std::string Help() {
  std::string help =
      "usage: mnist_bnn [options]\n\n"
      "The posterior of a network on MNIST, and what it predicts: the Python\n"
      "example's experiment, with the same figures for the same seed. Results\n"
      "go to --out: results.json and one checkpoint for each run, from which\n"
      "an interrupted run continues, here or in Python.\n\noptions:\n";
  for (const Option& option : Table()) {
    std::string usage = "  " + option.name;
    if (!option.value.empty()) usage += " " + option.value;
    usage.resize(std::max<size_t>(usage.size() + 2, 22), ' ');
    help += usage + option.help + "\n";
  }
  return help;
}

}  // namespace bnn
