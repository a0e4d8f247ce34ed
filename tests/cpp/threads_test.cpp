// Samplers in several threads of one program: each draws the chain that it
// draws alone. The preset tsan looks for races meanwhile; tests/faults/
// test_threads.py is the same in Python.
#include <gtest/gtest.h>

#include <cstdint>
#include <latch>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "every_chain.h"

namespace torch_sgmcmc {
namespace {

// A chain that goes through a state dict in its middle, and where it ends.
c10::IValue EndOf(const Maker& make, int64_t width) {
  const Chain chain = make(width);
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {
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
                                    int64_t width) {
  std::vector<c10::IValue> ends(makers.size());
  std::latch start(static_cast<std::ptrdiff_t>(makers.size()));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < makers.size(); ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      ends[i] = EndOf(makers[i], width);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ends;
}

// First the threads: what a program does once, it does in one of them.
TEST(Threads, EveryKindOfSamplerTwiceAtOnce) {
  std::vector<Maker> makers;
  for (const auto& [name, make] : Makers())
    makers.insert(makers.end(), 2, make);
  const std::vector<c10::IValue> ends = EndsAtOnce(makers, 1);
  size_t i = 0;
  for (const auto& [name, make] : Makers()) {
    const c10::IValue alone = EndOf(make, 1);
    EXPECT_TRUE(Same(ends[i++], alone)) << name;
    EXPECT_TRUE(Same(ends[i++], alone)) << name;
  }
}

// Parameters so large that each operator has several threads too: 3.6e5
// elements, since gradients are looked at in pieces of 1.6e5. HMC-ECS has a
// dense Hessian, and its operators are HMC's.
TEST(Threads, TwoSamplersShareTheThreadsOfOperators) {
  if (torch::get_num_threads() < 2) {
    GTEST_SKIP() << "torch was told to use one thread";
  }
  constexpr int64_t kWidth = 30000;
  for (const auto& [name, make] : Makers()) {
    if (name.find("ECS") != std::string::npos) continue;
    const c10::IValue alone = EndOf(make, kWidth);
    for (const c10::IValue& end : EndsAtOnce({make, make}, kWidth)) {
      EXPECT_TRUE(Same(end, alone)) << name;
    }
  }
}

}  // namespace
}  // namespace torch_sgmcmc
