// Sums: exact where they can be, accurate otherwise, and added in one order on
// the CPU (with any number of threads and instruction set) and in the CUDA
// kernels, over all elements and for each of many chains.
#include "launch/reduce.h"

#include "cuda_on_host.h"
#include "ops/gradients.h"
#include "ops/hmc.h"
#include "tensors.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

std::vector<Isa> Available() {
  std::vector<Isa> result = {Isa::kPortable};
  if (ActiveIsa() >= Isa::kAvx2) result.push_back(Isa::kAvx2);
  if (ActiveIsa() >= Isa::kAvx512) result.push_back(Isa::kAvx512);
  return result;
}

template <class Map>
std::vector<double> OnCpu(const std::vector<Segment>& segments, const Map& map,
                          int64_t num_chains, Isa isa) {
  std::vector<double> out(kSums<Map> * static_cast<size_t>(num_chains), -1.0);
  ReduceOnCpu(segments, map, num_chains, out.data(), isa);
  return out;
}

// On all instruction sets and in the CUDA kernels' order: the same bits.
template <class Map>
std::vector<double> Everywhere(const std::vector<Segment>& segments,
                               const Map& map, int64_t num_chains) {
  const std::vector<double> result =
      cuda_on_host::Reduce(map, segments, num_chains);
  for (const Isa isa : Available()) {
    EXPECT_EQ(result, OnCpu(segments, map, num_chains, isa)) << IsaName(isa);
  }
  return result;
}

template <class T>
class Reduce : public testing::Test {
 protected:
  Segment Random(int64_t numel) {
    Segment s{};
    for (int j = 0; j < kMaxArguments; ++j) {
      // These are in the type of the arithmetic.
      if ((j == 3 || j == kPriorMeans) && !std::is_same_v<T, double>) {
        s.data[j] = Fill(numel, &state_.emplace_back());
      } else {
        s.data[j] = Fill(numel, &data_.emplace_back());
      }
    }
    s.numel = numel;
    s.dtype = kScalarType<T>;
    return s;
  }

  Segment WithoutMeans(int64_t numel) {
    Segment s = Random(numel);
    s.data[kPriorMeans] = nullptr;
    return s;
  }

 private:
  // Normal draws again and again, of a prime number: to draw millions would
  // take most of the tests' time.
  template <class Element>
  Element* Fill(int64_t numel, std::vector<Element>* x) {
    constexpr size_t kDraws = 65521;
    if (draws_.empty()) {
      std::mt19937 random(23);
      std::normal_distribution<float> normal;
      for (size_t i = 0; i < kDraws; ++i) draws_.push_back(normal(random));
    }
    x->reserve(static_cast<size_t>(numel));
    for (int64_t i = 0; i < numel; ++i) {
      x->push_back(static_cast<Element>(draws_[next_]));
      next_ = (next_ + 1) % kDraws;
    }
    return x->data();
  }

  std::vector<float> draws_;
  size_t next_ = 0;
  std::vector<std::vector<T>> data_;
  std::vector<std::vector<float>> state_;
};
using Types = testing::Types<float, double, BFloat16, Half>;
TYPED_TEST_SUITE(Reduce, Types);

TYPED_TEST(Reduce, SumOfSquaresIsAccurate) {
  std::vector<Segment> segments;
  long double exact = 0;
  for (const int64_t numel :
       {1, 2, 15, 16, 17, 100, 255, 256, 257, 4095, 4096, 4097, 8192, 100003}) {
    segments.push_back(this->Random(numel));
    const TypeParam* x = static_cast<const TypeParam*>(segments.back().data[0]);
    for (int64_t i = 0; i < numel; ++i) {
      const long double value = static_cast<double>(x[i]);
      exact += value * value;
    }
    const double sum = Everywhere(segments, Square(), 1)[0];
    // A running sum of positive terms loses less than half an ulp a term; in
    // stretches and lanes the longest chain is a few hundred terms long.
    constexpr double kLongestChain = 256 + kLanes + 8 + 2;
    EXPECT_NEAR(sum, static_cast<double>(exact),
                kLongestChain * 0x1p-53 * static_cast<double>(exact));
  }
}

TYPED_TEST(Reduce, ManyStretches) {
  // More stretches than branches of the tree.
  const std::vector<Segment> segments(300, this->Random(2 * kStretch + 5));
  const double one = Everywhere({segments[0]}, Square(), 1)[0];
  EXPECT_NEAR(Everywhere(segments, Square(), 1)[0], 300 * one, 1e-12 * one);
}

// Every chain's sum is the one it has alone.
TYPED_TEST(Reduce, ChainsDoNotMix) {
  for (const int64_t chains : {1, 2, 3, 17, 1000}) {
    std::vector<Segment> segments;
    for (const int64_t row : {1, 3, 16, 17, 40, 5000}) {
      segments.push_back(this->Random(chains * row));
    }
    const std::vector<double> sums = Everywhere(segments, Square(), chains);
    for (int64_t k = 0; k < chains; ++k) {
      std::vector<Segment> alone = segments;
      for (Segment& s : alone) {
        s.numel /= chains;
        s.data[0] = static_cast<TypeParam*>(s.data[0]) + k * s.numel;
      }
      ASSERT_EQ(sums[k], OnCpu(alone, Square(), 1, ActiveIsa())[0]);
    }
  }
}

// A map of several sums: each has the bits that it has alone, for every chain,
// and so it has where the elements are updated in the same pass.
struct Products {
  static constexpr std::array<Role, 2> kRoles = {Role::kGradient,
                                                 Role::kGradient};
  static constexpr std::array<bool, 2> kReads = {true, true};
  std::array<double, 2> operator()(const double (&x)[2]) const {
    return {x[1] * x[1], x[0] * x[0]};
  }
  static double Finish(double sum) { return sum; }
};

template <class Real>
struct Double {
  static constexpr std::array<Role, 1> kRoles = {Role::kInPlace};
  explicit Double(int /*nothing*/) {}
  void operator()(Real (&x)[1], Real /*xi*/) const { x[0] *= 2; }
};

TYPED_TEST(Reduce, SeveralSumsInOnePass) {
  for (const int64_t chains : {1, 3}) {
    std::vector<Segment> segments;
    std::vector<Segment> swapped;
    for (const int64_t row : {1, 15, 16, 17, 255, 256, 300, 9000}) {
      segments.push_back(this->Random(chains * row));
      swapped.push_back(segments.back());
      std::swap(swapped.back().data[0], swapped.back().data[1]);
    }
    std::vector<double> expected = Everywhere(swapped, Square(), chains);
    const std::vector<double> second = Everywhere(segments, Square(), chains);
    expected.insert(expected.end(), second.begin(), second.end());
    ASSERT_EQ(Everywhere(segments, Products(), chains), expected);
  }
}

TYPED_TEST(Reduce, UpdatesFirst) {
  std::vector<Segment> segments;
  for (const int64_t numel : {1, 15, 16, 17, 255, 256, 300, 9000}) {
    segments.push_back(this->Random(numel));
  }
  double expected = Everywhere(segments, Square(), 1)[0];
  for (const Isa isa : Available()) {
    expected *= 4;  // exactly, and so is each term and each sum
    double out = 0;
    ReduceOnCpu(segments, Square(), 1, &out, isa, BothTypes<Double>(0));
    EXPECT_EQ(out, expected) << IsaName(isa);
  }
}

// Where there is no array of means, and not exactly a float.
template <class T>
constexpr Arithmetic<T> kMean = static_cast<Arithmetic<T>>(0.7);

TYPED_TEST(Reduce, EnergyTerm) {
  std::vector<Segment> segments;
  for (const int64_t numel : {int64_t{1000}, kStretch + 7}) {
    Segment& s = segments.emplace_back(this->Random(numel));
    s.data[1] = s.data[3];  // momenta and masses are state
    s.data[2] = this->Random(numel).data[3];
    if (numel == 1000) s.data[kPriorMeans] = nullptr;
  }
  for (const double prior : {0.0, 3.0}) {
    const auto expect = [&](const auto& map, bool has_mass) {
      long double want = 0;
      long double size = 0;
      for (const Segment& s : segments) {
        for (int64_t i = 0; i < s.numel; ++i) {
          using State = const Arithmetic<TypeParam>;
          const long double x =
              static_cast<double>(static_cast<TypeParam*>(s.data[0])[i]);
          const long double r = static_cast<State*>(s.data[1])[i];
          const long double m =
              has_mass ? static_cast<State*>(s.data[2])[i] : 1;
          const auto* means = static_cast<State*>(s.data[kPriorMeans]);
          const long double mean =
              means == nullptr ? kMean<TypeParam> : means[i];
          const long double away = x - mean;
          want += prior * away * away / 2 + r * r / (2 * m);
          size += prior * (x * x + mean * mean) + std::abs(r * r / (2 * m));
        }
      }
      EXPECT_NEAR(Everywhere(segments, map, 1)[0], static_cast<double>(want),
                  1e-13 * static_cast<double>(size));
    };
    if (prior == 0) {
      expect(EnergyTerm<false, true>(prior, 0.7), true);
      expect(EnergyTerm<false, false>(prior, 0.7), false);
    }
    expect(EnergyTerm<true, true>(prior, 0.7), true);
    expect(EnergyTerm<true, false>(prior, 0.7), false);
  }
}

TEST(Reduce, TheTreeLeavesOutOnlyZeros) {
  std::vector<double> sums;
  for (int count = 0; count < 1000; ++count) {
    double branches[kBranches];
    for (int b = 0; b < kBranches; ++b) {
      branches[b] = BranchSum(sums.data(), count, b);
    }
    for (int width = kBranches / 2; width > 0; width /= 2) {
      for (int b = 0; b < width; ++b) branches[b] += branches[b + width];
    }
    ASSERT_EQ(AddInTree(sums.data(), count), branches[0]) << count;
    sums.push_back(std::sin(count) / (1 + count % 7));
  }
}

}  // namespace
}  // namespace torch_sgmcmc
