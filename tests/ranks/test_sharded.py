"""DTensors on two ranks: chains of shards are those of whole tensors, to the bit."""

import copy
from contextlib import contextmanager
from functools import partial
from itertools import combinations, product
from pathlib import Path

import pytest
import sharded_hmc_ranks as hmc
import sharded_program
import sharded_ranks
import torch
import torch.distributed as dist
from hmc_ranks import Loss
from launch import launch, run_ranks
from one_rank import theta
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_sgmcmc as sg
from torch_sgmcmc.core import dtensor

pytestmark = pytest.mark.full

PROGRAM = Path(sharded_program.__file__)
RANKS = 2
MORE = ("online", "drawn", "means", "prior draws", "loaded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Starts a chain in one process, to resume in two."""
    folder = tmp_path_factory.mktemp("ranks")
    net = sharded_ranks.Net()
    sampler = sharded_ranks.KINDS["SGHMC"](net.groups(), seed=5)
    sharded_ranks.advance(net, sampler, range(5), missing=False)
    sharded_ranks.save(net, sampler, folder / "begun")
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """Returns the results of sharded_ranks.py on each rank."""
    return launch(PROGRAM, RANKS, folder)


def of_ranks(kinds, is_run):
    """Kinds of chains with the placements that they are run with."""
    every = product(kinds, sharded_ranks.placements_of(RANKS))
    return pytest.mark.parametrize(
        ("kind", "placement"), [each for each in every if is_run(*each)]
    )


@of_ranks(sharded_ranks.KINDS, sharded_ranks.is_run)
def test_shards_are_parts_of_one_chain(ranks, kind, placement):
    for rank in ranks:
        assert rank[f"{kind}, {placement}"] == []
    if kind.startswith("EWSG"):  # something has been decided on
        accepted, proposals = ranks[0][f"{kind} accepted"]
        assert 0 < accepted < proposals


@pytest.mark.parametrize("number", [4, pytest.param(3, marks=pytest.mark.nightly)])
def test_shards_equal_the_whole_on_more_ranks(tmp_path, number):
    ways = sharded_ranks.placements_of(number)
    chains = [
        f"{kind}, {placement}"
        for kind, placement in product(sharded_ranks.KINDS, ways)
        if sharded_ranks.is_run(kind, placement, number)
    ]
    assert len(chains) >= 2 * len(ways)
    for rank in launch(PROGRAM, number, tmp_path):
        assert {chain: rank[chain] for chain in chains if rank[chain]} == {}


@pytest.mark.parametrize(
    "chain",
    [
        *map(", ".join, product(MORE, sharded_ranks.EITHER)),
        "fully_shard",
        "prior_groups",
    ],
)
def test_more_chains(ranks, chain):
    for rank in ranks:
        assert rank[chain] == []


@pytest.mark.parametrize("placement", sharded_ranks.EITHER)
def test_precisions_are_drawn_given_all_elements(ranks, placement):
    (whole, one), (_, other) = (rank[f"precisions, {placement}"] for rank in ranks)
    assert one == other
    # Sums of two ranks are rounded otherwise than those of one process.
    assert one == pytest.approx(whole, rel=1e-13)


@pytest.mark.parametrize("placement", sharded_ranks.EITHER)
def test_what_one_rank_sees_all_ranks_go_by(ranks, placement):
    for rank in ranks:
        message, *rest = rank[f"raise, {placement}"]
        assert rest == [0, True]
        assert message == (
            "RuntimeError: SGHMC got a gradient that is not finite: 1 NaN and 0 "
            "infinite of 15 elements, for parameter 0 of group 0, of shape [5, 3] (and "
            "for 2 more). The step was not made. If losses have grown, the chain has "
            "diverged and needs a smaller lr; where it is rare, nonfinite='skip' "
            "skips such steps"
        )
        assert rank[f"skip, {placement}"] == ("nothing was raised", 1, True)
        assert rank[f"draws, {placement}"] == "nothing was raised"
        friction = "ValueError: Invalid noise_estimate: 990 in the noisiest coordinate."
        assert rank[f"friction, {placement}"].startswith(friction)


def test_refusals(ranks):
    columns = "a DTensor with placements (Shard(dim=1),)"
    rows = "a DTensor with placements (Shard(dim=0),)"
    alike = "(must be cut alike, or whole: full_tensor())"
    state = "ValueError: Invalid state_dict: momentum of parameter 0 is"
    mean = "ValueError: Invalid prior_mean: number 0 is"
    cannot = "ValueError: Invalid parameter: SGLD cannot sample"
    whole = (
        "ValueError: Invalid parameters: some are DTensors, which only steps and "
        "checkpoints of samplers take (keep whole parameters on every rank, as "
        "DistributedDataParallel does)"
    )
    for rank in ranks:
        found = dict(rank["refusals"])
        size = found.pop("size")
        assert found == {
            "another cut": f"RuntimeError: SGLD got {columns} as the gradient of "
            f"{rows} of shape [5, 3] (must be cut alike: see DTensor.redistribute)",
            "other means": f"{mean} {columns}, for {rows} {alike}",
            "means of a whole one": f"{mean} {columns}, for a plain tensor {alike}",
            "state of a whole one": f"{state} {columns}, for a plain tensor {alike}",
            "other state": f"{state} {columns}, for {rows} {alike}",
            "a wrong shard": f"{cannot} a DTensor of shape [5, 3] and placements "
            "(Shard(dim=0),) whose local tensor has shape [4, 3] (must be "
            f"[{size}, 3])",
            "a partial one": f"{cannot} a DTensor with placements (Partial(sum),) "
            "(must be Shard and Replicate: redistribute it)",
            "seeds": "RuntimeError: SGLD has DTensors, which are parts of one chain, "
            "and ranks differ: seeds [0, 1], steps [0, 0]. Give all ranks one seed, or "
            "none and a process_group that has all ranks of the mesh",
            "chains": "ValueError: Invalid num_chains: 5 (a DTensor belongs to one "
            "chain)",
            "monitor": "ValueError: Invalid sampler: it has DTensors, and a monitor "
            "sums over whole parameters (observe replicas under "
            "DistributedDataParallel)",
            "variates": whole,
            "replicas": whole,
        }


@pytest.fixture
def of_hmc(ranks):
    """Returns the results of sharded_hmc_ranks.py on each rank."""
    return [rank["HMC"] for rank in ranks]


@of_ranks(hmc.KINDS, hmc.is_run)
def test_shards_are_parts_of_one_chain_of_hmc(of_hmc, kind, placement):
    """Bitwise identical; energies alone, which decide, are rounded differently."""
    for rank in of_hmc:
        assert rank[f"{kind}, {placement}"] == []
    if kind != "untested":  # something has been decided on
        assert 0 < of_hmc[0][f"{kind} accepted"] < hmc.STEPS


def test_means_of_hmc_and_a_chain_that_resumes(of_hmc):
    for rank in of_hmc:
        assert rank["means"] == []


def test_a_warm_up_of_hmc(of_hmc):
    step_size = of_hmc[0]["warm-up, shards"]
    assert step_size == of_hmc[1]["warm-up, shards"]
    assert step_size == pytest.approx(of_hmc[0]["warm-up, one"], rel=1e-6)


@pytest.mark.parametrize("mesh", ["fully_shard", "replicas"])
def test_hmc_under_fully_shard_samples_what_one_process_samples(
    of_hmc, mesh, one_thread
):
    """Up to the rounding of the mean over ranks, and what chains make of it."""
    found, other = (rank[mesh] for rank in of_hmc)
    assert found["seed"] == other["seed"]
    assert torch.equal(found["draws"], other["draws"])
    model = copy.deepcopy(of_hmc[0]["model"])
    sampler = sg.HMC(model.parameters(), **hmc.FINER, seed=int(found["seed"]))
    loss, draws = Loss(model, 0, 1), []
    for _ in range(len(found["draws"])):
        sampler.step(loss)
        draws.append(theta([*model.parameters()]))
    assert sampler.param_groups[0]["num_accepted"] == found["accepted"]
    assert 2 < found["accepted"] < len(draws) - 2
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(found["draws"], torch.stack(draws), **close)


def test_what_one_rank_of_hmc_sees_all_ranks_go_by(of_hmc):
    for rank in of_hmc:
        bad = "RuntimeError: HMC got a loss or parameters that are not finite at the"
        bad = f"{bad} start of a trajectory"
        assert rank["not finite, start"] == (bad, True, 0)
        assert rank["not finite, end"] == ("nothing was raised", True, 1)
        said, stands, _ = rank["not finite, gradient"]
        assert said.startswith(
            "RuntimeError: HMC got a gradient that is not finite: 0 NaN and 1 infinite "
            "of 15 elements, for parameter 0 of group 0, of shape [5, 3]."
        )
        assert stands


def test_refusals_of_hmc(of_hmc):
    spoiled = "number 0 has elements out of range (must be finite and > 0)"
    for number, rank in enumerate(of_hmc):
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


def test_a_chain_resumes_in_other_numbers_of_processes(ranks, folder):
    for rank in ranks:  # one, then two
        assert rank["checkpoint"] == []
    net, alone = sharded_ranks.Net(), sharded_ranks.Net()
    sampler = sharded_ranks.KINDS["SGHMC"](net.groups(), seed=98)
    reference = sharded_ranks.KINDS["SGHMC"](alone.groups(), seed=5)
    sharded_ranks.load(net, sampler, folder / "saved")
    assert sampler.param_groups[0]["step"] == 10
    sharded_ranks.advance(net, sampler, range(10, 15), missing=False)
    sharded_ranks.advance(alone, reference, range(15), missing=False)
    assert sharded_ranks.differences((alone, reference), (net, sampler)) == []


@pytest.mark.parametrize("sizes", [(7,), (4, 5), (2, 3, 4), (3, 2, 2, 3)])
def test_pieces_are_all_of_a_box_in_its_order(sizes):
    indices = torch.arange(torch.Size(sizes).numel()).view(sizes)
    slices = ([(0, i, j - i) for i, j in combinations(range(n + 1), 2)] for n in sizes)
    for box in map(list, product(*slices)):
        expected = indices[tuple(slice(i, i + n) for _, i, n in box)]
        found = torch.full_like(expected, -1)
        for piece in dtensor._pieces(box, sizes):
            part = found[piece.part]
            k = torch.arange(part.numel())
            values = piece.begin + k // piece.row * piece.pitch + k % piece.row
            part.copy_(values.view(part.shape))
        assert torch.equal(found, expected)


WAYS = (Replicate(), Shard(0), Shard(1), Shard(2), _StridedShard(0, split_factor=2))


@contextmanager
def mesh_of(shape, rank=1):
    """The placement of one of four ranks, without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(4))
def test_where_the_elements_of_shards_are(rank):
    with mesh_of((2, 2), rank) as mesh:
        shapes = ((5, 3, 4), (1, 2, 7), (8, 8, 2), (2, 0, 3))
        for shape, placements in product(shapes, product(WAYS, WAYS)):
            indices = torch.arange(torch.Size(shape).numel()).view(shape)
            for order in ((0, 1, 2), (2, 0, 1)):  # in memory
                back = sorted(range(3), key=order.__getitem__)
                memory = indices.permute(order).contiguous().permute(back)
                whole = distribute_tensor(memory, mesh, placements, src_data_rank=None)
                layout = dtensor.layout_of(whole)
                here = whole.to_local()
                assert layout.shape == here.shape
                found = []
                pieces = zip(layout.pieces, dtensor._cut(here, layout), strict=True)
                for piece, part in pieces:
                    k = torch.arange(part.numel())
                    at = piece.begin + k // piece.row * piece.pitch + k % piece.row
                    assert torch.equal(part.flatten(), at)
                    found.append(at)
                assert sum(map(len, found)) == here.numel()


def test_layouts_that_are_kept_equal_those_of_the_placements_there_are():
    with mesh_of((4,)) as mesh:
        kept = dtensor.Sharded()
        ways = [[Shard(0)], [Shard(1)], [Replicate()]]
        place = partial(distribute_tensor, torch.ones(6, 5), mesh, src_data_rank=None)
        p, *others = map(place, ways)
        assert kept.layout(torch.ones(6, 5)) is None
        for other in others:
            assert kept.layout(p) == dtensor.layout_of(p)
            assert kept.layout(p) is kept.layout(p)
            torch.utils.swap_tensors(p, other)
        assert kept.layout(p) == dtensor.layout_of(p)


def test_another_order_of_cuts_is_refused():
    """It has the local shape of the usual one, and other elements."""
    with mesh_of((2, 2)) as mesh:
        ways = [Shard(0), Shard(0)]
        p = distribute_tensor(torch.ones(8, 2), mesh, ways, src_data_rank=None)
        (entry,) = p._spec.shard_order
        back = (entry._replace(mesh_dims=(1, 0)),)
        other = copy.copy(p._spec)
        other.shard_order = back
        turned = DTensor(p.to_local(), other, requires_grad=False)
        assert turned.placements == p.placements
        assert not dtensor.same_shards(p, turned) and dtensor.same_shards(p, p.clone())
        with pytest.raises(ValueError) as error:
            sg.SGLD([turned.requires_grad_()], 0.1, num_data=5, seed=0)
        assert str(error.value) == (
            "Invalid parameter: SGLD cannot sample a DTensor whose dimension 0 is cut "
            "along dimensions [1, 0] of the mesh, in this order (must be ascending: "
            "redistribute it)"
        )


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_samplers_that_decide_by_all_parameters_refuse(group_of_one):
    makes = (partial(sg.HMCECS, subsample_size=5), sg.SBPS)
    for placement, make in product((Shard(0), Replicate()), makes):
        p = nn.Parameter(distribute_tensor(torch.ones(3), group_of_one, [placement]))
        with pytest.raises(ValueError) as error:
            make([p], num_data=40)
        name = str(error.value).split()[2]
        assert name in ("HMCECS", "SBPS")
        assert str(error.value) == (
            f"Invalid parameter: {name} cannot sample a DTensor (it decides by all "
            "parameters together: use a sampler that does not, such as SGHMC)"
        )


@pytest.mark.parametrize("scaled", [False, True])
def test_mclmc_tunes_itself(group_of_one, scaled):
    start, found = torch.linspace(-1, 2, 9), []
    for is_cut in (False, True):

        def place(t, is_cut=is_cut):
            return distribute_tensor(t, group_of_one, [Shard(0)]) if is_cut else t

        p = nn.Parameter(place(start.clone()))
        scale = [place(start.abs() + 0.5)] if scaled else None
        settings = {"num_data": 10, "tune_steps": 60, "preconditioner": scale}
        sampler = sg.MCLMC([p], lr=0.05, seed=1, **settings)
        for _ in range(70):
            p.grad = p.detach().clone()
            sampler.step()
        (group,) = sampler.param_groups
        found.append((group["lr"], group["momentum"], sharded_ranks.whole(p).tolist()))
    assert found[0] == found[1]
    assert found[0][0] != 0.05


def test_psgld_with_gamma_refuses(group_of_one):
    p = nn.Parameter(distribute_tensor(torch.ones(3), group_of_one, [Shard(0)]))
    with pytest.raises(ValueError) as error:
        sg.PSGLD([p], 0.1, num_data=4, seed=1)
    assert str(error.value) == (
        "Invalid gamma: True needs second derivatives, which are not taken of DTensors "
        "(Set gamma=False, and stop adaptation (adapt=False) after burn-in)"
    )


def test_what_takes_no_dtensors(group_of_one, tmp_path):
    model = nn.Linear(3, 2)
    placed = distribute_tensor(model.weight.detach(), group_of_one, [Shard(0)])
    model.weight = nn.Parameter(placed)
    params = list(model.parameters())
    sampler = sg.SGLD(params, 0.1, num_data=4, seed=1)
    run = {"num_data": 4, "localization": 1.0, "burn_in": 1, "draws": 2}
    chain = partial(sg.SGLD, lr=0.1)
    for call in (
        lambda: sg.Collector(sampler, model, tmp_path / "draws"),
        lambda: sg.local_learning_coefficient(params, len, chain, **run),
    ):
        with pytest.raises(ValueError) as error:
            call()
        _, _, message = str(error.value).partition(": ")
        assert message == (
            "some are DTensors, which only steps and checkpoints of samplers take "
            "(keep whole parameters on every rank, as DistributedDataParallel does)"
        )


def test_all_ranks_of_a_mesh_raise_if_one_differs(tmp_path):
    """Ranks that share no group with it raise, too: they would wait for the others."""
    program = Path(__file__).with_name("threaded_ranks.py")
    (said,) = run_ranks(program, [[]], tmp_path)
    assert said == f"{[(rank, True) for rank in range(4)]}\n"
