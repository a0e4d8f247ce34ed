"""Runs one chain with its model, sampler, minibatches and draws."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torch_sgmcmc import data
from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.core.distributed import world_size
from torch_sgmcmc.core.hyperparams import wrong_result
from torch_sgmcmc.core.random_state import fold_in
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import traits_of
from torch_sgmcmc.core.utils import Interrupts, length_of, plain_names, progress_bar
from torch_sgmcmc.diagnostics.setup_check import check_setup
from torch_sgmcmc.diagnostics.setup_issues import SetupReport
from torch_sgmcmc.diagnostics.temperatures import TemperatureMonitor, has_temperatures
from torch_sgmcmc.draws.forward import model_device, moved
from torch_sgmcmc.draws.store import SampleStore
from torch_sgmcmc.io import save
from torch_sgmcmc.losses import Likelihood
from torch_sgmcmc.priors import with_params
from torch_sgmcmc.run import start as starts
from torch_sgmcmc.run.collector import Collector
from torch_sgmcmc.run.compile import Blocks, length_of_blocks
from torch_sgmcmc.run.start import Start
from torch_sgmcmc.schedules import GammaPrecision, collecting_with

# Steps between observations of a compiled chain, which makes a block of single steps
# for each.
_COMPILED_INTERVAL = 1000
#: Seconds between checkpoints if ``checkpoint_every`` is None.
CHECKPOINT_SECONDS = 300.0
# Seconds between updates of the progress bar's loss.
_SECONDS = 1.0
# A loss above this multiple of max(first loss, 1) means that the chain has diverged.
_EXPLODED = 100.0


@dataclass
class ChainState:
    """The state that callbacks get after each step.

    Attributes:
        chain: its number, from 0.
        step: steps made.
        loss: the loss of the step's (last) minibatch, a scalar tensor.
        model: the module at its present parameters.
        sampler: the sampler.
        collector: the :class:`Collector`.
        schedule: the learning-rate scheduler, a tuple if there are several, or None.
        monitor: the chain's :class:`TemperatureMonitor`, or None.
    """

    chain: int
    step: int
    loss: Tensor
    model: nn.Module
    sampler: Sampler
    collector: Collector
    schedule: Any
    monitor: TemperatureMonitor | None = None

    def __repr__(self) -> str:
        return f"ChainState(chain={self.chain}, step={self.step}, loss={self.loss:.4g})"


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`sample` that all chains share."""

    model: nn.Module | Callable[[], nn.Module]
    sampler: Callable[..., Sampler]
    loader: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    store: Path | SampleStore
    steps: int | None
    epochs: int | None
    seed: int
    schedules: tuple[Callable[[Sampler], Any], ...]
    callbacks: tuple[Callable[[ChainState], Any], ...]
    checkpoint_every: int | None
    progress: bool
    chains: int
    reports: bool
    compiles: bool
    groups: tuple[dict[str, Any], ...] = ()
    starts: tuple[Start, ...] = ()
    optimizer: Callable[..., Optimizer] | None = None
    optimizer_epochs: int = 0
    collecting: dict[str, Any] = field(default_factory=dict)


def run_chain(settings: Settings, chain: int) -> None:
    """Runs a chain to its end, from its last checkpoint if it has one.

    All randomness follows from the seed and the chain's number, unless the loss or a
    callback uses another generator than the default ones of torch, NumPy and Python.
    """
    with _started(settings, chain) as run:
        run.run()


def check_construction(settings: Settings) -> None:
    """Raises the errors of a first chain before its first step; changes no store."""
    with _started(settings, 0) as run:
        run.collector(SampleStore()).close()


def check_first_chain(settings: Settings) -> SetupReport:
    """Runs the setup check on a first chain; stores nothing."""
    with _started(settings, 0) as run:
        return run.check()


def first_chain_of(settings: Settings) -> tuple[nn.Module, Any]:
    """Returns a first chain's model at its start, and its first minibatch."""
    seed = fold_in(settings.seed, 0)
    with data.kept_generators(fold_in(seed, 0)):
        with closing(data.Minibatches(settings.loader, fold_in(seed, 2))) as batches:
            return _model_of(settings), batches.next()


@contextmanager
def _started(settings: Settings, chain: int) -> Iterator[_Run]:
    """Returns a chain at its start, with generators that are its own."""
    seed = fold_in(settings.seed, chain)
    with data.kept_generators(fold_in(seed, 0)):
        yield _Run(settings, chain, seed)


def _model_of(settings: Settings) -> nn.Module:
    given = settings.model
    model = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
    if not isinstance(model, nn.Module):
        raise wrong_result("model", model, "a torch.nn.Module")
    return model


class _Run:
    def __init__(self, settings: Settings, chain: int, seed: int) -> None:
        self._settings, self._chain = settings, chain
        self._model = _model_of(settings)
        self._device = model_device(self._model)
        named = dict(self._model.named_parameters())
        plain = plain_names(self._model, named)
        trained = [(plain[name], p) for name, p in named.items() if p.requires_grad]
        params = with_params(settings.groups, trained) if settings.groups else trained
        self._sampler = settings.sampler(params, seed=fold_in(seed, 1))
        if not isinstance(self._sampler, Sampler):
            raise wrong_result("sampler", self._sampler, "a sampler")
        group = self._sampler.process_group
        if group is not None and world_size(group) > 1:
            raise ValueError(
                "Invalid sampler: its process_group has other ranks, and sample() runs "
                "a chain in one process (write the loop, with a Collector)"
            )
        is_made = not isinstance(settings.model, nn.Module)
        self._start = starts.start_of(
            settings.starts, chain, self._sampler, is_made=is_made
        )
        self._seed = seed
        kept = starts.place(self._start, self._model, self._sampler)
        if kept:
            lack = {"prior": "a prior (prior_precision=0)"}
            warnings.warn(
                f"chain {chain} starts at {self._start!r}. Parameters without "
                f"{lack.get(str(self._start), 'reset_parameters()')} stay as they are: "
                f"{', '.join(kept)}",
                stacklevel=2,
            )
        if len(kept) == sum(p.requires_grad for _, p in trained):
            self._start = "model"
        self._groups = starts.hyperparameters(self._sampler)
        data.closure_of(self._sampler, self._loss_of_next)  # raises for an HMCECS
        self._schedules = [_checked(make(self._sampler)) for make in settings.schedules]
        self._identity = starts.identity(
            self._groups,
            self._model,
            settings.loader,
            settings.loss,
            self._schedules,
            settings.compiles,
        )
        self._identity["start", 0, ""] = self._describe_start()
        self._batches = data.Minibatches(settings.loader, fold_in(seed, 2))
        self._steps = self._length()
        self._check_stores_some()
        self._done = 0
        self._loss = torch.full((), torch.nan, device="cpu")
        # The first and the last losses detect a chain that has diverged.
        self._first_loss: Tensor | None = None
        self._losses: deque[Tensor] = deque(maxlen=5)
        self._monitor = self._make_monitor()
        self._blocks = self._make_blocks() if settings.compiles else None
        self._bar: Any = None
        self._shown = -math.inf
        # Whether the step in progress may have changed something.
        self._has_begun = False

    def _make_monitor(self) -> TemperatureMonitor | None:
        sampler = self._sampler
        if not self._settings.reports or not has_temperatures(sampler):
            return None
        is_sharded = context_of(sampler).placement.is_sharded
        if is_sharded or sampler.defaults["capturable"]:
            return None
        every = _COMPILED_INTERVAL if self._settings.compiles else 20
        return TemperatureMonitor(sampler, every=every)

    def collector(self, store: Path | SampleStore) -> Collector:
        """Returns the chain's Collector."""
        options = collecting_with(self._schedules, self._settings.collecting)
        options["monitor"] = self._monitor
        if isinstance(self._settings.loss, Likelihood):
            options["likelihood"] = self._settings.loss
        collector = Collector(
            self._sampler, self._model, store, chain=self._chain, **options
        )
        collector.start = self._describe_start()
        if data.one_gradient_a_step(self._sampler):
            collector.steps_per_pass = length_of(self._settings.loader)
        return collector

    def check(self) -> SetupReport:
        """Runs the setup check."""
        return check_setup(
            self._model,
            self._settings.loss,
            self._settings.loader,
            self._sampler,
            num_steps=self._steps,
            start=self._describe_start(),
        )

    def run(self) -> None:
        path = starts.checkpoint_path(self._settings.store, self._chain)
        with closing(self._batches), self.collector(self._settings.store) as collector:
            if path is not None and path.exists():
                self._load(starts.checkpoint(path), collector)
            else:  # a kill may come before the next one
                if collector.num_draws:
                    raise ValueError(
                        f"Invalid store: chain {self._chain} in {self._settings.store} "
                        f"has {collector.num_draws} draws and no checkpoint: they were "
                        "not made by sample() (restart=True deletes them)"
                    )
                self._optimize()
                self._save(collector, path)
            self._go(collector, path)

    def _describe_start(self) -> str:
        settings, text = self._settings, self._start
        if not isinstance(text, str):
            text = f"{starts.name_of(text)}()"
        if settings.optimizer is None or settings.optimizer_epochs == 0:
            return text
        passes = f"{settings.optimizer_epochs} epochs of"
        return f"{text}, {passes} {starts.name_of(settings.optimizer)}"

    def _optimize(self) -> None:
        """Makes an optimizer's passes from the start."""
        settings, length = self._settings, length_of(self._settings.loader)
        if settings.optimizer is None or settings.optimizer_epochs == 0:
            return
        trained = [p for p in self._model.parameters() if p.requires_grad]
        count = settings.optimizer_epochs * int(length or 0)
        name = f"optimizer of chain {self._chain + 1}"
        steps = progress_bar(range(count), name, settings.progress)
        optimizer = settings.optimizer(trained)
        seed = fold_in(self._seed, 3)
        with closing(data.Minibatches(settings.loader, seed)) as batches:
            for _ in steps:
                batch = moved(batches.next(), self._device)
                closure = partial(
                    data.new_gradients, optimizer, settings.loss, self._model, batch
                )
                optimizer.step(closure)
        optimizer.zero_grad()

    def _go(self, collector: Collector, path: Path | None) -> None:
        if self._blocks is not None and self._done % self._blocks.steps:
            self._blocks = self._make_blocks()  # that end at the resumed chain's draws
        self._stride = 1 if self._blocks is None else self._blocks.steps
        bar = progress_bar(
            range(self._done, self._steps, self._stride),
            f"chain {self._chain + 1} of {self._settings.chains}",
            self._settings.progress,
            unit_scale=self._stride,
        )
        steps, self._bar = iter(bar), bar
        while self._done < self._steps:
            with Interrupts() as interrupts:
                self._run_until_interrupted(steps, collector, path, interrupts)

    def _run_until_interrupted(
        self,
        steps: Iterator[int],
        collector: Collector,
        path: Path | None,
        interrupts: Interrupts,
    ) -> None:
        every = self._settings.checkpoint_every
        saved = time.monotonic()
        for _ in steps:
            self._has_begun = False
            try:
                self._step(collector)
            except BaseException:
                # For example from a loader's workers that the signal has ended.
                if interrupts.pending is not None and not self._has_begun:
                    self._save(collector, path)
                raise
            self._done += self._stride
            self._show_progress()
            try:
                self._call_back(collector)
            except KeyboardInterrupt:
                self._save(collector, path)
                raise
            if every is None:
                due = time.monotonic() - saved >= CHECKPOINT_SECONDS
            else:
                due = self._done // every > (self._done - self._stride) // every
            if due or self._done == self._steps or interrupts.pending is not None:
                self._save(collector, path)
                saved = time.monotonic()
            if interrupts.pending is not None:
                return

    def _show_progress(self) -> None:
        now = time.monotonic()
        if now - self._shown < _SECONDS or not hasattr(self._bar, "set_postfix_str"):
            return
        self._shown = now
        text = f"loss {float(self._loss):.3g}"
        if self._monitor is not None and self._monitor.num_observed:
            found = (self._monitor.tensor(name) for name in self._monitor.names)
            text += f", T_kin up to {max(t.kinetic.mean for t in found):.3g}"
        self._bar.set_postfix_str(text, refresh=False)

    def _step(self, collector: Collector) -> None:
        groups = self._sampler.param_groups
        refreshed = groups[0].get("num_refreshments")
        try:
            if self._blocks is None:
                self._sampler.step(self._closure_with(collector))
            else:
                self._make_block(collector, self._blocks)
        except RuntimeError as error:
            if "not finite" not in str(error):
                raise
            raise RuntimeError(self._describe_divergence(str(error))) from error
        # A path is a draw where it is refreshed, not where it bounces.
        has_draw = refreshed is None or groups[0]["num_refreshments"] > refreshed
        for schedule in self._schedules:
            # At T = 0, while cycles explore, there is no precision to draw.
            is_drawn = has_draw and all(group["temperature"] > 0 for group in groups)
            if is_drawn or not isinstance(schedule, GammaPrecision):
                schedule.step()

    def _make_blocks(self) -> Blocks:
        given = self._settings.collecting
        if given.get("when") is not None:
            raise ValueError("Invalid when: with compile, the draws follow `every`")
        return Blocks(
            self._model,
            self._sampler,
            self._settings.loss,
            self._schedules,
            length_of_blocks(given["burn_in"], given["every"], self._done, self._steps),
        )

    def _make_block(self, collector: Collector, blocks: Blocks) -> None:
        batches = [
            moved(self._batches.next(), self._device) for _ in range(blocks.steps)
        ]
        self._has_begun = True
        rows = blocks.stacked(batches)
        losses = collector.run(blocks.block, *rows)
        if self._first_loss is None:
            self._first_loss = losses[0]
        self._losses.extend(losses)
        self._loss = losses[-1]

    def _call_back(self, collector: Collector) -> None:
        schedules: Any = tuple(self._schedules) or None
        state = ChainState(
            chain=self._chain,
            step=self._done,
            loss=self._loss,
            model=self._model,
            sampler=self._sampler,
            collector=collector,
            schedule=schedules[0] if len(self._schedules) == 1 else schedules,
            monitor=self._monitor,
        )
        for callback in self._settings.callbacks:
            callback(state)

    def _closure_with(self, collector: Collector) -> Callable[[], Any]:
        evaluate = data.closure_of(self._sampler, self._loss_of_next)

        def closure() -> Any:
            value = evaluate()
            collector.loss = self._loss
            return value

        return closure

    def _loss_of_next(self) -> Tensor:
        batch = moved(self._batches.next(), self._device)
        self._has_begun = True
        with torch.enable_grad():
            loss = self._settings.loss(self._model, batch)
        if not isinstance(loss, Tensor):
            raise wrong_result("loss", loss, "the mean loss of the minibatch, a Tensor")
        self._loss = loss.detach().mean()
        if self._first_loss is None:
            self._first_loss = self._loss
        self._losses.append(self._loss)
        return loss

    def _describe_divergence(self, error: str) -> str:
        where = f"chain {self._chain}, step {self._done + 1}"
        losses = [float(loss) for loss in self._losses]
        first = 0.0 if self._first_loss is None else float(self._first_loss)
        worst = max(map(abs, filter(math.isfinite, losses)), default=0.0)
        if not worst > _EXPLODED * max(abs(first), 1.0):
            return f"{where}: {error}"
        group = self._sampler.param_groups[0]
        name = "lr" if "lr" in group else "step_size"
        advice = ""
        if name in group:
            rate = float(self._groups[0].get(name, group[name]))
            advice = f" {name} {rate:g} is too large: {rate / 10:g} may be stable, and"
        return (
            f"{where}: the chain has diverged: its loss was {first:.3g} at first, and "
            f"{', '.join(f'{loss:.3g}' for loss in losses)} in the end.{advice} "
            f"{starts.RESTART}"
        )

    def _length(self) -> int:
        steps, epochs = self._settings.steps, self._settings.epochs
        if steps is not None:
            return steps
        assert epochs is not None
        if not data.one_gradient_a_step(self._sampler):
            raise ValueError(
                f"Invalid epochs: steps of {type(self._sampler).__name__} take several "
                "minibatches (give steps)"
            )
        length = length_of(self._settings.loader)
        assert length is not None  # sample() has checked it
        return epochs * length

    def _check_stores_some(self) -> None:
        if traits_of(self._sampler).is_path:  # counts samples, not steps
            return starts.check_refreshments(self._sampler, bool(self._schedules))
        given = self._settings.collecting
        starts.check_tuning(self._sampler, given["burn_in"], bool(self._schedules))
        count, phases = self._steps, ""
        for schedule in self._schedules:
            if hasattr(schedule, "count_collecting"):
                count = schedule.count_collecting(count)
                phases = f", {count} of them in sampling phases"
        first = given["burn_in"] + given["every"]
        if count < first:
            raise ValueError(
                f"Invalid steps: {self._steps}{phases}, and the first draw would be "
                f"number {first} (burn_in {given['burn_in']}, every {given['every']}): "
                "nothing would be stored"
            )

    def _save(self, collector: Collector, path: Path | None) -> None:
        if path is None:  # draws in memory end with the process
            return
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        content = starts.Saved(
            seed=self._settings.seed,
            identity=self._identity,
            step=self._done,
            epoch=self._batches.epoch,
            position=self._batches.position,
            model=self._model.state_dict(),
            sampler=self._sampler.state_dict(),
            schedule=[schedule.state_dict() for schedule in self._schedules],
            collector=collector.state_dict(),
            random=data.generator_states(),
            random_cuda=cuda,
        )
        save(content._asdict(), path)

    def _load(self, content: dict[str, Any], collector: Collector) -> None:
        folder, steps = self._settings.store, self._steps
        assert isinstance(folder, Path)  # a store in memory has no checkpoint
        seed = self._settings.seed
        starts.check_saved(content, seed, self._identity, self._chain, folder)
        if content["step"] > steps:
            name = "steps" if self._settings.epochs is None else "epochs"
            made = f"chain {self._chain} in {folder} has made {content['step']}"
            raise ValueError(
                f"Invalid {name}: {steps} steps ({made}; {starts.RESTART})"
            )
        self._model.load_state_dict(content["model"])
        self._sampler.load_state_dict(content["sampler"])
        for schedule, state in zip(self._schedules, content["schedule"], strict=True):
            schedule.load_state_dict(state)
        collector.load_state_dict(content["collector"])
        self._batches.move_to(content["epoch"], content["position"])
        self._done = content["step"]
        data.set_generator_states(content["random"])
        if content["random_cuda"]:
            torch.cuda.set_rng_state_all(content["random_cuda"])


def _checked(schedule: Any) -> Any:
    if isinstance(schedule, ReduceLROnPlateau):
        raise TypeError(
            "Invalid schedule: ReduceLROnPlateau, whose lr follows a loss (must follow "
            "from the number of steps: a chain that adapts to its loss has another law)"
        )
    for name in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(schedule, name, None)):
            wanted = f"a scheduler, and this has no {name}()"
            raise wrong_result("schedule", schedule, wanted)
    return schedule
