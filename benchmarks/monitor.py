"""Cost of a step with a monitor, relative to one without.

    python benchmarks/monitor.py [--threads 1] [--every 20] [--rounds 40]

fp32: updates only, gradients in place, of the MNIST network 784-100-10 and of one
tensor of 10^7 elements; and training steps of the network, with minibatches of 500.
Both kinds of step are made in turns by one sampler; the median of the rounds' ratios of
processor time is reported, with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torch_sgmcmc as sg
from torch_sgmcmc.core.context import context_of

SAMPLERS = {
    "SGLD": lambda p: sg.SGLD(p, 1e-6, num_data=6e4),
    "SGHMC": lambda p: sg.SGHMC(p, 1e-6, 0.9, num_data=6e4),
    "PSGLD without Γ": lambda p: sg.PSGLD(p, 1e-6, num_data=6e4, gamma=False),
    "SGNHT": lambda p: sg.SGNHT(p, 1e-6, 0.9, num_data=6e4),
}


def network() -> nn.Module:
    """The MNIST network."""
    return nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))


def updates(name: str, params: list[nn.Parameter]) -> tuple[sg.Sampler, Callable]:
    """Steps with gradients that are there."""
    for p in params:
        p.grad = torch.randn_like(p)
    sampler = SAMPLERS[name](params)
    return sampler, sampler.step


def training(name: str) -> tuple[sg.Sampler, Callable]:
    """Steps of a training loop."""
    model, x, y = network(), torch.rand(500, 784), torch.randint(10, (500,))
    sampler = SAMPLERS[name](model.parameters())

    def closure() -> torch.Tensor:
        sampler.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    def step() -> None:
        sampler.step(closure)

    return sampler, step


CASES: dict[str, Callable[[str], tuple[sg.Sampler, Callable]]] = {
    "MNIST network": lambda name: updates(name, list(network().parameters())),
    "10^7 elements": lambda name: updates(name, [nn.Parameter(torch.randn(10**7))]),
    "training step": training,
}


def ratios(sampler: sg.Sampler, step: Callable, every: int, rounds: int) -> list[float]:
    """Times a whole period between two noise observations."""
    monitor = sg.TemperatureMonitor(sampler, every=every)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for observed in (False, True):
            context_of(sampler).monitor = monitor if observed else None
            started = time.process_time()
            for _ in range(5 * every):
                step()
            times[observed].append(time.process_time() - started)
    return [b / a for a, b in zip(times[False], times[True], strict=True)]


def main() -> None:
    """Prints three lines for each sampler."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in SAMPLERS:
        for where, make in CASES.items():
            large = where == "10^7 elements"
            rounds = max(2, arguments.rounds // 10) if large else arguments.rounds
            measured = ratios(*make(name), arguments.every, rounds)
            low, middle, high = statistics.quantiles(measured, n=4)
            print(f"{name:16} {where}: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
