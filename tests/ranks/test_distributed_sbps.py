"""SBPS in several processes, each with its part of every minibatch."""

from pathlib import Path
from typing import Any

import pytest
import sbps_ranks
import torch
from launch import on_ranks
from reference import assert_same_bits
from sbps_ranks import BATCH_SIZE, EVENTS, KINDS

#: What the program has found on each rank.
ranks = on_ranks(Path(sbps_ranks.__file__))
# Up to the rounding of the sums over ranks, and what 300 events make of it: 2e-14.
ROUNDED = {"rtol": 1e-11, "atol": 1e-12}
RUNS = ("times", "places", "samples", "means")


def assert_same(one: dict[str, Any], other: dict[str, Any], *runs: str) -> None:
    """To the bit."""
    for key in (*runs, "groups", "params", "state"):
        assert_same_bits(one[key], other[key])


def counts(found: dict[str, Any]) -> dict[str, int]:
    group = found["groups"][0]
    return {k: v for k, v in group.items() if k.startswith("num_")}


@pytest.mark.parametrize("kind", [*KINDS, "bfloat16"])
def test_ranks_stay_equal(ranks: Any, kind: str) -> None:
    for rank in ranks[1:]:
        assert_same(rank[kind], ranks[0][kind], *RUNS)
    assert ranks[0][kind]["groups"][0]["num_bounces"] > 10


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_sample_what_one_process_samples(
    ranks: Any, kind: str, one_thread: None
) -> None:
    """Though their parts of the minibatches are of different sizes."""
    found, expected = ranks[0][kind], sbps_ranks.one_chain(kind, 0, 1)
    assert counts(found) == counts(expected)
    for key in RUNS:
        torch.testing.assert_close(found[key], expected[key], **ROUNDED)
    group = found["groups"][0]
    # Something has been decided on, and minibatches have varied.
    assert group["num_bounces"] > 20 and group["num_samples"] > 100
    assert group["num_derivatives"] == BATCH_SIZE * EVENTS


def test_ranks_agree_on_a_seed(ranks: Any) -> None:
    assert len({rank["seed"] for rank in ranks}) == 1


def test_a_chain_goes_on_from_a_state_dict(ranks: Any) -> None:
    for rank in ranks:
        runs = ("times", "places", "samples")
        assert_same(rank["gone on"], rank["forward mode"], *runs)


def test_a_group_of_one(ranks: Any, one_thread: None) -> None:
    for number, rank in enumerate(ranks):
        assert_same(rank["alone"], sbps_ranks.alone(number), *RUNS)


def test_what_one_rank_sees_all_ranks_go_by(ranks: Any) -> None:
    nowhere = {"stood still": True, "step": 0, "num_skipped": 0}
    bad = BATCH_SIZE - 2 * (len(ranks) - 1)
    for rank in ranks:
        assert rank["bad losses"] == {
            "losses raise": {
                **nowhere,
                "message": f"SBPS got {bad} of 11 losses from the closure that are not "
                "finite",
            },
            "losses skip": {
                **nowhere,
                "num_skipped": 1,
                "message": "nothing was raised",
            },
            "slopes raise": {
                **nowhere,
                "message": "SBPS got losses from the closure whose derivatives are not "
                "finite",
            },
            "number raise": {
                **nowhere,
                "message": "SBPS got the losses of 11 examples from the closure, and "
                "num_data = 10 (must not be more; if examples are drawn with "
                "replacement, set replacement=True)",
            },
        }


@pytest.mark.parametrize(
    "what", ["seeds", "steps", "parameters", "velocities", "settings", "models"]
)
def test_ranks_that_do_not_sample_one_chain(ranks: Any, what: str) -> None:
    """They are told so, before any of them decides."""
    for rank in ranks:
        assert rank["unlike"][what] == {
            "message": f"SBPS cannot decide for the {len(ranks)} ranks of its process "
            "group: they differ in parameters, velocities or settings. Give them one "
            "seed and one state (check_replicas() says which differ), or each chain a "
            "process_group of its own",
            "stood still": True,
            "step": 0,
            "num_skipped": 0,
        }


def test_a_closure_that_raises_leaves_no_rank_waiting(ranks: Any) -> None:
    """Those that wait for its minibatch put their parameters back, too."""
    stood = {"stood still": True, "step": 7, "num_skipped": 0}
    *others, last = (rank["raising"] for rank in ranks)
    assert last == {"message": "the closure's own", **stood}
    for found in others:
        assert "gloo" in found.pop("message")
        assert found == stood
