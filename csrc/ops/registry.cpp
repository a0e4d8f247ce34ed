// All operators of the library.
//
// Operators are pure functions of their arguments; a trailing underscore means
// changes in place. `device_step`, an int64 scalar on the tensors' device, is
// added to `step`, so that a CUDA graph can advance the noise; if negative,
// nothing changes (Note [Skipped steps], random/counter.h). `masters` has a
// float32 tensor for each parameter in bfloat16 or float16 (Note [Master
// parameters], ops/roles.h). `prior_means`, of the state's dtype, has a tensor
// for each parameter; without it all means are `prior_mean`. `rows` has row and
// pitch of each shard, 0 and 0 for whole parameters (Note [Rows of shards],
// launch/plan.h). With `num_chains` > 0, tensors have a leading dimension of
// chains with a seed each (Note [Chains side by side], launch/plan.h).
#include <torch/csrc/stable/library.h>

#include "launch/call.h"
#include "ops/op_spec.h"

STABLE_TORCH_LIBRARY(torch_sgmcmc, m) {
  for (const torch_sgmcmc::OpSpec* spec : torch_sgmcmc::OpSpecs()) {
    m.def(torch_sgmcmc::SchemaOf(*spec).c_str());
  }
  // Operators without specs.
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
  // A step of all param groups on a device. `packed` has the other arguments
  // (launch/packed_step.h), `state` each group's lists after the first two,
  // then prior means. Advances `step`, the counter on the host. Returns false,
  // without a change, if a checked gradient is not finite.
  m.def(
      "fused_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, "
      "Tensor packed, Tensor(c!) step) -> bool");
  // The same without waiting for the device, which skips updates with gradients
  // that are not finite. With `num_skipped` the device has both counters;
  // otherwise the step is always counted. `counts` are count_nonfinite's, if
  // known. Returns the counts and the step, -1 if skipped.
  m.def(
      "deferred_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, "
      "Tensor packed, Tensor(c!) step, Tensor(d!)? num_skipped=None, "
      "Tensor? counts=None) -> (Tensor, Tensor)");
  // EWSG's step with the decision on the last proposal, on the CPU. `weights`
  // has a packed call of ewsg_log_ratio for each group. Returns 1 if accepted,
  // 0 if rejected, -1 if a checked gradient is not finite.
  m.def(
      "ewsg_step_(Tensor(a!)[] params, Tensor[] grads, Tensor[] proposals, "
      "Tensor(b!)[] state, Tensor packed, Tensor weights, Tensor(c!) step, "
      "int proposal) -> int");
  // Row s of each tensor gets the noise at step + s: standard normal, with
  // uniform = 1 uniform on (-1, 1). The tensors are parts of one tensor.
  m.def(
      "noise_steps_(Tensor(a!)[] noise, int[] offsets, *, int uniform, int seed, "
      "int step, int num_chains) -> ()");
  // The product of [rows, inner] and [inner, columns] of each chain (last
  // dimension).
  m.def("chain_product(Tensor a, Tensor b) -> Tensor");
  // mclmc_turn of all gradients, noise and directions, [d, K], with a row of
  // step_size, momentum and scale.
  m.def(
      "chain_turn(Tensor grad, Tensor refreshment, Tensor direction, "
      "Tensor energy, Tensor numbers) -> (Tensor, Tensor)");
  // MCLMC's step from sums of P tensors (mclmc_sums, [P, 6, K]) and records of
  // energy errors, [K, 4]: the numbers of its update, [K, 4], and the new
  // records.
  m.def(
      "mclmc_turn(Tensor sums, Tensor energy, *, float step_size, "
      "float momentum, int dimension, float scale) -> (Tensor, Tensor)");
  // True if any element is not finite, on the CPU.
  m.def("any_nonfinite(Tensor[] tensors) -> bool");
  // Row i of the result: the numbers of NaNs and infinities in tensor i.
  m.def("count_nonfinite(Tensor[] tensors) -> Tensor");
  // The device_step for an update: step + device_step if all counts are 0.
  m.def(
      "step_or_nothing(Tensor counts, *, int step, Tensor? device_step=None) "
      "-> Tensor");
  // Both in one call.
  m.def(
      "step_if_finite(Tensor[] tensors, *, int step, Tensor? device_step=None) "
      "-> Tensor");
}
