"""A run of SBPS: the particle starts where some epochs of SGD with momentum end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reproduce.checkpoint import Parts
from torch import Tensor
from torch.nn import functional as F

import torch_sgmcmc as sg

from .config import RunConfig
from .data import Images
from .loop import Chain, train_epoch
from .methods import METHODS, build_model, build_optimizer, build_sbps


class BouncyChain(Chain):
    """A network whose parameters are a bouncy particle's position.

    An epoch is N evaluations as in every other method, N the number of training
    images: derivatives of an image's loss along the trajectory, by forward-mode
    differentiation, and its gradient, where the particle bounces. The last event of
    an epoch may exceed it by less than two minibatches; the next one is shorter then.

    The first ``start_epochs`` are SGD with momentum: its lr, momentum and weight decay
    are those of the method ``sgdm``.

    Precisions, where they are drawn, are drawn after an epoch, thus after an event. Of
    an event's place the law is not quite the posterior's. pSBPS adapts all along.

    Args:
        config: the run, of method ``sbps`` or ``psbps``.
        images: training images; others are not looked at.
        store: where the samples after burn-in go.
    """

    def __init__(self, config: RunConfig, images: Images, store: Path) -> None:
        self._config, self._images, self._epoch = config, images, 0
        settings = dict(config.settings)
        num_data, pixels = images.train_x.shape
        self._start_epochs = int(settings["start_epochs"])
        self.model = build_model(pixels, config.seed, images.train_x.device)
        self._sgd, _ = build_optimizer(
            "sgdm", METHODS["sgdm"], self.model, num_data, config.seed
        )
        self._sampler, self._precision = build_sbps(
            config.method, settings, self.model, num_data, config.seed
        )
        self.collectors = [
            sg.Collector(self._sampler, self.model, store, when=self._averaging)
        ]
        self._batches = sg.IndependentBatchSampler(
            num_data, int(settings["minibatch"]), seed=config.seed
        )
        self.parts = Parts(
            model=self.model,
            sgd=self._sgd,
            optimizer=self._sampler,
            batches=self._batches,
        )
        if self._precision is not None:
            self.parts["precision"] = self._precision

    @property
    def evaluations(self) -> int:
        """Derivatives and gradients of single images that the particle has cost."""
        return sum(self._sampler.evaluations)

    def train(self, epoch: int) -> None:
        """SGD with momentum at first, then events to the epoch's evaluations."""
        self._epoch = epoch
        if epoch <= self._start_epochs:
            train_epoch(self.model, self._sgd, self._images, self._config, epoch)
            return
        self.model.train()
        budget = (epoch - self._start_epochs) * len(self._images.train_y)
        group = self._sampler.param_groups[0]
        while self.evaluations < budget:
            refreshed = group["num_refreshments"]
            self._sampler.step(self._losses)
            # Only there θ is a draw of the posterior.
            if self._precision is not None and group["num_refreshments"] > refreshed:
                self._precision.step()

    def _averaging(self) -> bool:
        return self._epoch > self._config.burn_in

    def _losses(self) -> Tensor:
        rows = self._batches.draw(1)[0].to(self._images.train_x.device)
        x, y = self._images.train_x[rows], self._images.train_y[rows]
        return F.cross_entropy(self.model(x), y, reduction="none")

    def report(self) -> dict[str, Any]:
        """Precisions, evaluations and the sampler's diagnostics."""
        return {
            "precisions": [g["prior_precision"] for g in self._sampler.param_groups],
            "evaluations": self.evaluations,
            # JSON has no NaN, which is what nothing has happened for yet.
            **{k: v for k, v in vars(self._sampler.diagnostics).items() if v == v},
        }
