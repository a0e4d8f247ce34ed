"""SBPS's operators equal their formulas in float64, to rounding, everywhere."""

import math

import pytest
import torch
from failed_steps import step_fails
from reference import DTYPES, SIZES, Exact, arithmetic, assert_rounded, same_bits
from sbps_chains import N, make, run
from torch import nn
from torch.nn import functional as F

from torch_sgmcmc.core import ops as ops
from torch_sgmcmc.samplers._sbps.event import rate_of
from torch_sgmcmc.samplers._sbps.statistics import Evaluations

DECAY = 0.37  # λ / N


def lists(*kinds, sizes=tuple(SIZES)):
    """Tensors of every size and dtype: "own" in it, else in its arithmetic type."""
    g = torch.Generator().manual_seed(1)
    result = []
    for kind in kinds:
        tensors = []
        for n in sizes:
            for dtype in DTYPES:
                t = torch.randn(n, generator=g, dtype=torch.float64)
                if kind == "positive":
                    t = t.abs() + 0.1
                tensors.append(t.to(dtype if kind == "own" else arithmetic(dtype)))
        result.append(tensors)
    return result


def total(*factors):
    """Sum of products over all elements, and of their absolute values."""
    rows = ([t.double() for t in ts] for ts in zip(*factors, strict=True))
    flat = torch.cat([torch.stack(row).prod(dim=0) for row in rows])
    return math.fsum(flat.tolist()), float(flat.abs().sum())


def assert_sums(sums, *products):
    for got, factors in zip(sums.tolist(), products, strict=True):
        expected, size = total(*factors)
        assert abs(got - expected) <= 1e-13 * size


def with_prior(params, grads):
    return [g.double() + DECAY * p.double() for p, g in zip(params, grads, strict=True)]


def test_place():
    params, origins, directions = lists("own", "state", "state")
    kept = [t.clone() for t in origins + directions]
    ops.sbps_place_(params, origins, directions, time=0.731)
    for p, x, u in zip(params, origins, directions, strict=True):
        # The time is rounded to the arithmetic type.
        time = float(torch.tensor(0.731, dtype=x.dtype))
        move = time * u.double()
        assert_rounded(p, Exact(x.double() + move, x.double().abs() + move.abs()))
    assert all(map(same_bits, kept, origins + directions))


@pytest.mark.parametrize("preconditioned", [False, True])
def test_reflect_and_its_sums(preconditioned):
    params, grads, velocities, scales = lists("own", "own", "state", "positive")
    a = scales if preconditioned else []
    ones = scales if preconditioned else [torch.ones_like(t) for t in scales]
    g = [x * s.double() for x, s in zip(with_prior(params, grads), ones, strict=True)]
    arrays = (params, grads, velocities, a)
    sums = ops.sbps_reflection_sums(*arrays, weight_decay=DECAY)
    assert_sums(sums, (velocities, g), (g, g), (velocities, velocities))
    old = [v.clone() for v in velocities]
    ops.sbps_reflect_(*arrays, weight_decay=DECAY, scale=0.8, gain=1.7)
    for i, v in enumerate(velocities):
        before = 0.8 * old[i].double()
        terms = grads[i].double().abs() + DECAY * params[i].double().abs()
        size = before.abs() + 1.7 * ones[i].double() * terms
        assert_rounded(v, Exact(before - 1.7 * g[i], size))


def test_a_reflection_keeps_length_and_turns_the_component():
    g = torch.Generator().manual_seed(2)
    p, grad, v = ([torch.randn(40, generator=g, dtype=torch.float64)] for _ in range(3))
    of, decay = (p, grad, v, []), {"weight_decay": DECAY}
    along, square, length = ops.sbps_reflection_sums(*of, **decay).tolist()
    scale = length**-0.5
    ops.sbps_reflect_(*of, **decay, scale=scale, gain=2 * along / square * scale)
    after, _, one = ops.sbps_reflection_sums(*of, **decay).tolist()
    assert after == pytest.approx(-along * scale, rel=1e-12)
    assert one == pytest.approx(1, abs=1e-14)


def test_adapt():
    params, grads, squares = lists("own", "own", "positive")
    g, old = with_prior(params, grads), [v.clone() for v in squares]
    ops.sbps_adapt_(params, grads, squares, weight_decay=DECAY, decay=0.83)
    for i, v in enumerate(squares):
        terms = grads[i].double().abs() + DECAY * params[i].double().abs()
        before = 0.83 * old[i].double()
        assert_rounded(v, Exact(before + 0.17 * g[i] ** 2, before + 0.17 * terms**2))


def test_precondition():
    squares, velocities, a, u = lists("positive", "state", "state", "state")
    squares[0].zero_()
    expected = [1 / (v.double().sqrt() + 0.05) for v in squares]
    got = float(ops.sbps_preconditioner_sum(squares, eps=0.05))
    flat = torch.cat(expected)
    assert got == pytest.approx(math.fsum(flat.tolist()), rel=1e-13)
    ops.sbps_precondition_(squares, velocities, a, u, eps=0.05, scale=0.3)
    for i, v in enumerate(velocities):
        scale = 0.3 * expected[i]
        assert_rounded(a[i], Exact(scale, scale))
        along = scale * v.double()
        assert_rounded(u[i], Exact(along, along.abs()))


def test_sums_of_a_line():
    origins, directions = lists("state", "state")
    sums = ops.sbps_line_sums(origins, directions)
    assert_sums(sums, (origins, directions), (directions, directions))


def test_line_sums_in_the_pass_of_a_bounce():
    """The same bits of both as by themselves, and nothing else has changed."""
    params, grads, velocities, origins = lists("own", "own", "state", "state")
    kept = [t.clone() for t in params + grads + origins]
    turned = [v.clone() for v in velocities]
    turn = {"weight_decay": DECAY, "scale": 0.8, "gain": 1.7}
    ops.sbps_reflect_(params, grads, turned, [], **turn)
    sums = ops.sbps_reflect_sums_(params, grads, velocities, origins, **turn)
    assert same_bits(sums, ops.sbps_line_sums(origins, turned))
    assert all(map(same_bits, velocities, turned))
    assert all(map(same_bits, kept, params + grads + origins))


def test_sums_of_a_line_in_the_pass_that_makes_its_direction():
    squares, velocities, a, u, origins = lists("positive", *(["state"] * 4))
    kept = [t.clone() for t in squares + velocities + origins]
    scales, along = ([torch.empty_like(t) for t in ts] for ts in (a, u))
    by = {"eps": 0.05, "scale": 0.3}
    ops.sbps_precondition_(squares, velocities, scales, along, **by)
    sums = ops.sbps_precondition_sums_(squares, velocities, a, u, origins, **by)
    assert same_bits(sums, ops.sbps_line_sums(origins, along))
    assert all(map(same_bits, a + u, scales + along))
    assert all(map(same_bits, kept, squares + velocities + origins))


def moments(losses, derivatives):
    """Bad losses; mean and sample variance of the derivatives."""
    bad, mean, of_mean = rate_of(losses, derivatives, 1.0, 1.0, True, 0.0)
    return bad, mean, of_mean * len(losses)


def test_moments():
    g = torch.Generator().manual_seed(3)
    for n in (2, 3, 100):
        d = 1e6 + torch.randn(n, generator=g, dtype=torch.float64)
        bad, mean, variance = moments(torch.ones(n), d)
        assert bad == 0
        assert mean == pytest.approx(float(d.mean()), rel=1e-15)
        assert variance == pytest.approx(float(d.var()), rel=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_of_any_row(dtype):
    """Other types and strides; losses that are not finite are counted."""
    table = torch.randn(9, 3, generator=torch.Generator().manual_seed(4)).to(dtype)
    table[[0, 4, 7], 1] = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    bad, mean, variance = moments(table[:, 1], table[:, 2])
    assert bad == 3
    assert mean == pytest.approx(float(table[:, 2].double().mean()), rel=1e-14)
    assert variance == pytest.approx(float(table[:, 2].double().var()), rel=1e-14)
    one = torch.full((), 0.25, dtype=dtype).expand(5)
    assert moments(one, one) == (0, 0.25, 0)


def test_layouts():
    """Every argument in another memory format than the parameter."""
    g = torch.Generator().manual_seed(4)

    def make(layout):
        t = torch.randn(3, 4, 5, 2, generator=g)
        if layout == 1:
            return t.to(memory_format=torch.channels_last)
        return t.repeat_interleave(2, dim=1)[:, ::2] if layout == 2 else t

    for first in range(3):
        for other in range(3):
            p, x, u, grad = (make(k) for k in (first, other, first, other))
            ops.sbps_place_([p], [x], [u], time=0.5)
            torch.testing.assert_close(p, x + 0.5 * u)
            v = make(other)
            expected = 0.9 * v - 0.3 * (grad + 0.5 * p)
            turn = {"weight_decay": 0.5, "scale": 0.9, "gain": 0.3}
            line = ops.sbps_reflect_sums_([p], [grad], [v], [x], **turn)
            torch.testing.assert_close(v, expected)
            sums = torch.stack([(t * v).double().sum() for t in (x, v)])
            torch.testing.assert_close(line, sums, rtol=1e-5, atol=1e-5)
            v = make(other)
            expected = 0.9 * v - 0.3 * u * (grad + 0.5 * p)
            ops.sbps_reflect_([p], [grad], [v], [u], **turn)
            torch.testing.assert_close(v, expected)
            sums = ops.sbps_reflection_sums([p], [grad], [v], [u], weight_decay=0.5)
            assert float(sums[2]) == pytest.approx(float(v.double().square().sum()))


def worst_speed(dtype, normalised):
    """The largest error of |v|² over 20,000 bounces, in units of rounding."""
    g = torch.Generator().manual_seed(5)
    p = [torch.zeros(7, dtype=dtype)]
    v = [torch.randn(7, generator=g, dtype=dtype)]
    v[0] /= v[0].norm()
    many = torch.randn(1000, 7, generator=g, dtype=dtype).unbind()
    worst, decay = 0.0, {"weight_decay": 0.0}
    for event in range(20_000):
        of = (p, [many[event % 1000]], v, [])
        along, square, length = ops.sbps_reflection_sums(*of, **decay).tolist()
        worst = max(worst, abs(length - 1))
        scale = length**-0.5 if normalised else 1.0
        ops.sbps_reflect_(*of, **decay, scale=scale, gain=2 * along / square * scale)
    return worst / torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_speed_stays_1(dtype):
    """However many bounces there are: each starts from the speed as it is.

    So the error is one event's rounding, of |v|² and of the gain, which counts up to
    twice. Without the scale it grows as the root of the number of bounces, and is more
    than four times the bound by now.
    """
    assert worst_speed(dtype, normalised=True) < 16
    assert worst_speed(dtype, normalised=False) > 4 * 16


class Net(nn.Module):
    """A little of everything, with a parameter that is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten())
        self.head = nn.Linear(8, 3)
        self.tied = nn.Linear(3, 3)
        self.tied2 = nn.Linear(3, 3, bias=False)
        self.tied2.weight = self.tied.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, x):
        return self.tied2(self.tied(self.head(self.body(x))).tanh())


def assert_same_places(places):
    for a, b in zip(*places, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def net_closure(net):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(N, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (N,), generator=generator)

    def closure():
        index = torch.randperm(N, generator=generator)[:10]
        return F.cross_entropy(net(x[index]), y[index], reduction="none")

    return closure


@pytest.mark.parametrize("always", [False, True])
def test_forward_and_reverse_mode_agree(always):
    places, counts = [], []
    learns = {"preconditioned": True, "adapt_every_step": True, "eps": 0.1}
    for forward in (False, True):
        net = Net()
        model = net if forward else None
        sampler = make(net.parameters(), model=model, **(learns if always else {}))
        places.append(run(sampler, net_closure(net), 100)[1])
        counts.append(sampler.evaluations)
        bounces = sampler.diagnostics.bounces
        assert 10 < bounces < 60
        assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        assert all(p.grad is None for p in net.parameters())
        # What the loss does not use moves all the same.
        assert (net.unused != 1).all()
    assert_same_places(places)
    # In forward mode gradients at bounces alone, unless it learns from all.
    assert counts[0] == Evaluations(1000, 1000)
    assert counts[1] == Evaluations(1000, 1000 if always else 10 * bounces)


def test_a_resumed_run_counts_the_same_evaluations():
    net, other = Net(), Net()
    sampler = make(net.parameters(), model=net)
    run(sampler, net_closure(net), 5)
    other.load_state_dict(net.state_dict())
    resumed = make(other.parameters(), model=other)
    resumed.load_state_dict(sampler.state_dict())
    for each, model in ((sampler, net), (resumed, other)):
        run(each, net_closure(model), 30)
    assert sampler.diagnostics.bounces > 1
    assert resumed.evaluations == sampler.evaluations


def test_forward_mode_restores_the_model():
    net = Net()
    sampler = make(net.parameters(), model=net)
    before = dict(net.named_parameters(remove_duplicate=False))

    def broken():
        assert net.head.weight is not before["head.weight"]
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        sampler.step(broken)
    after = dict(net.named_parameters(remove_duplicate=False))
    assert all(after[key] is before[key] for key in before)


def test_forward_mode_without_the_model():
    net, other = Net(), Net()
    message = (
        "SBPS got losses from the closure that do not depend on the parameters of its "
        "model (does the closure call another model?)"
    )
    sampler = make(net.parameters(), model=net)
    step_fails(sampler, net_closure(other), RuntimeError, message)


@pytest.mark.parametrize("change", ["parameter", "name", "module", "tie"])
def test_a_model_that_is_changed_between_steps(change):
    """Parameters are put in their places wherever those are now."""
    places = []
    for forward in (False, True):
        net = Net()
        sampler = make(net.parameters(), model=net if forward else None)
        closure = net_closure(net)
        run(sampler, closure, 20)
        if change == "parameter":  # another one in its place, and it in another's
            net.head.bias, net.tied.bias = net.tied.bias, net.head.bias
        elif change == "name":
            weight = net.tied2.weight
            del net.tied2.weight
            net.tied2.register_parameter("other", weight)
            net.tied2.forward = lambda x, m=net.tied2: F.linear(x, m.other)
        elif change == "module":
            old, net.head = net.head, nn.Linear(8, 3).double()
            net.head.weight, net.head.bias = old.weight, old.bias
        else:
            net.tied2.bias = net.tied.bias
        run(sampler, closure, 20)
        assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        assert change != "name" or list(net.tied2._parameters) == ["bias", "other"]
        places.append(run(sampler, closure, 20)[1])
    assert_same_places(places)


def test_a_model_that_keeps_copies_is_found_out():
    class Copying(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.b = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.kept = [self.b]

        def forward(self):
            return self.a + self.kept[0] * torch.arange(3.0, dtype=torch.float64)

    net = Copying()
    sampler = make(net.parameters(), model=net)
    with pytest.raises(RuntimeError, match=r"do not agree with the gradient.*RNNs do"):
        sampler.step(net)
    sampler.model = None
    sampler.step(net)
