"""A small classification for sample(), in functions that processes can import."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_sgmcmc as sg
from torch_sgmcmc.posterior import run as driver

ROWS = 60


def model() -> nn.Module:
    """A network with dropout and batch norm: random numbers and buffers to restore."""
    return nn.Sequential(
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)),
        nn.Linear(8, 3),
    )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def loader() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=10, shuffle=True)


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def sghmc(params: Any, seed: int) -> sg.Sampler:
    return sg.SGHMC(params, 0.05, 0.9, num_data=ROWS, prior_precision=1.0, seed=seed)


def cycles(sampler: sg.Sampler) -> Any:
    return sg.CyclicalSchedule(sampler, 8, exploration=0.5)


def run(folder: Path, **options: Any) -> sg.SampleStore:
    given: dict[str, Any] = {
        **{"steps": 50, "burn_in": 3, "every": 2, "seed": 5},
        **{"checkpoint_every": 7, "progress": False, "check": False},
        **options,
    }
    sampler = given.pop("sampler", sghmc)
    return sg.sample(model, sampler, loader(), loss, folder, **given)


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

    def __init__(self, folder: Path, chain: int, step: int) -> None:
        self.done, self.place = folder / f"killed-{chain}-{step}", (chain, step)

    def __call__(self, state: sg.ChainState) -> None:
        if (state.chain, state.step) == self.place and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
