// Every operator of the library, in one place.
//
// Operators are pure functions of their arguments: no global random state, no
// hidden step counter. A trailing underscore means that arguments are changed
// in place. `device_step`, an int64 scalar on the tensors' device, is added to
// `step`: a CUDA graph can then advance the noise without the host. If it is
// negative, nothing is changed (Note [Skipped steps],
// random/counter.h). `masters` has a float32 tensor for each parameter in
// bfloat16 or float16, in their order, see Note [Master parameters] in
// ops/roles.h. `prior_means`, in the type of a state, has a tensor for each
// parameter; without it all means are `prior_mean`. `rows` has two numbers for
// each parameter: shards' elements are numbered in rows of the first, which
// begin the second apart (Note [Rows of shards], launch/plan.h); 0 and 0 for
// what is whole. With `num_chains` > 0, tensors have a leading dimension of so
// many chains, each of which is the one that would run alone with a seed of its
// own (Note [Chains side by side], launch/plan.h).
#include "ops/registry.h"

#include <torch/csrc/stable/library.h>

#include "launch/call.h"

STABLE_TORCH_LIBRARY(torch_sgmcmc, m) {
  for (const torch_sgmcmc::OpSpec* spec : torch_sgmcmc::kOpSpecs) {
    m.def(torch_sgmcmc::SchemaOf(*spec).c_str());
  }
  // Those whose arguments are not lists of equal lengths.
  m.def(
      "metropolis_decide(Tensor log_ratios, *, int proposal, int purpose, "
      "int seed, int step) -> Tensor");
  m.def(
      "select_chains_(Tensor(a!)[] tensors, Tensor[] others, Tensor chosen) "
      "-> ()");
  m.def(
      "ecs_estimate(Tensor values, Tensor theta, Tensor anchor, "
      "Tensor expansions, Tensor gradients, Tensor? scales, "
      "Tensor? hessians, *, float temperature, float num_data, "
      "int batch_size, int num_factors, float lower_bound) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "ecs_density(Tensor estimate, Tensor gradient, Tensor weights, "
      "Tensor hessian_terms, Tensor theta, Tensor anchor, Tensor gradients, "
      "Tensor? scales, Tensor? hessians, Tensor sum_value, "
      "Tensor sum_gradient, Tensor? sum_hessian, Tensor prior, *, "
      "float temperature, Tensor? prior_mean=None) -> (Tensor, Tensor)");
  m.def(
      "ecs_leapfrog_(Tensor(a!) x, Tensor(b!) momentum, Tensor gradient, "
      "Tensor? whitening, Tensor origin, *, float kick, float drift) -> "
      "Tensor");
  // A step of all param groups on a device: `packed` has what is not a tensor
  // (launch/packed_step.h), `state` each group's lists but the first two, and
  // then its prior's means. `step` is the counter, on the host, which is
  // advanced. Returns false, with nothing changed, if gradients must be finite
  // and are not.
  m.def(
      "fused_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, "
      "Tensor packed, Tensor(c!) step) -> bool");
  // The same without waiting for the device, which leaves the updates out if
  // gradients are not finite. With `num_skipped` both counters are the
  // device's, and it counts; otherwise the step is counted in any case.
  // `counts` come from count_nonfinite, if the caller has them. Returns the
  // counts and the step, -1 if it was skipped.
  m.def(
      "deferred_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, "
      "Tensor packed, Tensor(c!) step, Tensor(d!)? num_skipped=None, "
      "Tensor? counts=None) -> (Tensor, Tensor)");
  // EWSG's step with the decision on its last proposal, on the CPU: `weights`
  // has a packed call of ewsg_log_ratio for each group. Returns whether it was
  // accepted, 1 or 0, or -1 where gradients must be finite and are not.
  m.def(
      "ewsg_step_(Tensor(a!)[] params, Tensor[] grads, Tensor[] proposals, "
      "Tensor(b!)[] state, Tensor packed, Tensor weights, Tensor(c!) step, "
      "int proposal) -> int");
  // Row s of each tensor: the noise of an update at step + s with std 1, or,
  // with uniform = 1, uniform on (-1, 1). The tensors are parts of one tensor
  // of rows.
  m.def(
      "noise_steps_(Tensor(a!)[] noise, int[] offsets, *, int uniform, int seed, "
      "int step, int num_chains) -> ()");
  // The product of [rows, inner] and [inner, columns] of each chain, the last
  // dimension.
  m.def("chain_product(Tensor a, Tensor b) -> Tensor");
  // True if any element is not finite: on the CPU, where the host need not
  // wait.
  m.def("any_nonfinite(Tensor[] tensors) -> bool");
  // OpSpec i of the result: how many elements of tensor i are NaN, and
  // infinite.
  m.def("count_nonfinite(Tensor[] tensors) -> Tensor");
  // The device_step for an update: step + device_step if all counts are 0.
  m.def(
      "step_or_nothing(Tensor counts, *, int step, Tensor? device_step=None) "
      "-> Tensor");
  // Both in one call, which takes most of their time.
  m.def(
      "step_if_finite(Tensor[] tensors, *, int step, Tensor? device_step=None) "
      "-> Tensor");
}
