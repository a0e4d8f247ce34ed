"""One chain: its model, its sampler, its minibatches, its draws."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.core.distributed import world_size
from torch_sgmcmc.core.files import load, save
from torch_sgmcmc.core.progress import progress_bar
from torch_sgmcmc.driver.batches import Minibatches
from torch_sgmcmc.driver.closures import closure_of, one_gradient_a_step
from torch_sgmcmc.predictive.forward import model_device, moved
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.schedules import PolynomialDecay
from torch_sgmcmc.seeds import fold_in
from torch_sgmcmc.store import Collector

__all__ = ["ChainState", "Settings", "checkpoint_path", "rehearse", "run_chain"]


@dataclass
class ChainState:
    """What callbacks see, after each step.

    Attributes:
        chain: its number, from 0.
        step: steps made.
        loss: what the step's (last) minibatch had, a scalar tensor.
        model: the module at its present parameters.
        sampler: the sampler.
        collector: the :class:`Collector`.
        schedule: the learning-rate scheduler, or None.
    """

    chain: int
    step: int
    loss: Tensor
    model: nn.Module
    sampler: Sampler
    collector: Collector
    schedule: Any


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`sample` that all chains share."""

    model: nn.Module | Callable[[], nn.Module]
    sampler: Callable[..., Sampler]
    loader: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    store: Path
    steps: int | None
    epochs: int | None
    seed: int
    schedule: Callable[[Sampler], Any] | None
    callbacks: tuple[Callable[[ChainState], Any], ...]
    checkpoint_every: int | None
    progress: bool
    chains: int
    collecting: dict[str, Any] = field(default_factory=dict)


def run_chain(settings: Settings, chain: int) -> None:
    """Runs a chain to its end, from its last checkpoint if it has one.

    What is random follows from the seed and the chain's number, but for what the loss
    and the callbacks draw elsewhere than from torch's default generator.
    """
    with _random_numbers(settings, chain) as seed:
        _Run(settings, chain, seed).run()


def rehearse(settings: Settings) -> None:
    """Raises what a first chain would before its first step; the store is as it was."""
    with (
        _random_numbers(settings, 0) as seed,
        tempfile.TemporaryDirectory(prefix="sgmcmc-rehearsal-") as folder,
    ):
        _Run(settings, 0, seed).collector(folder).close()


@contextmanager
def _random_numbers(settings: Settings, chain: int) -> Iterator[int]:
    """Those of a chain, within; its seed."""
    seed = fold_in(settings.seed, chain)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(fold_in(seed, 0))
        yield seed


def checkpoint(path: Path) -> dict[str, Any]:
    """What a chain has saved."""
    try:
        return load(path)
    except RuntimeError as error:
        raise RuntimeError(f"{error} (restart=True begins anew)") from error


class _Run:
    def __init__(self, settings: Settings, chain: int, seed: int) -> None:
        self._settings, self._chain = settings, chain
        given = settings.model
        self._model = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
        if not isinstance(self._model, nn.Module):
            raise TypeError(
                f"Invalid model: the function returned {type(self._model).__name__} "
                "(must return a torch.nn.Module)"
            )
        self._device = model_device(self._model)
        named = list(self._model.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad]
        self._sampler = settings.sampler(trained, seed=fold_in(seed, 1))
        if not isinstance(self._sampler, Sampler):
            raise TypeError(
                "Invalid sampler: the function returned "
                f"{type(self._sampler).__name__} (must return a sampler)"
            )
        group = self._sampler.process_group
        if group is not None and world_size(group) > 1:
            raise ValueError(
                "Invalid sampler: its process_group has other ranks, and sample() runs "
                "a chain in one process (write the loop, with a Collector)"
            )
        self._begun = _hyperparameters(self._sampler)
        self._closure = closure_of(self._sampler, self._loss_of_next)
        schedule = settings.schedule
        self._schedule = None if schedule is None else schedule(self._sampler)
        self._batches = Minibatches(settings.loader, fold_in(seed, 2))
        self._steps = self._length()
        self._done = 0
        self._loss = torch.full((), torch.nan)

    def collector(self, store: str | os.PathLike[str]) -> Collector:
        """What stores its draws."""
        options = dict(self._settings.collecting)
        if isinstance(self._schedule, PolynomialDecay):
            decay = self._schedule
            options.setdefault("weight", lambda sampler: decay.weight)
        if hasattr(self._schedule, "collecting"):
            given = options.get("when") or (lambda: True)
            options["when"] = lambda: self._schedule.collecting and given()
        return Collector(
            self._sampler, self._model, store, chain=self._chain, **options
        )

    def run(self) -> None:
        path = checkpoint_path(self._settings.store, self._chain)
        with self.collector(self._settings.store) as collector:
            if path.exists():
                self._load(checkpoint(path), collector)
            else:  # for a kill before the next
                if collector.num_draws:
                    raise ValueError(
                        f"Invalid store: chain {self._chain} in {self._settings.store} "
                        f"has {collector.num_draws} draws and no checkpoint: they are "
                        "not of sample() (restart=True deletes them)"
                    )
                self._save(collector, path)
            self._go(collector, path)

    def _go(self, collector: Collector, path: Path) -> None:
        settings = self._settings
        every = settings.checkpoint_every
        bar = progress_bar(
            range(self._done, self._steps),
            f"chain {self._chain + 1} of {settings.chains}",
            settings.progress,
        )
        for _ in bar:
            self._sampler.step(self._closure_with(collector))
            if self._schedule is not None:
                self._schedule.step()
            self._done += 1
            state = ChainState(
                *(self._chain, self._done, self._loss, self._model, self._sampler),
                *(collector, self._schedule),
            )
            for callback in settings.callbacks:
                callback(state)
            if every is not None and self._done % every == 0:
                self._save(collector, path)
        self._save(collector, path)

    def _closure_with(self, collector: Collector) -> Callable[[], Any]:
        def closure() -> Any:
            value = self._closure()
            collector.loss = self._loss
            return value

        return closure

    def _loss_of_next(self) -> Tensor:
        batch = moved(self._batches.next(), self._device)
        with torch.enable_grad():
            loss = self._settings.loss(self._model, batch)
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"Invalid loss: the function returned {type(loss).__name__} (must "
                "return the mean loss of the minibatch, a Tensor)"
            )
        self._loss = loss.detach().mean()
        return loss

    def _length(self) -> int:
        """Steps of the whole chain."""
        steps, epochs = self._settings.steps, self._settings.epochs
        if steps is not None:
            return steps
        assert epochs is not None
        if not one_gradient_a_step(self._sampler):
            raise ValueError(
                f"Invalid epochs: steps of {type(self._sampler).__name__} take several "
                "minibatches (give steps)"
            )
        return epochs * len(self._settings.loader)  # type: ignore[arg-type]

    # ---- Checkpoints ----------------------------------------------------------

    def _save(self, collector: Collector, path: Path) -> None:
        content = {
            "seed": self._settings.seed,
            "begun": self._begun,
            "step": self._done,
            "epoch": self._batches.epoch,
            "position": self._batches.position,
            "model": self._model.state_dict(),
            "sampler": self._sampler.state_dict(),
            "schedule": _state(self._schedule),
            "collector": collector.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": _cuda_state(),
        }
        save(content, path)

    def _load(self, content: dict[str, Any], collector: Collector) -> None:
        folder, steps = self._settings.store, self._steps
        if content["seed"] != self._settings.seed:
            raise ValueError(
                f"Invalid seed: {self._settings.seed} (the chain in {folder} has "
                f"{content['seed']}; restart=True begins anew)"
            )
        begun = content.get("begun", self._begun)
        for i, (former, group) in enumerate(zip(begun, self._begun, strict=False)):
            for name, value in former.items():
                if name in group and group[name] != value:
                    raise ValueError(
                        f"Invalid sampler: group {i} has {name} {group[name]} (the "
                        f"chain in {folder} was begun with {value}; restart=True "
                        "begins anew)"
                    )
        if content["step"] > steps:
            name = "steps" if self._settings.epochs is None else "epochs"
            raise ValueError(
                f"Invalid {name}: {steps} steps (chain {self._chain} in {folder} has "
                f"made {content['step']}; restart=True begins anew)"
            )
        self._model.load_state_dict(content["model"])
        self._sampler.load_state_dict(content["sampler"])
        if self._schedule is not None:
            self._schedule.load_state_dict(content["schedule"])
        collector.load_state_dict(content["collector"])
        self._batches.move_to(content["epoch"], content["position"])
        self._done = content["step"]
        torch.set_rng_state(content["random"])
        if content["random_cuda"]:
            torch.cuda.set_rng_state_all(content["random_cuda"])


def checkpoint_path(store: Path, chain: int) -> Path:
    """The file."""
    return store / f"checkpoint-{chain}.pt"


def _hyperparameters(sampler: Sampler) -> list[dict[str, Any]]:
    """What says which chain it is, but for the seed, before a step is made."""
    return [
        {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("seed", "step", "num_skipped")
            and (isinstance(value, bool | int | float | str) or _is_number(value))
        }
        for group in sampler.param_groups
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _state(schedule: Any) -> Any:
    return None if schedule is None else schedule.state_dict()


def _cuda_state() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
