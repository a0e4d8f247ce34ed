"""One run of one method with one seed: an ordinary training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from .bouncy import BouncyChain
from .data import Images
from .epoch import train_epoch
from .loop import RunConfig, run_chain
from .methods import build_model, build_optimizer

__all__ = ["RunConfig", "run"]


def run(
    config: RunConfig, images: Images, folder: Path, position: int = 0
) -> dict[str, Any]:
    """Runs to the last epoch, see :func:`bnn.loop.run_chain`."""
    inputs, labels = {"labelled": images.test_x}, images.test_y
    if config.validate:
        inputs, labels = {"labelled": images.validation_x}, images.validation_y
    elif images.other_x is not None:
        inputs["other"] = images.other_x
    build = BouncyChain if config.method in ("sbps", "psbps") else _Chain
    return run_chain(config, build(config, images), inputs, labels, folder, position)


class _Chain:
    """A network and its optimizer, and the hyperprior where there is one."""

    def __init__(self, config: RunConfig, images: Images) -> None:
        self._config = config
        self._images = images
        self._model = build_model(
            images.train_x.shape[1], config.seed, images.train_x.device
        )
        self._optimizer, self._precision = build_optimizer(
            config.method,
            dict(config.settings),
            self._model,
            len(images.train_y),
            config.seed,
        )

    def train(self, epoch: int) -> None:
        train_epoch(self._model, self._optimizer, self._images, self._config, epoch)
        if self._precision is not None:
            self._precision.step()

    def predict(self, x: Tensor) -> Tensor:
        self._model.eval()
        return self._model(x).softmax(1)

    def num_samples(self) -> int:
        return 1

    def report(self) -> dict[str, Any]:
        if self._precision is None:
            return {}
        return {
            "precisions": [g["prior_precision"] for g in self._optimizer.param_groups]
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": dict(self._model.state_dict()),
            "optimizer": self._optimizer.state_dict(),
        }
        if self._precision is not None:
            state["precision"] = self._precision.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._precision is not None:
            self._precision.load_state_dict(state["precision"])

    def parameters(self) -> list[Tensor]:
        return list(self._model.state_dict().values())
