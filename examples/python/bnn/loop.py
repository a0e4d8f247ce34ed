"""The loop of a run: train, predict, score, save; resumable after every epoch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import checkpoint
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from tqdm import tqdm

import torch_sgmcmc as sg

from .data import Images, minibatches
from .metrics import evaluate

__all__ = ["Chain", "RunConfig", "run_chain", "train_epoch"]


@dataclass(frozen=True)
class RunConfig:
    """What determines a run. Two runs with equal configs are the same chain."""

    method: str
    seed: int
    settings: tuple[tuple[str, float], ...]
    epochs: int
    burn_in: int
    batch_size: int
    dataset: str
    validate: bool = False  # report the validation set instead of the test set

    @property
    def name(self) -> str:
        """A file name."""
        return f"{self.method}-seed{self.seed}"

    @property
    def samples(self) -> bool:
        """Whether predictions are averaged over the posterior."""
        return self.method not in ("sgd", "sgdm")

    def as_dict(self) -> dict[str, Any]:
        """As checkpoints have it."""
        return vars(self) | {"settings": dict(self.settings)}

    def checkpoint(self, folder: Path) -> Path:
        """The run's file."""
        return folder / f"{self.name}.pt"


class Chain(Protocol):
    """What the loop trains."""

    #: What a checkpoint needs beyond what the loop keeps itself.
    parts: checkpoint.Parts
    #: The network that predicts.
    model: nn.Module

    def train(self, epoch: int) -> None:
        """Makes the updates of one epoch, which is counted from 1."""

    def draws(self) -> Sequence[Any]:
        """The epoch's samples: what :meth:`torch_sgmcmc.Predictive.update` takes."""
        return [None]

    def report(self) -> dict[str, Any]:
        """What goes into the history besides the scores."""
        return {}

    def parameters(self) -> list[Tensor]:
        """The current sample, for the fingerprint."""
        return list(self.parts["model"].state_dict().values())


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    images: Images,
    config: RunConfig,
    epoch: int,
) -> None:
    """Makes an update for each minibatch of the epoch."""
    model.train()
    for x, y in minibatches(
        images.train_x, images.train_y, config.batch_size, config.seed, epoch
    ):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def run_chain(
    config: RunConfig,
    chain: Chain,
    inputs: dict[str, Tensor],
    labels: Tensor,
    folder: Path,
) -> dict[str, Any]:
    """Runs to the last epoch, from the checkpoint in folder if there is one.

    A checkpoint is written after every epoch, all of it or nothing: a run that is
    killed at any moment continues from its last epoch to the same bits.

    Args:
        config: what determines the run.
        chain: the chain at its start.
        inputs: what to predict; ``"labelled"`` is what labels belong to.
        labels: the true classes.
        folder: where the checkpoint is.

    Returns:
        The state at the end: config, history of the scores, mean predictions, seconds
        of training, fingerprint.
    """
    path = config.checkpoint(folder)
    predictions = _predictions(chain, inputs)
    state = _begin(config, chain, predictions, path, labels.device)
    with tqdm(
        total=config.epochs,
        initial=min(state["epoch"], config.epochs),
        desc=config.name,
        unit="epoch",
    ) as bar:
        if state["history"]:
            bar.set_postfix(error=f"{state['history'][-1]['error']:.2%}")
        while state["epoch"] < config.epochs:
            started = time.perf_counter()
            state["epoch"] += 1
            chain.train(state["epoch"])
            state["seconds"] += time.perf_counter() - started

            draws = samples = chain.draws()
            averaging = config.samples and state["epoch"] > config.burn_in
            if not averaging or state["samples"] == 0:
                predictions = _predictions(chain, inputs)  # without those before
                draws = samples or [None]  # the network as it is
            for predictive in predictions.values():
                for draw in draws:
                    predictive.update(draw)
            state["samples"] += len(samples) if averaging else 0

            scores = evaluate(predictions["labelled"].result().mean, labels)
            scores |= {"epoch": state["epoch"]} | chain.report()
            state["history"].append(scores)
            saved = {"predictions": predictions.state_dict()}
            checkpoint.save(state | saved | chain.parts.state_dict(), path)
            bar.update()
            bar.set_postfix(error=f"{scores['error']:.2%}")
    state["predictions"] = {k: p.result().mean for k, p in predictions.items()}
    state["digest"] = _digest(chain, state)
    return state


def _predictions(chain: Chain, inputs: dict[str, Tensor]) -> checkpoint.Parts:
    return checkpoint.Parts(
        {name: sg.Predictive(chain.model, x) for name, x in inputs.items()}
    )


def _begin(
    config: RunConfig,
    chain: Chain,
    predictions: checkpoint.Parts,
    path: Path,
    device: torch.device,
) -> dict[str, Any]:
    """The state of the last checkpoint, loaded into the chain, or that of a start."""
    state: dict[str, Any] = {
        "config": config.as_dict(),
        "epoch": 0,
        "samples": 0,  # that predictions are the mean over, after burn-in
        "history": [],
        "seconds": 0.0,
    }
    saved = checkpoint.of_run(path, state["config"], device)
    if saved is None:
        return state
    try:
        if saved["predictions"].keys() != predictions.keys():
            raise ValueError(
                f"predictions for {' and '.join(saved['predictions'])} images, not "
                f"for {' and '.join(predictions)}"
            )
        predictions.load_state_dict(saved["predictions"])
        chain.parts.load_state_dict(saved)
        return {key: saved[key] for key in state} | {"config": state["config"]}
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise SystemExit(
            f"{path} does not fit: {error}\nDelete it or choose another --out."
        ) from error


def _digest(chain: Chain, state: dict[str, Any]) -> str:
    """A fingerprint of the final parameters and predictions."""
    content = hashlib.sha1()  # which LibTorch has as well
    for t in [*chain.parameters(), *state["predictions"].values()]:
        content.update(t.detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()
