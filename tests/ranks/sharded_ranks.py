"""Chains of shards on one rank of several, beside the same chains of whole tensors.

What sharded_program.py runs. Goes on with the chain in FOLDER/begun, to FOLDER/saved.
"""

from functools import cache, partial
from itertools import count
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from reference import same_bits
from short_chains import ALIKE, TARGET
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

import torch_sgmcmc as sg

STEPS = 6
EITHER = ("Shard(0)", "Shard(1)")


def preconditioned(groups, **settings):
    """BAOA with a G that is cut as its parameters are."""
    g = torch.Generator().manual_seed(8)
    params = [p for group in groups for p in group["params"]]
    own = [like(torch.rand(p.shape, generator=g) + 0.5, p) for p in params]
    return sg.BAOA(groups, preconditioner=own, **TARGET, **settings)


KINDS = {
    **{name: partial(cls, **TARGET) for name, cls in ALIKE.items()},
    "SGHMC": partial(sg.SGHMC, **TARGET, resample_momentum_every=5),
    "SGNHT": partial(sg.SGNHT, **TARGET),
    "MCLMC": partial(sg.MCLMC, **TARGET),
    "BAOA preconditioned": preconditioned,
    "PSGLD": partial(sg.PSGLD, **TARGET, gamma=False, eps=0.1),
    "PSGLD frozen": partial(sg.PSGLD, **TARGET, adapt=False, eps=0.1),
    "EWSG": partial(sg.EWSG, **TARGET, index_chain_length=2),
    "EWSG overdamped": partial(sg.EWSG, **TARGET, momentum=0.0, surrogate="zero"),
    "EWSG persistent": partial(sg.EWSG, **TARGET, persistent_index_chain=True),
}
ONLINE = partial(sg.SGHMC, **TARGET | {"lr": 0.01}, momentum=0.0)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def placements_of(ranks):
    """Shapes of meshes, and how matrices lie on them."""
    first = (2, 2) if ranks == 4 else (ranks, 1)
    second = (2, 2) if ranks == 4 else (1, ranks)
    found = {
        "Shard(0)": ((ranks,), [Shard(0)]),
        "Shard(1)": ((ranks,), [Shard(1)]),
        "replicas": (first, [Replicate(), Shard(0)]),
        "replicas of columns": (second, [Replicate(), Shard(1)]),
        "columns of columns": (second, [Shard(1), Shard(1)]),
    }
    if ranks == 4:
        found["blocks"] = ((2, 2), [Shard(1), Shard(0)])
        found["inner blocks"] = ((2, 2), [Shard(1), Shard(2)])
    return found


def is_run(kind, placement, ranks=2):
    """Shardings of the parameters; two samplers take every one of them."""
    return kind in ("SGHMC", "MCLMC", "EWSG") or (
        ranks == 2 and placement.startswith("Shard")
    )


class Net(nn.Module):
    """Sizes that ranks cannot share evenly, unless padded to more blocks of noise."""

    place: Any = None

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(3)

        def some(*shape):
            return nn.Parameter(torch.randn(shape, generator=g))

        self.small, self.row, self.column = some(5, 3), some(1, 4), some(4, 1)
        self.padded_rows, self.padded_columns = some(3, 42), some(42, 3)
        self.long, self.cube = some(7, 260), some(3, 5, 4)
        self.bias, self.whole, self.scalar = some(3), some(9), some()
        self.low = nn.Parameter(some(4, 6).detach().bfloat16())
        self.last = nn.Parameter(some(2, 3, 4, 5).detach())
        self.last.data = self.last.data.to(memory_format=torch.channels_last)
        self.frozen = some(2, 2).requires_grad_(False)

    def groups(self, **second):
        *first, a, b, frozen = self.parameters()
        return [{"params": [*first, frozen]}, {"params": [a, b], **second}]


def few():
    """Without those that differ from others in their sizes alone."""
    net = Net()
    for name in ("row", "column", "padded_columns", "long", "cube"):
        delattr(net, name)
    return net


def like(t, p):
    """Returns a tensor, cut as a parameter is."""
    return cut(t, p.device_mesh, list(p.placements)) if isinstance(p, DTensor) else t


def cut(t, mesh, placements):
    """Returns this rank's part of a tensor; vectors are cut where possible."""
    if any(isinstance(x, Shard) and x.dim >= t.dim() for x in placements):
        if t.dim() == 0:
            return t.clone()
        placements = [x if isinstance(x, Replicate) else Shard(0) for x in placements]
    return distribute_tensor(t.detach(), mesh, placements, src_data_rank=None)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def shard(net, mesh, placements):
    """Cuts all parameters but one, in the order in which they are."""
    net.place = (mesh, tuple(placements))
    for name, p in list(net.named_parameters()):
        if name != "whole":
            q = nn.Parameter(cut(p, mesh, placements), requires_grad=p.requires_grad)
            setattr(net, name, q)
    return net


@cache
def gradients(place, seed, size):
    """They depend on the step and the call alone."""
    g = torch.Generator().manual_seed(seed)
    grads = {}
    for name, p in Net().named_parameters():
        grad = size * torch.randn(p.shape, generator=g).to(p.dtype)
        grad = grad.contiguous(memory_format=memory_of(p))
        if place is not None and name != "whole":
            grad = cut(grad, place[0], list(place[1]))
        if p.requires_grad:
            grads[name] = grad
    return grads


def advance(net, sampler, steps, size=1.0, missing=True):
    """Makes a step for each number; lr and T change, also with a gradient missing."""
    for step in steps:
        for group in sampler.param_groups:
            group["lr"] *= {4: 0.5, 5: 2.0}.get(step % 6, 1.0)
            if group.get("noise_estimate", "") == 0:
                group["temperature"] = 0.0 if step % 6 == 2 else TARGET["temperature"]
        calls = count()

        def closure(step=step, calls=calls):
            seed = 1000 * step + next(calls)
            if sampler.param_groups[0].get("persistent_index_chain", False):
                seed = int(sampler.minibatches)
            grads = gradients(net.place, seed, size)
            for name, p in net.named_parameters():
                if not (missing and name == "column" and step % 3 == 1):
                    p.grad = grads.get(name)
            return torch.zeros(())

        for p in net.parameters():
            p.grad = None
        sampler.step(closure)


def memory_of(p):
    return torch.channels_last if p.dim() == 4 else torch.contiguous_format


def differences(one, other):
    """Returns the keys that differ, bitwise, from the second's shards put together."""
    found = []
    ours, theirs = (sampler.state_dict() for _, sampler in (one, other))
    if ours["param_groups"] != theirs["param_groups"]:
        found.append("groups")
    for name, _ in one[0].named_parameters():
        p, q = (pair[0].get_parameter(name) for pair in (one, other))
        if not same_bits(p.detach(), whole(q.detach())):
            found.append(name)
        state, expected = other[1].state.get(q, {}), one[1].state.get(p, {})
        if state.keys() != expected.keys():
            found.append(f"keys of {name}")
            continue
        for key, value in state.items():
            if not torch.is_tensor(value) or key == "step":
                alike = value == expected[key]
            else:
                alike = same_bits(whole(value), expected[key])
                alike &= getattr(value, "placements", 0) == getattr(q, "placements", 0)
            if not alike:
                found.append(f"{key} of {name}")
    return found


def pair_of(make, place, net=Net, **settings):
    """A chain of whole tensors and the same in shards."""
    nets = net(), shard(net(), *place)
    return [(each, make(each.groups(lr=0.05), seed=5, **settings)) for each in nets]


def error_of(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def every_kind(results, ranks, meshes):
    for kind, make in KINDS.items():
        if not any(is_run(kind, name, ranks) for name in meshes):
            continue
        one = Net()
        # MCLMC has one lr.
        second = {"prior_precision": 3.0} if kind == "MCLMC" else {"lr": 0.05}
        sampler = make(one.groups(**second), seed=5)
        advance(one, sampler, range(STEPS))
        for name, place in meshes.items():
            if not is_run(kind, name, ranks):
                continue
            net = shard(Net(), *place)
            other = make(net.groups(**second), seed=5)
            advance(net, other, range(STEPS))
            results[f"{kind}, {name}"] = differences((one, sampler), (net, other))
        if kind.startswith("EWSG"):
            group = sampler.param_groups[0]
            results[f"{kind} accepted"] = group["num_accepted"], group["num_proposals"]


def more_chains(results, rank, meshes):
    for name in EITHER:
        place = meshes[name]
        # Estimated from enough gradients to be used, of which few are cut for it.
        one, other = pair_of(ONLINE, place, few, noise_estimate="online")
        steps = [i % 10 for i in range(115)]
        for net, sampler in (one, other):
            advance(net, sampler, steps, size=0.1, missing=False)
        results[f"online, {name}"] = differences(one, other)
        # Seeds that are drawn are rank 0's.
        torch.manual_seed(rank)
        net = shard(Net(), *place)
        drawn = sg.SGHMC(net.groups(), **TARGET)
        advance(net, drawn, range(3))
        alone = Net()
        sampler = sg.SGHMC(alone.groups(), **TARGET, seed=drawn.seed)
        advance(alone, sampler, range(3))
        results[f"drawn, {name}"] = differences((alone, sampler), (net, drawn))
        # Means of priors, whole or in shards.
        pairs = []
        for in_shards in (None, False, True):
            net = Net()
            parts = enumerate(net.parameters())
            means = [torch.full_like(p, 0.5 + i) for i, p in parts]
            means[0][0, 0] = 7.0
            if in_shards is not None:
                shard(net, *place)
            if in_shards:
                sharded = shard(Net(), *place)
                parts = zip(means, sharded.parameters(), strict=True)
                means = [like(mean, p) for mean, p in parts]
            sampler = sg.SGLD(net.parameters(), **TARGET, prior_mean=means, seed=1)
            advance(net, sampler, range(3))
            pairs.append((net, sampler))
        first, second, third = pairs
        found = [*differences(first, second), *differences(first, third)]
        results[f"means, {name}"] = found
        one, other = pair_of(KINDS["SGLD"], place)
        kept = [sampler.draw_from_prior() for _, sampler in (one, other)]
        advance(*one, range(2))
        advance(*other, range(2))
        results[f"prior draws, {name}"] = [*kept[0], *kept[1], *differences(one, other)]
        # A state dict of whole tensors.
        one, other = pair_of(KINDS["SGHMC"], place)
        advance(*one, range(3))
        with torch.no_grad():
            for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
                q.copy_(like(p, q))
        other[1].load_state_dict(one[1].state_dict())
        for pair in (one, other):
            advance(*pair, range(3, 6))
        results[f"loaded, {name}"] = differences(one, other)
        # Precisions are drawn given all elements, up to the order of a sum.
        draws = [sg.GammaPrecision(sampler).step() for _, sampler in (one, other)]
        results[f"precisions, {name}"] = draws


def decisions(results, rank, meshes):
    """Returns the results on one rank."""
    for name in EITHER:
        for choice in ("raise", "skip"):
            net = shard(Net(), *meshes[name])
            sampler = sg.SGHMC(net.groups(), **TARGET, seed=1, nonfinite=choice)
            advance(net, sampler, range(2), missing=False)
            before = [whole(p.detach()).clone() for p in net.parameters()]
            for p in (net.small, net.long, net.whole):
                p.grad = p.grad.clone()  # the others are used again
            if rank == 0:
                for p in (net.small, net.long):
                    p.grad.to_local()[0, 0] = torch.nan
            net.whole.grad[0] = torch.inf
            message = error_of(sampler.step)
            after = [whole(p.detach()) for p in net.parameters()]
            same = all(map(torch.equal, before, after))
            results[f"{choice}, {name}"] = (message, sampler.num_skipped, same)
        p, options = shard(Net(), *meshes[name]).small, {"num_data": 1.0, "seed": 0}
        online = sg.SGHMC([p], 0.1, 0.0, noise_estimate="online", **options)
        for step in range(100):
            p.grad = torch.zeros_like(p)
            if rank == 0:  # noisy in its first element alone
                p.grad.to_local()[0, 0] = 100.0 * (-1) ** step
            online.step()
        results[f"friction, {name}"] = error_of(online.step)
        results[f"draws, {name}"] = fresh_on_one_rank(rank, *meshes[name])


def fresh_on_one_rank(rank, *mesh):
    """Minibatches that only the part on rank 0 tells apart."""
    p = shard(Net(), *mesh).small
    sampler = sg.EWSG([p], **TARGET, seed=1)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        p.grad = torch.ones_like(p)
        if rank == 0:
            p.grad.to_local()[0, 0] = calls
        return torch.zeros(())

    def steps():
        for _ in range(110):
            sampler.step(closure)

    return error_of(steps)


def refusals(rank, meshes):
    mesh, placements = meshes["Shard(0)"]
    net = shard(Net(), mesh, placements)
    p = net.small
    sampler = sg.SGLD([p], **TARGET, seed=1)

    def with_grad(grad):
        p.grad = grad
        return error_of(sampler.step)

    def meaning(mean, q):
        return error_of(partial(sg.SGLD, [q], **TARGET, prior_mean=[mean], seed=1))

    plain, columns = Net().small, shard(Net(), *meshes["Shard(1)"]).small
    shape = {"shape": plain.shape, "stride": plain.stride()}
    wrong = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)], **shape)
    partly = DTensor.from_local(torch.ones(5, 3), mesh, [Partial()])
    parts = nn.Parameter(torch.ones_like(plain))
    loaded = sg.SGHMC([nn.Parameter(torch.ones(5, 3))], **TARGET, seed=1)
    inner = {"momentum": torch.zeros_like(columns)}
    saved = {**loaded.state_dict(), "state": {0: inner}}
    sharded = sg.SGHMC([p], **TARGET, seed=1)
    found = {
        "another cut": with_grad(columns.detach()),
        "other means": meaning(columns.detach(), p),
        "means of a whole one": meaning(columns.detach(), parts),
        "state of a whole one": error_of(partial(loaded.load_state_dict, saved)),
        "other state": error_of(partial(sharded.load_state_dict, saved)),
        "a wrong shard": error_of(partial(sg.SGLD, [wrong], **TARGET, seed=1)),
        "a partial one": error_of(partial(sg.SGLD, [partly], **TARGET, seed=1)),
        "seeds": error_of(partial(sg.SGLD, [p], **TARGET, seed=rank)),
        "chains": error_of(partial(sg.EWSG, [p], **TARGET, num_chains=5, seed=1)),
        "monitor": error_of(partial(sg.TemperatureMonitor, sampler)),
        "variates": error_of(partial(sg.ControlVariates, sampler, p.sum)),
        "replicas": error_of(partial(sg.check_replicas, sampler)),
    }
    found["size"] = str(p.to_local().shape[0])
    return found


def by_fully_shard(results, rank, ranks):
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model.load_state_dict(alone.state_dict())
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    sampler = sg.SGHMC(model.parameters(), **TARGET)
    reference = sg.SGHMC(alone.parameters(), **TARGET, seed=sampler.seed)
    g = torch.Generator().manual_seed(100 + rank)
    for _ in range(20):
        x = torch.randn(8, 5, generator=g)
        sampler.zero_grad()
        (model(x) - x[:, :3]).square().mean().backward()
        for p, q in zip(alone.parameters(), model.parameters(), strict=True):
            p.grad = whole(q.grad)
        sampler.step()
        reference.step()
    results["fully_shard"] = differences((alone, reference), (model, sampler))


def by_prior_groups(results, ranks):
    """Priors measured in a model whose root keeps its parameters whole after a call."""
    alone, model = (nn.Sequential(nn.Linear(5, 7), nn.Tanh()) for _ in range(2))
    model.load_state_dict(alone.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    x = torch.ones(4, 5)
    pairs = []
    for net in (alone, model):
        sampler = sg.SGHMC(sg.prior_groups(net, x), 0.1, num_data=9, seed=1)
        pairs.append((net, sampler))
    results["prior_groups"] = differences(*pairs)
    if not torch.allclose(alone(x), model(x)):
        results["prior_groups"].append("outputs")


def checkpointed(results, folder, meshes):
    """Goes on with a chain, however many ranks it had."""
    net = shard(Net(), *meshes["Shard(0)"])
    sampler = KINDS["SGHMC"](net.groups(), seed=99)
    load(net, sampler, folder / "begun")
    step = int(sampler.param_groups[0]["step"])
    alone = Net()
    reference = KINDS["SGHMC"](alone.groups(), seed=5)
    advance(alone, reference, range(step + 5), missing=False)
    advance(net, sampler, range(step, step + 5), missing=False)
    results["checkpoint"] = differences((alone, reference), (net, sampler))
    save(net, sampler, folder / "saved")


def save(net, sampler, folder):
    model_state, state = get_state_dict(net, sampler, options=FLAT)
    dcp.save({"model": model_state, "sampler": state}, checkpoint_id=folder)


def load(net, sampler, folder):
    model_state, state = get_state_dict(net, sampler, options=FLAT)
    dcp.load({"model": model_state, "sampler": state}, checkpoint_id=folder)
    states = {"model_state_dict": model_state, "optim_state_dict": state}
    set_state_dict(net, sampler, **states, options=FLAT)


def found(rank, ranks, meshes, folder):
    results = {}
    every_kind(results, ranks, meshes)
    if ranks > 2:  # how shards lie differs there, and nothing else
        return results
    more_chains(results, rank, meshes)
    decisions(results, rank, meshes)
    results["refusals"] = refusals(rank, meshes)
    by_fully_shard(results, rank, ranks)
    by_prior_groups(results, ranks)
    checkpointed(results, folder, meshes)
    return results
