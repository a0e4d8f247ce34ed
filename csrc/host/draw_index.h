// The index of a chain's draws: lines of text, each with its CRC-32 at its end.
//
//   torch_sgmcmc draws 1 tensors 2 6d1e9d3a
//   tensor F32 100,784 hidden.weight 0f1c2d3e
//   tensor F32 100 hidden.bias 4b5a6978
//   draw 1 step 20 lr 0.1 temperature 1 weight 1 loss nan crc32 9a0bcd12 ...
//   thin 2 ...
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
  // Of the file's header, in which are the sums of all tensors.
  uint32_t crc32 = 0;
};

std::string IndexHead(const DrawLayout& layout);
std::string IndexLine(const DrawRecord& record);
// Draws whose number is no multiple are dropped.
std::string IndexThinning(int64_t interval);

struct DrawIndex {
  DrawLayout layout;
  // That are not dropped, in the order of their numbers.
  std::vector<DrawRecord> draws;
  // Where the head and where the last good line ends.
  uint64_t head_size = 0;
  uint64_t size = 0;
  // Lines, from 1 on, that are not as they were written.
  std::vector<int64_t> damaged;
};

// Throws std::runtime_error that says what is wrong if the head is damaged.
DrawIndex ParseIndex(std::string_view text);

// "0000000012.safetensors"
std::string DrawFileName(int64_t number);
// The number; 0 if it is no such name.
int64_t DrawFileNumber(std::string_view name);

}  // namespace torch_sgmcmc
