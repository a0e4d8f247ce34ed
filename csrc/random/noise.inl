// Philox4x32-10, and its words as standard normals (Box-Muller) or uniforms,
// for any lane type.
//
// Without an include guard: each inclusion is in a namespace with `Lanes`
// (random/lanes_*.inl) and a compiler region of one instruction set, for
// AVX-512, AVX2, portable and CUDA code.
//
// Every floating-point operation is a correctly rounded IEEE operation in a
// fixed order, so all versions give the same bits. Note [Counter layout] in
// random/counter.h has the inputs.

struct PhiloxWords {
  Lanes::U64 w0, w1, w2, w3;
};

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) of kStates counters at once:
// a round is a chain of three dependent instructions. Words are the low halves
// of 64-bit lanes; the multiplication does not read the high halves.
template <int kStates>
struct Philox {
  PhiloxWords c[kStates];
  uint32_t k0;
  uint32_t k1;

  SG_INLINE void Round() {
    SG_UNROLL for (int i = 0; i < kStates; ++i) {
      const Lanes::U64 p0 = Lanes::Multiply(c[i].w0, 0xD2511F53u);
      const Lanes::U64 p1 = Lanes::Multiply(c[i].w2, 0xCD9E8D57u);
      c[i] = {Lanes::Xor(Lanes::High(p1), c[i].w1, k0), p1,
              Lanes::Xor(Lanes::High(p0), c[i].w3, k1), p0};
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }

  SG_INLINE void AllRounds() {
    SG_UNROLL for (int round = 0; round < 10; ++round) Round();
  }
};

// Pairs of independent standard normals z0, z1 from pairs of uniform 32-bit
// words w0, w1, in ten steps.
//
// Radius (steps 0 to 5): u = (floor(w0 / 2) + 1/2) / 2^31 lies in [2^-32, 1],
// so r reaches 6.66. ln u = e ln 2 + ln(1 + f) with 1 + f in [2/3, 4/3), and
// -2 ln(1 + f) / f is a minimax polynomial of degree 7 (relative error 1.7e-7).
// Angle (steps 6 to 9): w1 as a signed integer gives an angle in
// [-pi/4, pi/4); its lowest two bits, far below the angle's resolution, choose
// the quadrant (swap and sign). Minimax polynomials for sin and cos: relative
// errors 3e-9 and 3e-8.
template <int kPairs>
class BoxMuller {
 public:
  using L = Lanes;
  L::U32 w0[kPairs], w1[kPairs];
  L::F32 z0[kPairs], z1[kPairs];

  SG_INLINE void AllSteps() { AllSteps(std::make_integer_sequence<int, 10>()); }

  template <int kStep>
  SG_INLINE void Step() {
    SG_UNROLL for (int i = 0; i < kPairs; ++i) {
      if constexpr (kStep == 0) {
        const L::F32 u = L::Fma(L::ToFloat(L::ShiftRight(w0[i], 1)),
                                L::Set(0x1p-31f), L::Set(0x1p-32f));
        bits_[i] = L::Bits(u);
      } else if constexpr (kStep == 1) {
        const L::U32 e =
            L::ShiftRightSigned(L::Subtract(bits_[i], 0x3F2AAAABu), 23);
        t_[i] =
            L::Subtract(L::FromBits(L::Subtract(bits_[i], L::ShiftLeft(e, 23))),
                        L::Set(1.0f));
        r_[i] = L::Multiply(L::ToFloat(e), L::Set(-1.3862943611f));
      } else if constexpr (kStep == 2) {
        q_[i] = L::Fma(L::Set(0.3073140598f), t_[i], L::Set(-0.3422235996f));
        q_[i] = L::Fma(q_[i], t_[i], L::Set(0.3284016956f));
      } else if constexpr (kStep == 3) {
        q_[i] = L::Fma(q_[i], t_[i], L::Set(-0.395900755f));
        q_[i] = L::Fma(q_[i], t_[i], L::Set(0.5001524361f));
      } else if constexpr (kStep == 4) {
        q_[i] = L::Fma(q_[i], t_[i], L::Set(-0.6667597735f));
        q_[i] = L::Fma(q_[i], t_[i], L::Set(0.9999987552f));
      } else if constexpr (kStep == 5) {
        q_[i] = L::Fma(q_[i], t_[i], L::Set(-1.999999672f));
        r_[i] = L::Sqrt(L::Fma(q_[i], t_[i], r_[i]));
      } else if constexpr (kStep == 6) {
        y_[i] = L::Multiply(L::ToFloat(w1[i]), L::Set(0x1p-31f));
        t_[i] = L::Multiply(y_[i], y_[i]);
      } else if constexpr (kStep == 7) {
        q_[i] =
            L::Fma(t_[i], L::Set(-3.595045227e-5f), L::Set(0.002490001024f));
        q_[i] = L::Fma(q_[i], t_[i], L::Set(-0.08074543253f));
        q_[i] = L::Fma(q_[i], t_[i], L::Set(0.7853981609f));
        y_[i] = L::Multiply(q_[i], y_[i]);  // sin
      } else if constexpr (kStep == 8) {
        q_[i] =
            L::Fma(t_[i], L::Set(-0.0003187278407f), L::Set(0.01584968417f));
        q_[i] = L::Fma(q_[i], t_[i], L::Set(-0.3084241656f));
        q_[i] = L::Fma(q_[i], t_[i], L::Set(0.9999999674f));  // cos
      } else {
        const L::F32 rs = L::Multiply(r_[i], y_[i]);
        const L::F32 rc =
            L::FlipSign(L::Multiply(r_[i], q_[i]), L::ShiftLeft(w1[i], 31));
        const L::Mask swap = L::TestBit(w1[i], 2u);
        z0[i] = L::Select(swap, rs, rc);
        z1[i] = L::Select(swap, rc, rs);
      }
    }
  }

 private:
  template <int... kStep>
  SG_INLINE void AllSteps(std::integer_sequence<int, kStep...>) {
    (Step<kStep>(), ...);
  }

  L::U32 bits_[kPairs];
  L::F32 t_[kPairs], q_[kPairs], r_[kPairs], y_[kPairs];
};

// Numbers uniform on (-1, 1), one of each word: (w + 1/2) / 2^31, w signed, in
// float32. In one of BoxMuller's ten steps.
template <int kPairs>
class Uniforms {
 public:
  using L = Lanes;
  L::U32 w0[kPairs], w1[kPairs];
  L::F32 z0[kPairs], z1[kPairs];

  SG_INLINE void AllSteps() { Step<0>(); }

  template <int kStep>
  SG_INLINE void Step() {
    if constexpr (kStep == 0) {
      SG_UNROLL for (int i = 0; i < kPairs; ++i) {
        z0[i] = Of(w0[i]);
        z1[i] = Of(w1[i]);
      }
    }
  }

 private:
  SG_INLINE static L::F32 Of(L::U32 word) {
    return L::Fma(L::ToFloat(word), L::Set(0x1p-31f), L::Set(0x1p-32f));
  }
};

// Writes the floats of Lanes::kQuads quads, and returns their end.
SG_INLINE float* StoreQuads(float* out, const Lanes::F32 z[4]) {
  SG_UNROLL for (int i = 0; i < 4; ++i) {
    memcpy(out, &z[i], sizeof z[i]);
    out += Lanes::kQuads;
  }
  return out;
}

// The noise of quads by blocks. The next block's words are made while this
// block's become normals: the two chains of dependent instructions interleave.
//
// Quads are the first number of consecutive ones below the next multiple of
// 2^32, or an object: Next() returns a vector of low words (lanes as in
// Lanes::OfState), high() the common high word.
template <template <int> class Noise>
class NoiseSource {
 public:
  // Take() does the rest.
  template <class Quads>
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  SG_INLINE NoiseSource(const NoiseStream& stream, Quads&& first)
      : stream_(stream) {
    Words next = Start(first);
    next.AllRounds();
    Take(next);
  }

  // Writes the noise of consecutive quads, and begins those at `then`.
  SG_INLINE void Next(float* out, uint64_t quad, uint64_t then) {
    const auto write = [&](const Lanes::F32* z) { out = StoreQuads(out, z); };
    for (int64_t n = kQuads; n <= kQuadBlock; n += kQuads) {
      Finish(write, Start(n < kQuadBlock ? quad + n : then));
    }
  }

  // Passes a block to write(z), Lanes::kQuads quads at a time, and begins the
  // next.
  template <class Quads, class Write>
  SG_INLINE void Next(Quads& quads, const Write& write) {
    for (int64_t n = 0; n < kQuadBlock; n += kQuads) {
      Finish(write, Start(quads));
    }
  }

 private:
  static constexpr int kVectors = Lanes::kVectors;
  static constexpr int kStates = Lanes::kStates;
  static constexpr int kQuads = kVectors * Lanes::kQuads;
  using Words = Philox<kVectors * kStates>;
  using Numbers = Noise<2 * kVectors>;

  // Writes the current numbers while the next begin.
  template <class Write>
  SG_INLINE void Finish(Write& write, Words next) {
    Numbers numbers;
    SG_UNROLL for (int i = 0; i < 2 * kVectors; ++i) {
      numbers.w0[i] = w0_[i];
      numbers.w1[i] = w1_[i];
    }
    Mix(next, numbers, std::make_integer_sequence<int, 10>());
    SG_UNROLL for (int i = 0; i < kVectors; ++i) {
      const Lanes::F32 z[4] = {numbers.z0[2 * i], numbers.z1[2 * i],
                               numbers.z0[2 * i + 1], numbers.z1[2 * i + 1]};
      Lanes::F32 quads[4];
      Lanes::ToQuads(z, quads);
      write(quads);
    }
    Take(next);
  }

  SG_INLINE Words Start(uint64_t quad) const {
    const Lanes::U64 c1 = Lanes::Set64(static_cast<uint32_t>(quad >> 32));
    Words w = Keyed();
    SG_UNROLL for (int i = 0; i < kVectors * kStates; ++i) {
      w.c[i] = Counter(Lanes::Quads(static_cast<uint32_t>(quad), i), c1);
    }
    return w;
  }

  template <class Quads>
  SG_INLINE Words Start(Quads& quads) const {
    const Lanes::U64 c1 = Lanes::Set64(quads.high());
    Words w = Keyed();
    SG_UNROLL for (int i = 0; i < kVectors; ++i) {
      const Lanes::U32 some = quads.Next();
      SG_UNROLL for (int j = 0; j < kStates; ++j) {
        w.c[i * kStates + j] = Counter(Lanes::OfState(some, j), c1);
      }
    }
    return w;
  }

  SG_INLINE PhiloxWords Counter(Lanes::U64 c0, Lanes::U64 c1) const {
    return {c0, c1, Lanes::Set64(stream_.counter2()),
            Lanes::Set64(stream_.counter3())};
  }

  SG_INLINE Words Keyed() const {
    Words w;
    w.k0 = static_cast<uint32_t>(stream_.seed);
    w.k1 = static_cast<uint32_t>(stream_.seed >> 32);
    return w;
  }

  template <int... kStep>
  SG_INLINE static void Mix(Words& next, Numbers& numbers,
                            std::integer_sequence<int, kStep...>) {
    ((next.Round(), numbers.template Step<kStep>()), ...);
  }

  SG_INLINE void Take(const Words& words) {
    SG_UNROLL for (int i = 0; i < kVectors; ++i) {
      const PhiloxWords& a = words.c[i * kStates];
      const PhiloxWords& b = words.c[i * kStates + kStates - 1];
      w0_[2 * i] = Lanes::Merge(a.w0, b.w0);
      w1_[2 * i] = Lanes::Merge(a.w1, b.w1);
      w0_[2 * i + 1] = Lanes::Merge(a.w2, b.w2);
      w1_[2 * i + 1] = Lanes::Merge(a.w3, b.w3);
    }
  }

  NoiseStream stream_;
  Lanes::U32 w0_[2 * kVectors], w1_[2 * kVectors];
};
