"""Schemas, fake kernels and functionalisation of every operator."""

import pytest
import torch
from levels import at_levels
from operator_tensors import TARGET, arguments_of, by_gradients, masters_of, registered

#: Operators that stand for all others in the default level.
FEW = ("sgld_step_", "sghmc_step_", "ewsg_log_ratio", "hmc_leapfrog_")


def opcheck_cases():
    def lists(count, dtype=torch.float32):
        g = torch.Generator().manual_seed(0)
        sizes = ((3,), (2, 129), (), (0, 4))
        return [
            [torch.randn(s, generator=g).to(dtype) for s in sizes] for _ in range(count)
        ]

    stream = {"offsets": [0, 128, 512, 640], "seed": -1, "step": 3}
    on_device = {**stream, "device_step": torch.tensor(4)}
    shared = {**TARGET, "momentum": 0.9, "noise_estimate": 0.05}
    shared["resample_momentum_every"] = 7
    preconditioner = {**TARGET, "decay": 0.9, "eps": 1e-3}
    thermostat = {**TARGET, "momentum": 0.9, "thermostat_rate": 0.01}
    p, g, v, s = lists(4)
    q = [t.square() for t in s]
    b, c = lists(2, torch.bfloat16)
    m32 = masters_of(b)
    means = {"prior_mean": 0.5, "prior_means": q}
    weights = {**TARGET, "momentum": 0.9, "surrogate": 0}
    leapfrog = {"kick": 0.1, "drift": 0.2, "num_data": 7.0, "prior_precision": 1.9}
    turn, prior = torch.ones(1, 4).double(), {"num_data": 7.0, "prior_precision": 1.9}
    k, m = ([torch.randn(3, 4), torch.randn(3)] for _ in range(2))
    ratios = torch.tensor([-1.0, 0.5, torch.nan], dtype=torch.float64)
    rows = {kind: ecs_arguments(kind) for kind in ("linear", "predictor", "whole")}
    return {
        **{op: (tensors, {**numbers, **stream}) for op in by_gradients()
         for tensors, numbers in [arguments_of(op, p, g, v, [])]},
        "square_root_": ((q,), {}),
        "sgld_step_ bf16": ((b, c, m32), {**TARGET, **on_device}),
        "sghmc_step_": ((p, g, v, [], []), {**shared, **stream}),
        "sghmc_step_ variances": ((p, g, v, s, []), {**shared, **on_device}),
        "sghmc_step_ bf16": ((b, c, v, [], m32), {**shared, **stream}),
        "psgld_step_": ((p, g, q, [], [], []), {**preconditioner, **stream}),
        "psgld_frozen_step_": ((p, g, q, []), {**TARGET, **on_device}),
        "psgld_frozen_step_ bf16": ((b, c, q, m32), {**TARGET, **stream}),
        "psgld_step_ corrected": ((p, g, q, s, v, []), {**preconditioner, **stream}),
        "psgld_step_ bf16": ((b, c, q, s, c, m32), {**preconditioner, **stream}),
        "sgnht_step_": ((p, g, v, s, []), {**thermostat, **stream}),
        "sgnht_step_ bf16": ((b, c, v, s, m32), {**thermostat, **on_device}),
        "gradient_variance_": ((g, s, v), {"weight": 0.25}),
        "running_mean_": ((p, s), {"weight": 0.25}),
        "mclmc_step_": ((p, g, v, s, [turn] * 4, [], []), {**prior, **stream}),
        "mclmc_step_ bf16": ((b, c, v, s, [turn] * 4, q, m32), {**prior, **on_device}),
        "mclmc_sums": ((g, p, v, s, []), {**prior, "num_chains": 1}),
        "mclmc_turn": ((torch.ones(3, 6, 2).double(), torch.zeros(2, 4).double()),
         {"step_size": 0.1, "momentum": 0.9, "dimension": 9, "scale": 2.0}),
        "control_variate_": ((g, p, s), {}),
        "control_variate_ bf16": ((b, c, s), {}),
        "gaussian_": ((p,), {"std": 0.5, "purpose": 0, **stream}),
        "gaussian_ on device": ((p,), {"std": 0.5, "purpose": 1, **on_device}),
        "sum_of_squares": ((p,), {}),
        **{f"temperature_sums of kind {kind}":
         ((g, p, s if kind % 2 else [], movers, q if kind in (1, 3, 5) else []),
         {"kind": kind, "weight_decay": 0.1, "decay": 0.9, "eps": 0.1})
         for kind, movers in enumerate(([], [], v, v, p, p))},
        "count_nonfinite": ((p,), {}),
        "count_nonfinite bf16": ((b,), {}),
        "step_or_nothing": ((torch.zeros(4, 2).long(),), {"step": 3}),
        "step_if_finite": ((p,), {"step": 3, "device_step": torch.tensor(5)}),
        "step_or_nothing on device":
         ((torch.ones(4, 2).long(),), {"step": 0, "device_step": torch.tensor(4)}),
        "ewsg_log_ratio": ((p, g, s, v), {**weights, "num_chains": 1}),
        "ewsg_log_ratio without momenta": ((b, c, b, []), {**weights, "num_chains": 1}),
        "ewsg_log_ratio of chains": ((k, k, m, m), {**weights, "num_chains": 3}),
        "hmc_momenta_": ((v, []), {"temperature": 0.7, **stream}),
        "hmc_momenta_ with masses": ((v, q), {"temperature": 0.7, **stream}),
        "hmc_leapfrog_": ((p, g, v, [], []), leapfrog),
        "hmc_leapfrog_ with masses": ((p, g, v, q, []), leapfrog),
        "hmc_leapfrog_ last": ((p, g, v, q, []), {**leapfrog, "drift": 0.0}),
        "hmc_leapfrog_ bf16": ((b, c, v, [], m32), leapfrog),
        "hmc_energy": ((p, v, []), {"prior_precision": 0.0, "num_chains": 1}),
        "hmc_energy of chains": ((k, m, m), {"prior_precision": 2.0, "num_chains": 3}),
        "chain_turn": ((torch.ones(5, 2), torch.ones(5, 2), torch.ones(5, 2),
         torch.zeros(2, 4).double(), torch.tensor([0.1, 0.9, 2.0]).double()), {}),
        "chain_product": ((torch.ones(3, 2, 16), torch.ones(2, 5, 16)), {}),
        "noise_steps_": (([torch.empty(2, 3)], [0]),
         {"uniform": 1, "seed": 1, "step": 2, "num_chains": 0}),
        "metropolis_decide": ((ratios,),
         {"proposal": 2, "purpose": 3, "seed": 5, "step": 7}),
        "select_chains_": ((k, m, ratios > 0), {}),
        **{f"ecs_estimate {kind}": rows[kind][0] for kind in rows},
        **{f"ecs_density {kind}": rows[kind][1] for kind in rows},
        "ecs_leapfrog_": (tuple(torch.ones(s, dtype=torch.float64)
         for s in (3, 3, 3, (3, 3), 3)), {"kick": 0.1, "drift": 0.2}),
        "sbps_place_": ((p, g, v), {"time": 0.7}),
        "sbps_place_ bf16": ((b, v, s), {"time": 0.7}),
        "sbps_reflect_": ((p, g, v, []),
         {"weight_decay": 0.1, "scale": 0.9, "gain": 0.3}),
        "sbps_reflect_ preconditioned":
         ((b, c, v, q), {"weight_decay": 0.1, "scale": 0.9, "gain": 0.3}),
        "sbps_reflection_sums": ((b, c, v, q), {"weight_decay": 0.1}),
        "sbps_adapt_": ((b, c, q), {"weight_decay": 0.1, "decay": 0.9}),
        "sbps_precondition_": ((q, v, s, g), {"eps": 0.1, "scale": 2.0}),
        "sbps_preconditioner_sum": ((q,), {"eps": 0.1}),
        "sbps_reflect_sums_":
         ((b, c, v, s), {"weight_decay": 0.1, "scale": 0.9, "gain": 0.3}),
        "sbps_precondition_sums_": ((q, v, s, g, p), {"eps": 0.1, "scale": 2.0}),
        "sbps_line_sums": ((v, s), {}),
        "sgld_step_ about means": ((b, c, m32), {**TARGET, **stream, **means}),
        "hmc_energy about means":
         ((b, v, []), {"prior_precision": 2.0, "num_chains": 1, **means}),
        "sbps_line_sums about means": ((v, s), means),
        "temperature_sums about means":
         ((g, p, [], [], []), {"kind": 0, "weight_decay": 0.1, "decay": 1.0, "eps": 0.1,
         **means}),
    }  # fmt: skip


def ecs_arguments(kind):
    """Arguments of ecs_estimate and of ecs_density."""

    def ones(*shape):
        return torch.ones(shape, dtype=torch.float64)

    one, whole = kind == "predictor", kind == "whole"
    scales, hessians = ones(6) if one else None, ones(6, 3, 3) if whole else None
    terms = (ones(1 + one, 6, 3), scales, hessians)
    hessian_terms = ones(6, 3) if whole else ones(6 if one else 0)
    sizes = {"num_data": 9.0, "batch_size": 2, "num_factors": 4, "lower_bound": -3.0}
    estimate = (ones(6), ones(3), ones(3), ones(6), *terms)
    density = (ones(5), ones(3), ones(6), hessian_terms, ones(3), ones(3), *terms)
    sums = (ones(), ones(3), None if kind == "linear" else ones(3, 3), ones(3))
    heat = {"temperature": 1.5}
    return (estimate, {**heat, **sizes}), ((*density, *sums), heat)


@pytest.mark.parametrize(
    "case",
    at_levels(
        opcheck_cases(),
        default=[c for c in opcheck_cases() if c.split()[0] in FEW],
        otherwise="full",
    ),
)
def test_opcheck(case):
    args, kwargs = opcheck_cases()[case]
    op = getattr(torch.ops.torch_sgmcmc, case.split()[0]).default
    with torch.no_grad():
        result = torch.library.opcheck(op, args, kwargs)
    assert set(result.values()) == {"SUCCESS"}


def test_opcheck_covers_every_operator():
    tested = {case.split()[0] for case in opcheck_cases()}
    answers = {"any_nonfinite", "fused_step_", "deferred_step_", "ewsg_step_"}
    assert registered() == tested | answers


def test_opcheck_of_an_answer_to_the_host():
    # It is no part of a graph, so there is nothing to fake.
    op = torch.ops.torch_sgmcmc.any_nonfinite.default
    tests = ("test_schema", "test_autograd_registration")
    result = torch.library.opcheck(op, ([torch.ones(3)],), test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}
