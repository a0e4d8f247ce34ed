"""Short chains of SBPS that its tests share."""

from itertools import pairwise

import torch
from torch import nn

import torch_sgmcmc as sg

N = 50


class Draws:
    """Minibatches of a Gaussian mean: losses ‖θ - xᵢ‖² / 2, of all parameters."""

    def __init__(self, params, n=10):
        self.params, self.n = params, n
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self):
        assert torch.is_grad_enabled()
        index = torch.randperm(N, generator=self.generator)[: self.n].double()
        total = torch.zeros(self.n, dtype=torch.float64)
        for p in self.params:
            x = torch.sin(index[:, None] + torch.arange(p.numel()))
            delta = p.double().flatten() - x
            total = total + 0.5 * delta.square().sum(dim=1)
        return total


def make(params, *, given=None, **settings):
    """A sampler; the A of each parameter may be given."""
    shared = {"num_data": N, "prior_precision": 20.0, "num_std": 3.0, "seed": 5}
    sampler = sg.SBPS(params, **{**shared, **settings})
    if given is not None:
        sampler.set_preconditioner(map(given, sampler._context.params))
    return sampler


def uneven(p):
    """A preconditioner of a parameter."""
    return torch.linspace(0.3, 2.0, p.numel()).view(p.shape)


def run(sampler, closure, steps):
    """Times and places of events."""
    params = sampler._context.params
    times, places = [], []
    for _ in range(steps):
        sampler.step(closure)
        times.append(sampler.trajectory_time)
        places.append(torch.cat([p.detach().flatten().double() for p in params]))
    return times, places


def two(dtype=torch.float64):
    return [
        nn.Parameter(torch.zeros(3, dtype=dtype)),
        nn.Parameter(torch.ones(2, 2, dtype=dtype)),
    ]


def segments(times, places):
    """Pairs of events (time, place), from the start of `two` on."""
    start = (0.0, torch.cat([torch.zeros(3), torch.ones(4)]).double())
    return pairwise([start, *zip(times, places, strict=True)])
