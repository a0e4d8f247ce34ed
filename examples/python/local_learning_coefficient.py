"""A network's coefficient while it learns: a staircase whose steps are known.

    python examples/python/local_learning_coefficient.py [--out DIR]

A deep linear network 6-4-4-6 learns a map of four singular values, one after the other,
from small weights. At each checkpoint λ̂ is that of the map as it is by then, so that w*
is a minimum there too; it should lie at the λ of the rank that has been learned (Aoyagi
2024), while d/2 is 32 throughout. (At rank 0, where the loss begins with the sixth
power of the weights, γ holds them back.) Two minutes.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor, nn

import torch_sgmcmc as sg

WIDTHS = 6, 4, 4, 6
KNOWN = 7.5, 10, 12, 14, 16  # λ, of rank 0 to 4
NUM_DATA = 100_000


def error(model: nn.Sequential, target: Tensor) -> Tensor:
    """The loss on inputs N(0, I), less that of the map itself."""
    return (model(torch.eye(WIDTHS[0])).T - target).square().sum() / 2


def main() -> None:
    """Trains, estimates, and writes ``local_learning_coefficient.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/local_learning_coefficient")
    )
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--checkpoints", type=int, default=12)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    layers = (nn.Linear(i, o, bias=False) for i, o in pairwise(WIDTHS))
    model = nn.Sequential(*layers)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.04)
    u, v = (torch.linalg.qr(torch.randn(6, 6))[0] for _ in range(2))
    target = u @ torch.diag(torch.tensor([2.0, 1.0, 0.6, 0.4, 0, 0])) @ v

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept = torch.logspace(1.7, 3.9, arguments.checkpoints).long().tolist()
    losses, checkpoints = [], {}
    for step in range(kept[-1] + 1):
        if step in kept:
            checkpoints[step] = {k: p.clone() for k, p in model.state_dict().items()}
        optimizer.zero_grad()
        loss = error(model, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    found = {}
    for step, state in checkpoints.items():
        model.load_state_dict(state)
        here = model(torch.eye(WIDTHS[0])).T.detach()
        found[step] = sg.local_learning_coefficient(
            model.parameters(),
            lambda indices, here=here: error(model, here),
            partial(sg.SGHMC, lr=0.02, momentum=0.985),
            num_data=NUM_DATA,
            localization=5.0,
            burn_in=arguments.draws * 3 // 2,
            draws=arguments.draws,
            chains=8,
            seed=0,  # the same noise for each: differences are the checkpoints'
            progress=False,
        )
        rank = int((torch.linalg.svdvals(here) > 0.02).sum())
        value, width = found[step].value, found[step].half_width
        print(f"{step:5d}  rank {rank}, {KNOWN[rank]:4}:  {value:.2f} ± {width:.2f}")
    found[step].plot().savefig(arguments.out / "traces.png", dpi=110)

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for rank, known in enumerate(KNOWN):
        axes.axhline(known, color="0.8", linewidth=1)
        axes.annotate(f"rank {rank}", (42, known), fontsize="small", va="bottom")
    values = [r.value for r in found.values()]
    widths = [r.half_width for r in found.values()]
    axes.errorbar([*found], values, widths, fmt="o", markersize=4)
    axes.set(xscale="log", xlim=(40, 10_000), xlabel="step of training", ylabel="λ̂")
    other = axes.twinx()
    other.plot(losses, color="C1", linewidth=1)
    other.set_ylabel("training loss", color="C1")
    figure.savefig(arguments.out / "local_learning_coefficient.png", dpi=110)


if __name__ == "__main__":
    main()
