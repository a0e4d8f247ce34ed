// Eight 32-bit lanes (AVX2 and FMA) for random/noise.inl; the layout follows
// random/lanes_avx512.inl.

// For each choice of lanes their numbers, as bytes.
constexpr std::array<uint64_t, 256> ChosenLanes() {
  std::array<uint64_t, 256> chosen{};
  for (uint32_t mask = 0; mask < 256; ++mask) {
    int count = 0;
    for (uint32_t lane = 0; lane < 8; ++lane) {
      if ((mask >> lane & 1U) != 0) {
        chosen[mask] |= uint64_t{lane} << 8 * count++;
      }
    }
  }
  return chosen;
}
inline constexpr std::array<uint64_t, 256> kChosenLanes = ChosenLanes();

struct Lanes {
  using U64 = __m256i;
  using U32 = __m256i;
  using F32 = __m256;
  using Mask = __m256;
  static constexpr int kQuads = 8;
  static constexpr int kStates = 2;
  static constexpr int kVectors = 1;

  static SG_INLINE U64 Set64(uint32_t x) { return _mm256_set1_epi64x(x); }
  static SG_INLINE U64 Quads(uint32_t quad, int state) {
    quad += static_cast<uint32_t>(state * 2);
    return _mm256_add_epi64(_mm256_set_epi64x(5, 1, 4, 0),
                            _mm256_set1_epi64x(quad));
  }
  static SG_INLINE U64 OfState(U32 quads, int state) {
    return state == 0 ? quads : High(quads);
  }
  static SG_INLINE U64 Multiply(U64 x, uint32_t m) {
    return _mm256_mul_epu32(x, _mm256_set1_epi64x(m));
  }
  static SG_INLINE U64 High(U64 x) { return _mm256_srli_epi64(x, 32); }
  static SG_INLINE U64 Xor(U64 x, U64 y, uint32_t key) {
    return _mm256_xor_si256(_mm256_xor_si256(x, y), _mm256_set1_epi64x(key));
  }
  static SG_INLINE U32 Merge(U64 even, U64 odd) {
    return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  }

  static SG_INLINE F32 Set(float x) { return _mm256_set1_ps(x); }
  // kCount floats again and again.
  template <int kCount>
  static SG_INLINE F32 Repeat(const float* x) {
    if constexpr (kCount == 8) {
      return _mm256_loadu_ps(x);
    } else if constexpr (kCount == 4) {
      return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x));
    } else if constexpr (kCount == 2) {
      double both;
      memcpy(&both, x, sizeof both);
      return _mm256_castpd_ps(_mm256_set1_pd(both));
    } else {
      return Set(*x);
    }
  }
  static SG_INLINE F32 ToFloat(U32 x) { return _mm256_cvtepi32_ps(x); }
  static SG_INLINE U32 Bits(F32 x) { return _mm256_castps_si256(x); }
  static SG_INLINE F32 FromBits(U32 x) { return _mm256_castsi256_ps(x); }
  static SG_INLINE U32 ShiftRight(U32 x, int n) {
    return _mm256_srli_epi32(x, n);
  }
  static SG_INLINE U32 ShiftRightSigned(U32 x, int n) {
    return _mm256_srai_epi32(x, n);
  }
  static SG_INLINE U32 ShiftLeft(U32 x, int n) {
    return _mm256_slli_epi32(x, n);
  }
  static SG_INLINE U32 Subtract(U32 x, uint32_t y) {
    return _mm256_sub_epi32(x, _mm256_set1_epi32(static_cast<int>(y)));
  }
  static SG_INLINE U32 Subtract(U32 x, U32 y) { return _mm256_sub_epi32(x, y); }
  static SG_INLINE U32 AddIfNegative(U32 x, uint32_t y, U32 sign) {
    return _mm256_add_epi32(
        x, _mm256_and_si256(_mm256_srai_epi32(sign, 31),
                            _mm256_set1_epi32(static_cast<int>(y))));
  }
  static SG_INLINE F32 Subtract(F32 x, F32 y) { return _mm256_sub_ps(x, y); }
  static SG_INLINE F32 Multiply(F32 x, F32 y) { return _mm256_mul_ps(x, y); }
  static SG_INLINE F32 Fma(F32 x, F32 y, F32 z) {
    return _mm256_fmadd_ps(x, y, z);
  }
  static SG_INLINE F32 Sqrt(F32 x) { return _mm256_sqrt_ps(x); }
  static SG_INLINE F32 FlipSign(F32 x, U32 sign) {
    return FromBits(_mm256_xor_si256(Bits(x), sign));
  }
  static SG_INLINE Mask TestBit(U32 x, uint32_t bit) {
    const U32 b = _mm256_set1_epi32(static_cast<int>(bit));
    return FromBits(_mm256_cmpeq_epi32(_mm256_and_si256(x, b), b));
  }
  static SG_INLINE F32 Select(Mask m, F32 yes, F32 no) {
    return _mm256_blendv_ps(no, yes, m);
  }
  static SG_INLINE void ToQuads(const F32 z[4], F32 quads[4]) {
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(z[0], z[1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(z[0], z[1]));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(z[2], z[3]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(z[2], z[3]));
    quads[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    quads[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    quads[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    quads[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
  static SG_INLINE float* StoreKept(float* out, const F32 quads[4],
                                    uint64_t kept) {
    SG_UNROLL for (int i = 0; i < 4; ++i) {
      const auto mask = static_cast<uint8_t>(kept >> 8 * i);
      const __m128i lanes =
          _mm_cvtsi64_si128(static_cast<int64_t>(kChosenLanes[mask]));
      _mm256_storeu_ps(
          out, _mm256_permutevar8x32_ps(quads[i], _mm256_cvtepu8_epi32(lanes)));
      out += _mm_popcnt_u32(mask);
    }
    return out;
  }
};
