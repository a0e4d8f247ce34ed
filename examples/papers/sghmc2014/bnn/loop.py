"""The loop of a run: train, store, predict, score, save; resumable every epoch."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

from reproduce import checkpoint
from reproduce.checkpoint import Parts
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import torch_sgmcmc as sg

from .config import RunConfig
from .data import Images, minibatches
from .metrics import evaluate


class Chain(Protocol):
    """A chain that the loop trains."""

    #: What a checkpoint needs beyond what the loop keeps itself.
    parts: Parts
    #: The network that predicts.
    model: nn.Module
    #: They store the draws after burn-in; none of point estimates.
    collectors: Sequence[sg.Collector] = ()

    def train(self, epoch: int) -> None:
        """Makes the updates of one epoch, which is counted from 1."""

    def report(self) -> dict[str, Any]:
        """Entries of the history besides the scores."""
        return {}

    def parameters(self) -> list[Tensor]:
        """The current sample, for the fingerprint."""
        return list(self.parts["model"].state_dict().values())


ChainT = TypeVar("ChainT", bound=Chain)


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
    begin: Callable[[Path], ChainT],
    inputs: dict[str, Tensor],
    labels: Tensor,
    folder: Path,
) -> tuple[ChainT, dict[str, Any]]:
    """Runs to the last epoch, from the checkpoint in folder if there is one.

    A checkpoint is written after every epoch, all of it or nothing: a run that is
    killed at any moment continues from its last epoch to the same bits, its draws
    among them.

    Args:
        config: what determines the run.
        begin: ``begin(store)`` returns the chain at its start; it stores draws there.
        inputs: what to predict; ``"labelled"`` is what labels belong to.
        labels: the true classes.
        folder: where checkpoint and store are.

    Returns:
        The chain at its end, and the state: config, history of the scores, mean
        predictions, seconds of training, fingerprint.
    """
    path, store = config.checkpoint(folder), config.store(folder)
    if (
        not path.exists()
    ):  # what there is, is of a run that was killed in its first epoch
        shutil.rmtree(store, ignore_errors=True)
    # Samples are those that predictions are the mean over, after burn-in.
    state: dict[str, Any] = {"samples": 0, "history": [], "seconds": 0.0}
    with ExitStack() as stack:
        chain = begin(store)
        for collector in chain.collectors:
            stack.enter_context(collector)
        run = _Run(chain, inputs)
        for epoch in checkpoint.epochs(
            path, config.as_dict(), run, state, config.epochs, device=labels.device
        ):
            started = time.perf_counter()
            chain.train(epoch)
            state["seconds"] += time.perf_counter() - started

            draws = new = _draws(chain, store)[state["samples"] :]
            if state["samples"] == 0:
                run.begin_predictions()
                draws = new or [None]  # without draws, the network as it is
            for predictive in run.predictions.values():
                for draw in draws:
                    predictive.update(draw)
            state["samples"] += len(new)

            scores = evaluate(run.predictions["labelled"].result().mean, labels)
            state["history"].append(scores | {"epoch": epoch} | chain.report())
    state["predictions"] = {k: p.result().mean for k, p in run.predictions.items()}
    state["digest"] = _digest(chain, state)
    return chain, state


class _Run:
    """A chain, its stores and its predictions: what a checkpoint has."""

    def __init__(self, chain: Chain, inputs: dict[str, Tensor]) -> None:
        self._chain, self._inputs = chain, inputs
        self.begin_predictions()

    def begin_predictions(self) -> None:
        """Without any draw."""
        self.predictions = Parts(
            {k: sg.Predictive(self._chain.model, x) for k, x in self._inputs.items()}
        )

    @property
    def _parts(self) -> Parts:
        collectors = {str(i): c for i, c in enumerate(self._chain.collectors)}
        more = {"predictions": self.predictions, "collectors": Parts(collectors)}
        return Parts(self._chain.parts | more)

    def state_dict(self) -> dict[str, Any]:
        return self._parts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["predictions"].keys() != self.predictions.keys():
            raise ValueError(
                f"predictions for {' and '.join(state['predictions'])} images, not "
                f"for {' and '.join(self.predictions)}"
            )
        self._parts.load_state_dict(state)


def _draws(chain: Chain, store: Path) -> list[Any]:
    """The draws of all chains, in the order of their steps."""
    for collector in chain.collectors:
        collector.flush()
    return sorted(sg.SampleStore(store), key=attrgetter("step"))


def _digest(chain: Chain, state: dict[str, Any]) -> str:
    """A fingerprint of the final parameters and predictions."""
    content = hashlib.sha1()  # which LibTorch has as well
    for t in [*chain.parameters(), *state["predictions"].values()]:
        content.update(t.detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()
