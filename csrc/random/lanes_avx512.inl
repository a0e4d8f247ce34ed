// Sixteen 32-bit lanes (AVX-512F and DQ) for random/noise.inl.
//
// A vector of 16 quads is merged from two Philox states of eight 64-bit lanes,
// "even" and "odd". Quads are numbered so that the final 4 x 4 transposes
// inside of 128-bit lanes leave 64 elements in memory order.

struct Lanes {
  using U64 = __m512i;
  using U32 = __m512i;
  using F32 = __m512;
  using Mask = __mmask16;
  static constexpr int kQuads = 16;   // a vector holds one word of 16 quads
  static constexpr int kStates = 2;   // Philox states merged into one vector
  static constexpr int kVectors = 2;  // vectors that advance in step

  static SG_INLINE U64 Set64(uint32_t x) { return _mm512_set1_epi64(x); }
  static SG_INLINE U64 Quads(uint32_t quad, int state) {
    quad += static_cast<uint32_t>(state / 2 * kQuads + state % 2 * 4);
    return _mm512_add_epi64(_mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0),
                            _mm512_set1_epi64(quad));
  }
  static SG_INLINE U64 OfState(U32 quads, int state) {
    return state == 0 ? quads : High(quads);
  }
  static SG_INLINE U64 Multiply(U64 x, uint32_t m) {
    return _mm512_mul_epu32(x, _mm512_set1_epi64(m));
  }
  static SG_INLINE U64 High(U64 x) { return _mm512_srli_epi64(x, 32); }
  static SG_INLINE U64 Xor(U64 x, U64 y, uint32_t key) {
    return _mm512_ternarylogic_epi64(x, y, _mm512_set1_epi64(key), 0x96);
  }
  static SG_INLINE U32 Merge(U64 even, U64 odd) {
    return _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CCAA);
  }

  static SG_INLINE F32 Set(float x) { return _mm512_set1_ps(x); }
  // kCount floats again and again.
  template <int kCount>
  static SG_INLINE F32 Repeat(const float* x) {
    if constexpr (kCount == 8) {
      return _mm512_broadcast_f32x8(_mm256_loadu_ps(x));
    } else if constexpr (kCount == 4) {
      return _mm512_broadcast_f32x4(_mm_loadu_ps(x));
    } else if constexpr (kCount == 2) {
      double both;
      memcpy(&both, x, sizeof both);
      return _mm512_castpd_ps(_mm512_set1_pd(both));
    } else {
      return Set(*x);
    }
  }
  static SG_INLINE F32 ToFloat(U32 x) { return _mm512_cvtepi32_ps(x); }
  static SG_INLINE U32 Bits(F32 x) { return _mm512_castps_si512(x); }
  static SG_INLINE F32 FromBits(U32 x) { return _mm512_castsi512_ps(x); }
  static SG_INLINE U32 ShiftRight(U32 x, int n) {
    return _mm512_srli_epi32(x, n);
  }
  static SG_INLINE U32 ShiftRightSigned(U32 x, int n) {
    return _mm512_srai_epi32(x, n);
  }
  static SG_INLINE U32 ShiftLeft(U32 x, int n) {
    return _mm512_slli_epi32(x, n);
  }
  static SG_INLINE U32 Subtract(U32 x, uint32_t y) {
    return _mm512_sub_epi32(x, _mm512_set1_epi32(static_cast<int>(y)));
  }
  static SG_INLINE U32 Subtract(U32 x, U32 y) { return _mm512_sub_epi32(x, y); }
  static SG_INLINE U32 AddIfNegative(U32 x, uint32_t y, U32 sign) {
    return _mm512_mask_add_epi32(x, _mm512_movepi32_mask(sign), x,
                                 _mm512_set1_epi32(static_cast<int>(y)));
  }
  static SG_INLINE F32 Subtract(F32 x, F32 y) { return _mm512_sub_ps(x, y); }
  static SG_INLINE F32 Multiply(F32 x, F32 y) { return _mm512_mul_ps(x, y); }
  static SG_INLINE F32 Fma(F32 x, F32 y, F32 z) {
    return _mm512_fmadd_ps(x, y, z);
  }
  static SG_INLINE F32 Sqrt(F32 x) { return _mm512_sqrt_ps(x); }
  static SG_INLINE F32 FlipSign(F32 x, U32 sign) {
    return FromBits(_mm512_xor_si512(Bits(x), sign));
  }
  static SG_INLINE Mask TestBit(U32 x, uint32_t bit) {
    return _mm512_test_epi32_mask(x, _mm512_set1_epi32(static_cast<int>(bit)));
  }
  static SG_INLINE F32 Select(Mask m, F32 yes, F32 no) {
    return _mm512_mask_blend_ps(m, no, yes);
  }
  // The floats of quads, of which each vector has a word, in memory's order.
  static SG_INLINE void ToQuads(const F32 z[4], F32 quads[4]) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(z[0], z[1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(z[0], z[1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(z[2], z[3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(z[2], z[3]));
    quads[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    quads[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    quads[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    quads[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  // Writes the floats whose bits are set, and returns their end; may overwrite
  // a vector after it.
  static SG_INLINE float* StoreKept(float* out, const F32 quads[4],
                                    uint64_t kept) {
    SG_UNROLL for (int i = 0; i < 4; ++i) {
      const auto mask = static_cast<__mmask16>(kept >> 16 * i);
      _mm512_storeu_ps(out, _mm512_maskz_compress_ps(mask, quads[i]));
      out += _mm_popcnt_u32(mask);
    }
    return out;
  }
};
