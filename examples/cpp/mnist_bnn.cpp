// The posterior of a network on MNIST, and what it predicts: figure 4 of Chen,
// Fox and Guestrin (2014), from a LibTorch program.
//
//   mnist_bnn --data-root DIR                        # all, 60 epochs, 2 seeds
//   mnist_bnn --data-root DIR --method sghmc --epochs 200
//   mnist_bnn --data-root DIR --paper                # 800 epochs, 5 seeds
//   mnist_bnn --digits digits.csv                    # 200 epochs
//
// Data, network, settings, random numbers and checkpoints are those of
// examples/papers sghmc2014.mnist: a seed gives the same chain in both. The
// parts: bnn/trainer.cpp is where a sampler is made, bnn/run.cpp the training
// loop.
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "bnn/data.h"
#include "bnn/folder_lock.h"
#include "bnn/methods.h"
#include "bnn/options.h"
#include "bnn/report.h"
#include "bnn/run.h"

namespace {

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

bnn::Settings SettingsOf(const std::string& method,
                         const bnn::Options& options) {
  bnn::Settings settings = bnn::FindMethod(method).settings;
  for (auto& [name, value] : settings) {
    if (name == "lr") value = options.lr.value_or(value);
    if (name == "momentum") value = options.momentum.value_or(value);
  }
  return settings;
}

torch_sgmcmc::StateDict Environment(const bnn::Options& options,
                                    const bnn::Images& images) {
  return {{"torch", TORCH_VERSION},
          {"torch_sgmcmc", TORCH_SGMCMC_VERSION},
          {"compiler", kCompiler},
          {"device", options.device.str()},
          {"threads", static_cast<int64_t>(at::get_num_threads())},
          {"dataset", images.name}};
}

void RunAll(const bnn::Options& options) {
  if (options.threads) at::set_num_threads(static_cast<int>(*options.threads));
  const bnn::Images images =
      (options.digits ? bnn::LoadDigits(*options.digits)
                      : bnn::LoadImages(options.data_root))
          .to(options.device);
  const bnn::FolderLock lock(options.out);
  std::vector<std::vector<bnn::RunConfig>> configs;
  for (const std::string& method : options.methods) {
    auto& of_method = configs.emplace_back();
    for (int64_t i = 0; i < options.seeds; ++i) {
      bnn::RunConfig config;
      config.method = method;
      config.seed = options.first_seed + i;
      config.settings = SettingsOf(method, options);
      config.epochs = options.epochs;
      config.burn_in = options.burn_in;
      config.batch_size = options.batch_size;
      config.dataset = images.name;
      bnn::CheckCheckpoint(config, images, options.out);
      of_method.push_back(config);
    }
  }
  bnn::Runs runs;
  for (const auto& of_method : configs) {
    auto& done = runs.emplace_back();
    for (const auto& config : of_method) {
      done.push_back(bnn::Run(config, images, options.out));
    }
  }
  const auto path = options.out / "results.json";
  bnn::WriteJson(runs, Environment(options, images), path);
  std::cout << "\n"
            << images.name << ", " << options.epochs << " epochs, "
            << options.burn_in << " burn-in\n\n"
            << bnn::Table(runs) << "\n\nAll figures are in " << path.string()
            << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bnn::Options options = bnn::ParseOptions(argc, argv);
    if (options.help) {
      std::cout << bnn::Help();
    } else {
      RunAll(options);
    }
    return 0;
  } catch (const bnn::UsageError& error) {
    std::cerr << "mnist_bnn: error: " << error.what()
              << "\n(mnist_bnn --help shows all options)\n";
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << "mnist_bnn: error: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "mnist_bnn: error: " << error.what() << "\n";
  }
  return 1;
}
