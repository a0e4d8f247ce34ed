"""What SBPS says of a trajectory, and what it warns of."""

import functools
import warnings
from typing import Any

import pytest
import torch
from sbps_chains import Closure, Draws, N, make, run, segments, two
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


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
        for _ in range(1500):
            sampler.step(closure)
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
