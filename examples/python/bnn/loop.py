"""The loop of a run: train, predict, score, save; resumable after every epoch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import checkpoint
import torch
from torch import Tensor
from tqdm import tqdm

from .metrics import evaluate

__all__ = ["Chain", "RunConfig", "run_chain", "run_in_turn"]

Config = TypeVar("Config", bound="RunConfig")


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

    A checkpoint is written after every epoch, all of it or nothing: a run that is
    killed at any moment continues from its last epoch to the same bits.

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
        "config": _as_dict(config),
        "epoch": 0,
        "samples": 0,
        "predictions": {},  # running means of the softmax outputs
        "history": [],
        "seconds": 0.0,
    }
    path = _path(config, folder)
    saved = _saved(config, folder, labels.device)
    if saved is not None:
        try:
            if saved["predictions"].keys() != inputs.keys():
                raise ValueError(
                    f"predictions for {' and '.join(saved['predictions'])} images, not "
                    f"for {' and '.join(inputs)}"
                )
            chain.load_state_dict(saved)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise SystemExit(
                f"{path} does not fit: {error}\nDelete it or choose another --out."
            ) from error
        state = saved | {"config": state["config"]}

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
            checkpoint.save(state, path)
            bar.update()
            bar.set_postfix(error=f"{scores['error']:.2%}")
    state["digest"] = _digest(chain, state)
    return state


def run_in_turn(
    configs: Mapping[str, Sequence[Config]],
    folder: Path,
    run: Callable[[Config], dict[str, Any]],
) -> dict[str, list[dict[str, Any]]]:
    """Runs all configs of each method, if the folder has no checkpoint against it."""
    for of_method in configs.values():
        for config in of_method:
            _saved(config, folder)
    return {method: [run(config) for config in configs[method]] for method in configs}


def _saved(
    config: RunConfig, folder: Path, device: torch.device | str = "cpu"
) -> dict[str, Any] | None:
    """The checkpoint from which a run continues, None at its start.

    A file that is damaged, or another run's, ends the program.
    """
    path = _path(config, folder)
    if not path.exists():
        return None
    saved = checkpoint.load(path, device)
    if not isinstance(saved, dict) or not isinstance(saved.get("config"), dict):
        raise SystemExit(f"{path} holds no run.\nDelete it or choose another --out.")
    if _fixed(saved["config"]) != _fixed(_as_dict(config)):
        raise SystemExit(
            f"{path} holds a run with other settings:\n  {saved['config']}\n"
            f"not\n  {_as_dict(config)}\nDelete it or choose another --out."
        )
    return saved


def _path(config: RunConfig, folder: Path) -> Path:
    return folder / f"{config.name}.pt"


def _as_dict(config: RunConfig) -> dict[str, Any]:
    return vars(config) | {"settings": dict(config.settings)}


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


def _digest(chain: Chain, state: dict[str, Any]) -> str:
    """A fingerprint of the final parameters and predictions."""
    content = hashlib.sha1()  # which LibTorch has as well
    for t in [*chain.parameters(), *state["predictions"].values()]:
        content.update(t.detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()
