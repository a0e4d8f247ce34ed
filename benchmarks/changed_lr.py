"""Cost of a new lr at every step, in steps of torch's SGD with momentum.

    python benchmarks/changed_lr.py [--rounds 21] [--steps 1000]

Four small tensors (5-16-2), one thread. A round times SGD with momentum, then each
sampler with the same lr and with another lr at every step; printed are the medians of
the rounds and their quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import torch_sgmcmc as sg

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
SAMPLERS: dict[str, Make] = {
    "SGLD": lambda p: sg.SGLD(p, 1e-3, num_data=1000, seed=0),
    "SGHMC": lambda p: sg.SGHMC(p, 1e-3, 0.9, num_data=1000, seed=0),
}


def seconds(make: Make, steps: int, *, changes: bool) -> float:
    """Returns the time of a step."""
    g = torch.Generator().manual_seed(0)
    shapes = (16, 5), (16,), (2, 16), (2,)
    params = [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=g)
    optimizer = make(params)
    for step in range(-100, steps):
        if step == 0:
            begin = time.perf_counter()
        lr = 1e-3 + 1e-7 * (step & 1023)
        optimizer.param_groups[0]["lr"] = lr if changes else 1e-3
        optimizer.step()
    return (time.perf_counter() - begin) / steps


def main() -> None:
    """Prints a row for each sampler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    added: dict[str, list[float]] = {name: [] for name in SAMPLERS}
    for _ in range(args.rounds):
        sgd = seconds(lambda p: torch.optim.SGD(p, 1e-3, 0.9), args.steps, changes=True)
        for name, make in SAMPLERS.items():
            same, other = (seconds(make, args.steps, changes=c) for c in (False, True))
            added[name].append((other - same) / sgd)
    for name, ratios in added.items():
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"{name}: {median:.2f} ({low:.2f} to {high:.2f}) of a step of SGD")


if __name__ == "__main__":
    main()
