"""A small regression with every sampler, for tests inside training frameworks."""

from functools import partial

import torch
from short_chains import ALIKE, with_means
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import torch_sgmcmc as sg

NUM_DATA, BATCH = 32, 8
_COMMON = {"num_data": NUM_DATA, "prior_precision": 1.0, "seed": 3}


# Those whose step() follows a backward() of somebody else's.
PLAIN = {
    **{k: partial(cls, lr=0.1, **_COMMON) for k, cls in ALIKE.items()},
    "SGHMC": lambda p: sg.SGHMC(p, 0.1, 0.9, **_COMMON),
    "SGHMC with means": lambda p: sg.SGHMC(with_means(p), 0.1, 0.8, **_COMMON),
    "PSGLD without gamma": lambda p: sg.PSGLD(p, 0.01, gamma=False, **_COMMON),
    "SGNHT": lambda p: sg.SGNHT(p, 0.1, **_COMMON),
}
# Those that ask for more: a graph, or a closure of their own.
CLOSED = {
    "PSGLD": lambda p: sg.PSGLD(p, 0.01, eps=0.1, **_COMMON),
    "EWSG": lambda p: sg.EWSG(p, 0.1, **_COMMON),
    "HMC": lambda p: sg.HMC(p, 0.1, num_steps=3, **_COMMON),
    "SBPS": lambda p: sg.SBPS(p, sample_interval=0.005, **_COMMON),
    "HMCECS": lambda p: sg.HMCECS(p, subsample_size=10, num_blocks=5, **_COMMON),
}
EVERY = {**PLAIN, **CLOSED}


def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 3, generator=g)
    noise = 0.1 * torch.randn(NUM_DATA, generator=g)
    return x, (x @ torch.tensor([1.0, -2.0, 0.5]) + noise)[:, None]


def loader():
    """Minibatches in a fixed order."""
    return DataLoader(TensorDataset(*data()), BATCH)


def new_model():
    g = torch.Generator().manual_seed(1)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return model


def new_sampler(kind, model):
    return EVERY[kind](model.parameters())


def collector_of(sampler, model, folder):
    """Every third draw after the second step, or of SBPS its second sample."""
    return sg.Collector(sampler, model, folder, burn_in=2, every=3)


def takes_closure(kind):
    return kind in CLOSED and kind != "PSGLD"


def graphs(kind):
    """Returns the argument of backward()."""
    return {"create_graph": True} if kind == "PSGLD" else {}


def closure_of(kind, model, batches, backward):
    """The closure that this sampler asks for."""
    x, y = data()

    def ewsg():
        (rows,) = batches.draw(1)
        loss = mse_loss(model(x[rows]), y[rows])
        backward(loss)
        return loss

    def hmc():
        loss = mse_loss(model(x), y)
        backward(loss)
        return loss

    def sbps():
        (rows,) = batches.draw(1)
        return (model(x[rows]) - y[rows]).square().sum(1)

    def hmcecs(indices):
        return -(model(x[indices]) - y[indices]).square().sum(1)

    return {"EWSG": ewsg, "HMC": hmc, "SBPS": sbps, "HMCECS": hmcecs}[kind]


def by_hand(kind, steps, *, parts=1, store=None):
    """The chain of a loop without a framework; gradients may be accumulated."""
    model = new_model()
    sampler = new_sampler(kind, model)
    collector = None if store is None else collector_of(sampler, model, store)
    batches = sg.IndependentBatchSampler(NUM_DATA, BATCH, seed=5)
    rows = list(loader())
    for step in range(steps):
        if takes_closure(kind):
            sampler.step(closure_of(kind, model, batches, Tensor.backward))
            continue
        sampler.zero_grad()
        for part in range(parts):
            x, y = rows[(step * parts + part) % len(rows)]
            (mse_loss(model(x), y) / parts).backward(**graphs(kind))
        sampler.step()
    if collector is not None:
        collector.close()
    return list(model.parameters())
