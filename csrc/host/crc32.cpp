#include "host/crc32.h"

#include <array>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace torch_sgmcmc {
namespace {

// OpSpec k: what a byte comes to that k more follow. Eight bytes are then
// looked up at once, instead of each having to wait for the one before.
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

constexpr auto kCrc32Tables = Crc32Tables();

// From the inverted sum of what comes before to that with these bytes.
uint32_t ByTables(const unsigned char* at, size_t size, uint32_t crc) {
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
  return crc;
}

#ifdef __x86_64__

// Bytes are a polynomial over GF(2), the first bit its highest power, of which
// the sum is the remainder. 16 bytes that n bits follow may be replaced by
// their product with x^n mod P, added to these bits: the remainder is the
// same. A product without carries of two halves in this order of bits is x
// times too small, which the constants make up for.
constexpr int64_t PowerOfX(int power) {
  uint32_t remainder = 0x80000000U;
  for (int i = 0; i < power; ++i) {
    remainder = remainder >> 1 ^ ((remainder & 1U) != 0 ? 0xEDB88320U : 0);
  }
  return static_cast<int64_t>(remainder) << 1;
}

// For the two halves of 16 bytes that lie so many bits before what they are
// added to.
#define TORCH_SGMCMC_FOLD(bits) \
  _mm_set_epi64x(PowerOfX((bits)-32), PowerOfX((bits) + 32))

__attribute__((target("pclmul,sse4.1"))) inline __m128i Folded(__m128i value,
                                                               __m128i powers) {
  return _mm_xor_si128(_mm_clmulepi64_si128(value, powers, 0x00),
                       _mm_clmulepi64_si128(value, powers, 0x11));
}

// What the tables give for bytes in multiples of 64, ten times as fast.
__attribute__((target("pclmul,sse4.1"))) uint32_t ByProducts(
    const unsigned char* at, size_t size, uint32_t crc) {
  const auto* next = reinterpret_cast<const __m128i*>(at);
  const auto* const end = reinterpret_cast<const __m128i*>(at + size);
  __m128i sums[4];  // of std::array they would lose their attributes
  for (__m128i& sum : sums) sum = _mm_loadu_si128(next++);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  const __m128i by_four = TORCH_SGMCMC_FOLD(4 * 128);
  while (next != end) {
    for (__m128i& sum : sums) {
      sum = _mm_xor_si128(Folded(sum, by_four), _mm_loadu_si128(next++));
    }
  }
  const __m128i by_one = TORCH_SGMCMC_FOLD(128);
  for (int i = 1; i < 4; ++i) {
    sums[i] = _mm_xor_si128(Folded(sums[i - 1], by_one), sums[i]);
  }
  std::array<unsigned char, 16> left{};
  _mm_storeu_si128(reinterpret_cast<__m128i*>(left.data()), sums[3]);
  return ByTables(left.data(), left.size(), 0);
}

#undef TORCH_SGMCMC_FOLD

bool HasProducts() {
  static const bool has =
      __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return has;
}

#endif

}  // namespace

uint32_t Crc32(const void* bytes, size_t size, uint32_t before) {
  const auto* at = static_cast<const unsigned char*>(bytes);
  uint32_t crc = ~before;
#ifdef __x86_64__
  if (const size_t whole = size & ~size_t{63}; whole > 0 && HasProducts()) {
    crc = ByProducts(at, whole, crc);
    at += whole;
    size -= whole;
  }
#endif
  return ~ByTables(at, size, crc);
}

}  // namespace torch_sgmcmc
