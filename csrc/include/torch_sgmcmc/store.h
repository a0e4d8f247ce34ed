// Draws of a model's parameters on disk, and their collector.
//
//   torch_sgmcmc::Collector collector(
//       sampler, *net, "draws",
//       torch_sgmcmc::CollectorOptions().burn_in(1000).every(20));
//   for (...) collector.step(closure);  // in place of sampler.step(closure)
//   collector.close();
//
//   for (const torch_sgmcmc::Draw& draw : torch_sgmcmc::SampleStore("draws")) {
//     draw.at("fc.weight");
//   }
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch_sgmcmc/sampler.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace torch_sgmcmc {

struct DrawFile;

/// One draw. The first access maps its file and compares the checksum; draws of
/// one file share this.
class TORCH_SGMCMC_API Draw {
 public:
  int64_t chain = 0;
  /// The sampler's step.
  int64_t step = 0;
  /// NaN if there was none.
  double lr = 0;
  double temperature = 1;
  /// Weight in averages; C++ writes 1.
  double weight = 1;
  /// The closure's result; NaN if it was not a scalar.
  double loss = 0;
  /// λ of each param group.
  std::vector<double> prior_precision = {};
  /// The file, in the format of safetensors.
  std::string path = {};

  const std::vector<std::string>& names() const { return *names_; }
  /// The tensor in its stored dtype; writes into it stay in this process.
  /// Throws std::invalid_argument if the name is unknown, std::runtime_error
  /// with the file's name if the file is missing, cut off or altered.
  at::Tensor at(const std::string& name) const;
  /// Copies the tensors into the module's parameters and buffers of the same
  /// names. Throws as at(), and std::invalid_argument, without a change, if a
  /// name or shape does not fit.
  void copy_to(torch::nn::Module& module) const;
  template <typename Module>
  void copy_to(torch::nn::ModuleHolder<Module>& net) const {
    copy_to(*net);
  }

 private:
  friend struct DrawFile;
  friend class SampleStore;
  std::shared_ptr<const std::vector<std::string>> names_ = nullptr;
  std::shared_ptr<DrawFile> file_ = nullptr;
  int64_t row_ = 0;
};

/// The draws of a folder, in the order of chains and steps, in the format of
/// Python's. A store can be opened while a collector writes to it, and shows
/// the draws of the time when it was opened or refreshed.
class TORCH_SGMCMC_API SampleStore {
 public:
  /// A missing folder has no draws. Throws std::runtime_error with the line if
  /// store.json or an index cannot be read.
  explicit SampleStore(std::string path) : path_(std::move(path)) { refresh(); }
  const SampleStore& refresh();

  size_t size() const { return draws_.size(); }
  /// Throws std::out_of_range.
  const Draw& operator[](size_t index) const;
  auto begin() const { return draws_.begin(); }
  auto end() const { return draws_.end(); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<Draw> draws_;
};

struct CollectorOptions {
  /// The chain's number in the store, >= 0; each has one writer.
  TORCH_ARG(int64_t, chain) = 0;
  /// Number of first steps (SBPS: samples) that are not stored, >= 0.
  TORCH_ARG(int64_t, burn_in) = 0;
  /// Steps from one draw to the next, >= 1.
  TORCH_ARG(int64_t, every) = 1;
};

/// Stores draws of a model while a sampler runs: copies of all parameters and
/// buffers after a step, or at samples of SBPS. Draws wait in memory until they
/// have 4 MiB or are 1,024, and are then written as one file. Skipped steps do
/// not count. More: docs/store.md.
///
/// The model must outlive the collector and not be moved; the sampler may be.
class TORCH_SGMCMC_API Collector {
 public:
  /// Throws std::invalid_argument if an option is out of range or the store is
  /// of another model, std::runtime_error if it cannot be written or another
  /// writer has the chain.
  Collector(Sampler& sampler, const torch::nn::Module& model,
            const std::string& store, const CollectorOptions& options = {});
  template <typename Module>
  Collector(Sampler& sampler, const torch::nn::ModuleHolder<Module>& net,
            const std::string& store, const CollectorOptions& options = {})
      : Collector(sampler, *net, store, options) {}
  /// Writes waiting draws; an error is a warning (close() throws).
  ~Collector();
  Collector(const Collector&) = delete;
  Collector(Collector&&) = delete;
  Collector& operator=(const Collector&) = delete;
  Collector& operator=(Collector&&) = delete;

  /// Makes the sampler's step and stores the draw if it is due, with the
  /// closure's scalar result as its loss.
  ///
  /// Throws std::runtime_error, before the step, if earlier draws cannot be
  /// written; they stay in memory and the next step tries again. Throws
  /// std::invalid_argument if the chain has draws of an earlier run: call
  /// load_state_dict() or restart() first.
  torch::Tensor step(
      const torch::optim::Optimizer::LossClosure& closure = nullptr);

  /// Writes waiting draws.
  void flush();
  /// The collector's progress, for a checkpoint, as in Python; flushes.
  StateDict state_dict();
  /// Cuts the store back to a checkpoint, from which the chain continues.
  /// Throws std::invalid_argument, without a change, if the checkpoint is of
  /// another store, run or options.
  void load_state_dict(const StateDict& dict);
  /// Deletes the chain's draws.
  void restart();
  /// Writes waiting draws, and releases the chain for other writers.
  void close();

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

}  // namespace torch_sgmcmc
