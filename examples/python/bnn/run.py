"""One run of one method with one seed: an ordinary training loop, resumable."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from .data import Images, minibatches
from .methods import build_model, build_optimizer
from .metrics import evaluate

__all__ = ["RunConfig", "run"]


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


def run(
    config: RunConfig, images: Images, folder: Path, position: int = 0
) -> dict[str, Any]:
    """Runs to the last epoch, from the checkpoint in folder if there is one.

    A checkpoint is written after every epoch, by rename: a run that is killed at
    any moment continues from its last epoch to the same bits.
    """
    device = images.train_x.device
    model = build_model(images.train_x.shape[1], config.seed, device)
    num_data = len(images.train_y)
    optimizer, precision = build_optimizer(
        config.method, dict(config.settings), model, num_data, config.seed
    )
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
        saved = torch.load(path, map_location=device, weights_only=True)
        if _chain(saved["config"]) != _chain(state["config"]):
            raise SystemExit(
                f"{path} holds a run with other settings:\n  {saved['config']}\n"
                f"not\n  {state['config']}\nDelete it or choose another --out."
            )
        state = saved | {"config": state["config"]}
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if precision is not None:
            precision.load_state_dict(state["precision"])

    wanted = _inputs(images, config.validate)
    labels = images.validation_y if config.validate else images.test_y
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
            model.train()
            for x, y in minibatches(
                images.train_x,
                images.train_y,
                config.batch_size,
                config.seed,
                state["epoch"],
            ):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            if precision is not None:
                precision.step()
            state["seconds"] += time.perf_counter() - started

            _predict(state, model, wanted, config)
            scores = evaluate(state["predictions"]["labelled"], labels)
            scores["epoch"] = state["epoch"]
            if precision is not None:
                scores["precisions"] = [
                    g["prior_precision"] for g in optimizer.param_groups
                ]
            state["history"].append(scores)
            state["model"] = dict(model.state_dict())
            state["optimizer"] = optimizer.state_dict()
            if precision is not None:
                state["precision"] = precision.state_dict()
            _save(state, path)
            bar.update()
            bar.set_postfix(error=f"{scores['error']:.2%}")
    state["digest"] = _digest(state)
    return state


def _chain(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that a chain cannot change: all but its length."""
    return {key: value for key, value in config.items() if key != "epochs"}


def _inputs(images: Images, validate: bool) -> dict[str, Tensor]:
    if validate:
        return {"labelled": images.validation_x}
    inputs = {"labelled": images.test_x}
    if images.other_x is not None:
        inputs["other"] = images.other_x
    return inputs


@torch.no_grad()
def _predict(
    state: dict[str, Any],
    model: nn.Module,
    inputs: dict[str, Tensor],
    config: RunConfig,
) -> None:
    """Updates the predictions: a running mean over the samples after burn-in."""
    model.eval()
    averaging = config.samples and state["epoch"] > config.burn_in
    state["samples"] = state["samples"] + 1 if averaging else 0
    for name, x in inputs.items():
        now = model(x).softmax(1)
        if state["samples"] > 1:
            mean = state["predictions"][name]
            mean += (now - mean) / state["samples"]
        else:
            state["predictions"][name] = now


def _save(state: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def _digest(state: dict[str, Any]) -> str:
    """A fingerprint of the final parameters and predictions."""
    tensors = [*state["model"].values(), *state["predictions"].values()]
    content = hashlib.sha256()
    for t in tensors:
        content.update(t.cpu().contiguous().numpy().tobytes())
    return content.hexdigest()[:16]
