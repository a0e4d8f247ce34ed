"""One run on one fold: rounds of steps, each from new hyperparameters on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reproduce import checkpoint
from torch import Tensor

import torch_sgmcmc as sg

from .data import SPAN, Ratings
from .hyperpriors import NoisePrecision
from .methods import build, samples
from .model import Factors

# Rounds in which a sampler only descends, and those with all precisions 1: as in the
# authors' program. The round with noise and λ = 1 matters: it spreads factors that are
# still small. Precisions drawn from these would be high, and keep them small for long.
DESCENTS = 2
FIXED = 3


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run.

    Args:
        method: a key of ``SETTINGS``.
        fold: which fifth is the test set; also the seed.
        settings: the method's.
        rounds: of ``steps`` steps each. A sampler's hyperparameters are drawn before
            each, a checkpoint is written after each.
        burn_in: rounds before samples are averaged.
        steps: of a round.
        every: steps from one averaged sample to the next, a divisor of ``steps``.
        batch_size: n.
        dimensions: K.
        data: the ratings' name.
        validate: whether a fifth of the training ratings is the test set.
    """

    method: str
    fold: int
    settings: tuple[tuple[str, float], ...]
    rounds: int
    burn_in: int
    steps: int
    every: int
    batch_size: int
    dimensions: int
    data: str
    validate: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The configuration in the form of checkpoints and results."""
        return vars(self) | {"settings": dict(self.settings)}

    def checkpoint(self, folder: Path) -> Path:
        """The run's file."""
        return folder / f"{self.method}-fold{self.fold}.pt"


def rmse(prediction: Tensor, test: Ratings) -> float:
    """Predictions in stars."""
    return float((prediction - test.values.double()).square().mean().sqrt())


class RunningMean:
    """The mean of predictions, in memory that does not grow with their number."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean = torch.zeros(size, dtype=torch.float64)

    def add(self, prediction: Tensor) -> None:
        """One more."""
        self.count += 1
        self.mean += (prediction - self.mean) / self.count

    def state_dict(self) -> dict[str, Any]:
        """The mean, and of how many it is."""
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`."""
        self.count = state["count"]
        self.mean.copy_(state["mean"])


class Chain:
    """The parameters, what moves them, and what they have predicted."""

    def __init__(self, config: RunConfig, train: Ratings, test: Ratings) -> None:
        self._config, self._test = config, test
        self._users, self._items = train.users, train.items
        centre = train.values.double().mean()
        self._centre = float(centre)
        self._y = ((train.values - centre) / SPAN).float()
        self.model = Factors(
            train.num_users, train.num_items, config.dimensions, config.fold
        )
        self.optimizer = build(
            config.method,
            dict(config.settings),
            self.model.parameters(),
            len(train),
            config.fold,
        )
        # With replacement, which takes a seventh of the time, and of 4000 of 800,000
        # has 1.005 times the variance.
        self._batches = sg.IndependentBatchSampler(
            len(train), config.batch_size, replacement=True, seed=config.fold
        )
        self.noise = NoisePrecision(
            self.model, self._users, self._items, self._y, config.fold
        )
        self.mean = RunningMean(len(test))
        self.parts = checkpoint.Parts(
            model=self.model,
            optimizer=self.optimizer,
            batches=self._batches,
            noise=self.noise,
            mean=self.mean,
        )
        if isinstance(self.optimizer, sg.Sampler):
            self.precision = sg.GammaPrecision(self.optimizer)
            self.parts["precision"] = self.precision

    def predict(self) -> Tensor:
        """The test ratings, in stars."""
        prediction = self.model.predict(self._test.users, self._test.items)
        return prediction.double().mul_(SPAN).add_(self._centre)

    def round(self, number: int) -> None:
        """Draws hyperparameters, then makes a round's steps; counted from 0."""
        if samples(self._config.method):
            for group in self.optimizer.param_groups:
                group["temperature"] = float(number >= DESCENTS)
            if number >= FIXED:
                self.precision.step()
                self.noise.step()
        averaging = samples(self._config.method) and number >= self._config.burn_in
        for _ in range(self._config.steps // self._config.every):
            for rows in self._batches.draw(self._config.every):
                self.model.gradient(
                    self._users.index_select(0, rows),
                    self._items.index_select(0, rows),
                    self._y.index_select(0, rows),
                    self.noise.value,
                )
                self.optimizer.step()
            if averaging:
                self.mean.add(self.predict())

    def report(self) -> dict[str, Any]:
        """Scores, and the precisions that the latest round had."""
        last = rmse(self.predict(), self._test)
        mean = rmse(self.mean.mean, self._test) if self.mean.count else last
        point = {"rmse": mean, "last": last, "samples": self.mean.count}
        if not samples(self._config.method):
            return point
        groups = self.optimizer.param_groups
        precisions = [group["prior_precision"] for group in groups]
        return point | {"precisions": [*precisions, self.noise.value]}


def run(config: RunConfig, ratings: Ratings, folder: Path) -> dict[str, Any]:
    """Runs to the last round, from the checkpoint in folder if there is one.

    A run that is killed at any moment goes on from its last round to the same bits.

    Returns:
        ``config``, ``history`` with a point for each round, ``seconds``, ``oracle``:
        the error of the means that simulated ratings were drawn from, else None.
    """
    train, test = ratings.fold(config.fold)
    if config.validate:
        train, test = train.fold(config.fold)
    chain = Chain(config, train, test)
    state: dict[str, Any] = {"history": [], "seconds": 0.0}
    for epoch in checkpoint.epochs(
        config.checkpoint(folder), config.as_dict(), chain.parts, state, config.rounds
    ):
        started = time.perf_counter()
        chain.round(epoch - 1)
        state["seconds"] += time.perf_counter() - started
        state["history"].append({"step": epoch * config.steps} | chain.report())
    oracle = None if test.truth is None else rmse(test.truth, test)
    return state | {"oracle": oracle}
