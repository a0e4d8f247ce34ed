"""One rank of several, over gloo: ``python chain_ranks.py RANK SIZE FOLDER``.

Does what test_distributed.py looks at, and saves it as FOLDER/RANK.pt.
"""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from one_rank import Run, join, refusal, run, state_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_sgmcmc as sg

STEPS = 20
LONGER = 40
NUM_DATA = 48
COMMON = {"lr": 0.05, "num_data": NUM_DATA, "prior_precision": 1.0}
KINDS = {
    "SGLD": partial(sg.SGLD, **COMMON),
    "SGHMC": partial(sg.SGHMC, **COMMON, resample_momentum_every=20),
    "SGHMC online": partial(sg.SGHMC, **COMMON, momentum=0.0, noise_estimate="online"),
    "SGNHT": partial(sg.SGNHT, **COMMON),
    "PSGLD": partial(sg.PSGLD, **COMMON, gamma=False, eps=0.1),
    "EWSG": partial(sg.EWSG, **COMMON, index_chain_length=2),
    "EWSG overdamped": partial(sg.EWSG, **COMMON, momentum=0.0),
    # Whose closure is asked for minibatches by number.
    "EWSG persistent": partial(sg.EWSG, **COMMON, persistent_index_chain=True),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data():
    x = torch.randn(NUM_DATA, 3, generator=torch.Generator().manual_seed(1)).double()
    return x, x[:, :2].tanh()


def train(model, sampler, batches, steps):
    x, y = data()
    persistent = sampler.param_groups[0].get("persistent_index_chain", False)

    def closure():
        at = batches.at(sampler.minibatches) if persistent else batches.draw(1)
        rows = at[0]
        sampler.zero_grad()
        loss = (model(x[rows]) - y[rows]).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        sampler.step(closure)


def train_together(model, sampler, rank, size):
    """Steps of all ranks, each with its part of every minibatch."""
    part = {"seed": 7, "num_replicas": size, "rank": rank}
    batches = sg.IndependentBatchSampler(NUM_DATA, 12, **part)
    train(model, sampler, batches, LONGER)
    return state_of(Run(model, sampler, model))


def one_chain(kind, rank, size, seed=None):
    """A chain of all ranks, or with one of them, of one process without a group."""
    model = DDP(network()) if size > 1 else network()
    torch.manual_seed(rank)
    sampler = KINDS[kind](model.parameters(), seed=seed)
    return train_together(model, sampler, rank, size)


def from_the_prior(rank, size):
    """A chain that begins at a draw from priors by layer."""
    model = DDP(network()) if size > 1 else network()
    torch.manual_seed(rank)
    options = {"lr": 0.05, "num_data": NUM_DATA, "seed": 4}
    sampler = sg.SGHMC(sg.prior_groups(model, data()[0]), **options)
    sampler.draw_from_prior()
    return train_together(model, sampler, rank, size)


def begun_before_the_group(rank):
    """Samplers with seeds of their own: of no step, of one, and of shards to be."""
    late, early, sharded = (network(rank) for _ in range(3))
    begun = {
        "late": (late, sg.SGHMC(late.parameters(), **COMMON)),
        "early": (early, sg.SGLD(early.parameters(), **COMMON)),
        "sharded": (sharded, sg.SGLD(sharded.parameters(), **COMMON, seed=1)),
    }
    for p in early.parameters():
        p.grad = torch.zeros_like(p)
    begun["early"][1].step()
    return begun


def refused(rank, begun):
    """Returns the errors of parameters that several ranks cannot sample."""
    theta = nn.Parameter(torch.ones(3))
    found = {"early": refusal(begun["early"][1].step)}
    found["PSGLD"] = refusal(partial(sg.PSGLD, [theta], **COMMON, seed=1))
    later = sg.PSGLD([theta], **COMMON, seed=1, gamma=False)
    theta.grad = torch.ones(3)
    later.step()
    later.param_groups[0]["gamma"] = True
    found["PSGLD step"] = refusal(later.step)
    zero = partial(ZeroRedundancyOptimizer, optimizer_class=sg.SGLD, **COMMON, seed=0)
    found["zero"] = refusal(lambda: zero(network().parameters()))
    cpu = torch.device("cpu")
    for original in (False, True):
        model = FSDP(network(), use_orig_params=original, device_id=cpu)
        make = partial(sg.SGLD, model.parameters(), **COMMON, seed=0)
        found[f"FSDP {original}"] = refusal(make)
    model, sampler = begun["sharded"]
    FSDP(model, use_orig_params=True, device_id=cpu)
    found["FSDP late"] = refusal(sampler.step)
    return found


def side_by_side(chains, folder):
    """So many chains, each of as many ranks as there are for it."""
    replicas = dist.get_world_size() // chains
    names = {"mesh_dim_names": ("chain", "replica")}
    mesh = init_device_mesh("cpu", (chains, replicas), **names)
    index, replica = mesh.get_coordinate()
    group = mesh.get_group("replica")
    model = DDP(network(), process_group=group)
    torch.manual_seed(replica)  # as all chains do
    sampler = sg.SGHMC(model.parameters(), **COMMON, process_group=group)
    part = {"seed": sampler.seed, "num_replicas": replicas, "rank": replica}
    batches = sg.IndependentBatchSampler(NUM_DATA, 12, **part)
    sg.check_replicas_every(sampler, 5)
    draws = folder / f"draws-{chains}"
    with sg.Collector(sampler, model.module, draws, chain=index, every=5) as collector:
        assert replica == 0 or collector.num_draws == 0

        train(model, sampler, batches, STEPS)
        state = collector.state_dict()
        collector.load_state_dict(state)
        found = {"draws": collector.num_draws, "position": state["position"]}
    theta = nn.Parameter(torch.ones(3))
    other = partial(sg.PSGLD, [theta], **COMMON, seed=1, process_group=group)
    found |= {"chain": (index, replica), "refused": refusal(other)}
    found["sampler"] = state_of(Run(model, sampler, model))
    return found


def two_vectors(steps):
    params = [nn.Parameter(torch.arange(4.0) + i) for i in range(2)]
    sampler = sg.SGHMC(params, **COMMON, resample_momentum_every=20)
    for p in params:
        p.grad = torch.ones(4)
    for _ in range(steps):
        sampler.step()
    return params, sampler


def flip(tensor, bit):
    tensor.detach().view(torch.int32)[2] ^= 1 << bit


def differences(rank):
    """Returns the message of check_replicas() after one rank was altered."""
    last = dist.get_world_size() - 1

    def alter(kind, params, sampler):
        group, (p, q) = sampler.param_groups[0], params
        if kind == "lowest bit":
            flip(q, 0)
        elif kind == "places in a tensor":
            p.data = p.data.flip(0)
        elif kind == "places of tensors":
            p.data, q.data = q.data, p.data
        elif kind == "state":
            flip(sampler.state[p]["momentum"], 31)
        elif kind == "lr":
            group["lr"] *= 2
        elif kind == "counters":
            group.update(step=group["step"] + 1, seed=5)

    found = {}
    of_last = ("places in a tensor", "places of tensors", "state", "lr", "counters")
    for kind, altered in (
        ("nothing", last),
        ("lowest bit", last),
        ("lowest bit", 0),
        *((kind, last) for kind in of_last),
    ):
        params, sampler = two_vectors(2)
        if rank == altered:
            alter(kind, params, sampler)
        found[f"{kind} of {altered}"] = refusal(partial(sg.check_replicas, sampler))

    params, sampler = two_vectors(2)
    handle = sg.check_replicas_every(sampler, 3)
    if rank == last:
        flip(params[0], 5)
    found["hook"] = "|".join(refusal(sampler.step) for _ in range(4))
    handle.remove()
    found["removed"] = "|".join(refusal(sampler.step) for _ in range(4))
    return found


def wrong_groups(rank):
    """Errors of groups that do not fit."""
    caught = partial(refusal, kind=ValueError)
    theta = [nn.Parameter(torch.ones(3))]
    of_first = dist.new_group([0])
    return {
        "not in it": caught(partial(sg.SGLD, theta, **COMMON, process_group=of_first))
    }


def raising(rank):
    """Returns the others' errors when the last rank's closure raises."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = DDP(network(), process_group=group)
    sampler = sg.SGHMC(model.parameters(), **COMMON, seed=0, process_group=group)
    x, _ = data()

    def closure():
        sampler.zero_grad()
        loss = model(x).square().mean()
        if rank == dist.get_world_size() - 1 and sampler.param_groups[0]["step"] == 2:
            raise RuntimeError("the closure's own")
        loss.backward()
        return loss

    for _ in range(2):
        sampler.step(closure)
    found = refusal(partial(sampler.step, closure))
    return f"step {sampler.param_groups[0]['step']}: {found}"


def main(rank, size, folder):
    begun = begun_before_the_group(rank)
    drawn = begun["late"][1].seed
    join(rank, size, folder)
    model, late = begun["late"]
    theta = nn.Parameter(torch.ones(3))
    results = {
        "one chain": {kind: one_chain(kind, rank, size) for kind in KINDS},
        "drawn seed": drawn,
        "late": train_together(DDP(model), late, rank, size),
        "prior": from_the_prior(rank, size),
        "seed given": sg.SGLD([theta], **COMMON, seed=rank).seed,
        "refused": refused(rank, begun),
        "differences": differences(rank),
        "wrong groups": wrong_groups(rank),
    }
    if rank == 0:  # a seed that is given takes no communication
        sg.SGLD([theta], **COMMON, seed=3)
    for chains in (n for n in range(1, size + 1) if size % n == 0):
        results[f"{chains} chains"] = side_by_side(chains, folder)
    results["raising"] = raising(rank)
    return results


if __name__ == "__main__":
    run(main)
