"""One run of one method with one seed: which chain, and what it predicts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from reproduce.checkpoint import Parts

import torch_sgmcmc as sg

from .bouncy import BouncyChain
from .config import RunConfig
from .data import Images
from .loop import Chain, run_chain, train_epoch
from .methods import build_model, build_optimizer


def run(config: RunConfig, images: Images, folder: Path) -> dict[str, Any]:
    """Runs to the last epoch, see :func:`run_chain`."""
    inputs, labels = {"labelled": images.test_x}, images.test_y
    if config.validate:
        inputs, labels = {"labelled": images.validation_x}, images.validation_y
    elif images.other_x is not None:
        inputs["other"] = images.other_x
    build = BouncyChain if config.method in ("sbps", "psbps") else NetworkChain
    begin = partial(build, config, images)
    _, state = run_chain(config, begin, inputs, labels, folder)
    return state


class NetworkChain(Chain):
    """A network and its optimizer, and the hyperprior where there is one."""

    def __init__(self, config: RunConfig, images: Images, store: Path) -> None:
        self._config, self._images = config, images
        num_data, pixels = images.train_x.shape
        self.model = build_model(pixels, config.seed, images.train_x.device)
        self._optimizer, self._precision = build_optimizer(
            config.method, dict(config.settings), self.model, num_data, config.seed
        )
        self.parts = Parts(model=self.model, optimizer=self._optimizer)
        if self._precision is not None:
            self.parts["precision"] = self._precision
        if isinstance(self._optimizer, sg.Sampler):
            epoch = -(-num_data // config.batch_size)
            self.collectors = [
                sg.Collector(
                    self._optimizer,
                    self.model,
                    store,
                    burn_in=config.burn_in * epoch,
                    every=epoch,
                )
            ]

    def train(self, epoch: int) -> None:
        """One pass over the images; then the precisions are drawn."""
        train_epoch(self.model, self._optimizer, self._images, self._config, epoch)
        if self._precision is not None:
            self._precision.step()

    def report(self) -> dict[str, Any]:
        """The precisions, where they are drawn."""
        if self._precision is None:
            return {}
        return {
            "precisions": [g["prior_precision"] for g in self._optimizer.param_groups]
        }
