// Draws of a model's parameters on disk, and what collects them from a sampler.
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

/// One draw. Its file is mapped into memory, and compared with its checksum,
/// when a tensor is first asked for; draws of one file share this.
class TORCH_SGMCMC_API Draw {
 public:
  int64_t chain = 0;
  /// The sampler's step that made it.
  int64_t step = 0;
  /// NaN if there was none.
  double lr = 0;
  double temperature = 1;
  /// In averages: in Python the sign of an HMCECS, else 1.
  double weight = 1;
  /// What the closure returned; NaN if that was no scalar.
  double loss = 0;
  /// Of each param group, as a GammaPrecision has last drawn it.
  std::vector<double> prior_precision = {};
  /// Its file, in the format of safetensors.
  std::string path = {};

  const std::vector<std::string>& names() const { return *names_; }
  /// The tensor, in the dtype in which it was stored; what is written into it
  /// stays in this process. Throws std::invalid_argument if there is none of
  /// this name, std::runtime_error, which names the file, if it is missing, cut
  /// off or altered.
  at::Tensor at(const std::string& name) const;
  /// Copies the tensors into the module's parameters and buffers of the same
  /// names; others are left alone. Throws as at(), and std::invalid_argument,
  /// and changes nothing, if the module has none of a name, or of another
  /// shape.
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

/// The draws of a folder, in the order of chains and steps; Python and C++
/// write and read the same files. A store can be opened while a collector
/// writes to it, and has the draws that it had when it was opened or refreshed.
class TORCH_SGMCMC_API SampleStore {
 public:
  /// The folder need not exist yet. Throws std::runtime_error, which names the
  /// line, if store.json or an index cannot be read.
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
  /// The number of this chain in the store, >= 0; each has one writer.
  TORCH_ARG(int64_t, chain) = 0;
  /// Steps (of SBPS, samples) that come first and are not stored.
  TORCH_ARG(int64_t, burn_in) = 0;
  /// Steps from one draw to the next, >= 1.
  TORCH_ARG(int64_t, every) = 1;
};

/// Stores draws of a model while a sampler runs: copies of all parameters and
/// buffers made after a step, or of SBPS at its samples. They wait in memory
/// until they have 4 MiB or are 1,024; then they are written as one file.
/// Skipped steps are not counted. More: docs/store.md.
///
/// The model must live as long as the collector, and not be moved; a sampler
/// that is moved is followed.
class TORCH_SGMCMC_API Collector {
 public:
  /// Throws std::invalid_argument if an option is out of range or the store is
  /// of another model, std::runtime_error if it cannot be written or somebody
  /// else writes this chain.
  Collector(Sampler& sampler, const torch::nn::Module& model,
            const std::string& store, const CollectorOptions& options = {});
  template <typename Module>
  Collector(Sampler& sampler, const torch::nn::ModuleHolder<Module>& net,
            const std::string& store, const CollectorOptions& options = {})
      : Collector(sampler, *net, store, options) {}
  /// Waits until all draws are on the disk; close() says what went wrong.
  ~Collector();
  Collector(const Collector&) = delete;
  Collector(Collector&&) = delete;
  Collector& operator=(const Collector&) = delete;
  Collector& operator=(Collector&&) = delete;

  /// Makes the sampler's step and stores the draw if it is one, with what the
  /// closure returned, if that is a scalar, as its loss.
  ///
  /// Throws std::runtime_error if an earlier draw could not be written; it says
  /// which ones are on the disk. The sampler is as before then, and the next
  /// step tries again to write what is waiting, of which nothing is lost.
  /// Throws std::invalid_argument if the chain has draws already, as of
  /// load_state_dict() or restart() comes first.
  torch::Tensor step(
      const torch::optim::Optimizer::LossClosure& closure = nullptr);

  /// Waits until all draws so far are on the disk.
  void flush();
  /// How far collecting is, for a checkpoint; flushes. Keys and values are
  /// Python's.
  StateDict state_dict();
  /// Cuts the store back to a checkpoint and continues from there, to the bytes
  /// of a run that was never interrupted. Throws std::invalid_argument if it is
  /// of another store, run or options; the store is as before.
  void load_state_dict(const StateDict& dict);
  /// Deletes the chain's draws, for a run that starts again.
  void restart();
  /// Waits until all draws are on the disk, and lets others write the chain.
  void close();

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

}  // namespace torch_sgmcmc
