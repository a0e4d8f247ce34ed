// What parameters must not share: memory, and elements of the noise stream
// (Note [Numbers of elements], torch_sgmcmc/core/random_state.py).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "random/counter.h"

namespace torch_sgmcmc {

// True if elements may share memory: unless each stride exceeds the span of all
// smaller ones.
template <class Range>
bool MayRepeat(const Range& sizes, const Range& strides) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return false;
    if (sizes[i] > 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < span) return true;
    span += (size - 1) * stride;
  }
  return false;
}

// The memory of a parameter, which has elements.
struct ParameterMemory {
  std::string device;
  int64_t begin = 0;  // an address
  int64_t element_size = 1;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  int64_t end() const {
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      last += (sizes[i] - 1) * strides[i];
    }
    return begin + (last + 1) * element_size;
  }
  // The address of each byte.
  std::vector<int64_t> bytes() const {
    std::vector<int64_t> all = {begin};
    const auto repeat = [&](int64_t times, int64_t distance) {
      const size_t count = all.size();
      for (int64_t k = 1; k < times; ++k) {
        for (size_t i = 0; i < count; ++i) {
          all.push_back(all[i] + k * distance);
        }
      }
    };
    repeat(element_size, 1);
    for (size_t i = 0; i < sizes.size(); ++i) {
      repeat(sizes[i], strides[i] * element_size);
    }
    return all;
  }
};

// The indices of two parameters that share a byte (columns of a matrix
// interleave without sharing any). Also returns an index twice, for a parameter
// whose elements share memory.
inline std::optional<std::pair<size_t, size_t>> FindOverlap(
    const std::vector<ParameterMemory>& all) {
  std::vector<size_t> order(all.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::tie(all[a].device, all[a].begin, a) <
           std::tie(all[b].device, all[b].begin, b);
  });
  for (size_t first = 0, next = 0; first < order.size(); first = next) {
    int64_t furthest = all[order[first]].end();
    for (next = first + 1; next < order.size(); ++next) {
      const ParameterMemory& own = all[order[next]];
      if (own.device != all[order[first]].device) break;
      if (own.begin >= furthest) break;
      furthest = std::max(furthest, own.end());
    }
    std::vector<std::pair<int64_t, size_t>> bytes;
    for (size_t k = first; k < next; ++k) {
      const ParameterMemory& own = all[order[k]];
      if (next - first == 1 && !MayRepeat(own.sizes, own.strides)) continue;
      for (const int64_t byte : own.bytes()) {
        bytes.emplace_back(byte, order[k]);
      }
    }
    std::sort(bytes.begin(), bytes.end());
    const auto twice = std::adjacent_find(
        bytes.begin(), bytes.end(),
        [](const auto& a, const auto& b) { return a.first == b.first; });
    if (twice == bytes.end()) continue;
    return std::pair(twice->second, (twice + 1)->second);
  }
  return std::nullopt;
}

// The first multiple of the noise block at or after offset + size.
inline int64_t NextOffset(int64_t offset, int64_t size) {
  return (offset + size + kNoiseBlock - 1) / kNoiseBlock * kNoiseBlock;
}

template <typename... Part>
[[noreturn]] void RefuseRanges(const Part&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Throws std::invalid_argument if the ranges of groups' parameters overlap, or
// reach beyond `next`. Numbers are in [0, 2^62).
inline void CheckRanges(const std::vector<std::vector<int64_t>>& offsets,
                        const std::vector<std::vector<int64_t>>& sizes,
                        int64_t next) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (offsets[i].size() != sizes[i].size()) {
      RefuseRanges("Invalid state_dict: param group ", i, " has ",
                   offsets[i].size(), " offsets, expected ", sizes[i].size());
    }
    for (size_t j = 0; j < sizes[i].size(); ++j) {
      const int64_t offset = offsets[i][j];
      if (offset % kNoiseBlock != 0) {
        RefuseRanges("Invalid offsets: ", offset, " in param group ", i,
                     " (must be a multiple of ", kNoiseBlock, ")");
      }
      if (sizes[i][j] == 0) continue;
      ranges.emplace_back(offset, NextOffset(offset, sizes[i][j]));
    }
  }
  if (next % kNoiseBlock != 0) {
    RefuseRanges("Invalid next_offset: ", next, " (must be a multiple of ",
                 kNoiseBlock, ")");
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto [begin, end] = ranges[i];
    const bool is_last = i + 1 == ranges.size();
    const int64_t following = is_last ? next : ranges[i + 1].first;
    if (end <= following) continue;
    RefuseRanges("Invalid offsets: elements [", begin, ", ", end,
                 ") reach beyond ", following,
                 " (each parameter needs its own, before next_offset = ", next,
                 ")");
  }
}

}  // namespace torch_sgmcmc
