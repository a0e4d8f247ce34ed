"""Cost of several param groups and of changed hyperparameters.

    python benchmarks/param_groups.py [--rounds 21]

One thread, processor time of ``step()`` alone: SGHMC with one group of four tensors,
with four groups of one, and with another lr before every step; for the MNIST network
784-100-10 and for four tensors of 2 to 5 elements. Candidates take turns, round by
round. Prints medians, and ratios to one group with quartiles over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import torch_sgmcmc as sg

SHAPES = {
    "MNIST network": [(100, 784), (100,), (10, 100), (10,)],
    "four small tensors": [(4,), (3,), (5,), (2,)],
}


def make(shapes: list[tuple[int, ...]], seed: int, *, groups: bool) -> sg.Sampler:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = 1e-3 * torch.randn_like(p)
    given = [{"params": [p]} for p in params] if groups else params
    return sg.SGHMC(given, 1e-4, num_data=1000, prior_precision=1.0, seed=seed)


def seconds(sampler: sg.Sampler, steps: int, *, changes: bool) -> float:
    """Processor time of a step."""
    group = sampler.param_groups[0]
    begin = time.process_time()
    for i in range(steps):
        if changes:
            group["lr"] = 1e-4 * (1 + 1e-6 * i)
        sampler.step()
    return (time.process_time() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, shapes in SHAPES.items():
        steps = 300 if name == "MNIST network" else 2000
        candidates = {
            "one group": (make(shapes, 1, groups=False), False),
            "four groups": (make(shapes, 2, groups=True), False),
            "another lr before every step": (make(shapes, 3, groups=False), True),
        }
        times: dict[str, list[float]] = {key: [] for key in candidates}
        for _ in range(rounds + 1):
            for key, (sampler, changes) in candidates.items():
                times[key].append(seconds(sampler, steps, changes=changes))
        print(name)
        for key, values in times.items():
            pairs = zip(values[1:], times["one group"][1:], strict=True)
            low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
            median = statistics.median(values[1:])
            print(
                f"  {key:30} {1e6 * median:7.1f} µs, "
                f"{middle:.2f} ({low:.2f} to {high:.2f}) times one group"
            )


if __name__ == "__main__":
    main()
