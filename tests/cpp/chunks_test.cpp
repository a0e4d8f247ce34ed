// The CUDA driver's index arithmetic, exhaustively, on the host.
#include "launch/chunks.h"

#include "testing.h"

namespace torch_sgmcmc {
namespace {

constexpr int64_t kChunk = 4 * kQuadsPerChunk;  // elements of an aligned chunk

// Visits a segment as the threads of all its chunks do and checks that each
// element is worked on once, as the word of the quad that its noise comes from.
void ExpectCoveredOnce(int64_t numel, uint64_t offset) {
  std::vector<uint8_t> visits(static_cast<size_t>(numel), 0);
  const int64_t chunks = ChunkCount(numel, offset);
  int64_t quads = 0;
  int64_t wrong = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int k = 0; k < kQuadsPerThread; ++k) {
      for (int thread = 0; thread < kThreads; ++thread) {
        const QuadSpan s = SpanOf(numel, offset, chunk, thread, k);
        if (s.begin >= s.end) {
          wrong += s.begin != s.end;
          continue;
        }
        ++quads;
        wrong += s.begin < 0 || s.end > 4;
        for (int w = s.begin; w < s.end; ++w) {
          const int64_t i = s.origin + w;
          if (i < 0 || i >= numel) {
            ++wrong;
            continue;
          }
          ++visits[static_cast<size_t>(i)];
          wrong += offset + static_cast<uint64_t>(i) !=
                   4 * s.quad + static_cast<uint64_t>(w);
        }
      }
    }
  }
  for (const uint8_t v : visits) wrong += v != 1;
  ASSERT_EQ(wrong, 0) << "numel " << numel << ", offset " << offset;
  ASSERT_EQ(quads, QuadCount(numel, offset))
      << "numel " << numel << ", offset " << offset;
}

TEST(Chunks, CoverEverySegmentUpToPastTheFirstChunk) {
  for (int64_t numel = 0; numel <= kChunk + 20; ++numel) {
    for (uint64_t offset = 0; offset <= 8; ++offset) {
      ExpectCoveredOnce(numel, offset);
    }
  }
}

TEST(Chunks, CoverSegmentsAroundLaterChunkBoundaries) {
  for (const int64_t chunks : {2, 3, 7}) {
    for (int64_t d = -20; d <= 20; ++d) {
      for (uint64_t offset = 0; offset <= 8; ++offset) {
        ExpectCoveredOnce(chunks * kChunk + d, offset);
      }
    }
  }
}

TEST(Chunks, CoverSegmentsAtLargeOffsets) {
  for (const uint64_t base : {uint64_t{1} << 32, uint64_t{1} << 34,
                              uint64_t{1} << 62, (uint64_t{1} << 63) - 10000}) {
    for (uint64_t d = 0; d <= 8; ++d) {
      for (const int64_t numel : {1, 2, 3, 4, 5, 100, 4095, 4096, 4097}) {
        ExpectCoveredOnce(numel, base - 4 + d);
      }
    }
  }
}

TEST(Chunks, EmptySegmentHasNone) {
  for (uint64_t offset = 0; offset <= 8; ++offset) {
    EXPECT_EQ(QuadCount(0, offset), 0);
    EXPECT_EQ(ChunkCount(0, offset), 0);
  }
}

// No thread block is launched for nothing, and none is missing.
TEST(Chunks, LastChunkHasWorkAndTheNextHasNone) {
  for (int64_t numel = 1; numel <= 3 * kChunk; ++numel) {
    for (uint64_t offset = 0; offset <= 8; ++offset) {
      const int64_t chunks = ChunkCount(numel, offset);
      const QuadSpan last = SpanOf(numel, offset, chunks - 1, 0, 0);
      const QuadSpan next = SpanOf(numel, offset, chunks, 0, 0);
      ASSERT_LT(last.begin, last.end) << numel << " " << offset;
      ASSERT_EQ(next.begin, next.end) << numel << " " << offset;
    }
  }
}

// A tensor of 2^33 elements and more: too large to visit, so only its ends.
TEST(Chunks, HugeSegmentEndsWhereItShould) {
  for (const int64_t numel : {(int64_t{1} << 33) + 5, int64_t{1} << 40}) {
    for (uint64_t offset = 0; offset <= 8; ++offset) {
      const int64_t quads = QuadCount(numel, offset);
      EXPECT_EQ(quads,
                static_cast<int64_t>(
                    (offset % 4 + static_cast<uint64_t>(numel) + 3) / 4));
      const int64_t last = quads - 1;
      const int64_t in_chunk = last % kQuadsPerChunk;
      const QuadSpan s = SpanOf(numel, offset, last / kQuadsPerChunk,
                                static_cast<int>(in_chunk % kThreads),
                                static_cast<int>(in_chunk / kThreads));
      EXPECT_EQ(s.origin + s.end, numel);
      EXPECT_LT(s.begin, s.end);
      EXPECT_EQ(offset + static_cast<uint64_t>(numel) - 1,
                4 * s.quad + static_cast<uint64_t>(s.end) - 1);
      EXPECT_EQ(ChunkCount(numel, offset), last / kQuadsPerChunk + 1);
    }
  }
}

TEST(SegmentOf, MatchesLinearSearch) {
  std::mt19937 random(3);
  for (int count = 1; count <= 48; ++count) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<int64_t> first(static_cast<size_t>(count) + 1, 0);
      for (size_t i = 0; i + 1 < first.size(); ++i) {
        first[i + 1] = first[i] + 1 + static_cast<int64_t>(random() % 5);
      }
      int expected = 0;
      for (int64_t block = 0; block < first.back(); ++block) {
        while (first[static_cast<size_t>(expected) + 1] <= block) ++expected;
        ASSERT_EQ(SegmentOf(first.data(), count, block), expected)
            << "count " << count << ", block " << block;
      }
    }
  }
}

}  // namespace
}  // namespace torch_sgmcmc
