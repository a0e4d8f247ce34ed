"""SBPS as a class: its closure, hooks, averages, state, and what it refuses.

Its law is the subject of ``test_sbps_law.py``, its operators of
``test_sbps_operators.py``, its clock of ``cpp/bounce_clock_test.cpp``.
"""

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from reference import DTYPES, same_bits
from short_chains import assert_same, make_params
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import torch_sgmcmc as sg
from torch_sgmcmc import _C

Closure = Callable[[], Any]
N = 50
NO_CLOSURE = """\
SBPS.step() needs a closure, which returns the losses of the examples:

    def closure():
        x, y = draw_minibatch()  # a fresh one at each call, independent of all others
        return F.cross_entropy(model(x), y, reduction="none")

    sampler.step(closure)"""


class Draws:
    """Minibatches of a Gaussian mean: losses ‖θ - xᵢ‖² / 2, of all parameters."""

    def __init__(self, params: list[nn.Parameter], n: int = 10) -> None:
        self.params, self.n = params, n
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self) -> Tensor:
        assert torch.is_grad_enabled()
        index = torch.randperm(N, generator=self.generator)[: self.n].double()
        total = torch.zeros(self.n, dtype=torch.float64)
        for p in self.params:
            x = torch.sin(index[:, None] + torch.arange(p.numel()))
            delta = p.double().flatten() - x
            total = total + 0.5 * delta.square().sum(dim=1)
        return total


def make(params: Any, **settings: Any) -> sg.SBPS:
    shared = {"num_data": N, "prior_precision": 20.0, "seed": 5}
    return sg.SBPS(params, **{**shared, **settings})


def run(
    sampler: sg.SBPS, closure: Closure, steps: int
) -> tuple[list[float], list[Tensor]]:
    """Times and places of events."""
    params = sampler._all_params()
    times, places = [], []
    for _ in range(steps):
        sampler.step(closure)
        times.append(sampler.trajectory_time)
        places.append(torch.cat([p.detach().flatten().double() for p in params]))
    return times, places


def two(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.zeros(3, dtype=dtype)),
        nn.Parameter(torch.ones(2, 2, dtype=dtype)),
    ]


def snapshot(sampler: sg.SBPS) -> Any:
    params = [p.detach() for p in sampler._all_params()]
    return copy.deepcopy([params, sampler.state_dict()])


def assert_unchanged(sampler: sg.SBPS, before: Any) -> None:
    params, state = snapshot(sampler)
    assert_same(params, before[0])
    assert state["param_groups"] == before[1]["param_groups"]
    assert state["state"].keys() == before[1]["state"].keys()
    torch.testing.assert_close(state["state"], before[1]["state"], rtol=0, atol=0)


def fails(
    sampler: sg.SBPS, closure: Closure | None, kind: type[Exception], message: str
) -> None:
    """The step fails, and neither parameters nor state have changed."""
    before = snapshot(sampler)
    with pytest.raises(kind) as error:
        sampler.step(closure)
    assert str(error.value) == message
    assert_unchanged(sampler, before)


# ---- What is refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("num_data", 0, "must be finite and > 0"),
        ("prior_precision", -1.0, "must be finite and >= 0"),
        ("temperature", 0, "must be finite and > 0"),
        ("confidence", -0.5, "must be finite and >= 0"),
        ("confidence", float("nan"), "must be finite and >= 0"),
        ("refresh_rate", float("inf"), "must be finite and >= 0"),
        ("decay", 1.0, "must be in [0, 1)"),
        ("eps", 0, "must be finite and > 0"),
        ("sample_interval", 0.0, "must be finite and > 0"),
    ],
)
def test_hyperparameters_out_of_range(name: str, value: float, wanted: str) -> None:
    message = f"Invalid {name}: {value} ({wanted})"
    with pytest.raises(ValueError) as error:
        make(two(), **{name: value})
    assert str(error.value) == message
    sampler = make(two())
    for group in sampler.param_groups:
        group[name] = value
    fails(sampler, Draws(sampler._all_params()), ValueError, message)


@pytest.mark.parametrize("name", ["preconditioned", "adapt", "replacement"])
def test_switches_are_bools(name: str) -> None:
    with pytest.raises(TypeError) as error:
        make(two(), **{name: 1})
    assert str(error.value) == f"Invalid {name}: 1 (must be a bool)"


def test_what_a_group_cannot_have_alone() -> None:
    p, q = two()
    with pytest.raises(ValueError) as error:
        make([{"params": [p], "confidence": 2.0}])
    assert str(error.value) == (
        "Invalid param group: 'confidence' is managed by SBPS and cannot be set for a "
        "group"
    )
    sampler = make([{"params": [p]}, {"params": [q], "prior_precision": 1.0}])
    sampler.param_groups[1]["temperature"] = 2.0
    message = (
        "Invalid temperature: [1.0, 2.0] in the param groups (must be equal: there is "
        "one particle for all)"
    )
    fails(sampler, Draws([p, q]), ValueError, message)


def test_models_that_are_none() -> None:
    params = two()
    with pytest.raises(TypeError) as error:
        make(params, model=len)
    assert str(error.value) == (
        "Invalid model: got builtin_function_or_method (must be a torch.nn.Module or "
        "None)"
    )
    with pytest.raises(ValueError) as error:
        make(params, model=nn.Linear(2, 2))
    assert str(error.value) == (
        "Invalid model: 2 of the 2 parameters of SBPS are not parameters of it"
    )


def with_backward(params: list[nn.Parameter]) -> Tensor:
    losses = Draws(params)()
    losses.sum().backward(retain_graph=True)
    return losses


def with_nan(params: list[nn.Parameter]) -> Tensor:
    return Draws(params)() + torch.tensor([float("nan"), float("inf")] + 8 * [0.0])


def with_infinite_slope(params: list[nn.Parameter]) -> Tensor:
    return Draws(params)() + (0 * params[0].sum()).sqrt()


BAD_CLOSURES: dict[str, tuple[Any, type[Exception], str]] = {
    "no tensor": (
        lambda p: 3.0,
        TypeError,
        "SBPS got a float from the closure (must return the losses of the examples, a "
        "Tensor of shape [n])",
    ),
    "backward": (
        with_backward,
        RuntimeError,
        "SBPS found gradients after the closure: it must return the losses of the "
        "examples and not call backward()",
    ),
    "reduced": (
        lambda p: Draws(p)().mean(),
        RuntimeError,
        "SBPS got losses of shape [] from the closure (must be those of the examples, "
        "of shape [n]: use reduction='none')",
    ),
    "a matrix": (
        lambda p: Draws(p)()[:, None],
        RuntimeError,
        "SBPS got losses of shape [10, 1] from the closure (must be those of the "
        "examples, of shape [n])",
    ),
    "one": (
        lambda p: Draws(p, 1)(),
        RuntimeError,
        "SBPS got the loss of 1 example from the closure (must be of 2 at least, to "
        "estimate the noise of a minibatch)",
    ),
    "too many": (
        lambda p: torch.cat([Draws(p, 50)(), Draws(p, 1)()]),
        RuntimeError,
        "SBPS got the losses of 51 examples from the closure, and num_data = 50 (must "
        "not be more; if examples are drawn with replacement, set replacement=True)",
    ),
    "not finite": (
        with_nan,
        RuntimeError,
        "SBPS got 2 of 10 losses from the closure that are not finite",
    ),
    "slopes not finite": (
        with_infinite_slope,
        RuntimeError,
        "SBPS got losses from the closure whose derivatives are not finite",
    ),
    "no graph": (
        lambda p: Draws(p)().detach(),
        RuntimeError,
        "SBPS got losses from the closure that do not depend on its parameters (were "
        "they computed under torch.no_grad()?)",
    ),
    "others' graph": (
        lambda p: Draws(two())(),
        RuntimeError,
        "SBPS got losses from the closure that do not depend on its parameters (were "
        "they computed under torch.no_grad()?)",
    ),
}


@pytest.mark.parametrize("bad", BAD_CLOSURES)
@pytest.mark.parametrize("done", [0, 7])
def test_closures_that_are_wrong(bad: str, done: int) -> None:
    closure, kind, message = BAD_CLOSURES[bad]
    params, others = two(), two()
    sampler, twin = make(params), make(others)
    good, same = Draws(params), Draws(others)
    run(sampler, good, done)
    run(twin, same, done)
    fails(sampler, lambda: closure(params), kind, message)
    assert all(p.grad is None for p in params)
    # And the chain goes on as if nothing had been.
    run(sampler, good, 5)
    run(twin, same, 5)
    assert_same(params, others)


def test_exceptions_of_closures_and_hooks_change_nothing() -> None:
    params, others = two(), two()
    samplers = [make(p, sample_interval=0.01) for p in (params, others)]
    for p, sampler in zip((params, others), samplers, strict=True):
        run(sampler, Draws(p), 6)
    sampler, twin = samplers
    before = snapshot(sampler)

    def broken(*_: object) -> None:
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        sampler.step(broken)
    assert_unchanged(sampler, before)
    handle = sampler.register_sample_hook(broken)
    with pytest.raises(KeyError, match="data"):
        for _ in range(20):
            before = snapshot(sampler)
            sampler.step(Draws(params))
            twin.step(Draws(others))
    assert_unchanged(sampler, before)
    handle.remove()
    sampler.step(Draws(params))
    twin.step(Draws(others))
    assert_same(params, others)


def test_a_step_without_closure_says_how_to_write_one() -> None:
    fails(make(two()), None, TypeError, NO_CLOSURE)


def test_nothing_to_move() -> None:
    p = nn.Parameter(torch.zeros(3), requires_grad=False)
    message = "SBPS has no parameter that requires gradients"
    fails(make([p]), lambda: p, RuntimeError, message)


def test_samples_need_an_interval() -> None:
    with pytest.raises(ValueError) as error:
        make(two()).register_sample_hook(lambda sampler, time: None)
    assert str(error.value) == (
        "Invalid sample_interval: None (must be a trajectory time, for there to be "
        "samples)"
    )


def test_state_dicts_with_a_broken_clock() -> None:
    sampler = make(two())
    state = sampler.state_dict()
    for group in state["param_groups"]:
        group["clock"] = [0.0] * 5
    with pytest.raises(ValueError) as error:
        sampler.load_state_dict(state)
    assert str(error.value) == (
        "Invalid clock: it has 5 numbers (must be 7, and 3 for each of at most 32 "
        "observations)"
    )


# ---- Forward mode ------------------------------------------------------------------


class Net(nn.Module):
    """A little of everything, with a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten())
        self.head = nn.Linear(8, 3)
        self.tied = nn.Linear(3, 3)
        self.tied2 = nn.Linear(3, 3, bias=False)
        self.tied2.weight = self.tied.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.tied2(self.tied(self.head(self.body(x))).tanh())


def net_closure(net: nn.Module) -> Closure:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(N, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (N,), generator=generator)

    def closure() -> Tensor:
        index = torch.randperm(N, generator=generator)[:10]
        return F.cross_entropy(net(x[index]), y[index], reduction="none")

    return closure


def test_forward_and_reverse_mode_agree() -> None:
    places, counts = [], []
    for forward in (False, True):
        net = Net()
        sampler = make(net.parameters(), model=net if forward else None)
        places.append(run(sampler, net_closure(net), 100)[1])
        counts.append(sampler.evaluations)
        bounces = sampler.diagnostics.bounces
        assert bounces > 10
        assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        assert all(p.grad is None for p in net.parameters())
        # What the loss does not use moves all the same.
        assert (net.unused != 1).all()
    for a, b in zip(*places, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    # In forward mode gradients at bounces alone, and the first, to compare.
    assert counts[0] == sg.sbps.Evaluations(1000, 1000)
    assert counts[1] == sg.sbps.Evaluations(1000, 10 * (bounces + 1))


def test_forward_mode_restores_the_model() -> None:
    net = Net()
    sampler = make(net.parameters(), model=net)
    before = dict(net.named_parameters(remove_duplicate=False))

    def broken() -> None:
        assert net.head.weight is not before["head.weight"]
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        sampler.step(broken)
    after = dict(net.named_parameters(remove_duplicate=False))
    assert all(after[key] is before[key] for key in before)


def test_forward_mode_without_the_model() -> None:
    net, other = Net(), Net()
    message = (
        "SBPS got losses from the closure that do not depend on the parameters of its "
        "model (does the closure call another model?)"
    )
    fails(make(net.parameters(), model=net), net_closure(other), RuntimeError, message)


def test_a_model_that_keeps_copies_is_found_out() -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.b = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.kept = [self.b]

        def forward(self) -> Tensor:
            return self.a + self.kept[0] * torch.arange(3.0, dtype=torch.float64)

    net = Copying()
    sampler = make(net.parameters(), model=net)
    with pytest.raises(RuntimeError, match=r"do not agree with the gradient.*RNNs do"):
        sampler.step(net)
    sampler.model = None
    sampler.step(net)


# ---- Samples and averages ----------------------------------------------------------


def test_samples_are_points_of_the_trajectory() -> None:
    params = two()
    closure = Draws(params)
    sampler = make(params, sample_interval=0.013)
    start = torch.cat([p.detach().flatten() for p in params])
    samples: list[tuple[float, Tensor]] = []

    def keep(s: sg.SBPS, time: float) -> None:
        assert s is sampler and not torch.is_grad_enabled()
        samples.append((time, torch.cat([p.detach().flatten() for p in params])))

    handle = sampler.register_sample_hook(keep)
    times, places = run(sampler, closure, 200)
    events = [(0.0, start), *zip(times, places, strict=True)]
    expected = [0.013 * (i + 1) for i in range(int(times[-1] / 0.013))]
    assert [time for time, _ in samples] == expected
    several = 0
    for (t0, a), (t1, b) in pairwise(events):
        inside = [(t, x) for t, x in samples if t0 < t <= t1]
        several += len(inside) > 1
        for t, x in inside:
            line = a + (t - t0) / (t1 - t0) * (b - a)
            torch.testing.assert_close(x, line, rtol=0, atol=1e-12)
    assert several > 10
    handle.remove()
    run(sampler, closure, 20)
    assert len(samples) == len(expected)


def test_hooks_do_not_change_the_chain() -> None:
    chains = []
    for interval in (None, 0.01, 0.3):
        params = make_params()
        sampler = make(params, sample_interval=interval)
        if interval is not None:
            sampler.register_sample_hook(lambda s, t: None)
            sg.TimeAverage(sampler, lambda: torch.ones(1))
        run(sampler, Draws(params), 30)
        chains.append(params)
    assert_same(chains[0], chains[1])
    assert_same(chains[0], chains[2])


def test_another_interval_continues_at_its_multiples() -> None:
    params = two()
    sampler = make(params, sample_interval=0.02)
    times: list[float] = []
    sampler.register_sample_hook(lambda s, t: times.append(t))
    run(sampler, Draws(params), 100)
    now = sampler.trajectory_time
    times.clear()
    sampler.param_groups[0]["sample_interval"] = 0.05
    run(sampler, Draws(params), 100)
    first = int(now / 0.05) + 1
    assert times[:3] == [0.05 * (first + i) for i in range(3)]


def segments(times: list[float], places: list[Tensor]) -> Any:
    start = (0.0, torch.cat([torch.zeros(3), torch.ones(4)]).double())
    return pairwise([start, *zip(times, places, strict=True)])


def test_time_averages_are_integrals_along_the_lines() -> None:
    params = two()
    sampler = make(params)
    average = sg.TimeAverage(sampler)
    square = sg.TimeAverage(sampler, lambda: params[0].square())
    wave = sg.TimeAverage(sampler, lambda: (9 * params[1]).sin(), max_piece=0.01)
    times, places = run(sampler, Draws(params), 150)
    first = second = waves = torch.zeros(7, dtype=torch.float64)
    for (t0, a), (t1, b) in segments(times, places):
        first = first + (t1 - t0) * (a + b) / 2
        second = second + (t1 - t0) * (a * a + a * b + b * b) / 3
        nodes = (torch.arange(200) + 0.5)[:, None] / 200
        waves = waves + (t1 - t0) * (9 * (a + nodes * (b - a))).sin().mean(0)
    mean, mean_square, waves = (v / times[-1] for v in (first, second, waves))
    assert average.time == pytest.approx(times[-1], rel=1e-12)
    for p, part in zip(params, (slice(0, 3), slice(3, 7)), strict=True):
        torch.testing.assert_close(average.mean(p).flatten(), mean[part])
        torch.testing.assert_close(average.mean_square(p).flatten(), mean_square[part])
        variance = (mean_square - mean**2)[part]
        torch.testing.assert_close(average.variance(p).flatten(), variance)
    torch.testing.assert_close(square.value, mean_square[:3])
    torch.testing.assert_close(wave.value.flatten(), waves[3:], atol=1e-4, rtol=0)

    # Saved and continued.
    rest = sg.TimeAverage(sampler)
    rest.load_state_dict(copy.deepcopy(average.state_dict()))
    run(sampler, Draws(params), 5)
    assert_same([average.mean(p) for p in params], [rest.mean(p) for p in params])
    rest.remove()
    before = rest.time
    run(sampler, Draws(params), 5)
    assert rest.time == before < average.time


def test_time_averages_refuse() -> None:
    params = two()
    sampler = make(params)
    with pytest.raises(TypeError) as error:
        sg.TimeAverage(sg.SGLD(params, lr=1, num_data=1))  # type: ignore[arg-type]
    assert str(error.value) == "Invalid sampler: got SGLD (must be an SBPS)"
    with pytest.raises(ValueError) as error:
        sg.TimeAverage(sampler, max_piece=0.0)
    assert str(error.value) == "Invalid max_piece: 0.0 (must be finite and > 0)"
    average = sg.TimeAverage(sampler)
    with pytest.raises(ValueError) as error:
        average.mean(params[1])
    assert str(error.value) == "There is no average of this parameter, of shape [2, 2]"
    with pytest.raises(ValueError) as error:
        _ = average.value
    assert str(error.value) == "There is no average of a function yet"
    state = {"time": 1.0, "means": {0: (torch.ones(9), torch.ones(9))}, "value": None}
    with pytest.raises(ValueError) as error:
        average.load_state_dict(state)
    assert str(error.value) == (
        "Invalid state_dict: it has an average of shape [9] for parameter 0"
    )


# ---- Diagnostics -------------------------------------------------------------------


def test_diagnostics() -> None:
    params = two()
    sampler = make(params, refresh_rate=3.0)
    empty = sampler.diagnostics
    assert empty.bounces == 0 and empty.trajectory_time == 0
    assert empty.bounce_rate != empty.bounce_rate  # NaN
    times, places = run(sampler, Draws(params), 300)
    d = sampler.diagnostics
    group = sampler.param_groups[0]
    lengths = [(b - a).norm() for (_, a), (_, b) in segments(times, places)]
    assert d.trajectory_time == times[-1]
    assert float(sum(lengths)) == pytest.approx(times[-1], rel=1e-9)
    assert d.bounce_rate == d.bounces / times[-1]
    assert d.proposals_per_bounce == group["num_proposals"] / d.bounces > 1
    assert d.mean_segment_length == times[-1] / (d.bounces + d.refreshments)
    assert d.violation_rate == group["num_violations"] / group["num_proposals"]
    kinds = ("num_looks", "num_proposals", "num_refreshments")
    assert sum(group[kind] for kind in kinds) == 300
    assert min(d.bounces, d.refreshments) > 10


def test_many_violations_are_warned_of_once() -> None:
    params = two()
    sampler = make(params)
    draws, noise = Draws(params), torch.Generator().manual_seed(1)

    # Noise that all examples share: their spread says nothing of it.
    def closure() -> Tensor:
        common = 30 * torch.randn((), generator=noise)
        return draws() + common * torch.stack([p.sum() for p in params]).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(sampler, closure, 1500)
    mine = [w for w in caught if "proposals of SBPS" in str(w.message)]
    assert len(mine) == 1 and mine[0].filename == __file__
    assert "0.1% are expected with confidence = 3" in str(mine[0].message)
    assert "use a larger confidence" in str(mine[0].message)


def test_few_violations_are_not() -> None:
    params = two()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = make(params)
        run(sampler, Draws(params), 1500)
    assert sampler.param_groups[0]["num_proposals"] > 1000
    assert sampler.diagnostics.violation_rate < 0.02


# ---- The order of the data ---------------------------------------------------------


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(N)), **options)


def draw_from(data: Any) -> Closure:
    draws = Draws(two())
    return lambda: (data, draws)[1]()


class Caller:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __call__(self) -> None: ...

    def method(self) -> None: ...


def warned(closure: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises((RuntimeError, TypeError)):
            make(two()).step(closure)
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def test_epoch_shuffling_is_warned_of() -> None:
    shuffled = loader(batch_size=5, shuffle=True)
    for data in (shuffled, loader(batch_size=5), iter(shuffled)):
        for closure in (
            draw_from(data),
            Caller(data),
            Caller(data).method,
            functools.partial(lambda d: None, data),
            lambda d=data: None,
        ):
            (message,) = warned(closure)
            assert message.startswith("The closure of SBPS draws from a DataLoader")
            assert "an IndependentBatchSampler as its batch_sampler" in message
    assert "(RandomSampler)" in warned(draw_from(shuffled))[0]


def test_independent_minibatches_are_not() -> None:
    data = TensorDataset(torch.arange(N))
    afresh = BatchSampler(RandomSampler(data, replacement=True), 5, drop_last=False)
    for fine in (loader(batch_sampler=afresh), loader(batch_sampler=[[1, 2]]), data):
        assert warned(draw_from(fine)) == []


# ---- pSBPS -------------------------------------------------------------------------


def test_the_preconditioner_learns_until_it_is_frozen() -> None:
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 10.0, 100.0])

    def closure() -> Tensor:
        x = torch.randn(10, 3, generator=generator, dtype=torch.float64)
        return 0.5 * (scale * (p - x)).square().sum(dim=1)

    sampler = make([p], preconditioned=True, replacement=True, prior_precision=0.0)
    sampler.step(closure)
    state = sampler.state[p]
    assert state["preconditioner"].tolist() == [1.0] * 3
    run(sampler, closure, 1500)
    state = sampler.state[p]
    assert sampler.diagnostics.bounces > 50
    a = state["preconditioner"]
    assert a.mean() == pytest.approx(1, abs=1e-12)
    # Gradients have standard deviations of the squared scales.
    assert a[0] > 30 * a[1] > 900 * a[2]
    torch.testing.assert_close(state["direction"], a * state["velocity"])
    assert state["velocity"].norm() == pytest.approx(1, abs=1e-14)

    kept = {key: state[key].clone() for key in ("square_average", "preconditioner")}
    sampler.param_groups[0]["adapt"] = False
    bounces = sampler.diagnostics.bounces
    run(sampler, closure, 300)
    assert sampler.diagnostics.bounces > bounces
    for key, value in kept.items():
        torch.testing.assert_close(sampler.state[p][key], value, rtol=1e-15, atol=0)


# ---- What users change ---------------------------------------------------------------


def test_a_parameter_changed_from_outside() -> None:
    params = two()
    sampler = make(params)
    closure = Draws(params)
    run(sampler, closure, 20)
    velocity = sampler.state[params[0]]["velocity"].clone()
    with torch.no_grad():
        params[0].add_(5.0)
        jumped = params[0].clone()
    looks = sampler.param_groups[0]["num_looks"]
    sampler.step(closure)  # observes there, with the same velocity
    assert torch.equal(params[0], jumped)
    assert sampler.param_groups[0]["num_looks"] == looks + 1
    assert torch.equal(sampler.state[params[0]]["velocity"], velocity)
    params[1].data = torch.full((2, 2), 7.0, dtype=torch.float64)
    sampler.step(closure)
    assert (params[1] == 7).all()


def test_a_parameter_changed_and_put_back() -> None:
    params, others = make_params(torch.bfloat16), make_params(torch.bfloat16)
    sampler, twin = make(params), make(others)
    for p, s in ((params, sampler), (others, twin)):
        run(s, Draws(p), 20)
    with torch.no_grad():
        for p in params:
            p.neg_()
            p.neg_()
    for p, s in ((params, sampler), (others, twin)):
        run(s, Draws(p), 20)
    assert_same(params, others)


def test_another_target_is_observed_afresh() -> None:
    params = two()
    sampler = make([{"params": [p]} for p in params])
    closure = Draws(params)
    run(sampler, closure, 20)
    precision = sg.GammaPrecision(sampler)
    precision.step()
    before = [p.detach().clone() for p in params]
    looks = sampler.param_groups[0]["num_looks"]
    state = closure.generator.get_state()
    sampler.step(closure)
    assert_same(before, [p.detach() for p in params])
    assert sampler.param_groups[0]["num_looks"] == looks + 1
    clock = _C.BounceClock.load(sampler.param_groups[0]["clock"])
    ((time, value, _),) = clock.observations
    assert time == 0
    # G has the new priors in it: they alone differ from a twin's at the same place.
    others = [nn.Parameter(p.detach().clone()) for p in params]
    twin = make([{"params": [p]} for p in others])
    twin.load_state_dict(copy.deepcopy(sampler.state_dict()))
    for group, other in zip(twin.param_groups, sampler.param_groups, strict=True):
        group["prior_precision"] = other["prior_precision"] + 2.0
    same = Draws(others)
    same.generator.set_state(state)
    twin.step(same)
    ((_, other_value, _),) = _C.BounceClock.load(
        twin.param_groups[0]["clock"]
    ).observations
    along = sum(
        float((p.detach() * sampler.state[p]["velocity"]).sum()) for p in params
    )
    assert other_value - value == pytest.approx(2.0 * along, rel=1e-9)
    run(sampler, closure, 20)


def test_frozen_parameters_stand_still() -> None:
    params = two()
    sampler = make(params)
    closure = Draws(params)
    run(sampler, closure, 10)
    params[1].requires_grad_(False)
    kept = params[1].clone()
    run(sampler, closure, 10)
    assert torch.equal(params[1], kept)
    assert set(sampler.state) == {params[0]}
    assert sampler.state[params[0]]["velocity"].norm() == pytest.approx(1)
    params[1].requires_grad_(True)
    run(sampler, closure, 10)
    assert not torch.equal(params[1], kept)
    velocity = [sampler.state[p]["velocity"].flatten() for p in params]
    assert torch.cat(velocity).norm() == pytest.approx(1)


def test_a_group_added_later_moves_along() -> None:
    p, q = two()
    sampler = make([p])
    run(sampler, Draws([p]), 10)
    sampler.add_param_group({"params": [q], "prior_precision": 3.0})
    run(sampler, Draws([p, q]), 10)
    assert (q != 1).all()
    assert sampler.param_groups[1]["clock"] == sampler.param_groups[0]["clock"]


# ---- One chain, however it is computed -----------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "SBPS": {"refresh_rate": 2.0},
    "pSBPS": {"preconditioned": True, "decay": 0.8, "eps": 0.1},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def saved_by_torch(sampler: sg.SBPS) -> Any:
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@each_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_restored_chain_continues_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    params = make_params(dtype)
    closure = Draws(params)
    sampler = make(params, sample_interval=0.05, **KINDS[kind])
    run(sampler, closure, 60)
    assert sampler.diagnostics.bounces > 3
    for restart in ("saved", "pickled", "copied"):
        if restart == "saved":
            others = [nn.Parameter(p.detach().clone()) for p in params]
            twin = make(others, seed=0)
            twin.load_state_dict(saved_by_torch(sampler))
        elif restart == "pickled":
            twin = pickle.loads(pickle.dumps(sampler))
            others = twin.param_groups[0]["params"]
        else:
            twin = copy.deepcopy(sampler)
            others = twin.param_groups[0]["params"]
        same = Draws(others)
        same.generator.set_state(closure.generator.get_state())
        run(sampler, closure, 20)
        run(twin, same, 20)
        assert_same(params, others)
        assert twin.diagnostics == sampler.diagnostics
        assert twin.param_groups[0]["clock"] == sampler.param_groups[0]["clock"]


@each_kind
def test_any_split_into_groups_gives_the_same_chain(kind: str) -> None:
    expected = make_params()
    run(make(expected, **KINDS[kind]), Draws(expected), 60)
    for cuts in ([1], [3], [2, 4], [1, 2, 3, 4, 5]):
        params = make_params()
        edges = [0, *cuts, len(params)]
        groups = [{"params": params[a:b]} for a, b in pairwise(edges)]
        run(make(groups, **KINDS[kind]), Draws(params), 60)
        assert_same(params, expected)


@each_kind
def test_any_number_of_threads_gives_the_same_chain(kind: str) -> None:
    before = torch.get_num_threads()
    chains = []
    for threads in (1, 2, 3):
        g = torch.Generator().manual_seed(1)
        p = nn.Parameter(torch.randn(90_000, generator=g))
        noise = torch.Generator().manual_seed(2)

        def closure(p: nn.Parameter = p, noise: torch.Generator = noise) -> Tensor:
            # Of few elements, whose sums do not depend on threads.
            scale = torch.randn(10, generator=noise)
            return scale * p[:50].sum() + 0.5 * p[50:90].square().sum()

        torch.set_num_threads(threads)
        sampler = make([p], num_data=1e4, **KINDS[kind])
        run(sampler, closure, 20)
        assert sampler.diagnostics.bounces > 0
        chains.append(p)
    torch.set_num_threads(before)
    assert same_bits(chains[0], chains[1]) and same_bits(chains[0], chains[2])


@each_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_are_rounded_points_of_a_line(kind: str, dtype: torch.dtype) -> None:
    """In a type however narrow: the origin has more digits."""
    params = make_params(dtype)
    sampler = make(params, **KINDS[kind])
    run(sampler, Draws(params), 100)
    group = sampler.param_groups[0]
    assert sampler.diagnostics.bounces > 5
    for p in params:
        state = sampler.state[p]
        assert state["origin"].dtype == state["velocity"].dtype
        u = state.get("direction", state["velocity"]).double()
        exact = state["origin"].double() + group["line_time"] * u
        finfo = torch.finfo(dtype)
        work = torch.finfo(u.dtype if dtype == torch.float64 else torch.float32).eps
        terms = state["origin"].double().abs() + (group["line_time"] * u).abs()
        bound = finfo.eps * exact.abs() + 2 * work * terms + finfo.smallest_normal
        assert ((p.double() - exact).abs() <= bound).all()


def test_layouts_of_parameters_do_not_matter() -> None:
    g = torch.Generator().manual_seed(1)
    start = torch.randn(4, 3, 5, 5, generator=g)
    chains = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(start.clone().to(memory_format=layout))
        sampler = make([p])
        # The noise is numbered as the parameter lies in memory: the same velocity.
        sampler.step(Draws([p]))
        chains.append(sampler)
    a, b = (next(iter(s.state.values()))["velocity"] for s in chains)
    assert torch.equal(a.flatten(), b.permute(0, 2, 3, 1).flatten())
    for s in chains:
        run(s, Draws(s._all_params()), 30)
        (p,) = s._all_params()
        assert p.is_contiguous() != p.is_contiguous(memory_format=torch.channels_last)
        assert torch.isfinite(p).all()


def test_the_losses_come_back() -> None:
    params = two()
    kept: list[Tensor] = []
    draws = Draws(params)

    def closure() -> Tensor:
        kept.append(draws())
        return kept[-1]

    losses = make(params).step(closure)
    assert torch.equal(losses, kept[0]) and not losses.requires_grad
