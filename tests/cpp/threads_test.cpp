// Samplers in several threads of one program: each draws the chain that it
// draws alone. The preset tsan looks for races meanwhile; tests/faults/
// test_threads.py is the same in Python.
#include <latch>
#include <thread>

#include "every_chain.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

// A chain that goes through a state dict in its middle, and where it ends.
c10::IValue EndOf(const Maker& make, int64_t width, int steps) {
  const Chain chain = make(width);
  for (int step = 0; step < steps; ++step) {
    if (step == steps / 2) {
      chain.sampler->load_state_dict(
          StateDict(c10::IValue(chain.sampler->state_dict()).deepcopy()));
    }
    chain.calls->begin();
    chain.step();
    chain.calls->end_step();
  }
  return Snapshot(chain);
}

// The ends of chains that run at once, each in a thread of its own.
std::vector<c10::IValue> EndsAtOnce(const std::vector<Maker>& makers,
                                    int64_t width, int steps) {
  std::vector<c10::IValue> ends(makers.size());
  std::latch start(static_cast<std::ptrdiff_t>(makers.size()));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < makers.size(); ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      ends[i] = EndOf(makers[i], width, steps);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ends;
}

// Expects chains of one kind, at once, to end where it ends alone.
void ExpectSameAtOnce(const std::string& name, const Maker& make,
                      size_t threads, int64_t width, int steps) {
  const std::vector<Maker> makers(threads, make);
  const std::vector<c10::IValue> ends = EndsAtOnce(makers, width, steps);
  const c10::IValue alone = EndOf(make, width, steps);
  for (const c10::IValue& end : ends)
    EXPECT_TRUE(SameValues(end, alone)) << name;
}

// Before what is done once in a program has been done by another test.
TEST(Threads, AllKindsAtOnce) {
  std::vector<Maker> makers;
  for (const auto& [name, make] : Makers()) makers.push_back(make);
  const std::vector<c10::IValue> ends = EndsAtOnce(makers, 1, 4);
  size_t i = 0;
  for (const auto& [name, make] : Makers()) {
    EXPECT_TRUE(SameValues(ends[i++], EndOf(make, 1, 4))) << name;
  }
}

// Long enough to overlap: torch's locks put an order between short chains, in
// which no race is seen.
TEST(Threads, FourOfAKindAtOnce) {
  for (const auto& [name, make] : Makers()) {
    ExpectSameAtOnce(name, make, 4, 1, 40);
  }
}

// Parameters so large that operators have several threads too: 3.6e5 elements,
// since gradients are looked at in pieces of 1.6e5.
TEST(Threads, TwoOfAKindShareTheThreadsOfOperators) {
  if (torch::get_num_threads() < 2) {
    GTEST_SKIP() << "torch was told to use one thread";
  }
  for (const auto& [name, make] : Makers()) {
    ExpectSameAtOnce(name, make, 2, 30000, 4);
  }
}

}  // namespace
}  // namespace torch_sgmcmc
