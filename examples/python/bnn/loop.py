"""The loop of a run: train, predict, score, save; resumable after every epoch."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from .metrics import evaluate

__all__ = ["Chain", "RunConfig", "run_chain"]


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


class Chain(Protocol):
    """What the loop trains."""

    def train(self, epoch: int) -> None:
        """Makes the updates of one epoch, which is counted from 1."""

    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities: the mean over the epoch's samples."""

    def num_samples(self) -> int:
        """How many samples the epoch has; without any, predict() is for the present."""

    def report(self) -> dict[str, Any]:
        """What goes into the history besides the scores."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beyond what the loop keeps itself."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a checkpoint, which has the loop's own entries too."""

    def parameters(self) -> list[Tensor]:
        """The current sample, for the fingerprint."""


def run_chain(
    config: RunConfig,
    chain: Chain,
    inputs: dict[str, Tensor],
    labels: Tensor,
    folder: Path,
    position: int = 0,
) -> dict[str, Any]:
    """Runs to the last epoch, from the checkpoint in folder if there is one.

    A checkpoint is written after every epoch, by rename: a run that is killed at
    any moment continues from its last epoch to the same bits.

    Args:
        config: what determines the run.
        chain: the chain at its start.
        inputs: what to predict; ``"labelled"`` is what labels belong to.
        labels: the true classes.
        folder: where the checkpoint is.
        position: the line of the progress bar.

    Returns:
        The state at the end: config, history of the scores, running means of the
        predictions, seconds of training, fingerprint.
    """
    state: dict[str, Any] = {
        "config": vars(config) | {"settings": dict(config.settings)},
        "epoch": 0,
        "samples": 0,
        "predictions": {},  # running means of the softmax outputs
        "history": [],
        "seconds": 0.0,
    }
    path = folder / f"{config.name}.pt"
    if path.exists():
        saved = torch.load(path, map_location=labels.device, weights_only=True)
        if _fixed(saved["config"]) != _fixed(state["config"]):
            raise SystemExit(
                f"{path} holds a run with other settings:\n  {saved['config']}\n"
                f"not\n  {state['config']}\nDelete it or choose another --out."
            )
        state = saved | {"config": state["config"]}
        chain.load_state_dict(state)

    with tqdm(
        total=config.epochs,
        initial=min(state["epoch"], config.epochs),
        desc=config.name,
        unit="epoch",
        position=position,
    ) as bar:
        if state["history"]:
            bar.set_postfix(error=f"{state['history'][-1]['error']:.2%}")
        while state["epoch"] < config.epochs:
            started = time.perf_counter()
            state["epoch"] += 1
            chain.train(state["epoch"])
            state["seconds"] += time.perf_counter() - started

            _predict(state, chain, inputs, config)
            scores = evaluate(state["predictions"]["labelled"], labels)
            scores["epoch"] = state["epoch"]
            scores |= chain.report()
            state["history"].append(scores)
            state |= chain.state_dict()
            _save(state, path)
            bar.update()
            bar.set_postfix(error=f"{scores['error']:.2%}")
    state["digest"] = _digest(chain, state)
    return state


def _fixed(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that a chain cannot change: all but its length."""
    return {key: value for key, value in config.items() if key != "epochs"}


@torch.no_grad()
def _predict(
    state: dict[str, Any], chain: Chain, inputs: dict[str, Tensor], config: RunConfig
) -> None:
    """Updates the predictions: a running mean over the samples after burn-in."""
    averaging = config.samples and state["epoch"] > config.burn_in
    before = state["samples"] if averaging else 0
    new = chain.num_samples() if averaging else 0
    state["samples"] = before + new
    for name, x in inputs.items():
        if before == 0:
            state["predictions"][name] = chain.predict(x)
        elif new > 0:
            mean = state["predictions"][name]
            mean += new * (chain.predict(x) - mean) / state["samples"]


def _save(state: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def _digest(chain: Chain, state: dict[str, Any]) -> str:
    """A fingerprint of the final parameters and predictions."""
    content = hashlib.sha256()
    for t in [*chain.parameters(), *state["predictions"].values()]:
        content.update(t.detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()[:16]
