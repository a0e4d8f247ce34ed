// The files of a store, whose format docs/store.md has, and the writer of a
// chain. torch_sgmcmc/posterior/store_files.py does the same in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_sgmcmc/store.h"

namespace torch_sgmcmc {

// What store.json says of a tensor of a draw.
struct StoredTensor {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
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
  int64_t crc32_ = 0;
  std::vector<DrawNumbers> draws_;
  std::mutex mutex_;  // of the tensors, once they were read
  std::map<std::string, at::Tensor> tensors_;
};

// The complete lines of an index.
struct ChainIndex {
  std::vector<std::shared_ptr<DrawFile>> files;
  int64_t size = 0;
  uint32_t crc32 = 0;
  size_t num_files = 0;
  int64_t num_draws = 0;
  std::optional<int64_t> last_step;
};

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
  ChainWriter(const std::string& store, int64_t chain,
              std::vector<StoredTensor> tensors);
  ~ChainWriter() { Close(); }
  ChainWriter(const ChainWriter&) = delete;
  ChainWriter(ChainWriter&&) = delete;
  ChainWriter& operator=(const ChainWriter&) = delete;
  ChainWriter& operator=(ChainWriter&&) = delete;

  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const std::string& place() const { return place_; }
  const ChainIndex& index() const { return index_; }

  void Write(const std::vector<DrawToWrite>& draws);
  // Throws std::invalid_argument unless the index begins with so many bytes of
  // this checksum.
  void CutBack(int64_t size, int64_t crc32);
  void Close();

 private:
  void ReadIndexAgain();

  std::string store_;
  std::string folder_;
  std::string place_;
  std::string index_path_;
  std::vector<StoredTensor> tensors_;
  int lock_ = -1;
  int index_file_ = -1;
  ChainIndex index_;
};

// ---- JSON of a store's files: dicts, lists, strings, numbers
// ------------------

// null is NaN. Throws std::runtime_error if the text is not one value of JSON.
c10::IValue ParseJson(std::string_view text);

// Numbers have as many digits as it takes to read them back; those that are not
// finite are null.
std::string ToJson(const c10::IValue& value);

}  // namespace torch_sgmcmc
