// Philox4x32-10 and the Box-Muller transform, written once for any lane type.
//
// This file has no include guard on purpose: whoever includes it sits inside a
// namespace of its own that provides `Lanes` (see core/lanes_*.inl) and inside
// a compiler region for one instruction set. The same lines thus become AVX-512
// code, AVX2 code, portable code and CUDA device code.
//
// Every floating-point operation below is a correctly rounded IEEE operation
// (conversion, add, multiply, fused multiply-add, square root) in a fixed
// order, so all of these produce the same bits. See Note [Counter layout] in
// core/counter.h for what is fed in.

struct PhiloxWords {
  Lanes::U64 w0, w1, w2, w3;
};

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) of kStates counters at once.
// Words live in the low halves of 64-bit lanes; the high halves hold leftovers
// that no operation looks at, because the 32 x 32 -> 64 bit multiplication reads
// low halves only. A round is a chain of three dependent instructions, so
// several counters advance in step to keep the processor busy.
template <int kStates>
SG_INLINE void Philox(PhiloxWords (&c)[kStates], uint32_t k0, uint32_t k1) {
  SG_UNROLL for (int round = 0; round < 10; ++round) {
    SG_UNROLL for (int i = 0; i < kStates; ++i) {
      const Lanes::U64 p0 = Lanes::Multiply(c[i].w0, 0xD2511F53u);
      const Lanes::U64 p1 = Lanes::Multiply(c[i].w2, 0xCD9E8D57u);
      c[i] = {Lanes::Xor(Lanes::High(p1), c[i].w1, k0), p1,
              Lanes::Xor(Lanes::High(p0), c[i].w3, k1), p0};
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// Two independent standard normals z0, z1 from two uniform 32-bit words w0, w1.
//
// Radius: u = (floor(w0 / 2) + 1/2) / 2^31 lies in [2^-32, 1], so r reaches
// 6.66. ln u = e ln 2 + ln(1 + f) with 1 + f in [2/3, 4/3); -2 ln(1 + f) / f is
// a minimax polynomial of degree 7 (relative error 1.7e-7).
// Angle: w1 as a signed integer gives an angle in [-pi/4, pi/4); its lowest two
// bits, far below the angle's resolution, choose the quadrant (swap and sign).
// Minimax polynomials for sin and cos: relative errors 3e-9 and 3e-8.
// kPairs independent pairs advance line by line, for the same reason as above.
template <int kPairs>
SG_INLINE void BoxMuller(const Lanes::U32 (&w0)[kPairs],
                         const Lanes::U32 (&w1)[kPairs],
                         Lanes::F32 (&z0)[kPairs], Lanes::F32 (&z1)[kPairs]) {
  using L = Lanes;
  L::F32 f[kPairs], q[kPairs], r[kPairs];
#define SG_EACH SG_UNROLL for (int i = 0; i < kPairs; ++i)
  SG_EACH {
    const L::F32 u = L::Fma(L::ToFloat(L::ShiftRight(w0[i], 1)),
                            L::Set(0x1p-31f), L::Set(0x1p-32f));
    const L::U32 bits = L::Bits(u);
    const L::U32 e = L::ShiftRightSigned(L::Subtract(bits, 0x3F2AAAABu), 23);
    f[i] = L::Subtract(L::FromBits(L::Subtract(bits, L::ShiftLeft(e, 23))),
                       L::Set(1.0f));
    r[i] = L::Multiply(L::ToFloat(e), L::Set(-1.3862943611f));
    q[i] = L::Fma(L::Set(0.3073140598f), f[i], L::Set(-0.3422235996f));
  }
  SG_EACH q[i] = L::Fma(q[i], f[i], L::Set(0.3284016956f));
  SG_EACH q[i] = L::Fma(q[i], f[i], L::Set(-0.395900755f));
  SG_EACH q[i] = L::Fma(q[i], f[i], L::Set(0.5001524361f));
  SG_EACH q[i] = L::Fma(q[i], f[i], L::Set(-0.6667597735f));
  SG_EACH q[i] = L::Fma(q[i], f[i], L::Set(0.9999987552f));
  SG_EACH q[i] = L::Fma(q[i], f[i], L::Set(-1.999999672f));
  SG_EACH r[i] = L::Sqrt(L::Fma(q[i], f[i], r[i]));

  L::F32 y[kPairs], s[kPairs], c[kPairs];
  SG_EACH {
    y[i] = L::Multiply(L::ToFloat(w1[i]), L::Set(0x1p-31f));
    f[i] = L::Multiply(y[i], y[i]);
  }
  SG_EACH {
    s[i] = L::Fma(f[i], L::Set(-3.595045227e-5f), L::Set(0.002490001024f));
    c[i] = L::Fma(f[i], L::Set(-0.0003187278407f), L::Set(0.01584968417f));
  }
  SG_EACH {
    s[i] = L::Fma(s[i], f[i], L::Set(-0.08074543253f));
    c[i] = L::Fma(c[i], f[i], L::Set(-0.3084241656f));
  }
  SG_EACH {
    s[i] = L::Fma(s[i], f[i], L::Set(0.7853981609f));
    c[i] = L::Fma(c[i], f[i], L::Set(0.9999999674f));
  }
  SG_EACH {
    const L::F32 rs = L::Multiply(r[i], L::Multiply(s[i], y[i]));
    const L::F32 rc =
        L::FlipSign(L::Multiply(r[i], c[i]), L::ShiftLeft(w1[i], 31));
    const L::Mask swap = L::TestBit(w1[i], 2u);
    z0[i] = L::Select(swap, rs, rc);
    z1[i] = L::Select(swap, rc, rs);
  }
#undef SG_EACH
}

// Fills out[0, kNoiseBlock * blocks) with the standard normals of the quads
// [first_quad, first_quad + kQuadBlock * blocks) of a stream. first_quad must be
// a multiple of kQuadBlock, and the range must not cross a multiple of 2^32.
SG_INLINE void FillNormal(float* out, uint64_t first_quad, int64_t blocks,
                          const NoiseStream& stream) {
  constexpr int kVectors = Lanes::kVectors;
  constexpr int kStates = Lanes::kStates;
  const uint32_t k0 = static_cast<uint32_t>(stream.seed);
  const uint32_t k1 = static_cast<uint32_t>(stream.seed >> 32);
  const Lanes::U64 c1 = Lanes::Set64(static_cast<uint32_t>(first_quad >> 32));
  const Lanes::U64 c2 = Lanes::Set64(stream.counter2());
  const Lanes::U64 c3 = Lanes::Set64(stream.counter3());
  uint32_t quad = static_cast<uint32_t>(first_quad);
  constexpr int kQuads = kVectors * Lanes::kQuads;  // made in one iteration
  for (int64_t n = blocks * (kQuadBlock / kQuads); n > 0; --n) {
    PhiloxWords c[kVectors * kStates];
    SG_UNROLL for (int i = 0; i < kVectors * kStates; ++i) {
      c[i] = {Lanes::Quads(quad, i), c1, c2, c3};
    }
    Philox(c, k0, k1);
    Lanes::U32 radius[2 * kVectors], angle[2 * kVectors];
    SG_UNROLL for (int i = 0; i < kVectors; ++i) {
      const PhiloxWords& a = c[i * kStates];
      const PhiloxWords& b = c[i * kStates + kStates - 1];
      radius[2 * i] = Lanes::Merge(a.w0, b.w0);
      angle[2 * i] = Lanes::Merge(a.w1, b.w1);
      radius[2 * i + 1] = Lanes::Merge(a.w2, b.w2);
      angle[2 * i + 1] = Lanes::Merge(a.w3, b.w3);
    }
    Lanes::F32 z0[2 * kVectors], z1[2 * kVectors];
    BoxMuller(radius, angle, z0, z1);
    SG_UNROLL for (int i = 0; i < kVectors; ++i) {
      const Lanes::F32 z[4] = {z0[2 * i], z1[2 * i], z0[2 * i + 1],
                               z1[2 * i + 1]};
      Lanes::StoreQuads(out + 4 * Lanes::kQuads * i, z);
    }
    out += 4 * kQuads;
    quad += kQuads;
  }
}
