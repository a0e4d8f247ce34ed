#include <torch/csrc/stable/library.h>

#include <string>
#include <type_traits>
#include <utility>

#include "apply/boxed.h"
#include "apply/cpu.h"
#include "apply/packed.h"
#include "methods/again.h"
#include "methods/rows.h"

void torch_sgmcmc::PerformStep(const char* op,
                               const PackedCall& packed,
                               TensorList params,
                               TensorList grads,
                               const TensorList& state,
                               int64_t step) {
  bool is_step = false;
  SamplerOperators::ForEach([&]<class Op>(std::type_identity<Op> /*op*/) {
    if (packed.row != PlaceOf(Op::kRow)) return;
    is_step = true;
    Perform<Op, CpuDriver>(CallOf(op,
                                  Op::kRow,
                                  packed,
                                  std::move(params),
                                  std::move(grads),
                                  state,
                                  step));
  });
  if (!is_step) Fail(op, "packed is no call of a sampler's step");
}

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CpuDriver>(SamplerOperators(), m);
}
