// One segment through the CPU loop of every instruction set and through the
// CUDA kernel's arithmetic: all must equal, bit for bit, the plain loop over
// elements that draws each element's noise by its definition.
#include <cstring>
#include <iterator>

#include "cuda_on_host.h"
#include "lane_probes.h"
#include "launch/cpu.h"
#include "numbers.h"
#include "ops/gaussian.h"
#include "ops/gradients.h"
#include "ops/psgld.h"
#include "ops/sghmc.h"
#include "ops/sgld.h"
#include "ops/sgnht.h"
#include "tensors.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

// The arrays of one segment with random contents, between guard elements, as
// raw memory that can be compared bit by bit.
template <class Update, class T>
class Arrays {
 public:
  // `shift` moves all arrays by so many elements from their natural alignment.
  Arrays(int64_t numel, int shift, uint32_t seed)
      : numel_(numel), shift_(shift) {
    std::mt19937 random(seed);
    Fill(random, kIndices);
    FillMasters(random);
  }

  // Without means, the update's number stands for them.
  Segment SegmentAt(uint64_t offset, bool has_means = true) {
    Segment s{};
    SetPointers(&s, kIndices);
    if (!has_means) s.data[kPriorMeans] = nullptr;
    s.numel = numel_;
    s.offset = offset;
    s.dtype = kScalarType<T>;
    s.data[kMasters] =
        reinterpret_cast<float*>(bytes_[kCount].data()) + kGuard + shift_;
    return s;
  }

  bool operator==(const Arrays& other) const { return bytes_ == other.bytes_; }

 private:
  static constexpr size_t kCount = std::tuple_size_v<decltype(Update::kRoles)>;
  static constexpr auto kIndices = std::make_index_sequence<kCount>();
  static constexpr int64_t kGuard = 16;

  template <size_t kIndex>
  using Element = Stored<Update::kRoles[kIndex], T>;

  template <size_t... kIndex>
  void Fill(std::mt19937& random, std::index_sequence<kIndex...>) {
    (FillOne<Element<kIndex>>(random, Update::kRoles[kIndex], &bytes_[kIndex]),
     ...);
  }

  template <class E>
  void FillOne(std::mt19937& random, Role role, std::vector<char>* bytes) {
    std::normal_distribution<float> normal;
    bytes->resize(static_cast<size_t>(numel_ + 2 * kGuard) * sizeof(E));
    for (size_t i = 0; i < bytes->size(); i += sizeof(E)) {
      const float x = normal(random);
      const E e = static_cast<E>(role == Role::kStatistic ? std::abs(x) : x);
      std::memcpy(bytes->data() + i, &e, sizeof e);
    }
  }

  // Every third of them is not what the parameter is the rounded value of. (If
  // there is one, the parameter is the first array.)
  void FillMasters(std::mt19937& random) {
    FillOne<float>(random, Role::kMaster, &bytes_[kCount]);
    if constexpr (kHasMaster<Update::kRoles[0], T>) {
      for (size_t i = 0; i < bytes_[kCount].size() / sizeof(float); ++i) {
        T visible;
        std::memcpy(&visible, bytes_[0].data() + i * sizeof(T), sizeof(T));
        const float master = static_cast<float>(visible) * (1 + 0x1p-13f);
        if (i % 3 == 0) continue;
        std::memcpy(bytes_[kCount].data() + i * sizeof master, &master,
                    sizeof master);
      }
    }
  }

  template <size_t... kIndex>
  void SetPointers(Segment* s, std::index_sequence<kIndex...>) {
    ((s->data[SlotOf(Update::kRoles[kIndex], kIndex)] =
          reinterpret_cast<Element<kIndex>*>(bytes_[kIndex].data()) + kGuard +
          shift_),
     ...);
  }

  int64_t numel_;
  int shift_;
  std::array<std::vector<char>, kCount + 1> bytes_;  // masters last
};

// Element by element, by the definition of the counter layout and of rows.
template <class Update, class T>
void RunByDefinition(const Update& update, const Segment& s,
                     const NoiseStream& stream) {
  constexpr auto kIndices =
      std::make_index_sequence<std::tuple_size_v<decltype(Update::kRoles)>>();
  const int64_t row = s.row == 0 ? s.numel : s.row;
  for (int64_t i = 0; i < s.numel; ++i) {
    const uint64_t element =
        s.offset + static_cast<uint64_t>(i / row * s.pitch + i % row);
    const int word = static_cast<int>(element % 4);
    UpdateQuad<Update, T>(update, s.data,
                          {element / 4, i - word, word, word + 1}, stream,
                          kIndices);
  }
}

std::vector<Isa> AvailableIsas() {
  std::vector<Isa> result;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    for (const LaneProbe& probe : LaneProbes()) {
      if (probe.available && std::string(probe.name) == IsaName(isa)) {
        result.push_back(isa);
      }
    }
  }
  return result;
}

template <class Update, class T>
void RunOn(const Update& update, const Segment& s, int64_t begin, int64_t end,
           const NoiseStream& stream, Isa isa) {
  SG_CALL_ON(isa, RunSegment<Update, T>(update, s, begin, end, stream));
}

template <class Update, class T>
void ExpectAllAgree(const Update& update, int64_t numel, uint64_t offset,
                    int shift, const NoiseStream& stream, bool has_means) {
  SCOPED_TRACE("numel " + std::to_string(numel) + ", offset " +
               std::to_string(offset) + ", shift " + std::to_string(shift) +
               (has_means ? "" : ", without means"));
  const Arrays<Update, T> before(numel, shift, 5);
  Arrays<Update, T> want = before;
  RunByDefinition<Update, T>(update, want.SegmentAt(offset, has_means), stream);

  Arrays<Update, T> cuda = before;
  ForEachTable({cuda.SegmentAt(offset, has_means)}, kScalarType<T>,
               [&](const SegmentTable& table, int64_t blocks) {
                 cuda_on_host::Launch<Update, T>(update, table, stream, blocks);
               });
  ASSERT_TRUE(cuda == want) << "CUDA";

  for (const Isa isa : AvailableIsas()) {
    Arrays<Update, T> whole = before;
    RunOn<Update, T>(update, whole.SegmentAt(offset, has_means), 0, numel,
                     stream, isa);
    ASSERT_TRUE(whole == want) << IsaName(isa);

    // In two parts, cut at an odd place.
    Arrays<Update, T> parts = before;
    const int64_t cut = numel * 5 / 8;
    for (const auto& [begin, end] : {std::pair(cut, numel), {0, cut}}) {
      RunOn<Update, T>(update, parts.SegmentAt(offset, has_means), begin, end,
                       stream, isa);
    }
    ASSERT_TRUE(parts == want) << IsaName(isa) << ", cut at " << cut;
  }
}

// Rows of these, whole, and in parts that are cut at odd places.
template <class Update, class T>
void ExpectRowsAgree(const Update& update, int64_t row, int64_t pitch,
                     int64_t count, uint64_t offset) {
  SCOPED_TRACE(std::to_string(count) + " rows of " + std::to_string(row) +
               ", " + std::to_string(pitch) + " apart, offset " +
               std::to_string(offset));
  const NoiseStream stream{0x9e3779b97f4a7c15, 0x123456789a, 1};
  const int64_t numel = row * count;
  const auto in_rows = [&](Arrays<Update, T>& arrays) {
    Segment s = arrays.SegmentAt(offset);
    s.row = row;
    s.pitch = pitch;
    return s;
  };
  const Arrays<Update, T> before(numel, static_cast<int>(offset % 3), 5);
  Arrays<Update, T> want = before;
  RunByDefinition<Update, T>(update, in_rows(want), stream);
  const int64_t cuts[] = {0, numel / 7, numel * 5 / 8, numel};
  for (const Isa isa : AvailableIsas()) {
    Arrays<Update, T> whole = before;
    RunOn<Update, T>(update, in_rows(whole), 0, numel, stream, isa);
    ASSERT_TRUE(whole == want) << IsaName(isa);
    Arrays<Update, T> parts = before;
    for (const int part : {1, 2, 0}) {
      RunOn<Update, T>(update, in_rows(parts), cuts[part], cuts[part + 1],
                       stream, isa);
    }
    ASSERT_TRUE(parts == want) << IsaName(isa) << ", in parts";
  }
}

constexpr int64_t kSizes[] = {1,   2,   3,   4,   5,    7,    8,    31,   32,
                              33,  63,  64,  65,  127,  128,  129,  255,  256,
                              257, 511, 513, 640, 1000, 4095, 4096, 4097, 5000};
// The last ones make the segment cross quad 2^32 and end near 2^63.
constexpr uint64_t kOffsets[] = {0,
                                 1,
                                 2,
                                 3,
                                 4,
                                 127,
                                 128,
                                 (uint64_t{1} << 34) - 500,
                                 (uint64_t{1} << 34) - 1,
                                 (uint64_t{1} << 63) - 6000};

// Every size at every offset; but the long ones, which take most of the time,
// at every third, each at others.
template <class Update, class T>
void ExpectAllAgreeEverywhere(const Update& update) {
  const NoiseStream stream{0x9e3779b97f4a7c15, 0x123456789a, 1};
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    const bool is_long = kSizes[i] > 640;
    for (size_t j = is_long ? i % 3 : 0; j < std::size(kOffsets);
         j += is_long ? 3 : 1) {
      const uint64_t offset = kOffsets[j];
      ExpectAllAgree<Update, T>(update, kSizes[i], offset,
                                static_cast<int>(offset % 3), stream, true);
    }
    if constexpr (kHasPriorMean<Update>) {
      ExpectAllAgree<Update, T>(update, kSizes[i], 3, 1, stream, false);
    }
  }
}

template <class T>
class Segments : public testing::Test {};
using Types = testing::Types<float, double, BFloat16, Half>;
TYPED_TEST_SUITE(Segments, Types);

const Numbers kNumbers({{"lr", 0.1},
                        {"momentum", 0.9},
                        {"num_data", 50},
                        {"prior_precision", 2},
                        {"temperature", 1},
                        {"noise_estimate", 0.01},
                        {"decay", 0.99},
                        {"eps", 1e-5},
                        {"thermostat_rate", 0.01},
                        {"weight", 0.05},
                        {"prior_mean", 0.7}});

// Calls a test with every update, as a sampler of the stored type makes it.
template <class T, class Test>
void ForEach(const Test& test) {
  using Real = Arithmetic<T>;
  test("SGLD", SGLDUpdate<Real>(kNumbers));
  test("SGLD without noise",
       SGLDUpdate<Real>(kNumbers.With({{"temperature", 0}})));
  test("SGHMC", SGHMCUpdate<Real>(SGHMCCoefficients(kNumbers)));
  // With so much heat that state of either sign leaves some.
  test("SGHMC, noise-aware",
       SGHMCNoiseAwareUpdate<Real>(SGHMCCoefficients(kNumbers.With(
           {{"momentum", 0.5}, {"num_data", 10}, {"noise_estimate", 0}}))));
  test("PSGLD, frozen", PSGLDFrozenUpdate<Real>(kNumbers));
  // State is filled with numbers of both signs: without memory V, a square,
  // does not depend on it.
  const Numbers forgets = kNumbers.With({{"decay", 0}});
  test("PSGLD, adapting", PSGLDAdaptingUpdate<Real>(forgets));
  test("PSGLD, corrected", PSGLDCorrectedUpdate<Real>(forgets));
  test("SGNHT", SGNHTUpdate<Real>(kNumbers));
  test("gradient variance", GradientVarianceUpdate<Real>(kNumbers));
  test("control variate", ControlVariateUpdate<Real>(kNumbers));
  test("Gaussian", GaussianFill<Real>(GaussianCoefficients{0.7}));
}

TYPED_TEST(Segments, OfEveryUpdate) {
  ForEach<TypeParam>([](const char* name, const auto& update) {
    SCOPED_TRACE(name);
    ExpectAllAgreeEverywhere<std::decay_t<decltype(update)>, TypeParam>(update);
  });
}

// Rows that a block of noise has many of, or a part, and wide ones; at each
// length some of the offsets and distances, at others others.
TYPED_TEST(Segments, InRows) {
  using Update = SGHMCUpdate<Arithmetic<TypeParam>>;
  const Update update{SGHMCCoefficients(kNumbers)};
  const int64_t rows[] = {1, 4, 5, 17, 33, 50, 100, 127, 128, 129, 1023, 1500};
  size_t turn = 0;
  for (const int64_t row : rows) {
    // One row, fewer elements than a batch has, and several batches.
    for (const int64_t count : {int64_t{1}, 260 / row + 1, 1700 / row + 2}) {
      const int64_t gaps[] = {0, 1, 3 * row, 5000 - row};
      ExpectRowsAgree<Update, TypeParam>(
          update, row, row + gaps[turn % std::size(gaps)], count,
          kOffsets[turn % std::size(kOffsets)]);
      ++turn;
    }
  }
}

// Of these nothing is put together but where a part begins within a quad.
TYPED_TEST(Segments, InRowsOfWholeQuads) {
  using Update = SGHMCUpdate<Arithmetic<TypeParam>>;
  const Update update{SGHMCCoefficients(kNumbers)};
  for (const int64_t row : {4, 20, 48, 100, 260}) {
    for (const int64_t gap : {int64_t{4}, 3 * row}) {
      for (const uint64_t offset :
           {uint64_t{0}, uint64_t{44}, (uint64_t{1} << 34) - 500}) {
        ExpectRowsAgree<Update, TypeParam>(update, row, row + gap,
                                           1700 / row + 2, offset);
      }
    }
  }
}

// Rows around multiples of 2^32 quads and behind one, and so far apart that
// each is between others of them, or that all span 2^32 elements or just less.
TEST(Segments, InRowsAcrossMultiplesOfTwoToThe32Quads) {
  using Update = GaussianFill<float>;
  const Update update(GaussianCoefficients{0.7});
  constexpr int64_t kPeriod = int64_t{1} << 34;
  for (const int64_t row : {5, 50, 129, 1024, 1501}) {
    const int64_t count = 1400 / row + 3;
    const int64_t all = kPeriod / 4;
    for (const int64_t pitch :
         {row + 7, kPeriod - 3, all / count, all / (count - 1) + 1}) {
      for (const int64_t offset : {kPeriod - 1, kPeriod - 700, kPeriod + 1}) {
        ExpectRowsAgree<Update, float>(update, row, pitch, count,
                                       static_cast<uint64_t>(offset));
      }
    }
  }
}

}  // namespace
}  // namespace torch_sgmcmc
