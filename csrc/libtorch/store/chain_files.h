// The files of a store, whose format docs/store.md has, and the writer of a
// chain. torch_sgmcmc/posterior/store_files.py does the same in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace torch_sgmcmc {

// What store.json says of a tensor of a draw.
struct StoredTensor {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
};

// What an index says of a draw.
struct DrawNumbers {
  int64_t step = 0;
  double lr = 0;
  double temperature = 1;
  double weight = 1;
  double loss = 0;
  std::vector<double> prior_precision;
};

// A file of draws, as a line of an index describes it.
class DrawFile {
 public:
  // Throws std::runtime_error if the line is damaged. It is number `number`,
  // from 0 on.
  DrawFile(const std::string& line, size_t number, const std::string& folder);

  const std::string& path() const { return path_; }
  const std::vector<DrawNumbers>& draws() const { return draws_; }
  // The tensor [count, ...], undefined if there is none of this name. Throws
  // std::runtime_error if the file is not as it was written.
  at::Tensor Read(const std::string& name);

 private:
  void Load();

  std::string path_;
  int64_t size_ = 0;
  uint32_t crc32_ = 0;
  std::vector<DrawNumbers> draws_;
  std::mutex mutex_;  // of the tensors, once they were read
  std::map<std::string, at::Tensor> tensors_;
};

// Of store.json; nothing where there is no store. Throws std::runtime_error if
// it cannot be read.
std::optional<std::vector<StoredTensor>> ReadStore(const std::string& store);
// The numbers of a store's chains, sorted.
std::vector<int64_t> ChainsIn(const std::string& store);
// Throws std::runtime_error that names the line.
std::vector<std::shared_ptr<DrawFile>> ReadIndex(const std::string& store,
                                                 int64_t chain);

// A draw, with tensors in the order of the store's.
struct DrawToWrite {
  std::vector<at::Tensor> tensors;
  DrawNumbers numbers;
};

// Writes files of draws. Throws std::runtime_error if something cannot be
// written, and the chain is as before.
class ChainWriter {
 public:
  // Throws std::invalid_argument if the store has draws of another model,
  // std::runtime_error if somebody else writes the chain.
  ChainWriter(const std::string& store,
              int64_t chain,
              std::vector<StoredTensor> tensors);
  ~ChainWriter();
  ChainWriter(const ChainWriter&) = delete;
  ChainWriter(ChainWriter&&) = delete;
  ChainWriter& operator=(const ChainWriter&) = delete;
  ChainWriter& operator=(ChainWriter&&) = delete;

  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const std::string& place() const { return place_; }
  int64_t num_draws() const { return num_draws_; }
  std::optional<int64_t> last_step() const { return last_step_; }

  void Write(const std::vector<DrawToWrite>& draws);
  // Length and checksum of the index.
  std::pair<int64_t, int64_t> position() const { return {size_, crc32_}; }
  // Throws std::invalid_argument if the position is not of this chain.
  void CutBack(int64_t size, int64_t crc32);
  void Clear() { CutBack(0, 0); }
  void Close();

 private:
  void TakeIndex();

  std::string store_;
  std::string folder_;
  std::string place_;
  std::string index_path_;
  std::vector<StoredTensor> tensors_;
  int lock_ = -1;
  int index_ = -1;
  int64_t size_ = 0;
  uint32_t crc32_ = 0;
  size_t num_files_ = 0;
  int64_t num_draws_ = 0;
  std::optional<int64_t> last_step_;
};

}  // namespace torch_sgmcmc
