#include "bnn/options.h"

#include <getopt.h>
#include <torch/cuda.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>

#include "bnn/methods.h"

namespace bnn {
namespace {

constexpr const char* kHelp = R"(usage: mnist_bnn [options]

The posterior of a network on MNIST, and what it predicts: the Python
example's experiment, with the same figures for the same seed. Results
go to --out: results.json and one checkpoint for each run, from which
an interrupted run continues, here or in Python.

options:
  --method NAME ...   one or several of sgd, sgdm, sgld, sghmc (default: all)
  --epochs N          default: 60, of the digits 200, with --paper 800
  --burn-in N         default: 10, of the digits 50, with --paper 50
  --seeds N           number of seeds (default: 2, with --paper 5)
  --first-seed N      default: 0
  --batch-size N      default: 500, of the digits 100
  --lr LR             step size, instead of the tuned one
  --momentum M        momentum of sgdm and sghmc, instead of the tuned one
  --data-root DIR     folder that holds MNIST/raw (default: data)
  --digits FILE       scikit-learn's 8x8 digits (digits.csv), not MNIST
  --device DEVICE     default: cpu
  --threads N         CPU threads (default: torch's)
  --out DIR           default: runs/mnist_bnn
  --paper             the paper's full length
  --help              show this and end
)";

constexpr option kOptions[] = {
    {"method", required_argument, nullptr, 0},
    {"epochs", required_argument, nullptr, 0},
    {"burn-in", required_argument, nullptr, 0},
    {"seeds", required_argument, nullptr, 0},
    {"first-seed", required_argument, nullptr, 0},
    {"batch-size", required_argument, nullptr, 0},
    {"lr", required_argument, nullptr, 0},
    {"momentum", required_argument, nullptr, 0},
    {"data-root", required_argument, nullptr, 0},
    {"digits", required_argument, nullptr, 0},
    {"device", required_argument, nullptr, 0},
    {"threads", required_argument, nullptr, 0},
    {"out", required_argument, nullptr, 0},
    {"paper", no_argument, nullptr, 0},
    {"help", no_argument, nullptr, 0},
    {nullptr, 0, nullptr, 0},
};

// The values of each option that is given.
using Given = std::map<std::string, std::vector<std::string>>;

Given Read(int argc, char** argv) {
  Given given;
  std::string name;
  opterr = 0;
  // "-": what is no option comes in its place, as more values of --method.
  // ":": a missing value is told from an unknown option.
  int index = 0;
  for (int c;
       (c = getopt_long_only(argc, argv, "-:", kOptions, &index)) >= 0;) {
    if (c == 0) {
      name = kOptions[index].name;
      given[name] = {optarg ? optarg : ""};
    } else if (c == 1 && name == "method") {
      given[name].emplace_back(optarg);
    } else if (c == 1) {
      throw UsageError(std::string("unexpected argument '") + optarg + "'");
    } else {
      throw UsageError((c == ':' ? "no value for " : "unknown option ") +
                       std::string(argv[optind - 1]));
    }
  }
  if (optind < argc) {
    throw UsageError(std::string("unexpected argument '") + argv[optind] + "'");
  }
  return given;
}

std::optional<std::string> Text(const Given& given, const std::string& name) {
  const auto found = given.find(name);
  if (found == given.end()) return std::nullopt;
  return found->second.front();
}

[[noreturn]] void Refuse(const std::string& name,
                         const std::string& text,
                         const std::string& reason) {
  throw UsageError("argument --" + name + ": '" + text + "' is " + reason);
}

template <typename Number>
std::optional<Number> Parse(const Given& given,
                            const std::string& name,
                            Number low,
                            Number high,
                            const std::string& expected) {
  const auto text = Text(given, name);
  if (!text) return std::nullopt;
  Number number{};
  const char* end = text->data() + text->size();
  const auto [rest, error] = std::from_chars(text->data(), end, number);
  const bool inside = number >= low && number <= high;  // not so for NaN
  if (error != std::errc() || rest != end || !inside) {
    Refuse(name, *text, "not " + expected);
  }
  return number;
}

std::optional<int64_t> Integer(const Given& given,
                               const std::string& name,
                               int64_t low) {
  constexpr int64_t high = std::numeric_limits<int32_t>::max();
  return Parse(given,
               name,
               low,
               high,
               "an integer in [" + std::to_string(low) + ", " +
                   std::to_string(high) + "]");
}

c10::Device ParseDevice(const std::string& text) {
  std::optional<c10::Device> device;
  try {
    device.emplace(text);
  } catch (const c10::Error&) {
    Refuse("device", text, "not a device (cpu, cuda, cuda:1, ...)");
  }
  if (!device->is_cpu() && !device->is_cuda()) {
    Refuse("device", text, "neither the CPU nor a CUDA device");
  }
  if (device->is_cuda() && std::max<int>(device->index(), 0) >=
                               static_cast<int>(torch::cuda::device_count())) {
    Refuse("device", text, "not there");
  }
  return *device;
}

std::string Joined(const std::vector<std::string>& words) {
  std::string joined;
  for (const auto& word : words) joined += (joined.empty() ? "" : ", ") + word;
  return joined;
}

void Check(const Options& options) {
  std::vector<std::string> known;
  for (const Method& method : Methods()) known.push_back(method.name);
  for (const auto& name : options.methods) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      Refuse("method", name, "not one of " + Joined(known));
    }
  }
  if (options.burn_in >= options.epochs) {
    throw UsageError("--burn-in " + std::to_string(options.burn_in) +
                     " must be in [0, --epochs " +
                     std::to_string(options.epochs) + ")");
  }
  const auto has_momentum = [](const std::string& name) {
    return name == "sgdm" || name == "sghmc";
  };
  if (options.momentum &&
      std::none_of(
          options.methods.begin(), options.methods.end(), has_momentum)) {
    throw UsageError("--momentum is for sgdm and sghmc, not for " +
                     Joined(options.methods));
  }
}

}  // namespace

Options ParseOptions(int argc, char** argv) {
  const Given given = Read(argc, argv);
  const bool paper = given.contains("paper");
  const bool digits = given.contains("digits");
  Options options;
  options.help = given.contains("help");
  if (given.contains("method")) {
    options.methods = given.at("method");
  } else {
    for (const Method& method : Methods()) {
      options.methods.push_back(method.name);
    }
  }
  options.epochs = Integer(given, "epochs", 1)
                       .value_or(paper    ? 800
                                 : digits ? 200
                                          : 60);
  options.burn_in =
      Integer(given, "burn-in", 0).value_or(paper || digits ? 50 : 10);
  options.seeds = Integer(given, "seeds", 1).value_or(paper ? 5 : 2);
  options.first_seed = Integer(given, "first-seed", 0).value_or(0);
  // The 1,200 digits need smaller minibatches and more epochs for as many
  // updates.
  options.batch_size =
      Integer(given, "batch-size", 1).value_or(digits ? 100 : 500);
  options.lr = Parse(given,
                     "lr",
                     0.0,
                     std::numeric_limits<double>::max(),
                     "a finite number >= 0");
  options.momentum = Parse(
      given, "momentum", 0.0, std::nextafter(1.0, 0.0), "a number in [0, 1)");
  options.data_root = Text(given, "data-root").value_or("data");
  options.digits = Text(given, "digits");
  if (const auto device = Text(given, "device")) {
    options.device = ParseDevice(*device);
  }
  options.threads = Integer(given, "threads", 1);
  options.out = Text(given, "out").value_or("runs/mnist_bnn");
  if (!options.help) Check(options);
  return options;
}

const char* Help() { return kHelp; }

}  // namespace bnn
