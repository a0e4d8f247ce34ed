// SHA-256 (FIPS 180-4), for the digests of runs: Python has it in its library,
// C++ has not.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace bnn {

class Sha256 {
 public:
  void update(const void* data, size_t size);
  /// The digest of all that was given, in hexadecimal. Ends the use.
  std::string hex_digest();

 private:
  void add(uint8_t byte);
  void compress();

  std::array<uint32_t, 8> state_{0x6a09e667,
                                 0xbb67ae85,
                                 0x3c6ef372,
                                 0xa54ff53a,
                                 0x510e527f,
                                 0x9b05688c,
                                 0x1f83d9ab,
                                 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  uint64_t size_ = 0;  // in bytes
};

}  // namespace bnn
