"""HMC on several ranks: what hmc_rank_programs.py runs, and one process beside it."""

from functools import partial

import torch
import torch.distributed as dist
from one_rank import Run, advance, gone_on
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_sgmcmc as sg

STEPS = 50
NUM_DATA = 47  # which ranks cannot share evenly
TARGET = {"num_data": NUM_DATA, "prior_precision": 1.0}
COARSE = {**TARGET, "step_size": 0.45, "num_steps": 3}
KINDS = {
    "drawn": partial(sg.HMC, **COARSE),
    "kept": partial(sg.HMC, **COARSE, resample_momentum_every=4),
    "untested": partial(sg.HMC, **COARSE, metropolis=False),
}
# Up to the rounding of the mean over ranks, and what chains make of it.
ROUNDED = {"rtol": 1e-9, "atol": 1e-11}


def data(rank, size):
    """A rank's share, unlike the others', and the weight of its mean loss."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_DATA, 3, generator=g, dtype=torch.float64)
    y = (x[:, 0] + torch.linspace(-2, 2, NUM_DATA).double() > 0).double()
    x, y = x.chunk(size)[rank], y.chunk(size)[rank]
    return x, y, size * len(x) / NUM_DATA


def network(size, group=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    return DDP(model, process_group=group, **options) if size > 1 else model


class Loss:
    """A closure: a rank's share of the data, and the mean loss of all."""

    def __init__(self, model, rank, size):
        self.model, self.size = model, size
        self.x, self.y, self.weight = data(rank, size)

    def __call__(self):
        eta = self.model(self.x).squeeze(1)
        loss = self.weight * F.binary_cross_entropy_with_logits(eta, self.y)
        loss.backward()
        total = loss.detach()
        if self.size > 1:
            dist.all_reduce(total)
            total /= self.size
        return total


def make(kind, model, **settings):
    return KINDS[kind](model.parameters(), **settings)


def begin(rank, size, kind="kept", seed=3, **settings):
    # Buckets' memory may be the gradients': none is kept.
    options = {"gradient_as_bucket_view": kind == "kept"} if size > 1 else {}
    model = network(size, settings.get("process_group"), **options)
    torch.manual_seed(10 + rank)
    sampler = make(kind, model, seed=seed, **settings)
    return Run(model, sampler, Loss(model, rank, size))


def one_chain(kind, rank, size, seed=None):
    run = begin(rank, size, kind, seed)
    found = advance(run, STEPS)
    sg.check_replicas(run.sampler)
    return found


def all_data_on_each(size):
    model = network(size).float()
    whole = Loss(model, 0, 1)  # of which every rank has the loss
    whole.x, whole.y = whole.x.float(), whole.y.float()
    return advance(Run(model, make("kept", model, seed=4), whole), STEPS)


def alone(rank, group=None):
    """A chain of the rank's own."""
    model = network(1)
    sampler = make("kept", model, seed=rank, process_group=group)
    return advance(Run(model, sampler, Loss(model, 0, 1)), STEPS)


def found(rank, size, group):
    results = {
        **{kind: one_chain(kind, rank, size) for kind in KINDS},
        "all data": all_data_on_each(size),
        "alone": alone(rank, group),
    }
    seed = int(results["kept"]["groups"][0]["seed"])
    again = partial(make, "kept", seed=seed + 1)
    run = begin(rank, size, seed=seed)
    results["gone on"] = gone_on(run, again, advance, STEPS)
    return results
