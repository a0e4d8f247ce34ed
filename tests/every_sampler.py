"""Short chains of every sampler, HMC-ECS and SBPS included, behind one interface."""

import torch
from ecs_data import Data
from ecs_data import make as make_ecs
from sbps_chains import N
from sbps_chains import make as make_sbps
from short_chains import ALIKE, THREE, take_step
from short_chains import make as make_short
from torch import Tensor, nn

__all__ = ["EVERY", "THREE", "Chain", "bits"]

EVERY = (
    *ALIKE,
    "SGHMC",
    "SGHMC online",
    "SGHMC with means",
    "SGHMC capturable",
    "EWSG",
    "PSGLD",
    "SGNHT",
    "HMC",
    "HMC of given length",
    "SBPS",
    "SBPS preconditioned",
    "HMCECS",
    "HMCECS signed",
)
SIZES = (3, 130, 4)


class Chain:
    """A sampler of two groups of parameters; a step depends on its number alone."""

    def __init__(self, kind, dtype=torch.float32, seed=5, sizes=SIZES):
        """HMC-ECS has sizes of its own."""
        self.kind = kind
        g = torch.Generator().manual_seed(3)
        self.params = [
            nn.Parameter(0.5 * torch.randn(n, generator=g).to(dtype)) for n in sizes
        ]
        if kind.startswith("HMCECS"):
            self.data = Data(dtype=torch.float64)
            self.params = self.data.params
        self.sampler = self.sampler_of(self.params, seed)

    def sampler_of(self, params, seed=99):
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        if self.kind.startswith("HMCECS"):
            signed = {"estimator": "signed", "num_factors": 9}
            settings = signed if self.kind == "HMCECS signed" else {}
            sampler = make_ecs(self.data, seed=seed, **settings)
            names = {"num_data", "subsample_size", "num_blocks", "seed", *settings}
            names |= {"prior_precision", "step_size"}
            given = {k: v for k, v in sampler.param_groups[0].items() if k in names}
            return type(sampler)(groups, **given)
        if self.kind.startswith("SBPS"):
            preconditioned = self.kind == "SBPS preconditioned"
            return make_sbps(
                groups, refresh_rate=0.5, preconditioned=preconditioned, seed=seed
            )
        return make_short(self.kind, groups, seed=seed)

    def twin(self, dtype=None):
        """Equal parameters, but for a dtype, with a sampler of another seed."""
        other = object.__new__(Chain)
        other.kind = self.kind
        if self.kind.startswith("HMCECS"):
            other.data = Data(dtype=dtype or torch.float64)
            other.params = other.data.params
        else:
            other.params = [
                nn.Parameter(p.detach().to(dtype or p.dtype, copy=True))
                for p in self.params
            ]
        other.set([p.detach() for p in self.params])
        other.sampler = other.sampler_of(other.params)
        return other

    def set(self, values):
        with torch.no_grad():
            for p, value in zip(self.params, values, strict=True):
                p.copy_(value)

    def run(self, steps):
        """Makes steps; returns where they end."""
        for step in steps:
            if self.kind.startswith("HMCECS"):
                self.sampler.step(self.data)
            elif self.kind.startswith("SBPS"):
                self.sampler.step(lambda step=step: self.losses(step))
            else:
                take_step(self.sampler, self.params, step)
        return [p.detach().clone() for p in self.params]

    def losses(self, step):
        g = torch.Generator().manual_seed(step)
        index = torch.randperm(N, generator=g)[:10].double()
        total = torch.zeros(10, dtype=torch.float64)
        for p in self.params:
            x = torch.sin(index[:, None] + torch.arange(p.numel()))
            total = total + 0.5 * (p.double().flatten() - x).square().sum(dim=1)
        return total


def bits(value):
    """The same nest of dicts and lists with tensors as bytes."""
    if isinstance(value, Tensor):
        numbers = value.detach().double().numpy()  # exact, and NumPy has no bfloat16
        return (str(value.dtype), numbers.shape, numbers.tobytes())
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    return repr(value)
