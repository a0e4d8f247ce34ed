"""HMC with DTensors on two ranks, beside one process."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import sharded_hmc_ranks
import torch
from hmc_ranks import Loss
from launch import launch
from sharded_hmc_ranks import FINER, KINDS, STEPS, is_run
from sharded_ranks import placements_of

import torch_sgmcmc as sg

PROGRAM = Path(sharded_hmc_ranks.__file__)
RANKS = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What sharded_hmc_ranks.py has found on each rank."""
    return launch(PROGRAM, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("kind", "placement"),
    [each for each in product(KINDS, placements_of(RANKS)) if is_run(*each)],
)
def test_shards_are_parts_of_one_chain(ranks: Any, kind: str, placement: str) -> None:
    """To the bit: energies alone, by which is decided, are rounded otherwise."""
    for rank in ranks:
        assert rank[f"{kind}, {placement}"] == []
    if kind != "untested":  # something has been decided on
        assert 0 < ranks[0][f"{kind} accepted"] < STEPS


def test_means_and_a_chain_that_goes_on(ranks: Any) -> None:
    for rank in ranks:
        assert rank["means"] == []


def test_warm_up(ranks: Any) -> None:
    step_size = ranks[0]["warm-up, shards"]
    assert step_size == ranks[1]["warm-up, shards"]
    assert step_size == pytest.approx(ranks[0]["warm-up, one"], rel=1e-6)


@pytest.mark.parametrize("mesh", ["fully_shard", "replicas"])
def test_fully_shard_samples_what_one_process_samples(
    ranks: Any, mesh: str, one_thread: None
) -> None:
    """Up to the rounding of the mean over ranks, and what chains make of it."""
    found, other = (rank[mesh] for rank in ranks)
    assert found["seed"] == other["seed"]
    assert torch.equal(found["draws"], other["draws"])
    model = copy.deepcopy(ranks[0]["model"])
    sampler = sg.HMC(model.parameters(), **FINER, seed=found["seed"])
    loss, draws = Loss(model, 0, 1), []
    for _ in range(len(found["draws"])):
        sampler.step(loss)
        draws.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert sampler.param_groups[0]["num_accepted"] == found["accepted"]
    assert 2 < found["accepted"] < len(draws) - 2
    torch.testing.assert_close(
        found["draws"], torch.stack(draws), rtol=1e-9, atol=1e-11
    )


def test_what_one_rank_sees_all_ranks_go_by(ranks: Any) -> None:
    for rank in ranks:
        assert rank["not finite, start"] == (
            "RuntimeError: HMC got a loss or parameters that are not finite at the "
            "start of a trajectory",
            True,
            0,
        )
        assert rank["not finite, end"] == ("nothing was raised", True, 1)
        said, stands, _ = rank["not finite, gradient"]
        assert said.startswith(
            "RuntimeError: HMC got a gradient that is not finite: 0 NaN and 1 infinite "
            "of 15 elements, for parameter 0 of group 0, of shape [5, 3]."
        )
        assert stands


def test_refusals(ranks: Any) -> None:
    spoiled = "number 0 has elements out of range (must be finite and > 0)"
    for number, rank in enumerate(ranks):
        assert rank["refusals"] == {
            "group": f"ValueError: Invalid process_group: ranks [{number}], of which "
            f"{number} has DTensors on ranks [0, 1] (it must be one of these, and the "
            "group of HMC, which decides by the loss, must have them all)",
            "chains": "ValueError: Invalid num_chains: 5 (a DTensor belongs to one "
            "chain)",
            "masses on one rank": f"ValueError: Invalid masses: {spoiled}",
            "other masses": "ValueError: Invalid masses: number 0 is a DTensor with "
            "placements (Shard(dim=1),), for a DTensor with placements "
            "(Shard(dim=0),) (must be cut alike, or whole: full_tensor())",
            "loaded": "ValueError: Invalid state_dict: mass of parameter 0 has "
            "elements out of range (must be finite and > 0)",
        }
