// Every operator of the library, in one place.
//
// Operators are pure functions of their arguments: no global random state, no
// hidden step counter. A trailing underscore means that arguments are changed
// in place. `device_step`, an int64 scalar on the tensors' device, is added to
// `step`: a CUDA graph can then advance the noise without the host. If it is
// negative, nothing is changed (Note [Steps that are left out],
// core/counter.h). `masters` has a float32 tensor for each parameter in
// bfloat16 or float16, in their order, see Note [Master parameters] in
// core/roles.h. `prior_means`, in the type of a state, has a tensor for each
// parameter; without it all means are `prior_mean`. `rows` has two numbers for
// each parameter: shards' elements are numbered in rows of the first, which
// begin the second apart (Note [Rows of shards], apply/plan.h); 0 and 0 for
// what is whole. With `num_chains` > 0, tensors have a leading dimension of so
// many chains, each of which is the one that would run alone with a seed of its
// own (Note [Chains side by side], apply/plan.h).
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(torch_sgmcmc, m) {
  m.def(
      "sgld_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] masters, "
      "*, float lr, float num_data, float prior_precision, float temperature, "
      "int[] offsets, int seed, int step, Tensor? device_step=None, float "
      "prior_mean=0.0, Tensor[]? prior_means=None, int[]? rows=None, int "
      "num_chains=0) -> ()");
  m.def(
      "sghmc_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momenta, "
      "Tensor[] grad_variances, Tensor(c!)[] masters, *, float lr, float "
      "momentum, float num_data, float prior_precision, float temperature, "
      "float noise_estimate, int resample_momentum_every, int[] offsets, int "
      "seed, int step, Tensor? device_step=None, float prior_mean=0.0, "
      "Tensor[]? prior_means=None, int[]? rows=None, int "
      "num_chains=0) -> ()");
  m.def(
      "sghmc_by_coordinate_step_(Tensor(a!)[] params, Tensor[] grads, "
      "Tensor(b!)[] momenta, Tensor[] grad_variances, Tensor[] masses, "
      "Tensor[] frictions, Tensor(c!)[] masters, *, float lr, float momentum, "
      "float num_data, float prior_precision, float temperature, float "
      "noise_estimate, int resample_momentum_every, int[] offsets, int seed, "
      "int step, Tensor? device_step=None, float prior_mean=0.0, Tensor[]? "
      "prior_means=None, int[]? rows=None, int num_chains=0) -> ()");
  m.def(
      "psgld_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] "
      "square_averages, Tensor(c!)[] sensitivities, Tensor[] curvatures, "
      "Tensor(d!)[] masters, *, float lr, float num_data, float "
      "prior_precision, float temperature, float decay, float eps, int[] "
      "offsets, int seed, int step, Tensor? device_step=None, float "
      "prior_mean=0.0, Tensor[]? prior_means=None, int[]? rows=None, int "
      "num_chains=0) -> ()");
  m.def(
      "psgld_frozen_step_(Tensor(a!)[] params, Tensor[] grads, Tensor[] "
      "roots, Tensor(b!)[] masters, *, float lr, float num_data, float "
      "prior_precision, float temperature, int[] offsets, int seed, int step, "
      "Tensor? device_step=None, float prior_mean=0.0, Tensor[]? "
      "prior_means=None, int[]? rows=None, int num_chains=0) -> ()");
  m.def(
      "sgnht_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momenta, "
      "Tensor(c!)[] thermostats, Tensor(d!)[] masters, *, float lr, float "
      "momentum, float num_data, float prior_precision, float temperature, "
      "float thermostat_rate, int[] offsets, int seed, int step, Tensor? "
      "device_step=None, float prior_mean=0.0, Tensor[]? prior_means=None, "
      "int[]? rows=None, int num_chains=0) -> ()");
  m.def(
      "gradient_variance_(Tensor[] grads, Tensor(a!)[] variances, "
      "Tensor(b!)[] previous, *, float weight) -> ()");
  m.def(
      "control_variate_(Tensor(a!)[] grads, Tensor[] anchor_grads, "
      "Tensor[] full_grads) -> ()");
  m.def(
      "gaussian_(Tensor(a!)[] out, *, float std, int[] offsets, int seed, int "
      "step, int purpose, Tensor? device_step=None, int[]? rows=None, int "
      "num_chains=0) -> ()");
  m.def(
      "ewsg_log_ratio(Tensor[] params, Tensor[] grads, Tensor[] proposals, "
      "Tensor[] momenta, *, float lr, float momentum, float num_data, "
      "float prior_precision, float temperature, int surrogate, int "
      "num_chains, float prior_mean=0.0, Tensor[]? prior_means=None) -> "
      "Tensor");
  m.def(
      "metropolis_decide(Tensor log_ratios, *, int proposal, int purpose, "
      "int seed, int step) -> Tensor");
  m.def(
      "select_chains_(Tensor(a!)[] tensors, Tensor[] others, Tensor chosen) "
      "-> ()");
  m.def(
      "hmc_momenta_(Tensor(a!)[] momenta, Tensor[] masses, *, "
      "float temperature, int[] offsets, int seed, int step, int[]? "
      "rows=None) -> ()");
  m.def(
      "hmc_leapfrog_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] "
      "momenta, Tensor[] masses, Tensor(c!)[] masters, *, float kick, "
      "float drift, float num_data, float prior_precision, float "
      "prior_mean=0.0, Tensor[]? prior_means=None) -> ()");
  m.def(
      "hmc_energy(Tensor[] params, Tensor[] momenta, Tensor[] masses, *, "
      "float prior_precision, int num_chains, float prior_mean=0.0, "
      "Tensor[]? prior_means=None) -> Tensor");
  m.def(
      "ecs_estimate(Tensor values, Tensor theta, Tensor anchor, "
      "Tensor expansions, Tensor slopes, Tensor? scales, Tensor? hessians, *, "
      "float temperature, float num_data, int batch_size, int num_products, "
      "float lower_bound, Tensor? importance=None) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "ecs_density(Tensor estimate, Tensor pull, Tensor weights, "
      "Tensor bends, Tensor theta, Tensor anchor, Tensor slopes, "
      "Tensor? scales, Tensor? hessians, Tensor sum_value, Tensor sum_slope, "
      "Tensor? sum_hessian, Tensor prior, *, float temperature, Tensor? prior_mean=None) -> "
      "(Tensor, Tensor)");
  m.def(
      "ecs_leapfrog_(Tensor(a!) x, Tensor(b!) momentum, Tensor gradient, "
      "Tensor? whitening, Tensor origin, *, float kick, float drift) -> "
      "Tensor");
  m.def(
      "sbps_place_(Tensor(a!)[] params, Tensor[] origins, "
      "Tensor[] directions, *, float time) -> ()");
  m.def(
      "sbps_reflect_(Tensor[] params, Tensor[] grads, Tensor(a!)[] "
      "velocities, Tensor[] preconditioners, *, float weight_decay, float "
      "scale, float gain, float prior_mean=0.0, Tensor[]? "
      "prior_means=None) -> ()");
  m.def(
      "sbps_adapt_(Tensor[] params, Tensor[] grads, Tensor(a!)[] "
      "square_averages, *, float weight_decay, float decay, float "
      "prior_mean=0.0, Tensor[]? prior_means=None) -> ()");
  m.def(
      "sbps_precondition_(Tensor[] square_averages, Tensor[] velocities, "
      "Tensor(a!)[] preconditioners, Tensor(b!)[] directions, *, float eps, "
      "float scale) -> ()");
  m.def(
      "sbps_reflect_sums_(Tensor[] params, Tensor[] grads, Tensor(a!)[] "
      "velocities, Tensor[] origins, *, float weight_decay, float scale, "
      "float gain, float prior_mean=0.0, Tensor[]? prior_means=None) -> "
      "Tensor");
  m.def(
      "sbps_precondition_sums_(Tensor[] square_averages, Tensor[] "
      "velocities, Tensor(a!)[] preconditioners, Tensor(b!)[] directions, "
      "Tensor[] origins, *, float eps, float scale, float prior_mean=0.0, "
      "Tensor[]? prior_means=None) -> Tensor");
  m.def(
      "sbps_line_sums(Tensor[] origins, Tensor[] directions, *, float "
      "prior_mean=0.0, Tensor[]? prior_means=None) -> Tensor");
  m.def(
      "sbps_reflection_sums(Tensor[] params, Tensor[] grads, Tensor[] "
      "velocities, Tensor[] preconditioners, *, float weight_decay, float "
      "prior_mean=0.0, Tensor[]? prior_means=None) -> Tensor");
  m.def(
      "sbps_preconditioner_sum(Tensor[] square_averages, *, float eps) -> "
      "Tensor");
  m.def("sum_of_squares(Tensor[] tensors) -> Tensor");
  // Row i of the result: sums over tensor i, by their kind (samplers/gauge.h).
  m.def(
      "gauge_sums(Tensor[] grads, Tensor[] positions, Tensor[] centers, "
      "Tensor[] movers, Tensor[] statistics, *, int kind, float "
      "weight_decay, float decay, float eps, float prior_mean=0.0, "
      "Tensor[]? prior_means=None) -> Tensor");
  // Whether any element is not finite: on the CPU, where the host need not
  // wait.
  m.def("any_nonfinite(Tensor[] tensors) -> bool");
  // Row i of the result: how many elements of tensor i are NaN, and infinite.
  m.def("count_nonfinite(Tensor[] tensors) -> Tensor");
  // The device_step for an update: step + device_step if all counts are 0.
  m.def(
      "step_or_nothing(Tensor counts, *, int step, Tensor? device_step=None) "
      "-> Tensor");
}
