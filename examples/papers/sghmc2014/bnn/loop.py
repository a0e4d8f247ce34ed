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
from tqdm import tqdm

import torch_sgmcmc as sg

from .config import RunConfig
from .data import Images, minibatches
from .metrics import evaluate


class Chain(Protocol):
    """What the loop trains."""

    #: What a checkpoint needs beyond what the loop keeps itself.
    parts: Parts
    #: The network that predicts.
    model: nn.Module
    #: They store the draws after burn-in; none of point estimates.
    collectors: Sequence[sg.Collector] = ()

    def train(self, epoch: int) -> None:
        """Makes the updates of one epoch, which is counted from 1."""

    def report(self) -> dict[str, Any]:
        """What goes into the history besides the scores."""
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
    saved = checkpoint.of_run(path, config.as_dict(), labels.device)
    if saved is None:  # what there is, is of a run that was killed in its first epoch
        shutil.rmtree(store, ignore_errors=True)
    with ExitStack() as stack:
        chain = begin(store)
        for collector in chain.collectors:
            stack.enter_context(collector)
        predictions = _predictions(chain, inputs)
        state = _begin(config, chain, predictions, saved, path)
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

                draws = new = _draws(chain, store)[state["samples"] :]
                if state["samples"] == 0:
                    predictions = _predictions(chain, inputs)
                    draws = new or [None]  # without draws, the network as it is
                for predictive in predictions.values():
                    for draw in draws:
                        predictive.update(draw)
                state["samples"] += len(new)

                scores = evaluate(predictions["labelled"].result().mean, labels)
                scores |= {"epoch": state["epoch"]} | chain.report()
                state["history"].append(scores)
                parts = _parts(chain, predictions)
                checkpoint.save(state | parts.state_dict(), path)
                bar.update()
                bar.set_postfix(error=f"{scores['error']:.2%}")
    state["predictions"] = {k: p.result().mean for k, p in predictions.items()}
    state["digest"] = _digest(chain, state)
    return chain, state


def _draws(chain: Chain, store: Path) -> list[Any]:
    """Those of all chains, in the order in which they were made."""
    for collector in chain.collectors:
        collector.flush()
    return sorted(sg.SampleStore(store), key=attrgetter("step"))


def _predictions(chain: Chain, inputs: dict[str, Tensor]) -> Parts:
    return Parts({name: sg.Predictive(chain.model, x) for name, x in inputs.items()})


def _parts(chain: Chain, predictions: Parts) -> Parts:
    collectors = {str(i): c for i, c in enumerate(chain.collectors)}
    return Parts(
        chain.parts | {"predictions": predictions, "collectors": Parts(collectors)}
    )


def _begin(
    config: RunConfig,
    chain: Chain,
    predictions: Parts,
    saved: dict[str, Any] | None,
    path: Path,
) -> dict[str, Any]:
    """The state of the last checkpoint, loaded into the chain, or that of a start."""
    state: dict[str, Any] = {
        "config": config.as_dict(),
        "epoch": 0,
        "samples": 0,  # that predictions are the mean over, after burn-in
        "history": [],
        "seconds": 0.0,
    }
    if saved is None:
        return state
    try:
        if saved["predictions"].keys() != predictions.keys():
            raise ValueError(
                f"predictions for {' and '.join(saved['predictions'])} images, not "
                f"for {' and '.join(predictions)}"
            )
        _parts(chain, predictions).load_state_dict(saved)
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
