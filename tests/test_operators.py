"""The fused operators equal plain-PyTorch references, to rounding, everywhere."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from harness.philox import philox
from reference import (
    DTYPES,
    SIZES,
    Exact,
    arithmetic,
    assert_rounded,
    draw,
    ewsg_log_weights,
    leapfrog,
    psgld,
    same_bits,
    sghmc,
    sgld,
    sgnht,
)
from torch import Tensor

from torch_sgmcmc import _C
from torch_sgmcmc import _library as ops

# Large steps, so that no term of an update hides behind another.
TARGET = {"lr": 0.3, "num_data": 7.0, "prior_precision": 1.9, "temperature": 0.7}
STREAM = {"seed": 0x0123456789ABCDEF, "step": 2**33 + 5}


def mixed_list(seed: int) -> list[Tensor]:
    """Tensors of every size and dtype in one list, shuffled together."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, generator=g, dtype=torch.float64).to(dtype)
        for n in SIZES
        for dtype in DTYPES
    ]


def states(like: list[Tensor], seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.shape, generator=g, dtype=torch.float64).to(arithmetic(t.dtype))
        for t in like
    ]


def scattered_offsets(tensors: list[Tensor]) -> list[int]:
    """Offsets of every alignment, near 0 and beyond 32 bits."""
    return [
        (2**40 if i % 3 == 0 else 0) + 10_007 * i + i % 7 for i in range(len(tensors))
    ]


def clones(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def assert_all_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


# ---- Schemas, fake kernels, functionalisation ------------------------------------


def opcheck_cases() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    def lists(count: int, dtype: torch.dtype = torch.float32) -> list[Any]:
        g = torch.Generator().manual_seed(0)
        sizes = ((3,), (2, 129), (), (0, 4))
        return [
            [torch.randn(s, generator=g).to(dtype) for s in sizes] for _ in range(count)
        ]

    stream = {"offsets": [0, 128, 512, 640], "seed": -1, "step": 3}
    on_device = {**stream, "device_step": torch.tensor(4)}
    shared = {
        **TARGET,
        "momentum": 0.9,
        "noise_estimate": 0.05,
        "resample_momentum_every": 7,
    }
    preconditioner = {**TARGET, "decay": 0.9, "eps": 1e-3}
    thermostat = {**TARGET, "momentum": 0.9, "thermostat_rate": 0.01}
    p, g, v, s = lists(4)
    q = [t.square() for t in s]
    b, c = lists(2, torch.bfloat16)
    weights = {**TARGET, "momentum": 0.9, "surrogate": 0}
    leapfrog = {"kick": 0.1, "drift": 0.2, "num_data": 7.0, "prior_precision": 1.9}
    k, m = ([torch.randn(3, 4), torch.randn(3)] for _ in range(2))
    ratios = torch.tensor([-1.0, 0.5, torch.nan], dtype=torch.float64)
    rows = {kind: ecs_arguments(kind) for kind in ("linear", "rank one", "whole")}
    return {
        "sgld_step_": ((p, g), {**TARGET, **stream}),
        "sgld_step_ bf16": ((b, c), {**TARGET, **on_device}),
        "sghmc_step_": ((p, g, v, []), {**shared, **stream}),
        "sghmc_step_ variances": ((p, g, v, s), {**shared, **on_device}),
        "sghmc_step_ bf16": ((b, c, v, []), {**shared, **stream}),
        "psgld_step_": ((p, g, q, [], []), {**preconditioner, **stream}),
        "psgld_frozen_step_": ((p, g, q), {**TARGET, **on_device}),
        "psgld_frozen_step_ bf16": ((b, c, q), {**TARGET, **stream}),
        "psgld_step_ corrected": ((p, g, q, s, v), {**preconditioner, **stream}),
        "psgld_step_ bf16": ((b, c, q, s, c), {**preconditioner, **stream}),
        "sgnht_step_": ((p, g, v, s), {**thermostat, **stream}),
        "sgnht_step_ bf16": ((b, c, v, s), {**thermostat, **on_device}),
        "gradient_variance_": ((g, s, v), {"weight": 0.25}),
        "control_variate_": ((g, p, s), {}),
        "control_variate_ bf16": ((b, c, s), {}),
        "gaussian_": ((p,), {"std": 0.5, "purpose": 0, **stream}),
        "gaussian_ on device": ((p,), {"std": 0.5, "purpose": 1, **on_device}),
        "sum_of_squares": ((p,), {}),
        "ewsg_log_ratio": ((p, g, s, v), {**weights, "num_chains": 1}),
        "ewsg_log_ratio without momenta": ((b, c, b, []), {**weights, "num_chains": 1}),
        "ewsg_log_ratio of chains": ((k, k, m, m), {**weights, "num_chains": 3}),
        "hmc_momenta_": ((v, []), {"temperature": 0.7, **stream}),
        "hmc_momenta_ with masses": ((v, q), {"temperature": 0.7, **stream}),
        "hmc_leapfrog_": ((p, g, v, []), leapfrog),
        "hmc_leapfrog_ with masses": ((p, g, v, q), leapfrog),
        "hmc_leapfrog_ last": ((p, g, v, q), {**leapfrog, "drift": 0.0}),
        "hmc_leapfrog_ bf16": ((b, c, v, []), leapfrog),
        "hmc_energy": ((p, v, []), {"prior_precision": 0.0, "num_chains": 1}),
        "hmc_energy of chains": ((k, m, m), {"prior_precision": 2.0, "num_chains": 3}),
        "metropolis_decide": (
            (ratios,),
            {"proposal": 2, "purpose": 3, "seed": 5, "step": 7},
        ),
        "select_chains_": ((k, m, ratios > 0), {}),
        **{f"ecs_estimate {kind}": rows[kind][0] for kind in rows},
        **{f"ecs_density {kind}": rows[kind][1] for kind in rows},
        "ecs_leapfrog_": (
            tuple(torch.ones(s, dtype=torch.float64) for s in (3, 3, 3, (3, 3), 3)),
            {"kick": 0.1, "drift": 0.2},
        ),
        "sbps_place_": ((p, g, v), {"time": 0.7}),
        "sbps_place_ bf16": ((b, v, s), {"time": 0.7}),
        "sbps_reflect_": (
            (p, g, v, []),
            {"weight_decay": 0.1, "scale": 0.9, "gain": 0.3},
        ),
        "sbps_reflect_ preconditioned": (
            (b, c, v, q),
            {"weight_decay": 0.1, "scale": 0.9, "gain": 0.3},
        ),
        "sbps_reflection_sums": ((b, c, v, q), {"weight_decay": 0.1}),
        "sbps_adapt_": ((b, c, q), {"weight_decay": 0.1, "decay": 0.9}),
        "sbps_precondition_": ((q, v, s, g), {"eps": 0.1, "scale": 2.0}),
        "sbps_preconditioner_sum": ((q,), {"eps": 0.1}),
        "sbps_reflect_sums_": (
            (b, c, v, s),
            {"weight_decay": 0.1, "scale": 0.9, "gain": 0.3},
        ),
        "sbps_precondition_sums_": ((q, v, s, g, p), {"eps": 0.1, "scale": 2.0}),
        "sbps_line_sums": ((v, s), {}),
    }


def ecs_arguments(kind: str) -> tuple[Any, Any]:
    """Those of ecs_estimate and of ecs_density."""

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.float64)

    one, whole = kind == "rank one", kind == "whole"
    scales, hessians = ones(6) if one else None, ones(6, 3, 3) if whole else None
    terms = (ones(1 + one, 6, 3), scales, hessians)
    bends = ones(6, 3) if whole else ones(6 if one else 0)
    sizes = {"num_data": 9.0, "batch_size": 2, "num_products": 4, "lower_bound": -3.0}
    estimate = (ones(6), ones(3), ones(3), ones(6), *terms)
    density = (ones(4), ones(3), ones(6), bends, ones(3), ones(3), *terms)
    sums = (ones(), ones(3), None if kind == "linear" else ones(3, 3), ones(3))
    heat = {"temperature": 1.5}
    return (estimate, {**heat, **sizes}), ((*density, *sums), heat)


@pytest.mark.parametrize("case", opcheck_cases())
def test_opcheck(case: str) -> None:
    args, kwargs = opcheck_cases()[case]
    op = getattr(torch.ops.torch_sgmcmc, case.split()[0]).default
    with torch.no_grad():
        result = torch.library.opcheck(op, args, kwargs)
    assert set(result.values()) == {"SUCCESS"}


def test_opcheck_covers_every_operator() -> None:
    registered = {
        name.removeprefix("torch_sgmcmc::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("torch_sgmcmc::")
    }
    assert registered == {case.split()[0] for case in opcheck_cases()}


# ---- Fused equals reference ------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
def test_sgld_equals_reference(temperature: float, prior_precision: float) -> None:
    params, grads = mixed_list(1), mixed_list(2)
    offsets = scattered_offsets(params)
    hyper = {**TARGET, "temperature": temperature, "prior_precision": prior_precision}
    noise = draw(params, offsets=offsets, **STREAM)
    expected = [
        sgld(p, g, z, **hyper) for p, g, z in zip(params, grads, noise, strict=True)
    ]
    untouched = clones(grads)
    ops.sgld_step_(params, grads, **hyper, offsets=offsets, **STREAM)
    for p, e in zip(params, expected, strict=True):
        assert_rounded(p, e)
    assert_all_same(grads, untouched)


@pytest.mark.parametrize("aware", [False, True], ids=["beta", "variances"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
def test_sghmc_equals_reference(
    temperature: float, prior_precision: float, aware: bool
) -> None:
    params, grads = mixed_list(1), mixed_list(2)
    momenta = states(params, 3)
    offsets = scattered_offsets(params)
    hyper = {
        **TARGET,
        "temperature": temperature,
        "prior_precision": prior_precision,
        "momentum": 0.8,
        "noise_estimate": 0.0 if aware else 0.05,
    }
    # Up to half of the friction's noise.
    most = (1 - hyper["momentum"]) * temperature / (hyper["lr"] * hyper["num_data"])
    variances = [most * torch.sigmoid(s) for s in states(params, 4)] if aware else []
    noise = draw(params, offsets=offsets, **STREAM)
    expected = [
        sghmc(p, g, v, z, variances[i] if aware else None, **hyper)
        for i, (p, g, v, z) in enumerate(
            zip(params, grads, momenta, noise, strict=True)
        )
    ]
    untouched = clones(grads + variances)
    ops.sghmc_step_(
        params,
        grads,
        momenta,
        variances,
        **hyper,
        resample_momentum_every=0,
        offsets=offsets,
        **STREAM,
    )
    for p, v, (new_p, new_v) in zip(params, momenta, expected, strict=True):
        assert v.dtype == arithmetic(p.dtype)
        assert_rounded(v, new_v)
        assert_rounded(p, new_p)
    assert_all_same(grads + variances, untouched)


# Longer ways through an update: two reciprocal roots of 1.5 units in the last place
# each, of which G holds the second one squared, and G² / √V five of them.
PSGLD_ROUNDINGS = 24


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_psgld_equals_reference(
    decay: float, prior_precision: float, temperature: float, corrected: bool
) -> None:
    params, grads, curvatures = (mixed_list(seed) for seed in (1, 2, 5))
    squares = [s.square() for s in states(params, 3)]
    sensitivities = states(params, 4) if corrected else []
    offsets = scattered_offsets(params)
    hyper = {
        **TARGET,
        "temperature": temperature,
        "prior_precision": prior_precision,
        "decay": decay,
        "eps": 0.05,
    }
    noise = draw(params, offsets=offsets, **STREAM)
    expected = [
        psgld(
            *lists,
            *((sensitivities[i], curvatures[i]) if corrected else ()),
            **hyper,
            adapt=True,
        )
        for i, lists in enumerate(zip(params, grads, squares, noise, strict=True))
    ]
    untouched = clones(grads + curvatures)
    ops.psgld_step_(
        params,
        grads,
        squares,
        sensitivities,
        curvatures if corrected else [],
        **hyper,
        offsets=offsets,
        **STREAM,
    )
    for i, (new_p, new_v, new_w) in enumerate(expected):
        assert_rounded(params[i], new_p, PSGLD_ROUNDINGS)
        assert_rounded(squares[i], new_v)
        if corrected:
            assert_rounded(sensitivities[i], new_w, PSGLD_ROUNDINGS)
    assert_all_same(grads + curvatures, untouched)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
def test_frozen_psgld_equals_reference(
    prior_precision: float, temperature: float
) -> None:
    params, grads = mixed_list(1), mixed_list(2)
    squares = [s.square() for s in states(params, 3)]
    offsets = scattered_offsets(params)
    target = {
        **TARGET,
        "temperature": temperature,
        "prior_precision": prior_precision,
    }
    noise = draw(params, offsets=offsets, **STREAM)
    mean = {"decay": 0.5, "eps": 0.05, "adapt": False}
    expected = [
        psgld(*lists, **target, **mean)[0]
        for lists in zip(params, grads, squares, noise, strict=True)
    ]
    roots = [(v.double().sqrt() + 0.05).rsqrt().to(v.dtype) for v in squares]
    untouched = clones(grads + roots)
    ops.psgld_frozen_step_(params, grads, roots, **target, offsets=offsets, **STREAM)
    for p, want in zip(params, expected, strict=True):
        assert_rounded(p, want, PSGLD_ROUNDINGS)
    assert_all_same(grads + roots, untouched)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_preconditioner_over_the_whole_range(dtype: torch.dtype) -> None:
    # From the smallest normal V on, which is ḡ² if nothing is remembered: θ moves by
    # -lr G ḡ alone, at temperature 0.
    low = math.log10(torch.finfo(dtype).tiny) / 2 + 0.1
    grads = torch.logspace(low, 19, 5001, dtype=torch.float64).to(dtype)
    params, squares = torch.zeros(5001, dtype=dtype), torch.ones(5001, dtype=dtype)
    hyper = {**TARGET, "temperature": 0.0, "decay": 0.0, "eps": 1e-5}
    (noise,) = draw([params], offsets=[0], **STREAM)
    want, _, _ = psgld(params, grads, squares, noise, **hyper, adapt=True)
    ops.psgld_step_(
        [params], [grads], [squares], [], [], **hyper, offsets=[0], **STREAM
    )
    assert_rounded(params, want, 8)


def test_the_preconditioner_of_vanishing_gradients() -> None:
    # V = 0: G = 1 / eps, and no Γ, whatever the curvature.
    for dtype in DTYPES:
        p, g = torch.ones(9, dtype=dtype), torch.zeros(9, dtype=dtype)
        state = arithmetic(dtype)
        v, w = torch.zeros(9, dtype=state), torch.zeros(9, dtype=state)
        hyper = {**TARGET, "decay": 0.9, "eps": 0.25}
        (noise,) = draw([p], offsets=[0], **STREAM)
        ones = torch.ones(9, dtype=state)
        want, _, _ = psgld(p, g, 0 * ones, noise, **hyper, adapt=False)
        ops.psgld_step_([p], [g], [v], [w], [g + 7], **hyper, offsets=[0], **STREAM)
        assert_rounded(p, want)
        assert not v.any() and not w.any()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_sgnht_equals_reference(
    rate: float, prior_precision: float, temperature: float
) -> None:
    params, grads = mixed_list(1), mixed_list(2)
    momenta, thermostats = states(params, 3), states(params, 4)
    offsets = scattered_offsets(params)
    hyper = {
        **TARGET,
        "temperature": temperature,
        "prior_precision": prior_precision,
        "momentum": 0.8,
        "thermostat_rate": rate,
    }
    noise = draw(params, offsets=offsets, **STREAM)
    expected = [
        sgnht(*lists, **hyper)
        for lists in zip(params, grads, momenta, thermostats, noise, strict=True)
    ]
    untouched, before = clones(grads), clones(thermostats)
    ops.sgnht_step_(
        params, grads, momenta, thermostats, **hyper, offsets=offsets, **STREAM
    )
    for i, (new_p, new_v, new_a) in enumerate(expected):
        assert_rounded(params[i], new_p)
        assert_rounded(momenta[i], new_v)
        assert_rounded(thermostats[i], new_a)
    if rate == 0:
        assert_all_same(thermostats, before)
    assert_all_same(grads, untouched)


@pytest.mark.parametrize("changed", [{"lr": 0.0}, {"temperature": 0.0}])
def test_thermostats_rest_without_heat(changed: dict[str, float]) -> None:
    p, g, v = torch.ones(9), torch.ones(9), torch.ones(9)
    a = torch.linspace(-0.1, 0.1, 9)
    before = a.clone()
    hyper = {**TARGET, "momentum": 0.5, "thermostat_rate": 0.3, **changed}
    ops.sgnht_step_([p], [g], [v], [a], **hyper, offsets=[0], **STREAM)
    assert same_bits(a, before)
    pull = hyper["lr"] * (1 + hyper["prior_precision"] / hyper["num_data"])
    torch.testing.assert_close(v, 0.5 - a - pull)


@pytest.mark.parametrize("step", [0, 6, 7, 2**33])
def test_momentum_is_resampled_every_kth_step(step: int) -> None:
    params, grads = mixed_list(1), mixed_list(2)
    momenta = states(params, 3)
    offsets = scattered_offsets(params)
    hyper = {**TARGET, "momentum": 0.8, "noise_estimate": 0.05}
    stream = {"offsets": offsets, "seed": 5, "step": step}
    expected_params, expected_momenta = clones(params), clones(momenta)
    expected_hyper = dict(hyper)
    drawn = step % 3 == 0
    if drawn:
        # Note [Momentum drawn afresh] in csrc/samplers/sghmc.h: the update takes a part
        # of its gradient, at unchanged heat lr T.
        part = 1 / (1 + hyper["momentum"])
        heat = 2 * hyper["lr"] * hyper["temperature"] / hyper["num_data"]
        ops.gaussian_(
            expected_momenta,
            std=(part * heat) ** 0.5,
            purpose=_C.PURPOSE_MOMENTUM,
            **stream,
        )
        expected_hyper["lr"] *= part
        expected_hyper["temperature"] /= part
        expected_hyper["noise_estimate"] *= part**2
    ops.sghmc_step_(
        expected_params,
        grads,
        expected_momenta,
        [],
        **expected_hyper,
        resample_momentum_every=0,
        **stream,
    )
    ops.sghmc_step_(
        params, grads, momenta, [], **hyper, resample_momentum_every=3, **stream
    )
    if drawn:  # coefficients may differ in their last bit
        for got, want in zip(
            params + momenta, expected_params + expected_momenta, strict=True
        ):
            torch.testing.assert_close(got, want)
    else:
        assert_all_same(params, expected_params)
        assert_all_same(momenta, expected_momenta)


def test_gradient_variance_equals_reference() -> None:
    grads = mixed_list(1)
    previous, variances = states(grads, 2), [s.square() for s in states(grads, 3)]
    weight = 0.3
    expected = []
    for g, old, var in zip(grads, previous, variances, strict=True):
        square = (g.double() - old.double()) ** 2 / 2
        value = var.double() + weight * (square - var.double())
        # The rounding of a difference counts by the size of what is subtracted.
        size = (g.double().abs() + old.double().abs()) ** 2
        expected.append(Exact(value, var.double() + weight * size))
    untouched = clones(grads)
    ops.gradient_variance_(grads, variances, previous, weight=weight)
    for g, old, var, e in zip(grads, previous, variances, expected, strict=True):
        assert_rounded(var, e)
        assert same_bits(old, g.to(old.dtype))
    assert_all_same(grads, untouched)


def test_gradient_variance_is_an_unbiased_mean() -> None:
    # With weights 1, 1/2, 1/3, ... it is the plain mean of half the squared
    # differences of consecutive gradients.
    g = torch.Generator().manual_seed(0)
    seen = torch.randn(6, 5, generator=g, dtype=torch.float64)
    variance, previous = torch.zeros(5, dtype=torch.float64), seen[0].clone()
    for i in range(1, 6):
        ops.gradient_variance_([seen[i]], [variance], [previous], weight=1 / i)
    expected = seen.diff(dim=0).square().mean(0) / 2
    torch.testing.assert_close(variance, expected, rtol=1e-14, atol=0)


def test_control_variate_equals_reference() -> None:
    grads, anchors = mixed_list(1), mixed_list(2)
    full = states(grads, 3)
    expected = [
        Exact(
            g.double() - a.double() + f.double(),
            g.double().abs() + a.double().abs() + f.double().abs(),
        )
        for g, a, f in zip(grads, anchors, full, strict=True)
    ]
    untouched = clones(anchors + full)
    ops.control_variate_(grads, anchors, full)
    for g, e in zip(grads, expected, strict=True):
        assert_rounded(g, e)
    assert_all_same(anchors + full, untouched)


def test_control_variate_at_the_anchor_is_the_full_gradient() -> None:
    # To the last bit, however much larger a minibatch's gradient is.
    grads = [1e4 * g for g in mixed_list(1)]
    full = states(grads, 3)
    ops.control_variate_(grads, clones(grads), full)
    assert_all_same(grads, [f.to(g.dtype) for f, g in zip(full, grads, strict=True)])


# ---- Zero temperature is SGD -----------------------------------------------------


def dyadic(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Multiples of 1/8 in [-2, 2): a few steps on them are free of rounding."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 16, shape, generator=g).to(dtype) / 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sampler", ["sgld", "sghmc", "sgnht"])
def test_zero_temperature_is_sgd_exactly(sampler: str, dtype: torch.dtype) -> None:
    # lr, momentum and weight decay are powers of two, and so every intermediate
    # result is a number that the type holds exactly, in any order of operations.
    momentum = 0.5 if sampler != "sgld" else 0.0
    ours, theirs = (dyadic(1000, seed=1, dtype=dtype) for _ in range(2))
    sgd = torch.optim.SGD([theirs], lr=0.25, momentum=momentum, weight_decay=0.5)
    velocity = torch.zeros_like(ours)
    common = {"lr": 0.25, "num_data": 4.0, "prior_precision": 2.0, "temperature": 0.0}
    for step in range(3):
        grad = dyadic(1000, seed=2 + step, dtype=dtype)
        theirs.grad = grad.clone()
        sgd.step()
        stream = {"offsets": [5], "seed": 0, "step": step}
        if sampler == "sgld":
            ops.sgld_step_([ours], [grad], **common, **stream)
        elif sampler == "sgnht":
            ops.sgnht_step_(
                [ours],
                [grad],
                [velocity],
                [torch.zeros_like(velocity)],
                **common,
                momentum=momentum,
                thermostat_rate=0.01,
                **stream,
            )
        else:
            ops.sghmc_step_(
                [ours],
                [grad],
                [velocity],
                [],
                **common,
                momentum=momentum,
                noise_estimate=0.0,
                resample_momentum_every=0,
                **stream,
            )
        assert torch.equal(ours, theirs)
    if sampler != "sgld":
        assert torch.equal(velocity, -0.25 * sgd.state[theirs]["momentum_buffer"])


# ---- Sums of squares -------------------------------------------------------------


def test_sum_of_squares_equals_reference() -> None:
    tensors = mixed_list(1)
    expected = sum(float(t.double().square().sum()) for t in tensors)
    result = ops.sum_of_squares(tensors)
    assert result.dtype == torch.float64 and result.shape == ()
    # Both sums are in float64; all terms are positive.
    assert float(result) == pytest.approx(expected, rel=1e-14, abs=0)
    for t in tensors:
        exact = float(t.double().square().sum())
        assert float(ops.sum_of_squares([t])) == pytest.approx(exact, rel=1e-14, abs=0)


def test_sum_of_squares_of_extreme_values() -> None:
    # Squares that overflow or vanish in the tensor's own type.
    for dtype in DTYPES[1:]:
        info = torch.finfo(dtype)
        t = torch.tensor([info.max, info.tiny, -info.max], dtype=dtype)
        expected = float(t.double().square().sum())
        assert float(ops.sum_of_squares([t])) == expected
    assert float(ops.sum_of_squares([torch.empty(0), torch.empty(3, 0)])) == 0.0


# ---- HMC -------------------------------------------------------------------------


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_leapfrog_equals_reference(
    drift: float, prior_precision: float, massive: bool
) -> None:
    params, grads = mixed_list(1), mixed_list(2)
    momenta = states(params, 3)
    masses = [0.3 + s.square() for s in states(params, 4)] if massive else []
    move = {"kick": 0.2, "num_data": 7.0, "prior_precision": prior_precision}
    expected = [
        leapfrog(p, g, r, masses[i] if massive else None, drift=drift, **move)
        for i, (p, g, r) in enumerate(zip(params, grads, momenta, strict=True))
    ]
    untouched, before = clones(grads + masses), clones(params)
    ops.hmc_leapfrog_(params, grads, momenta, masses, drift=drift, **move)
    for p, r, (new_p, new_r) in zip(params, momenta, expected, strict=True):
        assert_rounded(p, new_p)
        assert_rounded(r, new_r)
    assert_all_same(grads + masses, untouched)
    if drift == 0:
        assert_all_same(params, before)


def test_leapfrog_runs_back() -> None:
    """Reversible to rounding: a kick and a drift, and the same with r turned round."""
    p, r = torch.linspace(-2, 2, 999).double(), torch.linspace(3, -1, 999).double()
    mass = 0.5 + torch.linspace(0, 3, 999).double()
    start = p.clone(), r.clone()
    move = {"num_data": 3.0, "prior_precision": 0.4}

    def half() -> None:
        ops.hmc_leapfrog_([p], [p**3], [r], [mass], kick=0.01, drift=0.0, **move)

    for _ in range(2):
        for _ in range(50):  # a trajectory of whole leapfrog steps
            ops.hmc_leapfrog_([p], [p**3], [r], [mass], kick=0.01, drift=0.02, **move)
            half()
        r.neg_()
    assert not torch.equal(p, start[0])  # it did move and round
    torch.testing.assert_close(p, start[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(r, start[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("massive", [False, True])
def test_momenta_equal_reference(massive: bool) -> None:
    momenta = states(mixed_list(1), 3)
    masses = [0.3 + s.square() for s in states(mixed_list(1), 4)] if massive else []
    offsets = scattered_offsets(momenta)
    noise = draw(momenta, offsets=offsets, purpose=_C.PURPOSE_MOMENTUM, **STREAM)
    ops.hmc_momenta_(momenta, masses, temperature=0.7, offsets=offsets, **STREAM)
    for i, (r, z) in enumerate(zip(momenta, noise, strict=True)):
        mass = masses[i].double() if massive else 1.0
        value = torch.as_tensor(0.7 * mass, dtype=torch.float64).sqrt() * z
        assert_rounded(r, Exact(value, value.abs()))


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("chains", [1, 2, 17, 1000])
def test_energy_equals_reference(
    chains: int, prior_precision: float, massive: bool
) -> None:
    g = torch.Generator().manual_seed(chains)
    shapes = [(chains,), (chains, 2), (chains, 5, 3), (chains, 4097), (chains, 0)]
    dtypes = [*DTYPES, torch.float32]
    params = [
        torch.randn(s, generator=g).to(d) for s, d in zip(shapes, dtypes, strict=True)
    ]
    momenta = states(params, 3)
    masses = [0.3 + s.square() for s in states(params, 4)] if massive else []
    lists = [params, momenta, masses]
    hyper = {"prior_precision": prior_precision}
    energy = ops.hmc_energy(*lists, **hyper, num_chains=chains)
    expected = torch.zeros(chains, dtype=torch.float64)
    for i, (p, r) in enumerate(zip(params, momenta, strict=True)):
        terms = r.double().square() / (masses[i].double() if massive else 1.0)
        terms = terms + prior_precision * p.double().square()
        expected += terms.reshape(chains, -1).sum(dim=1) / 2
    torch.testing.assert_close(energy, expected, rtol=1e-13, atol=0)
    # A chain's energy does not depend on the others: the same bits alone.
    for k in (0, chains - 1):
        alone = [[t[k : k + 1] for t in ts] for ts in lists]
        assert same_bits(ops.hmc_energy(*alone, **hyper, num_chains=1)[0], energy[k])


# ---- EWSG ------------------------------------------------------------------------

SURROGATES = ("momentum", "zero", "one", "full_momentum")


def assert_log_ratio(
    lists: list[list[Tensor]], surrogate: str, hyper: dict[str, Any], chains: int = 1
) -> None:
    params, grads, proposals, momenta = lists
    before, after = (
        ewsg_log_weights(
            params, g, momenta, **hyper, surrogate=surrogate, num_chains=chains
        )
        for g in (grads, proposals)
    )
    result = ops.ewsg_log_ratio(
        params,
        grads,
        proposals,
        momenta,
        **hyper,
        surrogate=SURROGATES.index(surrogate),
        num_chains=chains,
    )
    assert result.dtype == torch.float64 and result.shape == (chains,)
    # Both are sums in float64, of terms no larger than W's.
    error = (result - (after - before)).abs()
    assert bool((error <= 1e-13 * (after + before)).all())
    if float(before[0]) > 0:
        assert result.abs().max() > 1e-3 * before.max()


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("with_momenta", [True, False])
def test_ewsg_log_ratio_equals_reference(
    with_momenta: bool, prior_precision: float, surrogate: str
) -> None:
    hyper = {**TARGET, "prior_precision": prior_precision, "momentum": 0.8}
    params, grads, proposals = (mixed_list(i) for i in (1, 2, 3))
    proposals = [1.5 * t for t in proposals]
    momenta = states(params, 4) if with_momenta else []
    lists = [params, grads, proposals, momenta]
    untouched = [clones(ts) for ts in lists]
    assert_log_ratio(lists, surrogate, hyper)
    for i in range(0, len(params), 5):
        single = [ts[i : i + 1] for ts in lists]
        assert_log_ratio(single, surrogate, hyper)
    for ts, copies in zip(lists, untouched, strict=True):
        assert_all_same(ts, copies)


@pytest.mark.parametrize("chains", [2, 3, 16, 17, 1000])
def test_ewsg_log_ratio_of_each_chain(chains: int) -> None:
    g = torch.Generator().manual_seed(chains)
    shapes = [(chains,), (chains, 2), (chains, 5, 3), (chains, 4097), (chains, 0)]
    lists = [
        [torch.randn(s, generator=g).to(d) for s, d in zip(shapes, dtypes, strict=True)]
        for dtypes in (
            *(
                [
                    torch.float32,
                    torch.float64,
                    torch.bfloat16,
                    torch.float32,
                    *[torch.float32],
                ],
            )
            * 3,
            [torch.float32, torch.float64, *[torch.float32] * 3],
        )
    ]
    hyper = {**TARGET, "momentum": 0.8}
    assert_log_ratio(lists, "momentum", hyper, chains)
    # A chain's ratio does not depend on the others: the same bits alone.
    together = ops.ewsg_log_ratio(*lists, **hyper, surrogate=0, num_chains=chains)
    for k in (0, chains - 1):
        alone = [[t[k : k + 1] for t in ts] for ts in lists]
        ratio = ops.ewsg_log_ratio(*alone, **hyper, surrogate=0, num_chains=1)
        assert same_bits(ratio[0], together[k])


def test_ewsg_log_ratio_at_learning_rate_zero() -> None:
    # W(g') - W(g) = N v (g' - g) / (2 T), where W itself is infinite.
    g = torch.Generator().manual_seed(0)
    p, a, b, v = ([torch.randn(100, generator=g)] for _ in range(4))
    hyper = {**TARGET, "lr": 0.0, "momentum": 0.8}
    ratio = ops.ewsg_log_ratio(p, a, b, v, **hyper, surrogate=0, num_chains=1)
    rise = (v[0].double() * (b[0].double() - a[0].double())).sum()
    expected = hyper["num_data"] / (2 * hyper["temperature"]) * rise
    torch.testing.assert_close(ratio[0], expected, rtol=1e-12, atol=0)


def test_equal_gradients_have_the_ratio_zero() -> None:
    params, grads = mixed_list(1), mixed_list(2)
    hyper = {**TARGET, "momentum": 0.8}
    ratio = ops.ewsg_log_ratio(
        params,
        grads,
        clones(grads),
        states(params, 3),
        **hyper,
        surrogate=0,
        num_chains=1,
    )
    assert float(ratio) == 0.0


def uniforms(
    chains: int, *, proposal: int, purpose: int, seed: int, step: int
) -> np.ndarray:
    """Note [Counter layout]: quad 2^24 chain + proposal, 52 bits of two words."""
    quads = (np.arange(chains, dtype=np.uint64) << np.uint64(24)) + np.uint64(proposal)
    low, high = quads & np.uint64(2**32 - 1), quads >> np.uint64(32)
    c2 = np.full_like(quads, step % 2**32)
    c3 = np.full_like(quads, (step >> 32) | purpose << 16)
    key = (seed % 2**32, (seed >> 32) % 2**32)
    words = philox(np.stack([low, high, c2, c3], axis=1), key)
    bits = (words[:, 0] << np.uint64(32) | words[:, 1]) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


@pytest.mark.parametrize("purpose", [_C.PURPOSE_INDEX_CHAIN, _C.PURPOSE_METROPOLIS])
@pytest.mark.parametrize("proposal", [0, 1, 2**24 - 1])
@pytest.mark.parametrize(("seed", "step"), [(0, 0), (-(2**40) + 77, 2**33 + 4)])
def test_decisions(seed: int, step: int, proposal: int, purpose: int) -> None:
    chains = 20_000
    counter = {"proposal": proposal, "seed": seed, "step": step}
    stream = {**counter, "purpose": purpose}
    log_u = np.log(uniforms(chains, **stream))
    g = torch.Generator().manual_seed(0)
    ratios = torch.randn(chains, generator=g, dtype=torch.float64)
    expected = torch.as_tensor(log_u < ratios.numpy())
    assert torch.equal(ops.metropolis_decide(ratios, **stream), expected)
    # To within a few ulp of the threshold, over its whole range.
    for sign in (-1, 1):
        near = torch.as_tensor(log_u + sign * 1e-15 * np.abs(log_u) + sign * 1e-18)
        near = near.clamp(max=-1e-300)
        decided = ops.metropolis_decide(near, **stream)
        assert decided.all() if sign > 0 else not decided.any()
    # The function for one chain is that of chain 0.
    if purpose == _C.PURPOSE_INDEX_CHAIN:
        for offset in (-1e-9, 1e-9):
            accepts = _C.index_chain_accepts(log_u[0] + offset, **counter)
            assert accepts == (offset > 0)


def test_decisions_on_unusual_ratios() -> None:
    values = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, -1e300]
    ratios = torch.tensor(values, dtype=torch.float64)
    for step in range(50):
        counter = {"proposal": 0, "seed": 1, "step": step}
        stream = {**counter, "purpose": _C.PURPOSE_INDEX_CHAIN}
        expected = [True, True, True, True, False, False, False]
        assert ops.metropolis_decide(ratios, **stream).tolist() == expected
        assert [_C.index_chain_accepts(x, **counter) for x in values] == expected
    empty = torch.empty(0, dtype=torch.float64)
    assert ops.metropolis_decide(empty, **stream).shape == (0,)


@pytest.mark.parametrize("chains", [1, 2, 7, 300])
def test_rows_are_selected(chains: int) -> None:
    g = torch.Generator().manual_seed(chains)
    shapes = [(chains,), (chains, 3), (chains, 0), (chains, 2, 50), (chains, 5000)]
    for dtype in DTYPES:
        a, b = (
            [torch.randn(s, generator=g).to(dtype) for s in shapes] for _ in range(2)
        )
        mask = torch.rand(chains, generator=g) < 0.5
        expected = [
            torch.where(mask.view(-1, *[1] * (x.dim() - 1)), y, x)
            for x, y in zip(a, b, strict=True)
        ]
        kept = clones(b)
        ops.select_chains_(a, b, mask)
        assert_all_same(a, expected)
        assert_all_same(b, kept)
