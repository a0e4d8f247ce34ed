// Numbers that C++ hands to Python as memory.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace torch_sgmcmc {

// The memory of int64 numbers, which Python can take for an array of its own.
inline pybind11::bytearray Memory(const std::vector<int64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()),
          numbers.size() * sizeof(int64_t)};
}

}  // namespace torch_sgmcmc
