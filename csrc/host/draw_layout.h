// How the tensors of a draw lie in its file, which is a safetensors file.
//
// Note [Files of draws]
// A safetensors file is the length of a header in 8 bytes, the header, which is
// JSON, and the tensors' bytes. The bytes here are those that the safetensors
// library writes: tensors by the rank of their dtype, largest first, then by
// name, and the header filled up with spaces to a multiple of 8. The metadata
// has one entry (the library's order of several is random): "crc32", the sums
// of the tensors in the file's order, eight hexadecimal digits each. So all
// draws of a model have one layout, and headers that differ in the sums alone.
//
// Small draws share files, of which 10,000 would be slow to list and to copy:
// then a file has those bytes of one draw behind those of the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace torch_sgmcmc {

struct StoredTensor {
  std::string name;
  // As safetensors calls it: "F32", "BF16", ...
  std::string dtype;
  std::vector<int64_t> shape;

  uint64_t num_bytes() const;
  bool operator==(const StoredTensor&) const = default;
};

class DrawLayout {
 public:
  DrawLayout() = default;
  // Tensors in any order. Throws std::invalid_argument if there is none, if a
  // name is used twice or is not UTF-8, or a dtype is none that it knows.
  explicit DrawLayout(std::vector<StoredTensor> tensors);

  // In the file's order.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  uint64_t header_size() const { return before_.size(); }
  // Of all its bytes.
  uint64_t size() const { return begins_.back(); }
  // How many share a file; 1 where each has its own.
  int64_t draws_per_file() const;
  // Where tensor i begins in it; one more for the end.
  const std::vector<uint64_t>& begins() const { return begins_; }

  // The header, with its length before it; a sum for each tensor.
  std::string Header(const std::vector<uint32_t>& sums) const;
  // The sums in a header; those of one that is not of this layout are wrong.
  std::vector<uint32_t> Sums(std::string_view header) const;
  // Tensors of a whole draw whose bytes are not those of its header's sums.
  std::vector<size_t> Altered(std::string_view draw) const;

 private:
  std::vector<StoredTensor> tensors_;
  std::vector<uint64_t> begins_;
  // The header where all sums are 0, and where they are in it.
  std::string before_;
  size_t sums_at_ = 0;
};

// Eight hexadecimal digits.
std::string HexSum(uint32_t sum);

// In what the tensors of two models differ, in words; empty if in nothing.
std::string Difference(const std::vector<StoredTensor>& here,
                       const std::vector<StoredTensor>& there);

}  // namespace torch_sgmcmc
