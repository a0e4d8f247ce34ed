"""Replicas of one chain on two ranks, and what is refused there."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from reference import same_bits
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from two_ranks import KINDS, PERSISTENT, STEPS

import torch_sgmcmc as sg
from torch_sgmcmc.chain import distributed

PROGRAM = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two_ranks.py has found on each rank."""
    return launch(PROGRAM, 2, tmp_path_factory.mktemp("ranks"))


def assert_replicas(one: dict[str, Any], other: dict[str, Any]) -> None:
    for p, q in zip(one["params"], other["params"], strict=True):
        assert same_bits(p, q)
    assert one["groups"] == other["groups"]
    assert one["groups"][0]["step"] == STEPS
    assert one["state"].keys() == other["state"].keys()
    for index, state in one["state"].items():
        for key, value in state.items():
            theirs = other["state"][index][key]
            assert (
                same_bits(value, theirs) if torch.is_tensor(value) else value == theirs
            )


@pytest.mark.parametrize("kind", [*KINDS, *PERSISTENT])
def test_replicas_without_a_seed_stay_equal(ranks: Any, kind: str) -> None:
    assert_replicas(ranks[0][kind], ranks[1][kind])
    # The ranks' minibatches differ, and something has been decided on them.
    if kind.startswith("EWSG"):
        group = ranks[0][kind]["groups"][0]
        assert 0 < group["num_accepted"] < group["num_proposals"]


def test_ranks_agree_when_the_group_comes_late(ranks: Any) -> None:
    assert ranks[0]["drawn seeds"] != ranks[1]["drawn seeds"]
    assert_replicas(ranks[0]["late"], ranks[1]["late"])
    assert ranks[1]["late"]["groups"][0]["seed"] == ranks[0]["drawn seeds"]


def test_a_seed_that_is_given_stays(ranks: Any) -> None:
    assert [rank["seeds given"] for rank in ranks] == [0, 1]


def test_ranks_that_made_steps_with_seeds_of_their_own(ranks: Any) -> None:
    for rank in ranks:
        message = rank["refusals"]["early"]
        assert message.startswith(
            "SGLD has made steps before the process group was initialised, and ranks "
            "differ: seeds ["
        )
        assert message.endswith("], steps [1, 1]. Give all ranks one seed")


def test_psgld_with_gamma_is_refused(ranks: Any) -> None:
    for rank, key in product(ranks, ("PSGLD", "PSGLD step")):
        assert rank["refusals"][key] == (
            "PSGLD cannot run in a process group of 2 ranks: each would go by its own "
            "Hessian, and replicas would drift apart. Set gamma=False, and stop "
            "adaptation (adapt=False) after burn-in"
        )


def test_shards_that_are_optimizers_are_refused(ranks: Any) -> None:
    for rank in ranks:
        refusals = rank["refusals"]
        assert refusals["zero"] == (
            "SGLD cannot be the optimizer_class of ZeroRedundancyOptimizer: each "
            "rank's part of the parameters would get the same noise. Construct SGLD "
            "itself, with all parameters of the DistributedDataParallel model"
        )
        for shards in ("FSDP False", "FSDP True", "FSDP late"):
            assert refusals[shards] == (
                "SGLD cannot sample the parameters of FullyShardedDataParallel: each "
                "rank's shard would get the same noise. Use fully_shard, or "
                "DistributedDataParallel"
            )


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "meta"),
    ],
)
def test_where_ranks_agree(
    backends: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the CPU if the group can, and otherwise where the parameters are.
    on_device = [torch.zeros(1), torch.zeros(1, device="meta")]
    chain: Any = SimpleNamespace(params=on_device, process_group=None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert distributed.device_of_group(chain).type == device


# ---- A group of one ----------------------------------------------------------------


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_all_samplers_run_in_a_group_of_one(group_of_one: None) -> None:
    theta = nn.Parameter(torch.ones(3))
    for make in KINDS.values():
        make([theta])


def test_the_constructor_and_the_first_step_look_at_other_ranks(
    group_of_one: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[str] = []

    def settle(chain: Any) -> bool:
        looks.append(chain.name)
        return True

    monkeypatch.setattr(distributed, "settle", settle)
    theta = nn.Parameter(torch.ones(3))
    sampler = sg.SGLD([theta], lr=0.1, num_data=10, seed=1)
    assert looks == ["SGLD"]
    for _ in range(3):
        theta.grad = torch.ones_like(theta)
        sampler.step()
        assert looks == ["SGLD"] * 2


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "EWSG"])
def test_zero_of_one_rank_is_the_sampler_itself(group_of_one: None, kind: str) -> None:
    # It says all that its constructor was given for every group again.
    make = KINDS[kind]
    chains = []
    for wrapped in (True, False):
        params = [nn.Parameter(torch.ones(n)) for n in (5, 3)]
        if wrapped:
            sampler = ZeroRedundancyOptimizer(
                params, optimizer_class=make.func, **make.keywords, seed=3
            )
        else:
            # Zero sorts parameters by size, which these are.
            sampler = make(params, seed=3)
        g = torch.Generator().manual_seed(0)

        def closure(params: Any = params, g: torch.Generator = g) -> torch.Tensor:
            x = torch.randn((), generator=g)
            loss = sum((p - x).square().sum() for p in params)
            loss.backward()
            return loss

        for _ in range(5):
            for p in params:
                p.grad = None
            sampler.step(closure)
        chains.append(params)
    for p, q in zip(*chains, strict=True):
        assert same_bits(p, q)
