"""Stores draws of a sampler's model beside training."""

from __future__ import annotations

import fnmatch
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_sgmcmc._impl.dtensor import is_dtensor, refuse
from torch_sgmcmc._impl.hyperparams import check_function, check_integer, wrong_type
from torch_sgmcmc._impl.utils import plain_names
from torch_sgmcmc.diagnostics.temperatures import TemperatureMonitor
from torch_sgmcmc.losses import Likelihood
from torch_sgmcmc.posterior.run_record import Trace, plain, record_run
from torch_sgmcmc.posterior.store import SampleStore
from torch_sgmcmc.posterior.store_files import checksums
from torch_sgmcmc.posterior.writer import SampleWriter
from torch_sgmcmc.samplers.sampler import Sampler
from torch_sgmcmc.samplers.sbps import SBPS

# So many skipped steps before the first draw are a fault.
_MANY = 10


class _DrawOfModel:
    """The tensors of a model that make a draw; takes arguments of a Collector."""

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        sampler: Sampler,
        parameters: str | Iterable[str],
        buffers: bool,
    ) -> None:
        self._model, self._plain, self._buffers = model, {}, []
        every = model
        if isinstance(model, nn.Module):
            every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            self._plain = plain_names(model, every)
            saved = model.state_dict() if buffers else {}
            held = [name for name, _ in model.named_buffers() if name in saved]
            self._buffers = [self._plain[name] for name in held]
        for name, tensor in every.items():
            if is_lazy(tensor):
                raise ValueError(
                    f"Invalid model: {name!r} has no shape yet (call the model once)"
                )
        named = self._parameters()
        params = [p for group in sampler.param_groups for p in group["params"]]
        sampled = {id(p) for p in params if p.requires_grad}
        if parameters == "sampled":
            parameters = [name for name, p in named.items() if id(p) in sampled]
        self._names = _chosen(parameters, list(named))
        refuse("parameters", (named[name] for name in self._names))
        self._check_sampled(params, named)
        # A module's objects under these names.
        chosen = {k: named[k] for k in self._names if isinstance(model, nn.Module)}
        self._objects = {k: p for k, p in chosen.items() if isinstance(p, nn.Parameter)}
        #: Tensors that are neither stored nor sampled.
        rest = {k: t for k, t in named.items() if k not in self._names}
        self.rest = {k: t for k, t in rest.items() if id(t) not in sampled}

    def _check_sampled(
        self, params: Sequence[Tensor], named: Mapping[str, Tensor]
    ) -> None:
        own, sampled = {*map(_place, named.values())}, {_place(p): p for p in params}
        if sampled.keys().isdisjoint(_place(named[name]) for name in self._names):
            raise ValueError(
                "Invalid parameters: the sampler has none of the ones that would be "
                "stored, so all draws would be the same (was the model copied after "
                "the sampler was made?)"
            )
        missing = [p for place, p in sampled.items() if place not in own]
        # Users choose the content of a mapping.
        if missing and isinstance(self._model, nn.Module):
            raise ValueError(
                f"Invalid model: it lacks {len(missing)} of the sampler's parameters, "
                f"one of shape {list(missing[0].shape)} (was a layer replaced after "
                "the sampler was made? Make the sampler after it; or give a mapping "
                "from names to all tensors that are to be stored)"
            )

    def _parameters(self) -> dict[str, Tensor]:
        is_module = isinstance(self._model, nn.Module)
        return self._by_plain_name(
            self._model.named_parameters() if is_module else self._model.items()
        )

    def _by_plain_name(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {self._plain.get(name, name): tensor for name, tensor in named}

    def now(self) -> dict[str, Tensor]:
        """Returns the model's own tensors by name."""
        named = self._parameters()
        for name in self._names:
            if name not in named:
                raise RuntimeError(
                    f"the model has no parameter {name!r} any more (weight_norm and "
                    "the like rename parameters: make the collector after them)"
                )
            if self._objects.get(name, named[name]) is not named[name]:
                raise RuntimeError(
                    f"the model's parameter {name!r} is another tensor than when the "
                    "collector was made (was a layer replaced? Make the sampler and "
                    "the collector after it)"
                )
        tensors = {name: named[name].detach() for name in self._names}
        if self._buffers:
            held = self._by_plain_name(self._model.named_buffers())
            tensors |= {name: held[name] for name in self._buffers}
        return tensors


def _chosen(parameters: str | Iterable[str], names: list[str]) -> list[str]:
    if parameters == "all":
        parameters = names
    if isinstance(parameters, str) or not isinstance(parameters, Iterable):
        raise ValueError(
            f"Invalid parameters: {parameters!r} (must be 'all', 'sampled' or a list "
            "of names)"
        )
    found: set[str] = set()
    for pattern in parameters:
        # "w[0]" is first a name, and only then a pattern for "w0".
        some = [pattern] if pattern in names else fnmatch.filter(names, pattern)
        if not some:
            raise ValueError(
                f"Invalid parameters: no parameter is named {pattern!r} (there are "
                f"{names})"
            )
        found.update(some)
    if not found:
        raise ValueError("Invalid parameters: none of the model's is chosen")
    return [name for name in names if name in found]


def _place(tensor: Tensor) -> int:
    """Returns a key that identifies a parameter, also through views."""
    if is_dtensor(tensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


class Collector:
    """Stores draws of a model while a sampler runs.

    Three lines are added to a training loop::

        store = sg.SampleStore("draws")
        collector = sg.Collector(sampler, model, store, burn_in=1000, every=20)
        ...  # the loop as it was
        collector.close()

    A draw is the model after a step, copied before ``step()`` returns. The next step
    writes it, or later ones if it is small (:class:`SampleWriter`). With :class:`SBPS`
    a draw is a point of the trajectory, at each multiple of ``sample_interval``, and
    ``burn_in`` and ``every`` count these points. Steps of a warm-up and skipped steps
    (``nonfinite="skip"``) do not count.

    A checkpoint holds :meth:`state_dict` beside the sampler's and the model's: loading
    it cuts the store back, and the chain makes the later draws again. If the sampler
    has a ``process_group``, its first rank stores the chain, and the others load its
    state dict. More: docs/store.md.

    Args:
        sampler: a :class:`Sampler`.
        model: the module whose parameters it samples, or a mapping from names to
            tensors.
        store: a folder or a :class:`SampleStore`.
        chain: the number of this chain in the store, >= 0. Each chain has one writer;
            several processes write their chains side by side. Default: 0.
        burn_in: number of first steps that are not stored, >= 0. Default: 0.
        every: steps from one draw to the next, >= 1. Default: 1.
        parameters: "all", "sampled" (the sampler's parameters), or names, in which
            ``*`` and ``?`` are wildcards: ``["fc.*", "*lora*"]``. Default: "all".
        buffers: whether to store the buffers of the module's state dict. Default: True.
        dtype: dtype of stored floating-point tensors, such as ``torch.bfloat16``; None
            keeps each tensor's. Default: None.
        weight: ``weight(sampler)`` is a draw's weight. None is the sign of an
            :class:`HMCECS`, and 1 for other samplers. Default: None.
        when: ``when()`` returns after a step whether the step counts: ``lambda:
            schedule.collecting`` of a :class:`CyclicalSchedule`. None counts all.
            Default: None.
        monitor: a :class:`TemperatureMonitor` of the sampler. Temperatures since the
            burn-in are written beside the draws, for :func:`report`, and are in
            :meth:`state_dict`. Default: None.
        likelihood: the loss, if it is one of :mod:`torch_sgmcmc.losses`: the default
            likelihood of predictions with the draws. Default: None.

    Attributes:
        loss: a number or a scalar tensor, set before a step and stored with the step's
            draw. NaN afterwards.

    Raises:
        ValueError: an argument is out of range, no parameter has a name, the sampler
            has none of the stored parameters, or the store is of another model. At the
            first step: the chain has draws already. The sampler is unchanged.
        RuntimeError: the store cannot be written, or another writer has the chain. At a
            step: a draw could not be written; the message names the draws on the disk.
            The sampler is unchanged; the next step tries again, and no draw is lost.
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
        if not isinstance(sampler, Sampler):
            raise wrong_type("sampler", sampler, "a Sampler")
        check_integer("burn_in", burn_in)
        check_integer("every", every, low=1)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"Invalid dtype: {dtype!r} (must be a torch.dtype)")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"Invalid dtype: {dtype} (must be a floating-point one)")
        if likelihood is not None and not isinstance(likelihood, Likelihood):
            raise wrong_type("likelihood", likelihood, "one of torch_sgmcmc.losses")
        if monitor is not None and not isinstance(monitor, TemperatureMonitor):
            raise wrong_type("monitor", monitor, "TemperatureMonitor")
        for name, function in {"weight": weight, "when": when}.items():
            if function is not None:
                check_function(name, function)
        if monitor is not None and monitor.sampler is not sampler:
            raise ValueError("Invalid monitor: it observes another sampler")
        if any("lookahead_alpha" in group for group in sampler.param_groups):
            raise ValueError(
                "Invalid sampler: it is inside of a Lookahead, which averages the "
                "chain's parameters: its average is not a draw of the posterior"
            )
        self._settings = {"burn_in": burn_in, "every": every}
        self._model = _DrawOfModel(model, sampler, parameters, buffers)
        group = sampler.process_group
        # The writers of other ranks than the first stay empty.
        self._stores = group is None or dist.get_rank(group) == 0
        self._writer = SampleWriter(
            *(store if self._stores else SampleStore(), self._model.now()),
            **{"chain": chain, "dtype": dtype, "likelihood": likelihood},
            not_sampled=self._model.rest if self._stores else None,
        )
        try:
            self._compare_rest()
        except BaseException:  # warnings can be errors
            self._writer.close()
            raise
        self._weight, self._when = weight or _sign, when
        self.loss: float | Tensor = math.nan
        self.sampler = sampler
        self._monitor, self._trace = monitor, Trace()
        self._temperature: float | None = None  # of the last draw
        # The number of counted steps, and the sampler's step or time after the last.
        self._count = 0
        self._mark: float | None = None
        self._skipped = sampler.num_skipped
        self._handles: list[Any] = []
        self._add_hooks()
        self._finish = weakref.finalize(self, _finish, self._handles, self._writer)

    def __repr__(self) -> str:
        if not self._stores:
            return "Collector of a rank that stores nothing"
        burn_in, every = self._settings.values()
        return (
            f"Collector of {type(self.sampler).__name__}: {self.num_draws} draws of "
            f"{self._writer.files.place} (burn_in={burn_in}, every={every})"
        )

    def _compare_rest(self) -> None:
        """Warns if earlier draws belong to other values of the tensors not stored."""
        if not self._stores:
            return
        files, now = self._writer.files, checksums(self._model.rest)
        stored = files.info.not_sampled.items()
        others = [name for name, checksum in stored if now.get(name) != checksum]
        if others:
            warnings.warn(
                f"draws of {files.place} are of a part of the model, and "
                f"{others[0]!r} and {len(others) - 1} more of its other parameters are "
                "not those that the draws were made with",
                stacklevel=4,
            )

    @property
    def num_draws(self) -> int:
        """The number of this chain's draws that are on the disk."""
        return len(self._writer)

    def _add_hooks(self) -> None:
        if self._stores:
            sampler, after = self.sampler, self.sampler.register_step_post_hook
            self._handles.append(sampler.register_step_pre_hook(self._before_step))
            if isinstance(sampler, SBPS):
                self._handles.append(sampler.register_sample_hook(self._at_sample))
            else:
                self._handles.append(after(self._after_step))
            self._handles.append(after(self._clear_loss))

    def _before_step(self, sampler: Any, *_: Any) -> None:
        """Raises, before the update, any error that would prevent storing the draw."""
        self._writer.check()
        if isinstance(sampler, SBPS):
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
        step = int(sampler.param_groups[0]["step"])
        if any(self._due(step - self._mark)):
            # A GPU reports a skipped step late.
            step = _steps_made(sampler)
        if step > self._mark:
            self._take(step, step, step - self._mark)

    def _due(self, steps: int) -> Iterator[bool]:
        """Returns of each of the next steps whether its draw is stored."""
        burn_in, every = self._settings.values()
        for count in range(self._count + 1, self._count + steps + 1):
            yield count > burn_in and (count - burn_in) % every == 0

    def _clear_loss(self, *_: Any) -> None:
        if isinstance(self.loss, Tensor) or self.loss == self.loss:
            self._trace.add(self.loss)
        self.loss = math.nan

    def _at_sample(self, sampler: SBPS, time: float) -> None:
        # A step that another hook has undone repeats its samples.
        if self._mark is None or time > self._mark:
            self._take(int(sampler.param_groups[0]["step"]) + 1, time, 1)

    def run(self, block: Callable[..., Tensor], *batches: Tensor) -> Tensor:
        """Makes a block of :func:`compile_steps`, and stores its draw if one is due.

        The draw is the chain at the block's end. Blocks whose length divides
        ``burn_in`` and ``every`` store the draws of single steps.

        Args:
            block: the result of :func:`compile_steps` for this sampler.
            batches: the block's arguments.

        Returns:
            The losses, [steps].

        Raises:
            ValueError: more than one draw would be due in the block, or there is a
                ``when``. Nothing has changed.
            RuntimeError: an error of the block or of a step.
        """
        if not self._stores:
            return block(*batches)
        if sum(self._due(len(batches[0]))) > 1 or self._when is not None:
            raise ValueError(
                f"Invalid block: {len(batches[0])} steps (must have one draw at most, "
                f"of a collector with every={self._settings['every']} and no when)"
            )
        self._before_step(self.sampler)
        _remove(self._handles)
        try:
            losses = block(*batches)
        finally:
            self._add_hooks()
        for self.loss in losses:
            self._trace.add(self.loss)
        self._after_step(self.sampler)
        self.loss = math.nan
        return losses

    def _take(self, step: int, mark: float, steps: int) -> None:
        """Counts steps, and stores the draw if it is due."""
        if self._when is not None and not self._when():
            self._mark = mark
            return
        if any(self._due(steps)):
            groups, now = self.sampler.param_groups, self._model.now()
            self._temperature = float(groups[0]["temperature"])
            self._writer.append(
                now,
                step=step,
                lr=groups[0].get("lr", groups[0].get("step_size", math.nan)),
                temperature=self._temperature,
                weight=self._weight(self.sampler),
                loss=self.loss,  # type: ignore[arg-type]
                prior_precision=[g["prior_precision"] for g in groups],
            )
        in_burn_in = self._count < self._settings["burn_in"]
        self._count, self._mark = self._count + steps, mark
        if in_burn_in and self._count >= self._settings["burn_in"] and self._monitor:
            self._monitor.reset()

    def flush(self) -> None:
        """Waits until all draws so far are on the disk.

        Raises:
            RuntimeError: a draw cannot be written; the next call tries again.
        """
        self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Returns the collector's progress, once all draws so far are on the disk."""
        self.flush()
        self._write_run()
        return {
            "monitor": self._monitor and self._monitor.state_dict(),
            **{"losses": self._trace.state, "temperature": self._temperature},
            **{"count": self._count, "mark": self._mark},
            "position": self._writer.checkpoint() if self._stores else None,
            **self._settings,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Cuts the store back to a checkpoint, from which the chain continues.

        Raises:
            ValueError: the checkpoint is of another store or an earlier run, or made
                with another ``burn_in`` or ``every``. The store is as before.
        """
        for name, value in self._settings.items():
            if state_dict[name] != value:
                run = f"the run in progress has {state_dict[name]}"
                raise ValueError(f"Invalid {name}: {value} ({run})")
        if self._stores:
            if state_dict["position"] is None:
                raise ValueError(
                    "Invalid state_dict: of a rank that stores nothing (must be of the "
                    "first rank of the sampler's process_group)"
                )
            self._writer.cut_back(state_dict["position"])
        # C++ keeps neither temperatures nor losses.
        if self._monitor is not None and state_dict.get("monitor") is not None:
            self._monitor.load_state_dict(state_dict["monitor"])
        if "losses" in state_dict:
            self._trace = Trace(state_dict["losses"])
        self._temperature = state_dict.get("temperature")
        self._count, self._mark = state_dict["count"], state_dict["mark"]

    def restart(self) -> None:
        """Deletes the chain's draws, for a run that starts again."""
        self._writer.restart()
        self._count, self._mark, self._trace = 0, None, Trace()
        if self._monitor is not None:
            self._monitor.reset()

    def close(self) -> None:
        """Waits until all draws are on the disk, and detaches from the sampler.

        A UserWarning is issued if all steps were skipped.

        Raises:
            RuntimeError: a draw cannot be written; the message names the draws on the
                disk. The collector is closed.
        """
        try:
            if self._stores and self._writer.is_open:
                self.flush()
                self._write_run()
                self._warn_if_all_are_skipped()
        finally:
            self._finish()

    def _warn_if_all_are_skipped(self) -> None:
        skipped = self.sampler.num_skipped - self._skipped
        if self._count == 0 and skipped >= _MANY:
            warnings.warn(
                f"all {skipped} steps of {type(self.sampler).__name__} were skipped, "
                "since gradients were not finite: "
                f"{self._writer.files.place} has no draw of them",
                stacklevel=3,
            )

    def _write_run(self) -> None:
        if self._mark is not None:
            beside = self._monitor, self._trace
            ran = record_run(self.sampler, *beside, temperature=self._temperature)
            self._writer.files.write_run(plain(ran))

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *error: object) -> None:
        (self.close if error[0] is None else self._finish)()


def _steps_made(sampler: Sampler) -> int:
    """Returns the sampler's step counter, once a GPU has reported its last step."""
    _ = sampler.num_skipped  # waits for the GPU
    return int(sampler.param_groups[0]["step"])


def _sign(sampler: Any) -> float:
    return getattr(sampler, "sign", 1.0)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _finish(handles: list[Any], writer: SampleWriter) -> None:
    _remove(handles)
    writer.close()
