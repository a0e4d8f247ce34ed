#include <torch/csrc/stable/library.h>

#include <type_traits>
#include <utility>

#include "apply/boxed.h"
#include "apply/cpu.h"
#include "apply/packed.h"
#include "methods/nonfinite_op.h"
#include "methods/rows.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kAgain = "step_again_";

bool StepAgain(TensorList params,
               TensorList grads,
               TensorList state,
               Tensor packed,
               int64_t step) {
  const PackedCall known = Unpacked(kAgain, packed);
  if (known.looks != 0 && AnyNonfiniteOf(kAgain, grads)) return false;
  bool is_step = false;
  SamplerOperators::ForEach([&]<class Op>(std::type_identity<Op> /*op*/) {
    if (known.row != PlaceOf(Op::kRow)) return;
    is_step = true;
    Perform<Op, CpuDriver>(CallOf(kAgain,
                                  Op::kRow,
                                  known,
                                  std::move(params),
                                  std::move(grads),
                                  state,
                                  step));
  });
  if (!is_step) Fail(kAgain, "packed is no call of a sampler's step");
  return true;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CpuDriver>(SamplerOperators(), m);
  m.impl(kAgain, TORCH_BOX(&StepAgain));
}
