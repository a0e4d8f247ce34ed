"""HMC's chains of shards on one rank of several, beside those of whole tensors."""

import copy
from functools import partial

import torch
from hmc_ranks import COARSE, Loss
from one_rank import theta
from sharded_ranks import cut, differences, error_of, few, shard, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_sgmcmc as sg

STEPS = 5
TARGET = {
    "num_data": 4,
    "prior_precision": 1.0,
    "temperature": 0.5,
    "step_size": 0.17,
    "num_steps": 3,
}
FINER = {**COARSE, "step_size": 0.25}
KINDS = {
    "drawn": partial(sg.HMC, **TARGET),
    "kept": partial(sg.HMC, **TARGET, resample_momentum_every=3),
    "untested": partial(sg.HMC, **TARGET, metropolis=False),
    "masses": partial(sg.HMC, **TARGET),
}


def is_run(kind, placement):
    """Returns the cases to run."""
    return kind == "kept" or placement == "Shard(1)"


class Pull:
    """A closure whose gradients are those of one process, to the bit."""

    def __init__(self, net):
        self.net = net

    def __call__(self):
        terms = []
        for p in self.net.parameters():
            if p.requires_grad:
                # Not by autograd: torch 2.11 leaves gradients of tensors that are
                # channels last whole.
                p.grad = p.detach() - 0.1
                terms.append((whole(p.detach()) - 0.1).double().square().sum() / 2)
        loss = torch.stack(terms).sum()
        if self.net.place is None:
            return loss
        # As a model with tensor parallelism has it.
        mesh, placements = self.net.place
        return DTensor.from_local(loss, mesh, [Replicate()] * len(placements))


def begun(kind, net):
    sampler = KINDS[kind](net.groups(prior_precision=3.0), seed=5)
    if kind == "masses":
        g = torch.Generator().manual_seed(6)
        masses = [torch.rand(p.shape, generator=g) + 0.7 for p in few().parameters()]
        # In the order of the groups.
        *first, a, b, frozen = masses
        masses = [*first, frozen, a, b]
        ps = [p for group in sampler.param_groups for p in group["params"]]
        if isinstance(ps[0], DTensor):  # one of them in shards
            masses[0] = cut(masses[0], ps[0].device_mesh, list(ps[0].placements))
        sampler.set_mass([*masses[:1], 1.3, *masses[2:]])
    return sampler


def advance(net, sampler, steps):
    for _ in range(steps):
        sampler.step(Pull(net))


def every_kind(results, meshes):
    for kind in KINDS:
        one = few()
        sampler = begun(kind, one)
        advance(one, sampler, STEPS)
        for name, place in meshes.items():
            if not is_run(kind, name):
                continue
            net = shard(few(), *place)
            other = begun(kind, net)
            advance(net, other, STEPS)
            results[f"{kind}, {name}"] = differences((one, sampler), (net, other))
        group = sampler.param_groups[0]
        results[f"{kind} accepted"] = group["num_accepted"]


def with_means(results, meshes):
    """Means of priors, and a chain that goes on from a state dict."""
    chains = []
    for place in (None, meshes["Shard(1)"]):
        net = few()
        means = [torch.full_like(p, 0.5 + i) for i, p in enumerate(net.parameters())]
        if place is not None:
            shard(net, *place)
        settings = {**TARGET, "resample_momentum_every": 0, "seed": 1}
        sampler = sg.HMC(net.parameters(), **settings, prior_mean=means)
        advance(net, sampler, 4)
        if place is not None:
            state = sampler.state_dict()
            sampler = sg.HMC(net.parameters(), **{**settings, "seed": 2})
            sampler.load_state_dict(state)
        advance(net, sampler, 4)
        chains.append((net, sampler))
    results["means"] = differences(*chains)


def warmed_up(results, meshes):
    for name, place in (("one", None), ("shards", meshes["Shard(0)"])):
        net = few() if place is None else shard(few(), *place)
        sampler = KINDS["drawn"](net.groups(), seed=3)
        sampler.warmup(Pull(net), 4, progress=False)
        results[f"warm-up, {name}"] = sampler.param_groups[0]["step_size"]


def by_fully_shard(results, rank, ranks):
    """Ranks have shares of the data, and parts of the parameters."""
    for name, shape in (("fully_shard", (ranks,)), ("replicas", (2, ranks // 2))):
        names = ("replica", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        results["model"] = copy.deepcopy(model)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        torch.manual_seed(10 + rank)
        sampler = sg.HMC(model.parameters(), **FINER)
        loss = Loss(model, rank, ranks)
        draws = []
        for _ in range(12):
            sampler.step(loss)
            draws.append(theta([whole(p.detach()) for p in model.parameters()]))
        group = sampler.param_groups[0]
        results[name] = {
            "seed": sampler.seed,
            "accepted": group["num_accepted"],
            "draws": torch.stack(draws),
        }


def decisions(results, rank, meshes):
    """Changes an element of a parameter, or a loss, on one rank."""
    for where in ("start", "end", "gradient"):
        net = shard(few(), *meshes["Shard(0)"])
        sampler = begun("kept", net)
        calls = 0

        def closure(where=where, net=net):
            nonlocal calls
            calls += 1
            loss = Pull(net)()
            if where == "start":  # all ranks have the loss of all data
                loss = loss * torch.nan
            if rank == 0 and where == "gradient":
                net.small.grad.to_local()[0, 0] = torch.inf
            if rank == 0 and where == "end" and calls == 4:
                net.small.detach().to_local()[0, 0] = torch.inf
            return loss

        before = [whole(p.detach()).clone() for p in net.parameters()]
        said = error_of(partial(sampler.step, closure))
        after = [whole(p.detach()) for p in net.parameters()]
        group = sampler.param_groups[0]
        stands = all(map(torch.equal, before, after))
        results[f"not finite, {where}"] = (said, stands, group["num_divergences"])


def refusals(rank, meshes, groups):
    p = shard(few(), *meshes["Shard(0)"]).small
    sampler = sg.HMC([p], **TARGET, seed=1)
    spoiled = cut(torch.ones(5, 3), p.device_mesh, [Shard(0)])
    if rank == 0:
        spoiled.to_local()[0, 0] = -1
    columns = cut(torch.ones(5, 3), p.device_mesh, [Shard(1)])
    alone = {"process_group": groups[rank]}
    return {
        "group": error_of(partial(sg.HMC, [p], **TARGET, seed=1, **alone)),
        "chains": error_of(partial(sg.HMC, [p], **TARGET, seed=1, num_chains=5)),
        "masses on one rank": error_of(partial(sampler.set_mass, [spoiled])),
        "other masses": error_of(partial(sampler.set_mass, [columns])),
        "loaded": error_of(partial(sampler.load_state_dict, _with(sampler, spoiled))),
    }


def _with(sampler, mass):
    return {**sampler.state_dict(), "state": {0: {"mass": mass}}}


def found(rank, ranks, meshes, groups):
    results = {}
    every_kind(results, meshes)
    with_means(results, meshes)
    warmed_up(results, meshes)
    by_fully_shard(results, rank, ranks)
    decisions(results, rank, meshes)
    results["refusals"] = refusals(rank, meshes, groups)
    return results
