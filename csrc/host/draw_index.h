// The index of a chain's draws: lines of text, each with its CRC-32 at its end.
//
//   torch_sgmcmc draws 1 tensors 2 6d1e9d3a
//   tensor F32 100,784 hidden.weight 0f1c2d3e
//   tensor F32 100 hidden.bias 4b5a6978
//   draw 1 step 20 lr 0.1 temperature 1 weight 1 loss nan prior 1,0.5 ...
//   thin 2 ...
//
// A draw's line ends with its sum, "crc32 9a0bcd12", which "file 1 slot 11"
// follows where draws share files (Note [Files of draws]): the number of the
// file's first draw, and how many come before this one.
//
// The head, the line of version and tensors, is there as a whole or not at all;
// then lines are only appended. What follows the last good line is torn, and no
// part of the index.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "host/draw_layout.h"

namespace torch_sgmcmc {

struct DrawRecord {
  // Among the candidates of its chain (Note [Thinning]), from 1 on.
  int64_t number = 0;
  int64_t step = 0;
  double lr = 0;
  double temperature = 0;
  double weight = 1;
  double loss = 0;
  // Of each param group; of a writer that was not told none.
  std::vector<double> prior_precision;
  // Of the header, in which are the sums of all tensors.
  uint32_t crc32 = 0;
  // Of a file that it shares: its first draw, and the place in it.
  int64_t file = 0;
  int64_t slot = 0;

  bool shares() const { return file != 0; }
};

std::string IndexHead(const DrawLayout& layout);
std::string IndexLine(const DrawRecord& record);
// Draws whose number is no multiple are dropped.
std::string IndexThinning(int64_t interval);

struct DrawIndex {
  DrawLayout layout;
  // In the order of their numbers, and those that were dropped.
  std::vector<DrawRecord> draws;
  std::vector<DrawRecord> dropped;
  // Where the head and where the last good line ends.
  uint64_t head_size = 0;
  uint64_t size = 0;
  // Lines, from 1 on, that are not as they were written.
  std::vector<int64_t> damaged;
};

// Throws std::runtime_error that says what is wrong if the head is damaged.
DrawIndex ParseIndex(std::string_view text);

// "0000000012.safetensors", or "0000000012.draws" of those that share it.
std::string DrawFileName(const DrawRecord& record);

}  // namespace torch_sgmcmc
