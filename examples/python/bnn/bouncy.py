"""A run of SBPS: the particle starts where some epochs of SGD with momentum end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import torch_sgmcmc as sg

from .data import Images
from .epoch import train_epoch
from .loop import RunConfig
from .methods import METHODS, build_model, build_optimizer, build_sbps

__all__ = ["BouncyChain"]


class BouncyChain:
    """A network whose parameters are a bouncy particle's position.

    An epoch is N evaluations as in every other method, N the number of training
    images: derivatives of an image's loss along the flight, by forward-mode
    differentiation, and its gradient, where the particle bounces. The last event of
    an epoch may exceed it by less than two minibatches; the next one is shorter then.

    The first ``start_epochs`` are SGD with momentum: its lr, momentum and weight decay
    are those of the method ``sgdm``.

    Precisions, where they are drawn, are drawn after an epoch, thus after an event. Of
    an event's place the law is not quite the posterior's. pSBPS adapts all along.

    Args:
        config: the run, of method ``sbps`` or ``psbps``.
        images: training images; others are not looked at.
    """

    def __init__(self, config: RunConfig, images: Images) -> None:
        self._config, self._images = config, images
        settings = dict(config.settings)
        num_data = len(images.train_y)
        self._start_epochs = int(settings["start_epochs"])
        self._model = build_model(
            images.train_x.shape[1], config.seed, images.train_x.device
        )
        self._sgd, _ = build_optimizer(
            "sgdm", METHODS["sgdm"], self._model, num_data, config.seed
        )
        self._sampler, self._precision = build_sbps(
            config.method, settings, self._model, num_data, config.seed
        )
        self._sampler.register_sample_hook(self._keep)
        self._batches = sg.IndependentBatchSampler(
            num_data, int(settings["minibatch"]), seed=config.seed
        )
        # The epoch's samples: their parameters in the order of state_dict.
        self._samples: list[list[Tensor]] = []

    @property
    def evaluations(self) -> int:
        """Derivatives and gradients of single images that the particle has cost."""
        return sum(self._sampler.evaluations)

    def train(self, epoch: int) -> None:
        """SGD with momentum at first, then events to the epoch's evaluations."""
        self._samples = []
        if epoch <= self._start_epochs:
            train_epoch(self._model, self._sgd, self._images, self._config, epoch)
            return
        self._model.train()
        budget = (epoch - self._start_epochs) * len(self._images.train_y)
        while self.evaluations < budget:
            self._sampler.step(self._losses)
        if self._precision is not None:
            self._precision.step()

    def _losses(self) -> Tensor:
        rows = self._batches.draw(1)[0].to(self._images.train_x.device)
        x, y = self._images.train_x[rows], self._images.train_y[rows]
        return F.cross_entropy(self._model(x), y, reduction="none")

    def _keep(self, sampler: sg.SBPS, time: float) -> None:
        self._samples.append([p.detach().clone() for p in self._model.parameters()])

    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities: the mean over the epoch's samples."""
        self._model.eval()
        names = [name for name, _ in self._model.named_parameters()]
        samples = self._samples or [list(self._model.parameters())]
        predictions = [
            torch.func.functional_call(
                self._model, dict(zip(names, sample, strict=True)), (x,)
            ).softmax(1)
            for sample in samples
        ]
        return torch.stack(predictions).mean(0)

    def num_samples(self) -> int:
        """How many sample times the epoch has passed."""
        return len(self._samples)

    def report(self) -> dict[str, Any]:
        """Precisions, evaluations and the sampler's diagnostics."""
        return {
            "precisions": [g["prior_precision"] for g in self._sampler.param_groups],
            "evaluations": self.evaluations,
            # JSON has no NaN, which is what nothing has happened for yet.
            **{k: v for k, v in vars(self._sampler.diagnostics).items() if v == v},
        }

    def state_dict(self) -> dict[str, Any]:
        """What the chain needs to continue to the same bits."""
        return {
            "model": dict(self._model.state_dict()),
            "sgd": self._sgd.state_dict(),
            "optimizer": self._sampler.state_dict(),
            "batches": self._batches.state_dict(),
            **({"precision": self._precision.state_dict()} if self._precision else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        self._model.load_state_dict(state["model"])
        self._sgd.load_state_dict(state["sgd"])
        self._sampler.load_state_dict(state["optimizer"])
        if self._precision is not None:
            self._precision.load_state_dict(state["precision"])
        self._batches.load_state_dict(state["batches"])

    def parameters(self) -> list[Tensor]:
        """The particle's position."""
        return list(self._model.state_dict().values())
