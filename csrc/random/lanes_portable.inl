// One 32-bit lane for random/noise.inl: plain C++ for any processor and CUDA
// thread. Vector lanes must be bitwise identical.

struct Lanes {
  using U64 = uint64_t;
  using U32 = uint32_t;
  using F32 = float;
  using Mask = bool;
  static constexpr int kQuads = 1;
  static constexpr int kStates = 1;
  static constexpr int kVectors = 1;

  static SG_INLINE U64 Set64(uint32_t x) { return x; }
  static SG_INLINE U64 Quads(uint32_t quad, int /*state*/) { return quad; }
  // Those of one state of a vector of quads, of which lane i is number
  // i % 4 * (kQuads / 4) + i / 4.
  static SG_INLINE U64 OfState(U32 quads, int /*state*/) { return quads; }
  static SG_INLINE U64 Multiply(U64 x, uint32_t m) {
    return static_cast<U64>(static_cast<uint32_t>(x)) * m;
  }
  static SG_INLINE U64 High(U64 x) { return x >> 32; }
  static SG_INLINE U64 Xor(U64 x, U64 y, uint32_t key) { return x ^ y ^ key; }
  static SG_INLINE U32 Merge(U64 even, U64 /*odd*/) {
    return static_cast<U32>(even);
  }

  static SG_INLINE F32 Set(float x) { return x; }
  template <int kCount>
  static SG_INLINE F32 Repeat(const float* x) {
    return *x;
  }
  static SG_INLINE F32 ToFloat(U32 x) {
    return static_cast<float>(static_cast<int32_t>(x));
  }
  static SG_INLINE U32 Bits(F32 x) {
    U32 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  static SG_INLINE F32 FromBits(U32 bits) {
    F32 x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
  static SG_INLINE U32 ShiftRight(U32 x, int n) { return x >> n; }
  static SG_INLINE U32 ShiftRightSigned(U32 x, int n) {
    return static_cast<U32>(static_cast<int32_t>(x) >> n);
  }
  static SG_INLINE U32 ShiftLeft(U32 x, int n) { return x << n; }
  static SG_INLINE U32 Subtract(U32 x, U32 y) { return x - y; }
  // x + y if the signed `sign` is negative, else x.
  static SG_INLINE U32 AddIfNegative(U32 x, uint32_t y, U32 sign) {
    return static_cast<int32_t>(sign) < 0 ? x + y : x;
  }
  static SG_INLINE F32 Subtract(F32 x, F32 y) { return x - y; }
  static SG_INLINE F32 Multiply(F32 x, F32 y) { return x * y; }
  static SG_INLINE F32 Fma(F32 x, F32 y, F32 z) { return fmaf(x, y, z); }
  static SG_INLINE F32 Sqrt(F32 x) { return sqrtf(x); }
  static SG_INLINE F32 FlipSign(F32 x, U32 sign) {
    return FromBits(Bits(x) ^ sign);
  }
  static SG_INLINE Mask TestBit(U32 x, uint32_t bit) { return (x & bit) != 0; }
  static SG_INLINE F32 Select(Mask m, F32 yes, F32 no) { return m ? yes : no; }
  static SG_INLINE void ToQuads(const F32 z[4], F32 quads[4]) {
    for (int i = 0; i < 4; ++i) quads[i] = z[i];
  }
  static SG_INLINE float* StoreKept(float* out, const F32 quads[4],
                                    uint64_t kept) {
    for (int i = 0; i < 4; ++i) {
      *out = quads[i];
      out += kept >> i & 1U;
    }
    return out;
  }
};
