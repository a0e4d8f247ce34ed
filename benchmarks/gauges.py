"""What a step with gauges costs beside one without, in one run.

    python benchmarks/gauges.py [--threads 1] [--every 20] [--rounds 40]

Updates only, gradients in place, fp32, of the MNIST network 784-100-10 and of one
tensor of 10^7 elements. Both kinds of step are made in turns by one sampler; the median
of the rounds' ratios is reported, with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import torch_sgmcmc as sg

MNIST = ((100, 784), (100,), (10, 100), (10,))
SAMPLERS = {
    "SGLD": lambda p: sg.SGLD(p, 1e-6, num_data=6e4),
    "SGHMC": lambda p: sg.SGHMC(p, 1e-6, 0.9, num_data=6e4),
    "PSGLD without Γ": lambda p: sg.PSGLD(p, 1e-6, num_data=6e4, gamma=False),
    "SGNHT": lambda p: sg.SGNHT(p, 1e-6, 0.9, num_data=6e4),
}


def ratios(name: str, shapes: tuple, every: int, rounds: int) -> list[float]:
    """Of the times of as many steps as there are from one look at noise to the next."""
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    sampler = SAMPLERS[name](params)
    gauges = sg.Gauges(sampler, every=every)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for observed in (False, True):
            sampler._gauges = gauges if observed else None
            started = time.perf_counter()
            for _ in range(5 * every):
                sampler.step()
            times[observed].append(time.perf_counter() - started)
    return [b / a for a, b in zip(times[False], times[True], strict=True)]


def main() -> None:
    """Prints a line for each sampler."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in SAMPLERS:
        for where, shapes, rounds in (
            ("MNIST network", MNIST, arguments.rounds),
            ("10^7 elements", ((10**7,),), max(2, arguments.rounds // 10)),
        ):
            measured = ratios(name, shapes, arguments.every, rounds)
            low, middle, high = statistics.quantiles(measured, n=4)
            print(f"{name:16} {where}: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
