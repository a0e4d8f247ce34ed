"""One rank of HMC's, over gloo: ``python hmc_ranks.py RANK SIZE FOLDER``.

Does what test_distributed_hmc.py looks at, and saves it as FOLDER/RANK.pt.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_rank import join, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from two_ranks import chain, refusal

import torch_sgmcmc as sg

STEPS = 50
NUM_DATA = 47  # which ranks cannot share evenly
CHAINS = 3
TARGET: dict[str, Any] = {"num_data": NUM_DATA, "prior_precision": 1.0}
COARSE: dict[str, Any] = {**TARGET, "step_size": 0.45, "num_steps": 3}
KINDS: dict[str, Callable[..., sg.HMC]] = {
    "drawn": partial(sg.HMC, **COARSE),
    "kept": partial(sg.HMC, **COARSE, resample_momentum_every=4),
    "untested": partial(sg.HMC, **COARSE, metropolis=False),
}


def data(rank: int, size: int) -> tuple[Tensor, Tensor, float]:
    """A rank's share, unlike the others', and the weight of its mean loss."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_DATA, 3, generator=g, dtype=torch.float64)
    y = (x[:, 0] + torch.linspace(-2, 2, NUM_DATA).double() > 0).double()
    x, y = x.chunk(size)[rank], y.chunk(size)[rank]
    return x, y, size * len(x) / NUM_DATA


def network(size: int, group: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    return DDP(model, process_group=group, **options) if size > 1 else model


class Loss:
    """A closure; of a rank's share of the data."""

    def __init__(self, model: nn.Module, rank: int, size: int) -> None:
        self.model, (self.x, self.y, self.weight) = model, data(rank, size)

    def __call__(self) -> Tensor:
        eta = self.model(self.x).squeeze(1)
        loss = self.weight * F.binary_cross_entropy_with_logits(eta, self.y)
        loss.backward()
        return loss


class LossOfChains:
    """The same of several chains, whose gradients are averaged by hand."""

    def __init__(self, theta: Tensor, rank: int, size: int) -> None:
        self.theta, self.size = theta, size
        self.x, self.y, self.weight = data(rank, size)

    def __call__(self) -> Tensor:
        eta = self.theta @ self.x.T
        terms = F.binary_cross_entropy_with_logits(
            eta, self.y.expand_as(eta), reduction="none"
        )
        losses = self.weight * terms.mean(1)
        losses.sum().backward()
        if self.size > 1:
            dist.all_reduce(self.theta.grad)
            self.theta.grad /= self.size
        return losses.detach()


def advance(model: nn.Module, sampler: sg.HMC, closure: Any, steps: int) -> Any:
    """What the chain was after every step, and is."""
    draws = []
    for _ in range(steps):
        sampler.step(closure)
        draws.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return {**chain(model, sampler), "draws": torch.stack(draws)}


def one_chain(kind: str, rank: int, size: int, seed: int | None = None) -> Any:
    # Buckets' memory may be the gradients': none is kept.
    options = {"gradient_as_bucket_view": kind == "kept"} if size > 1 else {}
    model = network(size, **options)
    torch.manual_seed(10 + rank)
    sampler = KINDS[kind](model.parameters(), seed=seed)
    found = advance(model, sampler, Loss(model, rank, size), STEPS)
    sg.check_replicas(sampler)
    return found


def gone_on_with(kind: str, rank: int, size: int, seed: int) -> Any:
    """The same, with half the steps made from a state dict."""
    parts, state = [], None
    model = network(size)
    for half in range(2):
        sampler = KINDS[kind](model.parameters(), seed=seed + half)
        if state is not None:
            sampler.load_state_dict(state)
        part = advance(model, sampler, Loss(model, rank, size), STEPS // 2)
        parts.append(part["draws"])
        state = sampler.state_dict()
    return {**part, "draws": torch.cat(parts)}


def many_chains(rank: int, size: int) -> Any:
    model = nn.ParameterList([torch.ones(CHAINS, 3, dtype=torch.float64)])
    sampler = sg.HMC(model.parameters(), **COARSE, num_chains=CHAINS, seed=2)
    found = advance(model, sampler, LossOfChains(model[0], rank, size), STEPS)
    sg.check_replicas(sampler)
    return found


def warmed_up(
    rank: int, size: int, model: nn.Module, sampler: sg.HMC
) -> tuple[float, Any]:
    closure = Loss(model, rank, size)
    sampler.warmup(closure, 20, progress=False)
    return sampler.param_groups[0]["step_size"], advance(model, sampler, closure, 10)


def all_data_on_each(size: int) -> Any:
    model = network(size).float()
    whole = Loss(model, 0, 1)
    whole.x, whole.y = whole.x.float(), whole.y.float()
    return advance(model, KINDS["kept"](model.parameters(), seed=4), whole, STEPS)


def alone(rank: int, group: Any = None) -> Any:
    """A chain of the rank's own."""
    model = network(1)
    sampler = KINDS["kept"](model.parameters(), seed=rank, process_group=group)
    return advance(model, sampler, Loss(model, 0, 1), STEPS)


def not_finite(rank: int, size: int) -> dict[str, Any]:
    """What all ranks do where something is not finite on the last one."""
    found = {}
    for where, call, choice in (
        ("end", 4, "raise"),
        ("start", 1, "raise"),
        ("start skipped", 1, "skip"),
        ("gradient", 1, "raise"),
        ("gradient at the end", 4, "raise"),
    ):
        model = network(size)
        sampler = KINDS["kept"](model.parameters(), seed=3, nonfinite=choice)
        loss, calls = Loss(model, rank, size), 0

        def closure(loss: Loss = loss, where: str = where, call: int = call) -> Tensor:
            nonlocal calls
            calls += 1
            here = calls == call and rank == size - 1
            x = loss.x
            by_gradient = where.startswith("gradient")
            if here and by_gradient:
                loss.x = x * torch.inf
            value = loss()
            loss.x = x
            return value * torch.inf if here and not by_gradient else value

        before = [p.detach().clone() for p in model.parameters()]
        message = refusal(partial(sampler.step, closure))
        group = sampler.param_groups[0]
        found[where] = {
            "message": message,
            "stood still": all(map(torch.equal, before, model.parameters())),
            **{k: group[k] for k in ("step", "num_skipped", "num_divergences")},
        }
        sg.check_replicas(sampler)
    return found


def unlike(rank: int, size: int) -> Any:
    """Ranks that do not sample one chain."""
    found = {}
    for what in ("seeds", "gradients"):
        model = network(1 if what == "gradients" else size)
        seed = rank if what == "seeds" else 0
        sampler = KINDS["kept"](model.parameters(), seed=seed)
        before = [p.detach().clone() for p in model.parameters()]
        message = refusal(partial(sampler.step, Loss(model, rank, size)))
        stands = all(map(torch.equal, before, model.parameters()))
        found[what] = message, stands, sampler.param_groups[0]["step"]
    return found


def raising(rank: int, size: int) -> Any:
    """What becomes of the others when the last rank's closure raises at the end."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = network(size, group)
    sampler = KINDS["kept"](model.parameters(), seed=0, process_group=group)
    loss, calls = Loss(model, rank, size), 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        value = loss()  # with all ranks' gradients
        if calls == 8 and rank == size - 1:
            raise RuntimeError("the closure's own")
        return value

    sampler.step(closure)
    before = [p.detach().clone() for p in model.parameters()]
    message = refusal(partial(sampler.step, closure))
    stands = all(map(torch.equal, before, model.parameters()))
    return message, calls, stands, sampler.param_groups[0]["step"]


def main(rank: int, size: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(20 + rank)
    late_model = network(1)
    torch.manual_seed(20 + rank)
    late = KINDS["drawn"](late_model.parameters())
    join(rank, size, folder)
    results = {
        "drawn seed": late.seed,
        "warm-up": warmed_up(rank, size, DDP(late_model), late),
        "seed": late.seed,
        **{kind: one_chain(kind, rank, size) for kind in KINDS},
        "chains": many_chains(rank, size),
        "all data": all_data_on_each(size),
        "not finite": not_finite(rank, size),
        "unlike": unlike(rank, size),
    }
    seed = results["kept"]["groups"][0]["seed"]
    results["gone on"] = gone_on_with("kept", rank, size, seed)
    groups = [dist.new_group([i]) for i in range(size)]
    results["alone"] = alone(rank, groups[rank])
    results["raising"] = raising(rank, size)
    return results


if __name__ == "__main__":
    run(main)
