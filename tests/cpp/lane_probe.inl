// Ordinary functions around random/noise.inl, for code that is compiled for the
// baseline instruction set. Included once per region, after random/noise.inl.

constexpr int kFloatLanes =
    static_cast<int>(sizeof(Lanes::F32) / sizeof(float));
constexpr int kWideLanes =
    static_cast<int>(sizeof(Lanes::U64) / sizeof(uint64_t));

template <template <int> class Noise>
void ProbeFill(float* out, uint64_t first_quad, int64_t blocks,
               const NoiseStream& stream) {
  NoiseSource<Noise> source(stream, first_quad);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint64_t quad = first_quad + static_cast<uint64_t>(b * kQuadBlock);
    source.Next(out + b * kNoiseBlock, quad, quad + kQuadBlock);
  }
}

// Philox of the same counter in every lane; out[i] is what lane i made.
void ProbePhilox(const uint32_t* counter, const uint32_t* key,
                 uint32_t (*out)[4]) {
  Philox<1> p{{{Lanes::Set64(counter[0]), Lanes::Set64(counter[1]),
                Lanes::Set64(counter[2]), Lanes::Set64(counter[3])}},
              key[0],
              key[1]};
  p.AllRounds();
  const Lanes::U64 words[4] = {p.c[0].w0, p.c[0].w1, p.c[0].w2, p.c[0].w3};
  for (int w = 0; w < 4; ++w) {
    uint64_t lanes[kWideLanes];
    memcpy(lanes, &words[w], sizeof lanes);
    for (int i = 0; i < kWideLanes; ++i) {
      out[i][w] = static_cast<uint32_t>(lanes[i]);
    }
  }
}

// The transform of `count` pairs of words, a multiple of kFloatLanes.
void ProbeBoxMuller(const uint32_t* w0, const uint32_t* w1, int64_t count,
                    float* z0, float* z1) {
  for (int64_t i = 0; i < count; i += kFloatLanes) {
    BoxMuller<1> pairs;
    memcpy(pairs.w0, w0 + i, sizeof pairs.w0);
    memcpy(pairs.w1, w1 + i, sizeof pairs.w1);
    pairs.AllSteps();
    memcpy(z0 + i, pairs.z0, sizeof pairs.z0);
    memcpy(z1 + i, pairs.z1, sizeof pairs.z1);
  }
}
