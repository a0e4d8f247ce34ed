"""The fused updates equal plain-PyTorch references, to rounding, everywhere."""

import math
from types import SimpleNamespace

import numpy as np
import operator_tensors as shared
import pytest
import reference
import torch
from operator_tensors import states

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops as ops


class Update:
    """Lists of every size and type, and with which numbers they are updated."""

    def __init__(self, **hyper):
        self.params, self.grads = shared.mixed_list(1), shared.mixed_list(2)
        self.hyper = {**shared.TARGET, **hyper}
        self.masters = shared.masters_of(self.params)
        self.values = shared.values_of(self.params, self.masters)
        offsets = shared.scattered_offsets(self.params)
        self.stream = {"offsets": offsets, **shared.STREAM}
        self.noise = reference.draw(self.params, **self.stream)

    def states(self, seed):
        return states(self.params, seed)

    def each(self, *lists):
        """Values, gradients, what else is given, and noise, tensor by tensor."""
        return zip(self.values, self.grads, *lists, self.noise, strict=True)

    def make(self, op, *lists, **more):
        """The update, which leaves the gradients as they are."""
        untouched = shared.clones(self.grads)
        lists = (self.params, self.grads, *lists, self.masters)
        op(*lists, **self.hyper, **self.stream, **more)
        shared.assert_all_same(self.grads, untouched)

    def assert_moved(self, expected, **roundings):
        shared.assert_updated(self.params, self.masters, list(expected), **roundings)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
def test_sgld_equals_reference(temperature, prior_precision):
    update = Update(temperature=temperature, prior_precision=prior_precision)
    expected = [reference.sgld(*each, **update.hyper) for each in update.each()]
    update.make(ops.sgld_step_)
    update.assert_moved(expected)


@pytest.mark.parametrize("aware", [False, True], ids=["beta", "variances"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
def test_sghmc_equals_reference(temperature, prior_precision, aware):
    target = {"temperature": temperature, "prior_precision": prior_precision}
    noise_estimate = 0.0 if aware else 0.05
    update = Update(**target, momentum=0.8, noise_estimate=noise_estimate)
    momenta = update.states(3)
    # Up to half of the friction's noise.
    most = (1 - 0.8) * temperature / (shared.TARGET["lr"] * shared.TARGET["num_data"])
    variances = [most * torch.sigmoid(s) for s in update.states(4)] if aware else []
    expected = [
        reference.sghmc(*each, variances[i] if aware else None, **update.hyper)
        for i, each in enumerate(update.each(momenta))
    ]
    untouched = shared.clones(variances)
    update.make(ops.sghmc_step_, momenta, variances, resample_momentum_every=0)
    moved, kicked = zip(*expected, strict=True)
    update.assert_moved(moved)
    for p, v, new_v in zip(update.params, momenta, kicked, strict=True):
        assert v.dtype == reference.arithmetic(p.dtype)
        reference.assert_rounded(v, new_v)
    shared.assert_all_same(variances, untouched)


# Longer ways through an update: two reciprocal roots of 1.5 units in the last place
# each, of which G holds the second one squared, and G² / √V five of them.
PSGLD_ROUNDINGS = 24


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_psgld_equals_reference(decay, prior_precision, temperature, corrected):
    target = {"temperature": temperature, "prior_precision": prior_precision}
    update = Update(**target, decay=decay, eps=0.05)
    squares = [s.square() for s in update.states(3)]
    sensitivities = update.states(4) if corrected else []
    curvatures = shared.mixed_list(5) if corrected else []
    more = [*zip(sensitivities, curvatures, strict=True)] or [()] * len(squares)
    expected = [
        reference.psgld(*each, *rest, **update.hyper, adapt=True)
        for each, rest in zip(update.each(squares), more, strict=True)
    ]
    untouched = shared.clones(curvatures)
    update.make(ops.psgld_step_, squares, sensitivities, curvatures)
    update.assert_moved([new for new, _, _ in expected], roundings=PSGLD_ROUNDINGS)
    for i, (_, new_v, new_w) in enumerate(expected):
        reference.assert_rounded(squares[i], new_v)
        if corrected:
            reference.assert_rounded(sensitivities[i], new_w, PSGLD_ROUNDINGS)
    shared.assert_all_same(curvatures, untouched)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
def test_frozen_psgld_equals_reference(prior_precision, temperature):
    update = Update(temperature=temperature, prior_precision=prior_precision)
    squares = [s.square() for s in update.states(3)]
    mean = {"decay": 0.5, "eps": 0.05, "adapt": False}
    each = update.each(squares)
    expected = [reference.psgld(*t, **update.hyper, **mean)[0] for t in each]
    numbers = SimpleNamespace(**update.hyper, **mean)
    least = max(0.05, 10 * numbers.lr * prior_precision / numbers.num_data)
    roots = [(v.double().sqrt() + least).rsqrt().to(v.dtype) for v in squares]
    untouched = shared.clones(roots)
    update.make(ops.psgld_frozen_step_, roots)
    update.assert_moved(expected, roundings=PSGLD_ROUNDINGS)
    shared.assert_all_same(roots, untouched)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_preconditioner_over_the_whole_range(dtype):
    # From the smallest normal V on, which is ḡ² if nothing is remembered: θ moves by
    # -lr G ḡ alone, at temperature 0.
    low = math.log10(torch.finfo(dtype).tiny) / 2 + 0.1
    grads = torch.logspace(low, 19, 5001, dtype=torch.float64).to(dtype)
    params, squares = torch.zeros(5001, dtype=dtype), torch.ones(5001, dtype=dtype)
    hyper = {**shared.TARGET, "temperature": 0.0, "decay": 0.0, "eps": 1e-5}
    (noise,) = reference.draw([params], offsets=[0], **shared.STREAM)
    want, _, _ = reference.psgld(params, grads, squares, noise, **hyper, adapt=True)
    hyper |= {"offsets": [0], **shared.STREAM}
    ops.psgld_step_([params], [grads], [squares], [], [], [], **hyper)
    reference.assert_rounded(params, want, 8)


def test_the_preconditioner_of_vanishing_gradients():
    # V = 0: G = 1 / eps, and no Γ, whatever the curvature.
    for dtype in reference.DTYPES:
        p, g = torch.ones(9, dtype=dtype), torch.zeros(9, dtype=dtype)
        state = reference.arithmetic(dtype)
        v, w = torch.zeros(9, dtype=state), torch.zeros(9, dtype=state)
        hyper = {**shared.TARGET, "decay": 0.9, "eps": 0.25}
        (noise,) = reference.draw([p], offsets=[0], **shared.STREAM)
        ones = torch.ones(9, dtype=state)
        masters = shared.masters_of([p])
        (value,) = shared.values_of([p], masters)
        want, _, _ = reference.psgld(value, g, 0 * ones, noise, **hyper, adapt=False)
        lists = ([p], [g], [v], [w], [g + 7], masters)
        ops.psgld_step_(*lists, **hyper, offsets=[0], **shared.STREAM)
        shared.assert_updated([p], masters, [want])
        assert not v.any() and not w.any()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_sgnht_equals_reference(rate, prior_precision, temperature):
    target = {"temperature": temperature, "prior_precision": prior_precision}
    update = Update(**target, momentum=0.8, thermostat_rate=rate)
    momenta, thermostats = update.states(3), update.states(4)
    each = update.each(momenta, thermostats)
    expected = [reference.sgnht(*t, **update.hyper) for t in each]
    before = shared.clones(thermostats)
    update.make(ops.sgnht_step_, momenta, thermostats)
    update.assert_moved([new for new, _, _ in expected])
    for i, (_, new_v, new_a) in enumerate(expected):
        reference.assert_rounded(momenta[i], new_v)
        reference.assert_rounded(thermostats[i], new_a)
    if rate == 0:
        shared.assert_all_same(thermostats, before)


@pytest.mark.parametrize("changed", [{"lr": 0.0}, {"temperature": 0.0}])
def test_thermostats_rest_without_heat(changed):
    p, g, v = torch.ones(9), torch.ones(9), torch.ones(9)
    a = torch.linspace(-0.1, 0.1, 9)
    before = a.clone()
    hyper = {**shared.TARGET, "momentum": 0.5, "thermostat_rate": 0.3, **changed}
    ops.sgnht_step_([p], [g], [v], [a], [], **hyper, offsets=[0], **shared.STREAM)
    assert reference.same_bits(a, before)
    pull = hyper["lr"] * (1 + hyper["prior_precision"] / hyper["num_data"])
    torch.testing.assert_close(v, 0.5 - a - pull)


@pytest.mark.parametrize("step", [0, 6, 7, 2**33])
def test_momentum_is_resampled_every_kth_step(step):
    ours, theirs = (Update(momentum=0.8, noise_estimate=0.05) for _ in range(2))
    momenta, others = ours.states(3), theirs.states(3)
    for update in (ours, theirs):
        update.stream |= {"seed": 5, "step": step}
    drawn = step % 3 == 0
    if drawn:
        # Note [Momentum drawn afresh] in csrc/ops/sghmc.h: the update takes a part
        # of its gradient, at unchanged heat lr T.
        hyper = theirs.hyper
        part = 1 / (1 + hyper["momentum"])
        heat = 2 * hyper["lr"] * hyper["temperature"] / hyper["num_data"]
        std, purpose = (part * heat) ** 0.5, _C.Purpose.MOMENTUM
        ops.gaussian_(others, std=std, purpose=purpose, **theirs.stream)
        hyper["lr"] *= part
        hyper["temperature"] /= part
        hyper["noise_estimate"] *= part**2
    theirs.make(ops.sghmc_step_, others, [], resample_momentum_every=0)
    ours.make(ops.sghmc_step_, momenta, [], resample_momentum_every=3)
    found = ours.params + momenta + ours.masters
    expected = theirs.params + others + theirs.masters
    if drawn:  # coefficients may differ in their last bit
        torch.testing.assert_close(found, expected)
    else:
        shared.assert_all_same(found, expected)


def test_gradient_variance_equals_reference():
    grads = shared.mixed_list(1)
    previous, variances = states(grads, 2), [s.square() for s in states(grads, 3)]
    weight = 0.3
    expected = []
    for g, old, var in zip(grads, previous, variances, strict=True):
        square = (g.double() - old.double()) ** 2 / 2
        value = var.double() + weight * (square - var.double())
        # The rounding of a difference counts by the size of what is subtracted.
        size = (g.double().abs() + old.double().abs()) ** 2
        expected.append(reference.Exact(value, var.double() + weight * size))
    untouched = shared.clones(grads)
    ops.gradient_variance_(grads, variances, previous, weight=weight)
    for g, old, var, e in zip(grads, previous, variances, expected, strict=True):
        reference.assert_rounded(var, e)
        assert reference.same_bits(old, g.to(old.dtype))
    shared.assert_all_same(grads, untouched)


def test_control_variate_equals_reference():
    grads, anchors = shared.mixed_list(1), shared.mixed_list(2)
    full = states(grads, 3)
    wide = ([t.double() for t in ts] for ts in (grads, anchors, full))
    expected = [
        reference.Exact(g - a + f, g.abs() + a.abs() + f.abs())
        for g, a, f in zip(*wide, strict=True)
    ]
    untouched = shared.clones(anchors + full)
    ops.control_variate_(grads, anchors, full)
    for g, e in zip(grads, expected, strict=True):
        reference.assert_rounded(g, e)
    shared.assert_all_same(anchors + full, untouched)


def test_control_variate_at_the_anchor_is_the_full_gradient():
    # To the last bit, however much larger a minibatch's gradient is.
    grads = [1e4 * g for g in shared.mixed_list(1)]
    full = states(grads, 3)
    ops.control_variate_(grads, shared.clones(grads), full)
    full = [f.to(g.dtype) for f, g in zip(full, grads, strict=True)]
    shared.assert_all_same(grads, full)


def dyadic(*shape, seed, dtype):
    """Multiples of 1/8 in [-2, 2): a few steps on them are free of rounding."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 16, shape, generator=g).to(dtype) / 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sampler", ["sgld", "sghmc", "sgnht"])
def test_zero_temperature_is_sgd_exactly(sampler, dtype):
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
        still, rest = torch.zeros_like(velocity), {"resample_momentum_every": 0}
        state, more = {
            "sgld": ([], {}),
            "sghmc": ([[velocity], []], {"noise_estimate": 0.0, **rest}),
            "sgnht": ([[velocity], [still]], {"thermostat_rate": 0.01}),
        }[sampler]
        if state:
            more["momentum"] = momentum
        stream = {"offsets": [5], "seed": 0, "step": step}
        op = getattr(ops, f"{sampler}_step_")
        op([ours], [grad], *state, [], **common, **more, **stream)
        assert torch.equal(ours, theirs)
    if sampler != "sgld":
        assert torch.equal(velocity, -0.25 * sgd.state[theirs]["momentum_buffer"])


def test_sum_of_squares_equals_reference():
    tensors = shared.mixed_list(1)
    expected = sum(float(t.double().square().sum()) for t in tensors)
    result = ops.sum_of_squares(tensors)
    assert result.dtype == torch.float64 and result.shape == ()
    # Both sums are in float64; all terms are positive.
    assert float(result) == pytest.approx(expected, rel=1e-14, abs=0)
    for t in tensors:
        exact = float(t.double().square().sum())
        assert float(ops.sum_of_squares([t])) == pytest.approx(exact, rel=1e-14, abs=0)


def test_sum_of_squares_of_extreme_values():
    # Squares that overflow or vanish in the tensor's own type.
    for dtype in reference.DTYPES[1:]:
        info = torch.finfo(dtype)
        t = torch.tensor([info.max, info.tiny, -info.max], dtype=dtype)
        expected = float(t.double().square().sum())
        assert float(ops.sum_of_squares([t])) == expected
    assert float(ops.sum_of_squares([torch.empty(0), torch.empty(3, 0)])) == 0.0


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_square_roots_are_correctly_rounded(dtype):
    g = torch.Generator().manual_seed(1)
    tensors = [torch.rand(n, generator=g, dtype=torch.float64) for n in (1, 37, 9999)]
    tensors = [(1e3 * t).to(dtype) for t in tensors]
    # Of a number in a wider type, and rounded once.
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    roots = (np.sqrt(t.to(wide).numpy()) for t in tensors)
    expected = [torch.from_numpy(root).to(dtype) for root in roots]
    ops.square_root_(tensors)
    shared.assert_all_same(tensors, expected)
