// Files that are on the disk, all of them or nothing.
#pragma once

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace torch_sgmcmc::disk {

// These throw std::runtime_error: "Cannot read PATH: reason" or "Cannot write".
[[noreturn]] void Unreadable(const std::string& path,
                             const std::string& reason);
[[noreturn]] void Unwritable(const std::string& path, int reason = errno);

// Closes a file; its lock ends even if a forked process has the file, too.
struct Close {
  void operator()(const int* file) const;
};
using OpenFile = std::unique_ptr<const int, Close>;

// These return null or false if they fail; errno has the reason.
OpenFile Open(const std::string& path, int flags = O_RDWR | O_CREAT);
bool Sync(const std::string& path);

// True of a folder, a device and the like, and a FIFO, which would wait.
bool IsSpecial(const std::string& path);

// Returns a file's content, nothing if it is missing.
std::optional<std::string> Read(const std::string& path);

// Replaces what an open file has from `at` on, and waits until it is on the
// disk. Throws std::runtime_error, and the file then ends at `at`.
void Append(int file, const std::string& path, std::string_view bytes,
            int64_t at);

// Writes a file, all of it or nothing, and waits until it and its name are on
// the disk. A link stays, and an older file's mode. Throws std::runtime_error,
// and an older file is as before.
void Replace(const std::string& path, std::string_view bytes);

// CRC-32 as zip archives, PNG images and zlib have it.

// Row k: the remainder of a byte that k more follow. Eight bytes are then
// looked up at once.
constexpr std::array<std::array<uint32_t, 256>, 8> Crc32Tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) {
      value = value >> 1 ^ ((value & 1U) != 0 ? 0xEDB88320U : 0);
    }
    tables[0][i] = value;
  }
  for (size_t row = 1; row < 8; ++row) {
    for (uint32_t i = 0; i < 256; ++i) {
      const uint32_t value = tables[row - 1][i];
      tables[row][i] = value >> 8 ^ tables[0][value & 0xFF];
    }
  }
  return tables;
}

inline constexpr auto kCrc32Tables = Crc32Tables();

inline uint32_t Crc32(const void* bytes, size_t size) {
  const auto* at = static_cast<const unsigned char*>(bytes);
  uint32_t crc = ~uint32_t{0};
  const auto& t = kCrc32Tables;
  for (; size >= 8; size -= 8, at += 8) {
    uint32_t low = 0;
    std::memcpy(&low, at, 4);  // little-endian, as all that it runs on
    crc ^= low;
    crc = t[7][crc & 0xFF] ^ t[6][crc >> 8 & 0xFF] ^ t[5][crc >> 16 & 0xFF] ^
          t[4][crc >> 24] ^ t[3][at[4]] ^ t[2][at[5]] ^ t[1][at[6]] ^
          t[0][at[7]];
  }
  for (; size > 0; --size, ++at) {
    crc = crc >> 8 ^ t[0][(crc ^ *at) & 0xFF];
  }
  return ~crc;
}

}  // namespace torch_sgmcmc::disk
