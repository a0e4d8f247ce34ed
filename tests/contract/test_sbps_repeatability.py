"""One chain of SBPS, however it is computed: saved, in groups, by threads, in types."""

import copy
import pickle
from itertools import pairwise, product

import pytest
import torch
from failed_steps import refused
from reference import same_bits
from sbps_chains import Draws, make, run, segments, two, uneven
from short_chains import assert_same, make_params
from stored_files import through_file
from torch import nn

import torch_sgmcmc as sg

LEARNED = {"preconditioned": True, "decay": 0.8, "eps": 0.1}
KINDS = {
    "SBPS": {"refresh_rate": 2.0},
    "pSBPS": LEARNED,
    "always": {"adapt_every_step": True, **LEARNED},
    "given": {"preconditioned": True, "given": uneven},
    "local": {"refresh_rate": 2.0, "observation_decay": 0.5, "num_std": 2.0},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
# Each dtype, each kind, and two of them with and without masters.
CASES = [
    *product(("SBPS", "pSBPS"), (torch.float32, torch.bfloat16)),
    ("always", torch.float64),
    ("given", torch.float32),
    ("local", torch.float16),
]
each_kind_and_dtype = pytest.mark.parametrize(("kind", "dtype"), CASES)


@each_kind_and_dtype
def test_a_restored_chain_continues_bit_for_bit(kind, dtype):
    params = make_params(dtype)
    closure = Draws(params)
    sampler = make(params, sample_interval=0.05, **KINDS[kind])
    run(sampler, closure, 75)
    assert sampler.diagnostics.bounces > 3
    restarts = ("saved", "pickled", "copied")
    for restart in restarts if dtype is torch.float32 else restarts[:1]:
        if restart == "saved":
            others = [nn.Parameter(p.detach().clone()) for p in params]
            twin = make(others, seed=0)
            twin.load_state_dict(through_file(sampler.state_dict()))
        elif restart == "pickled":
            twin = pickle.loads(pickle.dumps(sampler))
            others = twin.param_groups[0]["params"]
        else:
            twin = copy.deepcopy(sampler)
            others = twin.param_groups[0]["params"]
        same = Draws(others)
        same.generator.set_state(closure.generator.get_state())
        run(sampler, closure, 15)
        run(twin, same, 15)
        assert_same(params, others)
        assert twin.diagnostics == sampler.diagnostics
        assert twin.param_groups[0]["clock"] == sampler.param_groups[0]["clock"]


@each_kind
def test_any_split_into_groups_gives_the_same_chain(kind):
    expected = make_params()
    run(make(expected, **KINDS[kind]), Draws(expected), 40)
    for cuts in ([2, 4], [1, 2, 3, 4, 5]):
        params = make_params()
        edges = [0, *cuts, len(params)]
        groups = [{"params": params[a:b]} for a, b in pairwise(edges)]
        run(make(groups, **KINDS[kind]), Draws(params), 40)
        assert_same(params, expected)


@each_kind
def test_any_number_of_threads_gives_the_same_chain(kind, set_threads):
    chains = []
    for threads in (1, 3):
        g = torch.Generator().manual_seed(1)
        p = nn.Parameter(torch.randn(90_000, generator=g))
        noise = torch.Generator().manual_seed(2)

        def closure(p=p, noise=noise):
            # Of few elements, whose sums do not depend on threads.
            scale = torch.randn(10, generator=noise)
            return scale * p[:50].sum() + 0.5 * p[50:90].square().sum()

        set_threads(threads)
        sampler = make([p], num_data=1e4, **KINDS[kind])
        for _ in range(60):
            sampler.step(closure)
        assert sampler.diagnostics.bounces > 0
        chains.append(p)
    assert same_bits(*chains)


@each_kind_and_dtype
def test_positions_are_rounded_points_of_a_line(kind, dtype):
    """A restart in a narrow type: the origin has more digits."""
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


def test_layouts_of_parameters_do_not_matter():
    g = torch.Generator().manual_seed(1)
    start = torch.randn(4, 3, 5, 5, generator=g)
    chains = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(start.clone().to(memory_format=layout))
        sampler = make([p])
        # The noise is numbered by index: the same velocity.
        sampler.step(Draws([p]))
        chains.append(sampler)
    a, b = (next(iter(s.state.values()))["velocity"] for s in chains)
    assert torch.equal(a, b)
    for s in chains:
        run(s, Draws(s._context.params), 30)
        (p,) = s._context.params
        assert p.is_contiguous() != p.is_contiguous(memory_format=torch.channels_last)
        assert torch.isfinite(p).all()


def test_the_losses_come_back():
    params = two()
    kept = []
    draws = Draws(params)

    def closure():
        kept.append(draws())
        return kept[-1]

    losses = make(params).step(closure)
    assert torch.equal(losses, kept[0]) and not losses.requires_grad


def test_samples_are_points_of_the_trajectory():
    params = two()
    closure = Draws(params)
    sampler = make(params, sample_interval=0.013)
    start = torch.cat([p.detach().flatten() for p in params])
    samples = []

    def keep(s, time):
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


def test_hooks_do_not_change_the_chain():
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


def test_another_interval_continues_at_its_multiples():
    params = two()
    sampler = make(params, sample_interval=0.02)
    times = []
    sampler.register_sample_hook(lambda s, t: times.append(t))
    run(sampler, Draws(params), 100)
    now = sampler.trajectory_time
    times.clear()
    sampler.param_groups[0]["sample_interval"] = 0.05
    run(sampler, Draws(params), 100)
    first = int(now / 0.05) + 1
    assert times[:3] == [0.05 * (first + i) for i in range(3)]


def test_time_averages_are_integrals_along_the_lines():
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
    # A frozen parameter stands still, and its time counts.
    params[0].requires_grad_(False)
    begun, still = average.time, average.mean(params[0]) * average.time
    run(sampler, Draws(params[1:]), 5)
    still += (average.time - begun) * params[0].detach()
    torch.testing.assert_close(average.mean(params[0]) * average.time, still)
    params[0].requires_grad_(True)
    run(sampler, Draws(params), 5)
    assert rest.time == before < average.time


def test_time_averages_refuse():
    params = two()
    sampler = make(params)
    with refused(TypeError, "Invalid sampler: of type SGLD (must be an SBPS)"):
        sg.TimeAverage(sg.SGLD(params, lr=1, num_data=1))
    with refused(ValueError, "Invalid max_piece: 0.0 (must be finite and > 0)"):
        sg.TimeAverage(sampler, max_piece=0.0)
    average = sg.TimeAverage(sampler)
    with refused(ValueError, "This parameter, of shape [2, 2], has no average"):
        average.mean(params[1])
    with pytest.raises(ValueError) as error:
        _ = average.value
    assert str(error.value) == "No function has been averaged yet"
    nine, good = torch.ones(9).double(), torch.ones(params[0].shape).double()
    no_number = f"its means have a key that is not a number of {len(params)} parameters"
    for means, message in (
        ({0: (nine, good)}, "mean of parameter 0 has shape [9], expected "),
        ({0: (good, nine)}, "mean square of parameter 0 has shape [9], expected "),
        ({0: (good.float(), good)}, "mean of parameter 0 is of torch.float32"),
        ({0: (good.to("meta"), good)}, "mean of parameter 0 has the layout"),
        ({0: (good,)}, "means of parameter 0 is not a tuple of 2 Tensors"),
        ({-1: (good, good)}, no_number),
        ({len(params): (good, good)}, no_number),
    ):
        with pytest.raises(ValueError) as error:
            average.load_state_dict({"time": 1.0, "means": means, "value": None})
        assert str(error.value).startswith(f"Invalid state_dict: {message}")
        assert average.time == 0
