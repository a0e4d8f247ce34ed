"""HMC-ECS in several processes, each evaluating a part of the subsample."""

from pathlib import Path
from typing import Any

import hmcecs_ranks
import pytest
import torch
from hmcecs_ranks import KINDS, STEPS
from launch import on_ranks
from reference import assert_same_bits, same_bits

#: What the program has found on each rank.
ranks = on_ranks(Path(hmcecs_ranks.__file__))
# Up to the rounding of sums over ranks, and what chains make of it.
ROUNDED = {"rtol": 1e-10, "atol": 1e-11}


def counts(found: dict[str, Any]) -> dict[str, int]:
    return {k: v for k, v in found["group"].items() if k.startswith("num_")}


@pytest.mark.parametrize("kind", [*KINDS, "warmed up", "gone on"])
def test_ranks_stay_equal(ranks: Any, kind: str) -> None:
    for rank in ranks[1:]:
        assert_same_bits(rank[kind], ranks[0][kind])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_sample_what_one_process_samples(
    ranks: Any, kind: str, one_thread: None
) -> None:
    """Though their parts of the subsample are of different sizes."""
    found, expected = ranks[0][kind], hmcecs_ranks.one_chain(kind)
    assert counts(found) == counts(expected)
    for key in ("draws", "losses"):
        torch.testing.assert_close(found[key], expected[key], **ROUNDED)
    group = found["group"]  # something has been decided on
    assert 0.2 * STEPS < group["num_accepted"] < STEPS


def test_a_warm_up(ranks: Any, one_thread: None) -> None:
    """θ*, mass, step size and the subsample's size are those of one process."""
    found, expected = ranks[0]["warmed up"], hmcecs_ranks.warmed_up()
    assert counts(found) == counts(expected)
    torch.testing.assert_close(found["draws"], expected["draws"], **ROUNDED)
    for name in ("subsample_size", "num_blocks"):
        assert found["group"][name] == expected["group"][name]
    step_sizes = [each["group"]["step_size"] for each in (found, expected)]
    assert step_sizes[0] == pytest.approx(step_sizes[1], rel=1e-10)
    assert found["group"]["num_accepted"] > 0
    assert found["group"]["subsample_size"] > KINDS["first order"]["subsample_size"]


def test_each_rank_evaluates_its_part(ranks: Any) -> None:
    """The first call of a step expands a whole block, the others are shared."""
    parts = [rank["calls"] for rank in ranks]
    for subsample, expanded, *evaluated in parts:
        assert torch.equal(expanded, subsample)
        assert len(evaluated) > 1
    for calls in zip(*(part[2:] for part in parts), strict=True):
        assert torch.equal(torch.cat(calls), parts[0][0])
        assert max(map(len, calls)) - min(map(len, calls)) == 1


def test_ranks_agree_on_a_seed(ranks: Any) -> None:
    assert len({rank["seed"] for rank in ranks}) == 1


def test_a_chain_goes_on_from_a_state_dict(ranks: Any) -> None:
    for rank in ranks:
        assert same_bits(rank["gone on"]["draws"], rank["perturbed"]["draws"])


def test_a_group_of_one(ranks: Any, one_thread: None) -> None:
    for number, rank in enumerate(ranks):
        assert_same_bits(rank["alone"], hmcecs_ranks.alone(number))


def test_what_is_not_finite_on_one_rank_all_ranks_go_by(ranks: Any) -> None:
    nowhere = {"stood still": True, "steps": 0, "skipped": 0}
    message = (
        "HMCECS got log-likelihoods or parameters that are not finite at the start of "
        "a step"
    )
    for rank in ranks:
        assert rank["not finite"] == {
            "raise": {**nowhere, "message": message},
            "skip": {**nowhere, "skipped": 1, "message": "nothing was raised"},
        }


@pytest.mark.parametrize(
    "what", ["seeds", "steps", "parameters", "settings", "subsamples", "weights"]
)
def test_ranks_that_do_not_sample_one_chain(ranks: Any, what: str) -> None:
    """They are told so, and have not moved."""
    for rank in ranks:
        assert rank["unlike"][what] == {
            "message": f"HMCECS cannot decide for the {len(ranks)} ranks of its "
            "process group: they differ in parameters, subsamples or settings. Give "
            "them one seed and one state (check_replicas() says which differ), or each "
            "chain a process_group of its own",
            "stood still": True,
            "steps": 0,
            "skipped": 0,
        }


def test_a_closure_that_raises_leaves_no_rank_waiting(ranks: Any) -> None:
    """Those that wait for its values put their parameters back, too."""
    stood = {"stood still": True, "steps": 0, "skipped": 0}
    *others, last = (rank["raising"] for rank in ranks)
    assert last == {"message": "the closure's own", **stood}
    for found in others:
        assert "gloo" in found.pop("message")
        assert found == stood
