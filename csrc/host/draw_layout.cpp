#include "host/draw_layout.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>

#include "host/crc32.h"

namespace torch_sgmcmc {
namespace {

struct StoredType {
  std::string_view name;
  uint64_t size;
};

// By safetensors' rank, largest first.
constexpr std::array<StoredType, 14> kStoredTypes = {{{"U64", 8},
                                                      {"I64", 8},
                                                      {"F64", 8},
                                                      {"C64", 8},
                                                      {"F32", 4},
                                                      {"U32", 4},
                                                      {"I32", 4},
                                                      {"BF16", 2},
                                                      {"F16", 2},
                                                      {"U16", 2},
                                                      {"I16", 2},
                                                      {"I8", 1},
                                                      {"U8", 1},
                                                      {"BOOL", 1}}};

// The rank; throws if there is none.
size_t RankOf(const StoredTensor& tensor) {
  const auto* const found = std::find_if(
      kStoredTypes.begin(), kStoredTypes.end(), [&](const StoredType& t) {
        return t.name == tensor.dtype;
      });
  if (found == kStoredTypes.end()) {
    throw std::invalid_argument("Invalid dtype of '" + tensor.name +
                                "': " + tensor.dtype +
                                " (draws cannot be stored in it)");
  }
  return static_cast<size_t>(found - kStoredTypes.begin());
}

// Draws up to this size share files, up to that size and number.
constexpr uint64_t kSharingSize = uint64_t{16} << 10;
constexpr uint64_t kSharedSize = uint64_t{4} << 20;
constexpr uint64_t kMostSharing = 1024;

bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i++]);
    const int more = byte < 0x80   ? 0
                     : byte < 0xC2 ? -1
                     : byte < 0xE0 ? 1
                     : byte < 0xF0 ? 2
                     : byte < 0xF5 ? 3
                                   : -1;
    if (more < 0 || i + more > text.size()) return false;
    uint32_t code = byte & (0x7FU >> more);
    for (int k = 0; k < more; ++k) {
      const auto next = static_cast<unsigned char>(text[i++]);
      if (next >> 6 != 2) return false;
      code = code << 6 | (next & 0x3FU);
    }
    // Longer than need be, half of a pair of UTF-16, or too large.
    if ((more == 2 && code < 0x800) || (more == 3 && code < 0x10000) ||
        (code >= 0xD800 && code < 0xE000) || code > 0x10FFFF) {
      return false;
    }
  }
  return true;
}

// A string in JSON, as safetensors' library (serde_json) writes it.
std::string Quoted(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  constexpr std::string_view kEscaped = "\"\\\b\f\n\r\t";
  constexpr std::string_view kLetters = "\"\\bfnrt";
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const size_t place = kEscaped.find(c);
    if (place != std::string_view::npos) {
      quoted += {'\\', kLetters[place]};
    } else if (byte < 0x20) {
      quoted += "\\u00";
      quoted += {kDigits[byte >> 4], kDigits[byte & 15]};
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string Listed(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

uint64_t StoredTensor::num_bytes() const {
  uint64_t count = kStoredTypes[RankOf(*this)].size;
  for (const int64_t size : shape) count *= static_cast<uint64_t>(size);
  return count;
}

DrawLayout::DrawLayout(std::vector<StoredTensor> tensors)
    : tensors_(std::move(tensors)) {
  if (tensors_.empty()) {
    throw std::invalid_argument("Invalid tensors: there are none to store");
  }
  std::set<std::string> names;
  for (const StoredTensor& t : tensors_) {
    if (!IsUtf8(t.name) || t.name == "__metadata__" ||
        !names.insert(t.name).second) {
      throw std::invalid_argument("Invalid name: '" + t.name +
                                  "' (must be UTF-8, other than "
                                  "'__metadata__', and of one tensor)");
    }
  }
  std::stable_sort(tensors_.begin(),
                   tensors_.end(),
                   [](const StoredTensor& a, const StoredTensor& b) {
                     return std::pair(RankOf(a), std::string_view(a.name)) <
                            std::pair(RankOf(b), std::string_view(b.name));
                   });
  before_ = std::string(8, '\0') + R"({"__metadata__":{"crc32":")";
  sums_at_ = before_.size();
  before_ += std::string(8 * tensors_.size(), '0') + "\"}";
  begins_ = {0};
  for (const StoredTensor& t : tensors_) {
    const uint64_t begin = begins_.back();
    begins_.push_back(begin + t.num_bytes());
    before_ += "," + Quoted(t.name) + R"(:{"dtype":")" + t.dtype +
               R"(","shape":)" + Listed(t.shape) + R"(,"data_offsets":[)" +
               std::to_string(begin) + "," + std::to_string(begins_.back()) +
               "]}";
  }
  before_ += "}";
  before_.resize((before_.size() + 7) / 8 * 8, ' ');
  const uint64_t length = before_.size() - 8;
  std::memcpy(before_.data(), &length, 8);
  for (uint64_t& begin : begins_) begin += before_.size();
}

int64_t DrawLayout::draws_per_file() const {
  if (size() > kSharingSize) return 1;
  return static_cast<int64_t>(std::min(kSharedSize / size(), kMostSharing));
}

std::string DrawLayout::Header(const std::vector<uint32_t>& sums) const {
  std::string header = before_;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    header.replace(sums_at_ + 8 * i, 8, HexSum(sums.at(i)));
  }
  return header;
}

std::vector<uint32_t> DrawLayout::Sums(std::string_view header) const {
  std::vector<uint32_t> sums;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    uint32_t sum = 0;
    for (const char c : header.substr(sums_at_ + 8 * i, 8)) {
      sum = sum << 4 | static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    sums.push_back(sum);
  }
  return sums;
}

std::vector<size_t> DrawLayout::Altered(std::string_view draw) const {
  const std::vector<uint32_t> sums = Sums(draw.substr(0, header_size()));
  std::vector<size_t> altered;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto bytes = draw.substr(begins_[i], begins_[i + 1] - begins_[i]);
    if (Crc32(bytes.data(), bytes.size()) != sums[i]) altered.push_back(i);
  }
  return altered;
}

std::string HexSum(uint32_t sum) {
  std::string text(8, '0');
  for (size_t i = 8; i-- > 0; sum >>= 4) text[i] = "0123456789abcdef"[sum & 15];
  return text;
}

std::string Difference(const std::vector<StoredTensor>& here,
                       const std::vector<StoredTensor>& there) {
  std::map<std::string, const StoredTensor*> others;
  for (const StoredTensor& t : there) others[t.name] = &t;
  for (const StoredTensor& t : here) {
    const auto found = others.find(t.name);
    if (found == others.end()) return "it has no '" + t.name + "'";
    const StoredTensor& other = *found->second;
    if (other == t) {
      others.erase(found);
      continue;
    }
    return "its '" + t.name + "' is " + other.dtype + " of shape " +
           Listed(other.shape) + ", not " + t.dtype + " of shape " +
           Listed(t.shape);
  }
  return others.empty() ? "" : "it has '" + others.begin()->first + "' besides";
}

}  // namespace torch_sgmcmc
