"""HMC-ECS's schedule, and where its chain may not go: csrc/host/ecs_*.h."""

from __future__ import annotations

import math

import pytest

import torch_sgmcmc._C as _C


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
def test_what_a_warm_up_does_when(
    steps: int, every: int, anchors: list[int], sizing: int
) -> None:
    """θ* not so late that less than half as many steps are left."""
    schedule = _C.ECSSchedule(steps, every)
    times = range(steps + 1)
    assert [i for i in times if schedule.moves_anchor_after(i)] == anchors
    assert [i for i in times if schedule.chooses_sizes_after(i)] == [sizing]
    if anchors and anchors[-1] == sizing:
        with pytest.raises(ValueError, match=r"Invalid steps: 5 .*makes after 5\)"):
            schedule.check_sizing()
    else:
        schedule.check_sizing()


@pytest.mark.parametrize(("steps", "every"), [(0, 1), (1, 0)])
def test_schedules_that_are_none(steps: int, every: int) -> None:
    name = "steps" if steps == 0 else "anchor_every"
    with pytest.raises(ValueError, match=rf"Invalid {name}: 0 \(must be >= 1\)"):
        _C.ECSSchedule(steps, every)


def test_half_of_the_draws_are_used() -> None:
    assert [_C.first_late(n) for n in range(1, 6)] == [0, 1, 1, 2, 2]


def test_a_tenth_of_the_evaluations_are_for_all_data() -> None:
    due = [i for i in range(100) if _C.is_check_due(i, 400.0, 130.0)]
    assert due == [31, 62, 93]
    assert not _C.is_check_due(0, 1.0, 100.0)


def test_how_far_a_draw_may_fall() -> None:
    assert _C.deepest_fall(10) == 10 + 20 + math.sqrt(400)


def test_out_of_bounds() -> None:
    signed = _C.ECSEstimator(400.0, 10, num_products=10, lower_bound=-3.0)
    few = _C.ECSEstimator(400.0, 10, num_products=9, lower_bound=-3.0)
    perturbed = _C.ECSEstimator(400.0)
    assert [signed.is_overturned(mean) for mean in (-3.1, -3.0)] == [True, False]
    assert not few.is_overturned(-3.1)
    assert not perturbed.is_overturned(-3.1)

    def rejected(variance: float, mean: float, present: float) -> bool:
        limits = {"present_variance": present, "max_variance": 5.0}
        return signed.is_out_of_bounds(variance, mean, **limits)

    assert rejected(5.1, 0.0, 1.0)
    assert not rejected(5.0, 0.0, 1.0)
    assert not rejected(7.0, 0.0, 8.0)  # there it comes from worse
    assert rejected(1.0, -3.1, 1.0)
