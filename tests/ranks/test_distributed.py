"""Ranks that sample one chain, or chains side by side, and what is refused there."""

import math
from pathlib import Path
from types import SimpleNamespace

import chain_ranks
import pytest
import torch
import torch.distributed as dist
from chain_ranks import COMMON, KINDS, LONGER, network
from launch import launch
from reference import assert_same_bits, same_bits
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import torch_sgmcmc as sg
from torch_sgmcmc.core import distributed


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def job(request, tmp_path_factory):
    """Returns the results of chain_ranks.py on each rank, and its folder."""
    folder = tmp_path_factory.mktemp("ranks")
    return launch(Path(chain_ranks.__file__), request.param, folder), folder


@pytest.fixture
def ranks(job):
    return job[0]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_without_a_seed_sample_what_one_process_samples(ranks, kind, one_thread):
    """The chain of all ranks' num_data and batch_size together, up to rounding."""
    first, *others = (rank["one chain"][kind] for rank in ranks)
    for other in others:
        assert_same_bits(other, first)
    group = first["groups"][0]
    assert group["step"] == LONGER
    if kind.startswith("EWSG"):  # something has been decided on
        assert 0 < group["num_accepted"] < group["num_proposals"]
    expected = chain_ranks.one_chain(kind, 0, 1, int(group["seed"]))
    near = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(first["params"], expected["params"], **near)


def test_replicas_start_at_one_draw_from_the_prior(ranks, one_thread):
    for rank in ranks:
        assert_same_bits(rank["prior"], ranks[0]["prior"])
    expected = chain_ranks.from_the_prior(0, 1)
    near = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(ranks[0]["prior"]["params"], expected["params"], **near)


def test_ranks_agree_when_the_group_comes_late(ranks):
    seeds = [rank["drawn seed"] for rank in ranks]
    assert len({*seeds}) == len(ranks)
    for rank in ranks:
        assert_same_bits(rank["late"], ranks[0]["late"])
        assert rank["late"]["groups"][0]["seed"] == seeds[0]


def test_a_seed_that_is_given_stays(ranks):
    assert [rank["seed given"] for rank in ranks] == [*range(len(ranks))]


def gamma_is_refused(size):
    return (
        f"PSGLD cannot run in a process group of {size} ranks: each would go by its "
        "own Hessian, and replicas would drift apart. Set gamma=False, and stop "
        "adaptation (adapt=False) after burn-in"
    )


def test_refusals(ranks):
    fully_sharded = (
        "SGLD cannot sample the parameters of FullyShardedDataParallel: each rank's "
        "shard would get the same noise. Use fully_shard, or DistributedDataParallel"
    )
    for rank in ranks:
        found = dict(rank["refused"])
        early = found.pop("early")  # of seeds of their own
        assert early.startswith(
            "SGLD has made steps before the process group was initialised, and ranks "
            "differ: seeds ["
        )
        assert early.endswith(f"], steps {[1] * len(ranks)}. Give all ranks one seed")
        assert found == {
            **dict.fromkeys(("PSGLD", "PSGLD step"), gamma_is_refused(len(ranks))),
            "zero": "SGLD cannot be the optimizer_class of ZeroRedundancyOptimizer: "
            "each rank's part of the parameters would get the same noise. Construct "
            "SGLD itself, with all parameters of the DistributedDataParallel model",
            **dict.fromkeys(("FSDP False", "FSDP True", "FSDP late"), fully_sharded),
        }


def test_the_ranks_that_differ_are_named(job):
    ranks, _ = job
    last = len(ranks) - 1
    # Of two ranks the first is as good as any; of more, most of them.
    odd = "rank 1's: rank 0" if last > 1 else "rank 0's: rank 1"
    places = (f"places in a tensor of {last}", f"places of tensors of {last}")
    expected = {
        **dict.fromkeys((f"lowest bit of {last}", *places, "hook"), "parameters"),
        f"state of {last}": "state",
        f"lr of {last}": "settings",
    }
    for rank in ranks:
        found = dict(rank["differences"])
        assert found.pop(f"nothing of {last}") == "nothing was raised"
        assert set(found.pop("removed").split("|")) == {"nothing was raised"}
        first, second, third, fourth = found["hook"].split("|")
        assert {first, second, fourth} == {"nothing was raised"}
        found["hook"] = third
        replicas = "SGHMC's replicas differ from"
        of_first = found.pop("lowest bit of 0")
        assert of_first == f"{replicas} {odd} in parameters"
        counters = found.pop(f"counters of {last}")
        differs = f"{replicas} rank 0's: rank {last} in"
        assert counters.startswith(f"{differs} step (3 for 2), seed (5 for ")
        assert found == {key: f"{differs} {part}" for key, part in expected.items()}


def test_one_process_has_no_replicas_to_check():
    theta = nn.Parameter(torch.ones(3))
    sampler = sg.SGLD([theta], **COMMON)
    sg.check_replicas(sampler)
    with pytest.raises(ValueError, match=r"^Invalid steps: 0 \(must be >= 1\)$"):
        sg.check_replicas_every(sampler, 0)


def test_a_closure_that_raises_leaves_no_rank_waiting(job):
    *others, last = (rank["raising"] for rank in job[0])
    assert last == "step 2: the closure's own"
    for found in others:
        assert found.startswith("step 2: ") and "gloo" in found


def layouts(ranks):
    """Returns the ranks' results for each number of chains."""
    numbers = [n for n in range(1, len(ranks) + 1) if f"{n} chains" in ranks[0]]
    assert len(numbers) >= 2
    return [(n, [rank[f"{n} chains"] for rank in ranks]) for n in numbers]


def test_replicas_of_each_chain_agree_on_its_seed(job):
    for number, ranks in layouts(job[0]):
        chains = {}
        for rank in ranks:
            chains.setdefault(rank["chain"][0], []).append(rank["sampler"])
        assert sorted(chains) == list(range(number))
        seeds = set()
        for first, *others in chains.values():
            assert len(others) + 1 == len(ranks) // number
            seeds.add(int(first["groups"][0]["seed"]))
            for other in others:
                for p, q in zip(first["params"], other["params"], strict=True):
                    assert same_bits(p, q)
                assert first["groups"] == other["groups"]
        assert len(seeds) == number


def test_what_decides_alone_is_refused_where_a_chain_has_several_ranks(job):
    for number, ranks in layouts(job[0]):
        size = len(ranks) // number
        for rank in ranks:
            expected = "nothing was raised" if size == 1 else gamma_is_refused(size)
            assert rank["refused"] == expected


def test_the_first_rank_of_a_chain_stores_it(job):
    for number, ranks in layouts(job[0]):
        store = sg.SampleStore(job[1] / f"draws-{number}")
        assert store.chains == list(range(number))
        for rank in ranks:
            chain, replica = rank["chain"]
            assert rank["draws"] == (0 if replica else 4)
            assert (rank["position"]["size"] < 0) == bool(replica)
            draws = store.chain(chain)
            assert [draw.step for draw in draws] == [5, 10, 15, 20]
            params = rank["sampler"]["params"]
            for (name, _), p in zip(network().named_parameters(), params, strict=True):
                assert same_bits(draws[-1][name], p)


def test_groups_that_do_not_fit(job):
    ranks = [rank["wrong groups"] for rank in job[0]]
    for number, found in enumerate(ranks):
        not_in_it = (
            f"Invalid process_group: rank {number} is not in it (give each rank the "
            "group that it is in)"
        )
        assert found == {"not in it": not_in_it if number else "nothing was raised"}
    with pytest.raises(TypeError) as error:
        sg.SGLD([nn.Parameter(torch.ones(3))], **COMMON, process_group="replica")
    assert str(error.value) == (
        "Invalid process_group: str (must be a ProcessGroup, such as get_group() of a "
        "DeviceMesh returns)"
    )


def test_a_checkpoint_of_a_rank_that_stores_nothing(tmp_path):
    model = nn.Linear(2, 1)
    sampler = sg.SGLD(model.parameters(), **COMMON)
    with sg.Collector(sampler, model, tmp_path) as collector:
        state = {**collector.state_dict(), "position": {"size": -1, "crc32": 0}}
        with pytest.raises(ValueError, match="Invalid checkpoint: it is not of chain"):
            collector.load_state_dict(state)


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "meta"),
    ],
)
def test_where_ranks_agree(backends, device, monkeypatch):
    # On the CPU if the group can, and otherwise where the parameters are.
    on_device = [torch.zeros(1), torch.zeros(1, device="meta")]
    chain = SimpleNamespace(params=on_device, process_group=None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert distributed.device_of_group(chain).type == device


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("error")
def test_a_rank_that_stores_nothing_knows_of_no_draws(group_of_one, monkeypatch):
    theta, group = nn.Parameter(torch.ones(3)), dist.group.WORLD
    sampler = sg.SGLD([theta], **COMMON, nonfinite="skip", process_group=group)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    with sg.Collector(sampler, {"theta": theta}, sg.SampleStore()) as collector:
        for i in range(24):
            theta.grad = torch.full((3,), math.nan if i % 2 else 0.0)
            sampler.step()
        assert "0 draws of another rank's chain" in repr(collector)
    assert sampler.num_skipped == 12


def test_all_samplers_run_in_a_group_of_one(group_of_one):
    theta = nn.Parameter(torch.ones(3))
    for make in KINDS.values():
        make([theta])


def test_the_constructor_and_the_first_step_compare_ranks(group_of_one, monkeypatch):
    looks = []

    def settle(chain):
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
def test_zero_of_one_rank_is_the_sampler_itself(group_of_one, kind):
    # It says all that its constructor was given for every group again.
    make = KINDS[kind]
    chains = []
    for wrapped in (True, False):
        params = [nn.Parameter(torch.ones(n)) for n in (5, 3)]
        if wrapped:
            settings = {"optimizer_class": make.func, **make.keywords, "seed": 3}
            sampler = ZeroRedundancyOptimizer(params, **settings)
        else:
            # Zero sorts parameters by size, which these are.
            sampler = make(params, seed=3)
        g = torch.Generator().manual_seed(0)

        def closure(params=params, g=g):
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
