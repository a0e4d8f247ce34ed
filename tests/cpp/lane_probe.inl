// Ordinary functions around random/noise.inl, for code that is compiled for the
// baseline instruction set. Included once per region, after random/noise.inl.

constexpr int kFloatLanes =
    static_cast<int>(sizeof(Lanes::F32) / sizeof(float));

template <template <int> class Noise>
void ProbeFill(float* out, uint64_t first_quad, int64_t blocks,
               const NoiseStream& stream) {
  NoiseSource<Noise> source(stream, first_quad);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint64_t quad = first_quad + static_cast<uint64_t>(b * kQuadBlock);
    source.Next(out + b * kNoiseBlock, quad, quad + kQuadBlock);
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
