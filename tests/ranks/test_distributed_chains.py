"""Chains side by side on several ranks, and whether replicas are still one chain."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chain_ranks import network, one_chain
from launch import launch
from reference import same_bits
from torch import nn
from two_ranks import COMMON, KINDS

import torch_sgmcmc as sg
from torch_sgmcmc.judge.convergence import RunningConvergence

PROGRAM = Path(__file__).with_name("chain_ranks.py")


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)]
)
def job(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    """What chain_ranks.py has found on each rank, and its folder."""
    folder = tmp_path_factory.mktemp("ranks")
    return launch(PROGRAM, request.param, folder), folder


def layouts(ranks: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """For each number of chains, what the ranks have found."""
    numbers = [n for n in range(1, len(ranks) + 1) if f"{n} chains" in ranks[0]]
    assert len(numbers) >= 2
    return [(n, [rank[f"{n} chains"] for rank in ranks]) for n in numbers]


# ---- One chain ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_sample_what_one_process_samples(
    job: Any, kind: str, one_thread: None
) -> None:
    """num_data and batch_size of all ranks together, gradients of which DDP is mean."""
    expected = one_chain(kind, 0, 1)
    for rank in job[0]:
        torch.testing.assert_close(
            rank["one chain"][kind], expected, rtol=1e-9, atol=1e-11
        )


def test_the_ranks_that_differ_are_named(job: Any) -> None:
    ranks, _ = job
    last = len(ranks) - 1
    # Of two ranks the first is as good as any; of more, most of them.
    odd = "rank 1: rank 0" if last > 1 else "rank 0: rank 1"
    expected = {
        f"lowest bit of {last}": "parameters",
        f"places in a tensor of {last}": "parameters",
        f"places of tensors of {last}": "parameters",
        f"state of {last}": "state",
        f"lr of {last}": "settings",
        "hook": "parameters",
    }
    for rank in ranks:
        found = dict(rank["differences"])
        assert found.pop(f"nothing of {last}") == "nothing was raised"
        assert set(found.pop("removed").split("|")) == {"nothing was raised"}
        first, second, third, fourth = found["hook"].split("|")
        assert {first, second, fourth} == {"nothing was raised"}
        found["hook"] = third
        assert found.pop("lowest bit of 0") == (
            f"SGHMC's replicas differ from that of {odd} in parameters"
        )
        counters = found.pop(f"counters of {last}")
        assert counters.startswith(
            f"SGHMC's replicas differ from that of rank 0: rank {last} in step (3 for "
            "2), seed (5 for "
        )
        assert found == {
            key: f"SGHMC's replicas differ from that of rank 0: rank {last} in {part}"
            for key, part in expected.items()
        }


def test_one_process_has_no_replicas_to_check() -> None:
    theta = nn.Parameter(torch.ones(3))
    sampler = sg.SGLD([theta], **COMMON)
    sg.check_replicas(sampler)
    with pytest.raises(ValueError, match=r"^Invalid steps: 0 \(must be >= 1\)$"):
        sg.check_replicas_every(sampler, 0)


def test_a_closure_that_raises_leaves_no_rank_waiting(job: Any) -> None:
    *others, last = (rank["raising"] for rank in job[0])
    assert last == "step 2: the closure's own"
    for found in others:
        assert found.startswith("step 2: ") and "gloo" in found


# ---- Chains side by side -----------------------------------------------------------


def test_replicas_of_each_chain_agree_on_its_seed(job: Any) -> None:
    for number, ranks in layouts(job[0]):
        chains: dict[int, list[Any]] = {}
        for rank in ranks:
            chains.setdefault(rank["chain"][0], []).append(rank["sampler"])
        assert sorted(chains) == list(range(number))
        seeds = set()
        for first, *others in chains.values():
            assert len(others) + 1 == len(ranks) // number
            seeds.add(first["groups"][0]["seed"])
            for other in others:
                for p, q in zip(first["params"], other["params"], strict=True):
                    assert same_bits(p, q)
                assert first["groups"] == other["groups"]
        assert len(seeds) == number


def test_what_decides_alone_is_refused_where_a_chain_has_several_ranks(
    job: Any,
) -> None:
    for number, ranks in layouts(job[0]):
        size = len(ranks) // number
        refused = (
            f"PSGLD cannot run in a process group of {size} ranks: each would go by "
            "its own Hessian, and replicas would drift apart. Set gamma=False, and "
            "stop adaptation (adapt=False) after burn-in"
        )
        for rank in ranks:
            expected = "nothing was raised" if size == 1 else refused
            assert rank["refused"] == expected


def test_the_first_rank_of_a_chain_stores_it(job: Any) -> None:
    for number, ranks in layouts(job[0]):
        store = sg.SampleStore(job[1] / f"draws-{number}")
        assert store.chains == list(range(number))
        for rank in ranks:
            chain, replica = rank["chain"]
            assert rank["draws"] == (0 if replica else 4)
            assert (rank["position"] is None) == bool(replica)
            draws = store.chain(chain)
            assert [draw.step for draw in draws] == [5, 10, 15, 20]
            params = rank["sampler"]["params"]
            for (name, _), p in zip(network().named_parameters(), params, strict=True):
                assert same_bits(draws[-1][name], p)


def test_convergence_of_all_chains_without_their_draws(job: Any) -> None:
    for number, ranks in layouts(job[0]):
        if number == 1:
            continue
        together = RunningConvergence(number, 2)
        state = together.state_dict()
        for rank in ranks:
            chain, own = rank["chain"][0], rank["own"]
            assert own["draws"] == [20 * (i == chain) for i in range(number)]
            for key in ("means", "squares", "draws", "lengths"):
                state[key][chain] = own[key][chain]
        together.load_state_dict(state)
        for rank in ranks:
            for key in ("means", "squares"):
                assert same_bits(rank["all"][key], state[key])
            for key in ("draws", "lengths"):
                assert rank["all"][key] == state[key]
            assert same_bits(rank["report"], together.report().rhat)


def test_groups_that_do_not_fit(job: Any) -> None:
    ranks = [rank["wrong groups"] for rank in job[0]]
    numbers = list(range(len(ranks)))
    sizes = [(2 + number, [1], 64) for number in numbers]
    for number, found in enumerate(ranks):
        not_in_it = (
            f"Invalid process_group: rank {number} is not in it (each rank gives the "
            "group that it is in)"
        )
        assert found == {
            "not in it": not_in_it if number else "nothing was raised",
            "one chain twice": f"Invalid process_group: its ranks {numbers} all follow "
            "chain 0 (must be one for each chain)",
            "other sizes": "Invalid process_group: its ranks have (num_chains, shape, "
            f"batches) = {sizes} (must be equal)",
        }
    with pytest.raises(TypeError) as error:
        sg.SGLD([nn.Parameter(torch.ones(3))], **COMMON, process_group="replica")
    assert str(error.value) == (
        "Invalid process_group: str (must be a ProcessGroup, such as get_group() of a "
        "DeviceMesh returns)"
    )


def test_chains_that_one_process_follows_are_gathered_without_a_group() -> None:
    running = RunningConvergence(2, 3)
    for _ in range(8):
        running.update(torch.randn(2, 3))
    gathered = running.gathered()
    assert same_bits(gathered.report().rhat, running.report().rhat)
    running.update(torch.randn(2, 3))
    assert gathered.num_draws == [8, 8]


def test_a_checkpoint_of_a_rank_that_stores_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    sampler = sg.SGLD(model.parameters(), **COMMON)
    with sg.Collector(sampler, model, tmp_path) as collector:
        state = {**collector.state_dict(), "position": None}
        with pytest.raises(ValueError) as error:
            collector.load_state_dict(state)
    assert str(error.value) == (
        "Invalid state_dict: of a rank that stores nothing (must be that of the first "
        "rank of the sampler's process_group)"
    )
