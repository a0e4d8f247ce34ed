// Draws of a model's parameters on disk, and their collector.
//
//   torch_sgmcmc::Collector collector(sampler, *net, "draws");
//   while (sampler.num_steps() < 9000) {
//     const auto loss = sampler.step(closure);
//     if (sampler.num_steps() % 20 == 0) collector.collect(loss);
//   }
//   collector.close();
//
//   for (const torch_sgmcmc::Draw& draw : torch_sgmcmc::SampleStore("draws")) {
//     draw.at("fc.weight");
//   }
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch_sgmcmc/sampler.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

struct DrawFile;

/// One draw. The first access maps its file and compares the checksum; draws of
/// one file share this.
class TORCH_SGMCMC_API Draw {
 public:
  int64_t chain = 0;
  int64_t step = 0;  // of the sampler
  double lr = 0;     // NaN if there is none
  double temperature = 1;
  double weight = 1;                         // in averages; C++ writes 1
  double loss = 0;                           // NaN if there is none
  std::vector<double> prior_precision = {};  // λ of each param group
  std::string path = {};                     // a file of safetensors

  const std::vector<std::string>& names() const { return *names_; }
  /// The tensor in its stored dtype; writes into it stay in this process.
  /// Throws std::invalid_argument if the name is unknown, std::runtime_error
  /// with the file's name if the file is missing, cut off or altered.
  at::Tensor at(const std::string& name) const;
  /// Copies the tensors into the module's parameters and buffers of the same
  /// names. Throws as at(), and std::invalid_argument, without a change, if a
  /// name or shape does not fit.
  void copy_to(torch::nn::Module& module) const;

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
  /// store.json or an index cannot be read, std::invalid_argument for an empty
  /// name.
  explicit SampleStore(std::string path) : path_(std::move(path)) { refresh(); }
  const SampleStore& refresh();

  size_t size() const { return draws_.size(); }
  /// Throws std::out_of_range.
  const Draw& operator[](size_t index) const;
  auto begin() const { return draws_.begin(); }
  auto end() const { return draws_.end(); }

 private:
  std::string path_;
  std::vector<Draw> draws_;
};

/// Stores draws: copies of all parameters and buffers of a model. Draws wait in
/// memory until they have 4 MiB or are 1,024, and are then written as one file.
///
/// The model must outlive the collector and not be moved; the sampler may be.
class TORCH_SGMCMC_API Collector {
 public:
  /// Each chain >= 0 of a store has one writer. Throws std::invalid_argument if
  /// the sampler has no parameter of the model or the store is of another
  /// model, std::runtime_error if it cannot be written or another writer has
  /// the chain.
  Collector(Sampler& sampler, const torch::nn::Module& model,
            const std::string& store, int64_t chain = 0);
  /// Writes waiting draws; an error is a warning (close() throws).
  ~Collector();
  Collector(const Collector&) = delete;
  Collector(Collector&&) = delete;
  Collector& operator=(const Collector&) = delete;
  Collector& operator=(Collector&&) = delete;

  /// Stores a draw and its loss, a number or a tensor of one element; of SBPS
  /// in a sample hook. Does nothing if the sampler has not moved since the last
  /// draw, as after a skipped step.
  ///
  /// Throws std::runtime_error, before it copies anything, if earlier draws
  /// cannot be written: they stay in memory, and the call can be repeated.
  /// Throws std::invalid_argument if the chain has draws of an earlier run
  /// (call load_state_dict() or restart() first), or a tensor of the model has
  /// another shape or dtype than at first.
  void collect(double loss = std::numeric_limits<double>::quiet_NaN());
  void collect(const at::Tensor& loss);

  /// Describes the run for Python's report(): how the chain began ("model", or
  /// "prior" for a draw from the prior), and the steps of a pass over the data.
  /// Throws std::invalid_argument if there are none.
  void describe(const std::string& start, int64_t steps_per_pass);

  /// Writes waiting draws.
  void flush();
  /// The chain's length, for a checkpoint; flushes.
  StateDict state_dict();
  /// Cuts the chain back to a checkpoint, from which it continues. Throws
  /// std::invalid_argument, without a change, if it is of another chain or run.
  void load_state_dict(const StateDict& dict);
  /// Deletes the chain's draws.
  void restart();
  /// Writes waiting draws, and releases the chain for other writers. Throws
  /// std::runtime_error if they cannot be written, and loses none: make room,
  /// and call it again.
  void close();

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

}  // namespace torch_sgmcmc
