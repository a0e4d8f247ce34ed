"""SBPS's output: samples at their times, averages over time."""

import copy
from itertools import pairwise

import pytest
import torch
from failed_steps import refused
from sbps_chains import Draws, make, run, segments, two
from short_chains import assert_same, make_params

import torch_sgmcmc as sg


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
