"""The fused updates equal plain-PyTorch references, to rounding, everywhere."""

import math

import numpy as np
import pytest
import torch
from operator_tensors import (
    STREAM,
    TARGET,
    assert_all_same,
    assert_updated,
    clones,
    masters_of,
    mixed_list,
    scattered_offsets,
    states,
    values_of,
)
from reference import (
    DTYPES,
    Exact,
    arithmetic,
    assert_rounded,
    draw,
    psgld,
    same_bits,
    sghmc,
    sgld,
    sgnht,
)
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain import operators as ops


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
def test_sgld_equals_reference(temperature: float, prior_precision: float) -> None:
    params, grads = mixed_list(1), mixed_list(2)
    offsets = scattered_offsets(params)
    hyper = {**TARGET, "temperature": temperature, "prior_precision": prior_precision}
    noise = draw(params, offsets=offsets, **STREAM)
    masters = masters_of(params)
    values = values_of(params, masters)
    expected = [
        sgld(p, g, z, **hyper) for p, g, z in zip(values, grads, noise, strict=True)
    ]
    untouched = clones(grads)
    ops.sgld_step_(params, grads, masters, **hyper, offsets=offsets, **STREAM)
    assert_updated(params, masters, expected)
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
    masters = masters_of(params)
    values = values_of(params, masters)
    expected = [
        sghmc(p, g, v, z, variances[i] if aware else None, **hyper)
        for i, (p, g, v, z) in enumerate(
            zip(values, grads, momenta, noise, strict=True)
        )
    ]
    untouched = clones(grads + variances)
    ops.sghmc_step_(
        params,
        grads,
        momenta,
        variances,
        masters,
        **hyper,
        resample_momentum_every=0,
        offsets=offsets,
        **STREAM,
    )
    assert_updated(params, masters, [new for new, _ in expected])
    for p, v, (_, new_v) in zip(params, momenta, expected, strict=True):
        assert v.dtype == arithmetic(p.dtype)
        assert_rounded(v, new_v)
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
    masters = masters_of(params)
    values = values_of(params, masters)
    expected = [
        psgld(
            *lists,
            *((sensitivities[i], curvatures[i]) if corrected else ()),
            **hyper,
            adapt=True,
        )
        for i, lists in enumerate(zip(values, grads, squares, noise, strict=True))
    ]
    untouched = clones(grads + curvatures)
    ops.psgld_step_(
        params,
        grads,
        squares,
        sensitivities,
        curvatures if corrected else [],
        masters,
        **hyper,
        offsets=offsets,
        **STREAM,
    )
    moved = [new for new, _, _ in expected]
    assert_updated(params, masters, moved, roundings=PSGLD_ROUNDINGS)
    for i, (_, new_v, new_w) in enumerate(expected):
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
    masters = masters_of(params)
    values = values_of(params, masters)
    expected = [
        psgld(*lists, **target, **mean)[0]
        for lists in zip(values, grads, squares, noise, strict=True)
    ]
    roots = [(v.double().sqrt() + 0.05).rsqrt().to(v.dtype) for v in squares]
    untouched = clones(grads + roots)
    ops.psgld_frozen_step_(
        params, grads, roots, masters, **target, offsets=offsets, **STREAM
    )
    assert_updated(params, masters, expected, roundings=PSGLD_ROUNDINGS)
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
        [params], [grads], [squares], [], [], [], **hyper, offsets=[0], **STREAM
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
        masters = masters_of([p])
        (value,) = values_of([p], masters)
        want, _, _ = psgld(value, g, 0 * ones, noise, **hyper, adapt=False)
        lists = ([p], [g], [v], [w], [g + 7], masters)
        ops.psgld_step_(*lists, **hyper, offsets=[0], **STREAM)
        assert_updated([p], masters, [want])
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
    masters = masters_of(params)
    values = values_of(params, masters)
    expected = [
        sgnht(*lists, **hyper)
        for lists in zip(values, grads, momenta, thermostats, noise, strict=True)
    ]
    untouched, before = clones(grads), clones(thermostats)
    lists = (params, grads, momenta, thermostats, masters)
    ops.sgnht_step_(*lists, **hyper, offsets=offsets, **STREAM)
    assert_updated(params, masters, [new for new, _, _ in expected])
    for i, (_, new_v, new_a) in enumerate(expected):
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
    ops.sgnht_step_([p], [g], [v], [a], [], **hyper, offsets=[0], **STREAM)
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
    masters = masters_of(params)
    expected_params, expected_momenta = clones(params), clones(momenta)
    expected_masters = clones(masters)
    expected_hyper = dict(hyper)
    drawn = step % 3 == 0
    if drawn:
        # Note [Momentum drawn afresh] in csrc/methods/sghmc.h: the update takes a part
        # of its gradient, at unchanged heat lr T.
        part = 1 / (1 + hyper["momentum"])
        heat = 2 * hyper["lr"] * hyper["temperature"] / hyper["num_data"]
        ops.gaussian_(
            expected_momenta,
            std=(part * heat) ** 0.5,
            purpose=_C.Purpose.MOMENTUM,
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
        expected_masters,
        **expected_hyper,
        resample_momentum_every=0,
        **stream,
    )
    lists = (params, grads, momenta, [], masters)
    ops.sghmc_step_(*lists, **hyper, resample_momentum_every=3, **stream)
    if drawn:  # coefficients may differ in their last bit
        for got, want in zip(
            params + momenta + masters,
            expected_params + expected_momenta + expected_masters,
            strict=True,
        ):
            torch.testing.assert_close(got, want)
    else:
        assert_all_same(params, expected_params)
        assert_all_same(momenta, expected_momenta)
        assert_all_same(masters, expected_masters)


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
            ops.sgld_step_([ours], [grad], [], **common, **stream)
        elif sampler == "sgnht":
            ops.sgnht_step_(
                [ours],
                [grad],
                [velocity],
                [torch.zeros_like(velocity)],
                [],
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_square_roots_are_correctly_rounded(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    tensors = [torch.rand(n, generator=g, dtype=torch.float64) for n in (1, 37, 9999)]
    tensors = [(1e3 * t).to(dtype) for t in tensors]
    # Of a number in a wider type, and rounded once.
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    expected = [
        torch.from_numpy(np.sqrt(t.to(wide).numpy())).to(dtype) for t in tensors
    ]
    ops.square_root_(tensors)
    assert_all_same(tensors, expected)
