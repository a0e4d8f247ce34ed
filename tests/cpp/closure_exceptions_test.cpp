// A closure may fail at any of its calls: the step is as if it had not been
// begun. tests/faults/test_closure_exceptions.py is the same in Python.
//
// Every call of every step fails in turn, once before the closure has done
// anything and once when it has done everything. After each failure the sampler
// must be as before the step, and the chain that goes on must be the one that
// was never interrupted.
#include <gtest/gtest.h>

#include <cstdint>

#include "every_chain.h"

namespace torch_sgmcmc {
namespace {

TEST(ClosureExceptions, AStepThatFailsWasNotBegun) {
  for (const auto& [name, make] : Makers()) {
    SCOPED_TRACE(name);
    const Chain whole = make(1);
    const Chain broken = make(1);
    for (int step = 0; step < 3; ++step) {
      whole.calls->begin();
      whole.step();
      const int64_t calls = whole.calls->count();
      const c10::IValue before = Snapshot(broken);
      for (int64_t at = 1; at <= calls; ++at) {
        for (const bool late : {false, true}) {
          broken.calls->begin(at, late);
          EXPECT_THROW(broken.step(), Broken) << at;
          ASSERT_TRUE(SameValues(Snapshot(broken), before)) << at << late;
        }
      }
      broken.calls->begin();
      broken.step();
      EXPECT_EQ(broken.calls->count(), calls);
      ASSERT_TRUE(SameValues(Snapshot(broken), Snapshot(whole)));
      whole.calls->end_step();
      broken.calls->end_step();
      EXPECT_TRUE(calls > 1 || name[0] != 'E');
    }
  }
}

}  // namespace
}  // namespace torch_sgmcmc
