"""What SBPS says of a trajectory, and what it warns of."""

import warnings

import pytest
import torch
from sbps_chains import Draws, make, run, segments, two
from torch import Tensor


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
        for _ in range(1250):
            sampler.step(closure)
    mine = [w for w in caught if "proposals of SBPS" in str(w.message)]
    assert len(mine) == 1 and mine[0].filename == __file__
    assert "0.1% are expected with confidence = 3" in str(mine[0].message)
    assert "use a larger confidence" in str(mine[0].message)


@pytest.mark.usefixtures("no_warnings")
def test_few_violations_are_not() -> None:
    params = two()
    sampler = make(params)
    run(sampler, Draws(params), 1250)
    assert sampler.param_groups[0]["num_proposals"] > 1000
    assert sampler.diagnostics.violation_rate < 0.02
