"""HMC-ECS's schedule, sizes, and where its chain may not go."""

import math
from contextlib import nullcontext

import pytest
import torch
from ecs_data import Data, make

from torch_sgmcmc._ecs.target import (
    Estimate,
    Estimator,
    choose_num_factors,
    choose_sizes,
    schedule,
)
from torch_sgmcmc._ecs.taylor import Anchor, Prior, TaylorSums


@pytest.mark.parametrize(
    ("steps", "every", "anchors", "sizing"),
    [
        (1000, 200, [200, 400, 600, 800], 900),
        (899, 200, [200, 400, 600], 749),
        (900, 200, [200, 400, 600, 800], 850),
        (10, 4, [4, 8], 9),
        (9, 4, [4], 6),
        (5, 1, [1, 2, 3, 4, 5], 5),
        (30, 200, [], 15),
    ],
)
def test_what_a_warm_up_does_when(steps, every, anchors, sizing):
    """θ* not so late that less than half as many steps are left."""
    last_anchor, chosen = schedule(steps, every)
    assert [i for i in range(1, last_anchor + 1) if i % every == 0] == anchors
    assert chosen == sizing


def group(**settings):
    return {
        "estimator": "signed",
        "subsample_size": 100,
        "num_data": 100_000,
        **settings,
    }


def estimates(variances, means=(0.0, 0.0), lowest=(0.0, 0.0)):
    rows = zip(variances, means, lowest, strict=False)
    return [Estimate(0.0, v, mean, 1.0, low) for v, mean, low in rows]


@pytest.mark.parametrize(
    ("variances", "size", "num_data", "chosen"),
    [
        ([1.5, 2.5], 100, 100_000, 400),  # proportional to the variance
        ([2.001], 100, 100_000, 401),
        # Enough to estimate a variance from, unless there were fewer.
        ([0.01], 100, 100_000, 30),
        ([0.01], 12, 100_000, 12),
        # Not more than there are data.
        ([2.0], 100, 250, 250),
        ([2.0], 100, 1, 2),
        ([math.inf], 100, 250, 250),
    ],
)
def test_the_size_of_perturbed_subsamples(variances, size, num_data, chosen):
    settings = group(estimator="perturbed", subsample_size=size, num_data=num_data)
    found = choose_sizes(estimates(variances), 0.5, settings)
    assert found == {"subsample_size": chosen}


def kept_by_signs(spread, factors):
    """Returns the part of effective draws that is left."""
    negative = 0.5 * math.erfc(factors / math.sqrt(2 * spread))
    return math.exp(-4 * factors * negative)


def test_factors_keep_the_signs_positive():
    # A large variance: that of the log decides. A small one: the signs do.
    assert choose_num_factors(400.0, 0.5) == 800
    for spread in (0.5, 4.0, 60.0):
        chosen = choose_num_factors(spread, 1e9)
        assert kept_by_signs(spread, chosen) >= 0.98
        assert chosen > 1
        assert kept_by_signs(spread, chosen - 1 - chosen // 10) < 0.98
    assert choose_num_factors(0.0, 0.5) == 1


@pytest.mark.parametrize(
    ("variances", "means", "lowest", "chosen"),
    [
        ([2.0, 4.0], (-4.0, -6.0), (-9.5, -11.5), 20),  # three times the deepest fall
        ([2.0, 4.0], (-4.0, -6.0), (-9.5, -999.0), 150),  # or a variance of 1
        ([0.0], (0.0,), (0.0,), 1),
    ],
)
def test_factors_for_the_least_time(variances, means, lowest, chosen):
    settings = group(num_factors=50)
    found = choose_sizes(estimates(variances, means, lowest), math.inf, settings)
    mean = sum(means) / len(means)
    assert found == {"mean_difference": mean, "num_factors": chosen}


def test_a_tenth_of_the_evaluations_are_for_all_data():
    data = Data()
    sampler = make(data, trajectory_length=1.2)  # 32 evaluations a step, of 60 data
    due = []
    for i in range(100):
        sampler._set(num_trajectories=i)
        if sampler._is_check_due():
            due.append(i)
    assert due == [19, 38, 57, 76, 95]


@pytest.mark.parametrize(("fall", "left"), [(29.9 + 20, False), (30.1 + 20, True)])
def test_how_far_a_draw_may_fall(fall, left):
    """d + sqrt(40 d) + 20, with d = 10."""
    like = {"dtype": torch.float64}
    sums = TaylorSums(torch.zeros((), **like), torch.zeros(10, **like), None, "linear")
    anchor = Anchor(torch.zeros(10, **like), 1, sums, None)
    prior = Prior(torch.zeros(10, **like), torch.zeros(10, **like))
    raised = pytest.raises(RuntimeError, match="has left") if left else nullcontext()
    with raised:
        anchor.check_near(torch.tensor(-fall, **like), anchor.theta, prior, 1.0)


def test_out_of_bounds():
    signed = Estimator(400.0, 10, num_factors=10, lower_bound=-3.0)
    few = Estimator(400.0, 10, num_factors=9, lower_bound=-3.0)
    perturbed = Estimator(400.0)
    assert [signed.is_overturned(mean) for mean in (-3.1, -3.0)] == [True, False]
    assert not few.is_overturned(-3.1)
    assert not perturbed.is_overturned(-3.1)

    def rejected(variance, mean, present):
        limits = {"present_variance": present, "max_variance": 5.0}
        return signed.is_out_of_bounds(variance, mean, **limits)

    assert rejected(5.1, 0.0, 1.0)
    assert not rejected(5.0, 0.0, 1.0)
    assert not rejected(7.0, 0.0, 8.0)  # there it comes from worse
    assert rejected(1.0, -3.1, 1.0)
