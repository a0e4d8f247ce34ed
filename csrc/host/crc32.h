// CRC-32 as zip archives, PNG images and zlib have it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_sgmcmc {

// The sum of bytes after others with the sum `before`.
uint32_t Crc32(const void* bytes, size_t size, uint32_t before = 0);

}  // namespace torch_sgmcmc
