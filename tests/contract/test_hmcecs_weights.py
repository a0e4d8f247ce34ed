"""HMC-ECS with data that are drawn by weights: which are drawn, and what is refused.

What it samples: ``test_hmcecs_mutants_law.py``.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from ecs_data import F64, Data, N, chain, make
from short_chains import assert_same
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.ecs.likelihood import estimate
from torch_sgmcmc.ecs.sampling import Sampling

WEIGHTS = torch.linspace(1.0, 3.0, N)


@pytest.mark.parametrize("poisson", [False, True])
def test_the_estimate_of_the_sum_is_unbiased(poisson: bool) -> None:
    """Of whole draws and of proposals; a z-test of |z| < 4.4, once in 10^5 seeds.

    With as much certainty it sees that uniform draws, or weights that are used once,
    are something else.
    """
    d = torch.tensor([0.4, -0.9, 0.3, 0.1], dtype=F64)
    sampling = Sampling.of(torch.tensor([1.0, 5.0, 2.0, 0.5], dtype=F64))
    sizes = {"num_data": 4, "num_cells": 6, "num_blocks": 2, "batch_size": 2}
    by_weights, uniformly = (
        _C.Subsample(**sizes, poisson=poisson, seed=7, weights=law)
        for law in (sampling.law, None)
    )

    def z(draws: _C.Subsample, importance: Tensor, *, whole: bool) -> float:
        means = []
        for step in range(3000):
            *_, memory = draws.draw(step) if whole else draws.propose(step)
            if len(memory) == 0:
                continue
            indices = torch.from_numpy(np.frombuffer(memory, dtype=np.int64).copy())
            estimator = _C.ECSEstimator(4.0)
            found = estimate(estimator, d[indices], importance[indices])
            means.append(found.mean)
        error = np.std(means) / len(means) ** 0.5
        return abs(float(np.mean(means) - float(d.sum())) / error)

    for whole in (True, False):
        assert z(by_weights, sampling.importance, whole=whole) < 4.4
        assert z(by_weights, torch.ones(4, dtype=F64), whole=whole) > 4.4
        assert z(uniformly, sampling.importance, whole=whole) > 4.4


def test_equal_weights_give_equal_estimates() -> None:
    """But of other data: these are drawn in another way."""
    data = Data()
    sampler = make(data)
    sampler.set_sampling_weights(torch.full((N,), 0.3))
    sampler.step(data)
    target = sampler._target(data)
    assert target.importance is not None
    torch.testing.assert_close(target.importance, torch.ones(N, dtype=F64))
    point = target.at(sampler._subsample(data), target.anchor + 0.1)
    target.importance = None
    other = target.at(point.subsample, point.theta)
    torch.testing.assert_close(point.estimate.weights, other.estimate.weights)


def test_weights_that_change_draw_the_subsample_anew() -> None:
    data = Data()
    sampler = make(data)
    expected = chain(sampler, data, 3)
    sampler.set_sampling_weights(WEIGHTS)
    assert "subsample" not in sampler.state
    chain(sampler, data, 3)
    sampler.set_sampling_weights(None)
    assert not {"subsample", "sampling"}.intersection(sampler.state)
    chain(sampler, data, 3)
    # None where there are none changes nothing, and what is given is copied.
    plain, given = Data(), WEIGHTS.clone()
    sampler = make(plain)
    sampler.set_sampling_weights(None)
    assert_same(chain(sampler, plain, 3), expected)
    sampler.set_sampling_weights(given)
    given.zero_()
    assert torch.equal(sampler.state["sampling"]["weights"], WEIGHTS.double())


def test_weights_stay_where_parameters_are_added() -> None:
    data = Data()
    sampler = make(data)
    sampler.set_sampling_weights(WEIGHTS)
    sampler.step(data)
    sampler.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    assert set(sampler.state) == {"sampling"}


def test_a_copy_has_the_weights() -> None:
    data = Data()
    sampler = make(data)
    sampler.set_sampling_weights(WEIGHTS)
    sampler.step(data)
    twin = copy.deepcopy(sampler)
    assert torch.equal(twin.state["sampling"]["weights"], WEIGHTS.double())
    assert twin._layout().weights is not None


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (WEIGHTS.tolist(), TypeError, "got list .must be a tensor of real numbers"),
        (WEIGHTS.to(torch.complex64), TypeError, "got torch.complex64 .must be a ten"),
        (WEIGHTS[1:], ValueError, r"shape \[59\] \(must be \[60\], one for each datu"),
        (WEIGHTS[:, None], ValueError, r"shape \[60, 1\] \(must be \[60\]"),
        (WEIGHTS - 1, ValueError, r"0 at 0 \(must be > 0 and finite, as their sum\)"),
        (WEIGHTS * torch.nan, ValueError, r"nan at 0 \(must be > 0"),
        (WEIGHTS.double() * 1e308, ValueError, r"\S+e\+308 at 1 \(must be > 0"),
        (WEIGHTS.double() ** 70, ValueError, r"1 at 0 \(must be at least 2\^-40 of"),
    ],
)
def test_bad_weights(weights: object, error: type[Exception], message: str) -> None:
    """They change nothing."""
    data = Data()
    sampler = make(data)
    sampler.set_sampling_weights(WEIGHTS)
    sampler.step(data)
    before = dict(sampler.state)
    with pytest.raises(error, match=f"Invalid sampling_weights: {message}"):
        sampler.set_sampling_weights(weights)  # type: ignore[arg-type]
    assert dict(sampler.state) == before


def test_as_many_weights_as_data() -> None:
    data = Data()
    sampler = make(data)
    sampler.set_sampling_weights(WEIGHTS)
    sampler.step(data)
    calls = len(data.seen)
    sampler.param_groups[0]["num_data"] = 50
    with pytest.raises(ValueError, match=r"there are 60 \(must be 50, one for each"):
        sampler.step(data)
    assert len(data.seen) == calls
