"""A small classification for sample(), in functions that processes can import."""

import os
import signal
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_sgmcmc as sg
from torch_sgmcmc.run import sample as driver

ROWS = 60


def model():
    """A network with dropout and batch norm: random numbers and buffers to restore."""
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
    )


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def loader():
    return DataLoader(data(), batch_size=10, shuffle=True)


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def sghmc(params, seed):
    return sg.SGHMC(params, 0.05, 0.9, num_data=ROWS, prior_precision=1.0, seed=seed)


def cycles(sampler):
    return sg.CyclicalSchedule(sampler, 8, exploration=0.5)


def run(folder, model=model, sampler=sghmc, batches=None, loss=loss, **options):
    given = {"steps": 50, "burn_in": 3, "every": 2, "seed": 5, "checkpoint_every": 7}
    given |= {"progress": False, "check": False, **options}
    return sg.sample(model, sampler, batches or loader(), loss, folder, **given)


@pytest.fixture
def forked(monkeypatch):
    """Chains' processes are forked from this one, whose torch is imported.

    To import it takes longer than all that they do. Tests of start_processes itself
    (`spawn`) do not use this.
    """
    start = partial(driver.start_processes, start_method="fork")
    monkeypatch.setattr(driver, "start_processes", start)


class KilledAt:
    """A callback that ends the process at a step of a chain, while files are written.

    Once only: a file tells that it has done so.
    """

    def __init__(self, folder, chain, step):
        self.done, self.place = folder / f"killed-{chain}-{step}", (chain, step)

    def __call__(self, state):
        if (state.chain, state.step) == self.place and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
