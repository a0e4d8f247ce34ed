"""Stores draws of a sampler's model beside training."""

from __future__ import annotations

import fnmatch
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.core.dtensor import refuse
from torch_sgmcmc.core.hyperparams import check_function, check_integer, warn
from torch_sgmcmc.core.sampler import Sampler, check_sampler
from torch_sgmcmc.core.spec import traits_of
from torch_sgmcmc.core.state_dict import check_count, check_keys
from torch_sgmcmc.core.steps import is_adapting
from torch_sgmcmc.core.utils import plain_names, unwrapped
from torch_sgmcmc.diagnostics.run_record import RunRecorder, plain
from torch_sgmcmc.diagnostics.temperatures import TemperatureMonitor
from torch_sgmcmc.draws.store import SampleStore, SampleWriter
from torch_sgmcmc.losses import Likelihood


class _ModelTensors:
    """The tensors of a model that make a draw; takes arguments of a Collector."""

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        sampler: Sampler,
        parameters: str | Iterable[str],
        buffers: bool,
    ) -> None:
        if isinstance(model, nn.Module):
            model = unwrapped(model)
        self._model = model
        self._plain: dict[str, str] = {}
        if isinstance(model, nn.Module):
            every = (*model.named_parameters(), *model.named_buffers())
            self._plain = plain_names(model, (name for name, _ in every))
        named, held = self._named("parameters"), self._named("buffers")
        for name, tensor in {**named, **held}.items():
            if is_lazy(tensor):
                raise ValueError(
                    f"Invalid model: {name!r} has no shape yet (call the model once)"
                )
        params = [p for group in sampler.param_groups for p in group["params"]]
        sampled = {id(p) for p in params if p.requires_grad}
        own = [name for name, p in named.items() if id(p) in sampled]
        chosen = _chosen(own if parameters == "sampled" else parameters, [*named])
        refuse("parameters", (named[name] for name in chosen))
        places = {_place(p): p for p in params}
        if places.keys().isdisjoint(_place(named[name]) for name in chosen):
            raise ValueError(
                "Invalid parameters: the sampler has none of the ones that would be "
                "stored, so all draws would be the same (was the model copied after "
                "the sampler was made?)"
            )
        known = {*map(_place, named.values())}
        missing = [p for place, p in places.items() if place not in known]
        # Users choose the content of a mapping.
        if missing and isinstance(model, nn.Module):
            raise ValueError(
                f"Invalid model: it lacks {len(missing)} of the sampler's parameters, "
                f"one of shape {list(missing[0].shape)} (was a layer "
                "replaced after the sampler was made? Make the sampler after it; or "
                "give a mapping from names to all tensors that are to be stored)"
            )
        saved: Mapping[str, Any] = {}
        if buffers and held and isinstance(model, nn.Module):
            saved = model.state_dict()
        self._first = {name: p for name, p in named.items() if name in chosen}
        # Views of parameters, such as the chains of one tensor.
        self._params, is_view = params, lambda t: not isinstance(t, nn.Parameter)
        self._views = {
            k: t for k, t in self._first.items() if is_view(t) and _place(t) in places
        }
        self._first |= {k: held[k] for k in map(self._plain.get, saved) if k in held}
        #: Tensors that are not stored; None for those that are sampled.
        self.rest: dict[str, Tensor | None] = {
            k: None if k in own else t for k, t in named.items() if k not in chosen
        }

    def now(self) -> dict[str, Tensor]:
        """Returns the model's own tensors by name."""
        named = {**self._named("parameters"), **self._named("buffers")}
        for name, first in self._first.items():
            is_same = named.get(name) is first or not isinstance(first, nn.Parameter)
            if name not in named or not is_same:
                raise RuntimeError(
                    f"the model's {name!r} is missing or another tensor than when the "
                    "collector was made (was a layer replaced, or did weight_norm "
                    "rename it? Make the sampler and the collector after it)"
                )
        if self._views:
            places = {*map(_place, self._params)}
            lost = [k for k, view in self._views.items() if _place(view) not in places]
            if lost:
                raise RuntimeError(
                    f"the mapping's {lost[0]!r} is not a view of a parameter of the "
                    "sampler any more, as when it was given (was a parameter's .data "
                    "replaced, as by vector_to_parameters? Make the collector after it)"
                )
        return {name: named[name].detach() for name in self._first}

    def _named(self, kind: str) -> dict[str, Tensor]:
        """Returns parameters or buffers by names without wrappers."""
        if not isinstance(self._model, nn.Module):
            return dict(self._model) if kind == "parameters" else {}
        named = getattr(self._model, f"named_{kind}")()
        return {self._plain.get(name, name): tensor for name, tensor in named}


def _chosen(parameters: str | Iterable[str], names: list[str]) -> set[str]:
    if parameters == "all":
        parameters = names
    if isinstance(parameters, str) or not isinstance(parameters, Iterable):
        raise ValueError(
            f"Invalid parameters: {parameters!r} (must be 'all', 'sampled' or names)"
        )
    found: set[str] = set()
    for pattern in parameters:
        # "w[0]" is first a name, and only then a pattern for "w0".
        some = [pattern] if pattern in names else fnmatch.filter(names, pattern)
        if not some:
            raise ValueError(
                f"Invalid parameters: no parameter is named {pattern!r} (of {names})"
            )
        found.update(some)
    return found


def _place(tensor: Tensor) -> int:
    """Returns a key that identifies a parameter, also through views."""
    if is_traceable_wrapper_subclass(tensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _refuse_lookahead(sampler: Sampler) -> None:
    if any("lookahead_alpha" in group for group in sampler.param_groups):
        raise ValueError(
            "Invalid sampler: it is inside of a Lookahead, whose averages of the chain "
            "are not draws of the posterior"
        )


class Collector(AbstractContextManager["Collector"]):
    """Stores draws of a model while a sampler runs.

    Two lines are added to a training loop::

        collector = sg.Collector(sampler, model, "draws", burn_in=1000, every=20)
        ...  # the loop as it was
        collector.close()

    A draw is the model after a step, copied before ``step()`` returns; a next step
    writes it (:class:`SampleWriter`). With :class:`SBPS` draws are points of the
    trajectory, at multiples of ``sample_interval``, and ``burn_in`` and ``every`` count
    these points. Steps of a warm-up and skipped steps do not count.

    Put :meth:`state_dict` into checkpoints: loading it cuts the store back, and the
    chain makes the later draws again. If the sampler has a ``process_group``, its first
    rank stores the chain, and the others load its state dict. More: docs/store.md.

    Args:
        sampler: a :class:`Sampler`.
        model: the module with its parameters, or a mapping from names to tensors.
        store: a folder or a :class:`SampleStore`.
        chain: its number in the store, >= 0. Each chain has one writer. Default: 0.
        burn_in: first steps that are not stored, >= 0. Default: 0.
        every: steps from one draw to the next, >= 1. Default: 1.
        parameters: "all", "sampled" (the sampler's parameters), or names, in which
            ``*`` and ``?`` are wildcards: ``["fc.*", "*lora*"]``. Default: "all".
        buffers: whether to store the buffers of the module's state dict. Default: True.
        dtype: of stored floating-point tensors; None keeps each one's. Default: None.
        weight: ``weight(sampler)`` weighs a draw. Default: the sign of HMCECS, else 1.
        when: ``when()`` returns after a step whether the step counts: ``lambda:
            schedule.collecting`` of a :class:`CyclicalSchedule`. Default: None.
        monitor: a :class:`TemperatureMonitor` of the sampler, for :func:`report`.
        likelihood: the predictions' default, one of :mod:`torch_sgmcmc.losses`.

    Attributes:
        loss: a number or scalar tensor that is set before a step and stored with the
            step's draw. NaN afterwards.
        start: how the chain begins, for :func:`report`; None is not known. At the
            chain's first step, if not set: "prior" after
            :meth:`Sampler.draw_from_prior`, else "model".
        steps_per_pass: steps of a pass over the data; None is not known.

    Raises:
        ValueError: an argument is out of range, the sampler has none of the stored
            parameters, or the store is of another model. At the first step: the chain
            has draws already.
        RuntimeError: the store cannot be written, or another writer has the chain. At a
            step: earlier draws cannot be written. The sampler is unchanged; the next
            step tries again, and no draw is lost.
    """

    def __init__(
        self,
        sampler: Sampler,
        model: nn.Module | Mapping[str, Tensor],
        store: SampleStore | str | os.PathLike[str],
        *,
        chain: int = 0,
        burn_in: int = 0,
        every: int = 1,
        parameters: str | Iterable[str] = "all",
        buffers: bool = True,
        dtype: torch.dtype | None = None,
        weight: Callable[[Any], float] | None = None,
        when: Callable[[], bool] | None = None,
        monitor: TemperatureMonitor | None = None,
        likelihood: Likelihood | None = None,
    ) -> None:
        check_sampler(sampler)
        check_integer("burn_in", burn_in)
        check_integer("every", every, low=1)
        for name, function in {"weight": weight, "when": when}.items():
            if function is not None:
                check_function(name, function)
        if monitor is not None and getattr(monitor, "sampler", None) is not sampler:
            raise ValueError(
                f"Invalid monitor: {monitor!r} (must be a monitor of this sampler)"
            )
        _refuse_lookahead(sampler)
        self._settings, self._has_warned = {"burn_in": burn_in, "every": every}, False
        self._model = _ModelTensors(model, sampler, parameters, buffers)
        group = sampler.process_group
        self._is_path = traits_of(sampler).is_path
        # The writers of other ranks than the first stay empty.
        self._stores = group is None or dist.get_rank(group) == 0
        self._writer = SampleWriter(
            store if self._stores else SampleStore(),
            self._model.now(),
            chain=chain,
            dtype=dtype,
            likelihood=likelihood,
            not_sampled=self._model.rest if self._stores else None,
        )
        self._weight = weight or (lambda own: getattr(own, "sign", 1.0))
        self._when = when
        self.loss: float | Tensor = math.nan
        self.sampler = sampler
        self.start: str | None = None
        self.steps_per_pass: int | None = None
        self._record = RunRecorder(sampler, monitor)
        # The number of counted steps, and the sampler's step or time after the last.
        self._count = 0
        self._mark: float | None = None
        self._hooks = ExitStack()
        self._add_hooks()
        closing = ExitStack()
        closing.callback(self._writer.release)
        closing.callback(self._hooks.close)
        self._finish = weakref.finalize(self, closing.close)

    def __repr__(self) -> str:
        place = self._writer.files.place if self._stores else "another rank's chain"
        kind = type(self.sampler).__name__
        settings = ", ".join(f"{k}={v}" for k, v in self._settings.items())
        return f"Collector of {kind}: {self.num_draws} draws of {place} ({settings})"

    @property
    def num_draws(self) -> int:
        """The number of this chain's draws that are on the disk."""
        return len(self._writer)

    def _add_hooks(self) -> None:
        sampler, add = self.sampler, self._hooks.callback
        if self._stores:
            add(sampler.register_step_pre_hook(self._before_step).remove)
            add(sampler.register_step_post_hook(self._after_step).remove)
        if self._stores and self._is_path:
            add(sampler.register_sample_hook(self._at_sample).remove)  # type: ignore[attr-defined]

    def _before_step(self, sampler: Any, *_: Any) -> None:
        """Raises, before the update, any error that would prevent storing the draw."""
        self._writer.check()
        if (
            self._mark is None
            and self.start is None
            and context_of(sampler).rng.steps == 0
        ):
            self.start = context_of(sampler).start or "model"
        if self._is_path:
            return
        if self._mark is None:
            self._mark = _steps_made(sampler)
        elif int(sampler.param_groups[0]["step"]) < self._mark - 1:
            raise RuntimeError(
                f"the sampler went back to step {_steps_made(sampler)}, and its "
                f"collector is at {self._mark}: load the collector's state dict too"
            )
        elif hasattr(sampler, "warmup"):  # its steps do not count
            self._mark = max(self._mark, _steps_made(sampler))
        if any(self._due(1)):
            self._writer.check_draw(self._model.now())

    def _after_step(self, sampler: Any, *_: Any) -> None:
        if not self._is_path:
            step = int(sampler.param_groups[0]["step"])
            assert self._mark is not None  # set before the step
            mark = int(self._mark)
            if any(self._due(step - mark)):
                step = _steps_made(sampler)  # a GPU reports a skipped step late
            if step > mark:
                self._take(step, step, step - mark)
        self._record.add_loss(self.loss)
        self.loss = math.nan

    def _due(self, steps: int) -> Iterator[bool]:
        """Returns of each of the next steps whether its draw is stored."""
        burn_in, every = self._settings.values()
        for count in range(self._count + 1, self._count + steps + 1):
            yield count > burn_in and (count - burn_in) % every == 0

    def _at_sample(self, sampler: Sampler, time: float) -> None:
        # A step that another hook has undone repeats its samples.
        if self._mark is None or time > self._mark:
            self._take(int(sampler.param_groups[0]["step"]) + 1, time, 1)

    def run(self, block: Callable[..., Tensor], *batches: Tensor) -> Tensor:
        """Calls a block of :func:`compile_steps`, and stores its draw if one is due.

        The draw is the chain at the block's end. Blocks whose length divides
        ``burn_in`` and ``every`` store the draws of single steps.

        Raises:
            ValueError: more than one draw would be due in the block, or there is a
                ``when``. Nothing has changed.
        """
        if not self._stores:
            return block(*batches)
        if sum(self._due(len(batches[0]))) > 1 or self._when is not None:
            raise ValueError(
                f"Invalid block: {len(batches[0])} steps (must have one draw at most, "
                f"of a collector with every={self._settings['every']} and no when)"
            )
        self._before_step(self.sampler)
        self._hooks.close()
        try:
            losses = block(*batches)
        finally:
            self._add_hooks()
        *before, self.loss = losses.reshape(len(losses), -1).mean(1)  # over chains
        for loss in before:
            self._record.add_loss(loss)
        self._after_step(self.sampler)
        return losses

    def _take(self, step: int, mark: float, steps: int) -> None:
        """Counts steps, and stores the draw if it is due."""
        if self._when is not None and not self._when():
            steps = 0
        if any(self._due(steps)):
            self._warn_of_tuning()
            groups, now = self.sampler.param_groups, self._model.now()
            self._record.temperature = float(groups[0]["temperature"])
            self._writer.append(
                now,
                step=step,
                lr=groups[0].get("lr", groups[0].get("step_size", math.nan)),
                temperature=self._record.temperature,
                weight=self._weight(self.sampler),
                loss=self.loss,
                prior_precision=[g["prior_precision"] for g in groups],
            )
        before, self._count, self._mark = self._count, self._count + steps, mark
        if before < self._settings["burn_in"] <= self._count:
            self._record.end_burn_in()

    def _warn_of_tuning(self) -> None:
        if is_adapting(self.sampler) and not self._has_warned:
            self._has_warned = True
            warn(
                "A draw is stored while the sampler tunes its settings, and such draws "
                "are burn-in: give burn_in of at least tune_steps"
            )

    def flush(self) -> None:
        """Writes all draws so far; a RuntimeError loses none."""
        self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Returns the collector's progress, once all draws so far are on the disk."""
        self.flush()
        self._write_run()
        # The first rank refuses another's: no chain has a negative size.
        nowhere = {"size": -1, "crc32": 0}
        return {
            **self._record.state_dict(),
            "count": self._count,
            "mark": self._mark,
            "start": self.start,
            "position": self._writer.checkpoint() if self._stores else nowhere,
            **self._settings,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Cuts the store back to a checkpoint, from which the chain continues.

        Raises:
            ValueError: the checkpoint is of another store or an earlier run, made with
                another ``burn_in`` or ``every``, or of another object. The store is as
                before.
        """
        check_keys(state_dict, "Collector", "position")
        check_keys(state_dict["position"], "Collector", "size", "crc32")
        if is_of_python := len(state_dict) > 1:
            keys = ("count", "mark", "monitor", "losses", "temperature")
            check_keys(state_dict, "Collector", *keys, *self._settings)
        for name, value in self._settings.items():
            if state_dict.get(name, value) != value:
                run = f"the run in progress has {state_dict[name]}"
                raise ValueError(f"Invalid {name}: {value} ({run})")
        before = self._record.state_dict()
        try:
            if is_of_python:
                count = check_count("count", state_dict["count"])
                self._record.load_state_dict(state_dict)
            if self._stores:
                self._writer.cut_back(state_dict["position"])
        except Exception:
            self._record.load_state_dict(before)
            raise
        if is_of_python:
            self.start = state_dict.get("start", self.start)
            self._count, self._mark = count, state_dict["mark"]
            return
        burn_in, every = self._settings.values()  # in C++ the program chose the draws
        self._record.restart()
        self._count = (burn_in + every * self.num_draws) if self.num_draws else 0
        self._mark = None

    def restart(self) -> None:
        """Deletes the chain's draws, for a run that starts again."""
        self._writer.restart()
        self._record.restart()
        self._count, self._mark = 0, None

    def close(self) -> None:
        """Writes all draws, and detaches from the sampler.

        Raises:
            RuntimeError: a draw cannot be written. No draw is lost: the collector stays
                open, and ``close()`` can be called again.
        """
        if self._stores and self._writer.is_open:
            self.flush()
            self._write_run()
        self._finish()

    def _write_run(self) -> None:
        if self._mark is not None:
            record = replace(self._record.record(), start=self.start)
            record = replace(record, steps_per_pass=self.steps_per_pass)
            self._writer.files.write_run(plain(record))

    def __exit__(self, *error: object) -> None:
        (self.close if error[0] is None else self._finish)()


def _steps_made(sampler: Sampler) -> int:
    """Returns the sampler's step counter, once a GPU has reported its last step."""
    _ = sampler.num_skipped  # waits for the GPU
    return int(sampler.param_groups[0]["step"])
