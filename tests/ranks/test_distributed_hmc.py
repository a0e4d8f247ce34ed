"""HMC in several processes, each with its share of the data."""

from pathlib import Path
from typing import Any

import hmc_ranks
import pytest
import torch
from hmc_ranks import KINDS, STEPS
from launch import on_ranks
from reference import assert_same_bits

#: What the program has found on each rank.
ranks = on_ranks(Path(hmc_ranks.__file__))
# Up to the rounding of the mean over ranks, and what chains make of it.
ROUNDED = {"rtol": 1e-9, "atol": 1e-11}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """To the bit."""
    for key in ("groups", "draws", "params", "state"):
        assert_same_bits(one[key], other[key])


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """With the same decisions."""
    assert found["groups"] == expected["groups"]
    torch.testing.assert_close(found["draws"], expected["draws"], **ROUNDED)


@pytest.mark.parametrize("kind", [*KINDS, "chains", "all data", "gone on"])
def test_ranks_stay_equal(ranks: Any, kind: str) -> None:
    for rank in ranks[1:]:
        assert_same(rank[kind], ranks[0][kind])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_sample_what_one_process_samples(
    ranks: Any, kind: str, one_thread: None
) -> None:
    found = ranks[0][kind]
    group = found["groups"][0]
    assert_close(found, hmc_ranks.one_chain(kind, 0, 1, group["seed"]))
    assert group["step"] == STEPS
    if kind != "untested":  # something has been decided on
        assert 0.3 * STEPS < group["num_accepted"] < 0.9 * STEPS


def test_many_chains(ranks: Any, one_thread: None) -> None:
    found = ranks[0]["chains"]
    assert_close(found, hmc_ranks.many_chains(0, 1))
    group = found["groups"][0]
    assert 0.3 < group["num_accepted"] / group["num_trajectories"] < 0.9


def test_a_warm_up_is_the_first_to_see_other_ranks(
    ranks: Any, one_thread: None
) -> None:
    """They then agree on the first one's seed, and on the step size."""
    assert ranks[0]["drawn seed"] != ranks[1]["drawn seed"]
    step_size, chain = ranks[0]["warm-up"]
    for rank in ranks:
        assert rank["seed"] == ranks[0]["drawn seed"]
        assert rank["warm-up"][0] == step_size
        assert_same(rank["warm-up"][1], chain)
    model = hmc_ranks.network(1)
    sampler = KINDS["drawn"](model.parameters(), seed=ranks[0]["seed"])
    expected, draws = hmc_ranks.warmed_up(0, 1, model, sampler)
    assert step_size == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(chain["draws"], draws["draws"], **ROUNDED)


def test_all_data_on_each_rank(ranks: Any, one_thread: None) -> None:
    """The mean of equal numbers is that number: the bits are those of one process."""
    assert_same(ranks[0]["all data"], hmc_ranks.all_data_on_each(1))


def test_a_group_of_one(ranks: Any, one_thread: None) -> None:
    for number, rank in enumerate(ranks):
        assert_same(rank["alone"], hmc_ranks.alone(number))


def test_a_chain_goes_on_from_a_state_dict(ranks: Any) -> None:
    for rank in ranks:
        assert_same(rank["gone on"], rank["kept"])


def test_what_is_not_finite_on_one_rank_all_ranks_go_by(ranks: Any) -> None:
    counts = {"step": 0, "num_skipped": 0, "num_divergences": 0, "stood still": True}
    for rank in ranks:
        found = rank["not finite"]
        gradient = found["gradient"].pop("message")
        assert gradient.startswith("HMC got a gradient that is not finite: ")
        nothing = "nothing was raised"
        start = (
            "HMC got a loss or parameters that are not finite at the start of a "
            "trajectory"
        )
        assert found == {
            "end": {**counts, "message": nothing, "step": 1, "num_divergences": 1},
            "gradient at the end": found["end"],
            "start": {**counts, "message": start},
            "start skipped": {**counts, "message": nothing, "num_skipped": 1},
            "gradient": counts,
        }


@pytest.mark.parametrize("what", ["seeds", "gradients"])
def test_ranks_that_do_not_sample_one_chain(ranks: Any, what: str) -> None:
    """They are told so, and do not accept by each other's losses."""
    for rank in ranks:
        assert rank["unlike"][what] == (
            f"HMC cannot decide for the {len(ranks)} ranks of its process group: they "
            "differ in parameters or momenta. Give them one seed and averaged "
            "gradients (check_replicas() says which differ), or each chain a "
            "process_group of its own",
            True,
            0,
        )


def test_a_closure_that_raises_leaves_no_rank_waiting(ranks: Any) -> None:
    """Those that wait for its loss put their parameters back, too."""
    *others, last = (rank["raising"] for rank in ranks)
    assert last == ("the closure's own", 8, True, 1)
    for message, *found in others:
        assert "gloo" in message
        assert found == [8, True, 1]
