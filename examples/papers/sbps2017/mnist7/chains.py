"""One run of SGLD or SBPS, from w = 0; resumable after every part of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from reproduce import checkpoint
from reproduce.checkpoint import Parts
from torch import Tensor
from torch.nn import functional as F

import torch_sgmcmc as sg

from .data import SmallImages
from .model import PRIOR_PRECISION, Softmax

# A checkpoint after each.
_PARTS = 10


@dataclass(frozen=True)
class ChainConfig:
    """The configuration of a run.

    Args:
        method: ``sgld`` or ``sbps``.
        setting: SGLD's lr; SBPS's refresh_rate.
        seed: of noise and minibatches.
        epochs: of N evaluations each: gradients of single images, and derivatives
            along the trajectory.
        batch_size: n.
        dataset: its name.
        num_std: of SBPS, k.
        sample_interval: of SBPS, in trajectory time. SGLD has a sample an epoch.
    """

    method: str
    setting: float
    seed: int
    epochs: int
    batch_size: int
    dataset: str
    num_std: float = 3.0
    sample_interval: float = 0.5

    @property
    def name(self) -> str:
        """A file name."""
        band = f"-k{self.num_std:g}" if self.method == "sbps" else ""
        return f"{self.method}-{self.setting:g}{band}-seed{self.seed}"


class _Chain:
    def __init__(self, config: ChainConfig, images: SmallImages) -> None:
        self._x, self._y = images.train_x, images.train_y
        self._n = config.batch_size
        num_data = len(self._y)
        self._epoch = num_data
        self.model = Softmax(self._x.shape[1])
        self.batches = sg.IndependentBatchSampler(num_data, self._n, seed=config.seed)
        #: Gradients that SGLD has taken.
        self._gradients = 0
        #: Each with the evaluations that the run had cost by then.
        self.samples: list[Tensor] = []
        self.costs: list[int] = []
        common: dict[str, Any] = {
            "num_data": num_data,
            "prior_precision": PRIOR_PRECISION,
            "seed": config.seed,
        }
        self.sampler: sg.SGLD | sg.SBPS
        if config.method == "sgld":
            self.sampler = sg.SGLD(self.model.parameters(), config.setting, **common)
        else:
            self.sampler = sg.SBPS(
                self.model.parameters(),
                num_std=config.num_std,
                refresh_rate=config.setting,
                sample_interval=config.sample_interval,
                model=self.model,
                **common,
            )
            self.sampler.register_sample_hook(lambda sampler, time: self._keep())
        self._parts = Parts(
            model=self.model, sampler=self.sampler, batches=self.batches
        )

    @property
    def evaluations(self) -> int:
        """Gradients of single images, and derivatives along the trajectory."""
        if isinstance(self.sampler, sg.SBPS):
            return sum(self.sampler.evaluations)
        return self._gradients

    def advance(self, epochs: int) -> None:
        """Goes on to the end of an epoch, counted from 1."""
        while self.evaluations < epochs * self._epoch:
            if isinstance(self.sampler, sg.SBPS):
                self.sampler.step(self._losses)
            else:
                self.sampler.zero_grad()
                self._losses().mean().backward()
                self.sampler.step()
                self._gradients += self._n
        if isinstance(self.sampler, sg.SGLD):
            self._keep()

    def _losses(self) -> Tensor:
        rows = self.batches.draw(1)[0]
        return F.cross_entropy(
            self.model(self._x[rows]), self._y[rows], reduction="none"
        )

    def _keep(self) -> None:
        self.samples.append(self.model.weight.detach().flatten().clone())
        self.costs.append(self.evaluations)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._parts.state_dict(),
            "gradients": self._gradients,
            "samples": torch.stack(self.samples) if self.samples else torch.empty(0),
            "costs": self.costs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._parts.load_state_dict(state)
        self._gradients = state["gradients"]
        self.samples = list(state["samples"])
        self.costs = list(state["costs"])


def run_chain(config: ChainConfig, images: SmallImages, folder: Path) -> dict[str, Any]:
    """Runs to the last epoch, from the checkpoint in folder if there is one.

    What a checkpoint has of later epochs is left out: runs of different lengths are
    parts of the same chain.

    Args:
        config: the run.
        images: the data.
        folder: where the checkpoint is.

    Returns:
        ``samples`` [samples, d], ``costs`` in evaluations, and ``diagnostics`` of SBPS.
    """
    path, chain = folder / f"{config.name}.pt", _Chain(config, images)
    fixed = asdict(config)
    del fixed["epochs"]
    part = -(-config.epochs // _PARTS)
    for epoch in checkpoint.epochs(path, fixed, chain, {}, config.epochs, every=part):
        chain.advance(epoch)
    # An epoch ends with the step that completes its evaluations.
    end = config.epochs * len(images.train_y) + 2 * config.batch_size
    count = sum(cost < end for cost in chain.costs)
    result: dict[str, Any] = {
        "samples": chain.state_dict()["samples"][:count],
        "costs": chain.costs[:count],
        "diagnostics": {},
    }
    if isinstance(chain.sampler, sg.SBPS):
        result["diagnostics"] = vars(chain.sampler.diagnostics)
    return result
