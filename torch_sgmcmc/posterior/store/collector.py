"""Hooks onto a sampler and stores draws of it beside training."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.checks import check_function, check_integer
from torch_sgmcmc.hmc import HMC
from torch_sgmcmc.judge.gauges import Gauges
from torch_sgmcmc.posterior.store.background import Background
from torch_sgmcmc.posterior.store.base import base_path, differences, write_base
from torch_sgmcmc.posterior.store.chosen import Chosen
from torch_sgmcmc.posterior.store.ran import Trace, ran_of, write_ran
from torch_sgmcmc.posterior.store.sample_store import SampleStore, folder_of
from torch_sgmcmc.posterior.store.writer import NoWriter, SampleWriter, copied, record
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sbps import SBPS

__all__ = ["Collector"]


# So many steps or draws are no chance.
_MANY = 10


class Collector:
    r"""Stores draws of a model while a sampler runs.

    Three lines are added to a training loop::

        store = sg.SampleStore("draws")
        collector = sg.Collector(sampler, model, store, burn_in=1000, every=20)
        ...  # the loop as it was
        collector.close()

    A draw is the model after a step: a copy made before ``step()`` returns, which a
    thread then writes. Of :class:`SBPS` it is a point of the trajectory, at each
    multiple of ``sample_interval``; burn-in and ``every`` count these then. Steps of a
    warm-up and steps that were left out (``nonfinite="skip"``) are not counted.

    **Resuming.** Put :meth:`state_dict` into the checkpoint, beside the sampler's and
    the model's. Loaded, it cuts the store back to what it had then, and the chain goes
    on to the same bytes as one that was never interrupted. A run that begins anew over
    what a killed one has left says :meth:`restart`. More: docs/store.md.

    **Several ranks.** If the sampler has a ``process_group``, the first rank of it
    stores the chain. On the others a collector can be used alike and does nothing; what
    they load may be the first rank's state dict.

    Args:
        sampler: a :class:`Sampler`.
        model: the module whose parameters it samples, or a mapping from names to
            tensors.
        store: where to; a folder or a :class:`SampleStore`.
        chain: the number of this chain in the store, >= 0. Each has one writer; several
            processes write their chains side by side. Default: 0.
        burn_in: steps that come first and are not stored, >= 0. Default: 0.
        every: steps from one draw to the next, >= 1. Default: 1.
        max_samples: as many draws at most, >= 1: whenever there would be more, every
            second is dropped, and ``every`` is twice what it was. None is no limit.
            Default: None.
        parameters: "all", "sampled" (those that the sampler has), or names, of which
            ``*`` and ``?`` stand for others: ``["fc.*", "*lora*"]``. Default: "all".
        buffers: whether buffers are stored as well, those of a module that its state
            dict has. Default: True.
        dtype: in which floating-point tensors are stored, ``torch.bfloat16`` say; None
            is their own. Default: None.
        weight: ``weight(sampler)`` is a draw's weight. None is the sign of an
            :class:`HMCECS`, and 1 of all others. Default: None.
        when: ``when()`` tells after a step whether it counts: ``lambda:
            schedule.collecting`` of a :class:`CyclicalSchedule`. None is all. Default:
            None.
        gauges: of the sampler: what they have read since the burn-in is written beside
            the draws, for :func:`report`, and goes through :meth:`state_dict`. Default:
            None.
        queue_size: draws in memory, >= 1, that training does not wait for. Default: 2.

    Attributes:
        loss: set it before a step, to a number or a scalar tensor, and it is stored
            with that step's draw. Then it is NaN again.

    Raises:
        ValueError: an argument is out of range, no parameter has a name, none of those
            that are stored is the sampler's, or the store is of another model; at the
            first step, if the chain has draws already, and the sampler is as before.
        RuntimeError: the store cannot be written, or another writer has the chain. At a
            step: a draw could not be written; the message says which ones are on the
            disk. The sampler is as before; the next step goes on, and tries again to
            write the draws that are waiting, of which none is lost. (Where several
            ranks sample a chain, only the first one raises: let it end the job.)
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
        max_samples: int | None = None,
        parameters: str | Iterable[str] = "all",
        buffers: bool = True,
        dtype: torch.dtype | None = None,
        weight: Callable[[Any], float] | None = None,
        when: Callable[[], bool] | None = None,
        gauges: Gauges | None = None,
        queue_size: int = 2,
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise TypeError(
                f"Invalid sampler: {type(sampler).__name__} (must be a Sampler)"
            )
        check_integer("chain", chain, low=0)
        check_integer("burn_in", burn_in, low=0)
        check_integer("every", every, low=1)
        if max_samples is not None:
            check_integer("max_samples", max_samples, low=1)
        check_integer("queue_size", queue_size, low=1)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"Invalid dtype: {dtype!r} (must be a torch.dtype)")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"Invalid dtype: {dtype} (must be a floating-point one)")
        for name, function in {"weight": weight, "when": when}.items():
            if function is not None:
                check_function(name, function)
        if gauges is not None and not isinstance(gauges, Gauges):
            raise TypeError(f"Invalid gauges: {type(gauges).__name__} (must be Gauges)")
        if gauges is not None and gauges.sampler is not sampler:
            raise ValueError("Invalid gauges: they observe another sampler")
        if any("lookahead_alpha" in group for group in sampler.param_groups):
            raise ValueError(
                "Invalid sampler: it is inside of a Lookahead, which averages the "
                "chain's parameters: draws are those of the posterior without it"
            )
        self._settings = {
            "burn_in": burn_in,
            "every": every,
            "max_samples": max_samples or 0,
        }
        self._schedule = _C.DrawSchedule(**self._settings)
        self._chosen = Chosen(model, sampler, parameters, buffers)
        path = folder_of(store)
        self._store = store  # which may be in memory as long as it is known
        group = sampler.process_group
        self._stores = group is None or dist.get_rank(group) == 0
        self._writer = (
            SampleWriter(path, self._chosen.now(), chain=chain, dtype=dtype)
            if self._stores
            else NoWriter()
        )
        self._base = base_path(Path(path), chain)
        if self._stores:
            self._keep_base()
        self._weight = weight or _sign
        self._when = when
        self._free: deque[dict[str, Tensor]] = deque()
        self._background = Background(queue_size)
        self.loss: float | Tensor = math.nan
        self.sampler = sampler
        self._gauges, self._trace = gauges, Trace()
        self._temperature: float | None = None  # that of the last draw
        # Of the steps that were made, the number, and how far the sampler was.
        self._count = 0
        self._mark: float | None = None
        self._skipped = sampler.num_skipped
        self._handles: list[Any] = []
        self._listen()
        self._finish = weakref.finalize(
            self, _finish, self._handles, self._background, self._writer, os.getpid()
        )

    def __repr__(self) -> str:
        if not self._stores:
            return "Collector of a rank that stores nothing"
        burn_in, every, most = self._settings.values()
        cap = f", max_samples={most}" if most else ""
        return (
            f"Collector of {type(self.sampler).__name__}: {self.num_draws} draws of "
            f"chain {self._writer.chain} in {self._writer.path} "
            f"(burn_in={burn_in}, every={every}{cap})"
        )

    @property
    def num_draws(self) -> int:
        """The draws of this chain that are on the disk."""
        return len(self._writer)

    def _keep_base(self) -> None:
        """Writes of what draws of a part of the model are a part."""
        if self.num_draws == 0:
            write_base(self._base, self._chosen.rest)
            return
        others = differences(self._base, self._chosen.rest)
        if others:
            warnings.warn(
                f"draws of {self._base.parent} are of a part of the model, and "
                f"{others[0]!r} and {len(others) - 1} more of its other parameters "
                "are not those that the draws were made with",
                stacklevel=3,
            )

    # ---- Hooks ----------------------------------------------------------------

    def _listen(self) -> None:
        """Has the sampler tell of its steps."""
        if not self._stores:
            return
        sampler = self.sampler
        self._handles.append(sampler.register_step_pre_hook(self._before_step))
        if isinstance(sampler, SBPS):
            self._handles.append(sampler.register_sample_hook(self._at_sample))
        else:
            self._handles.append(sampler.register_step_post_hook(self._after_step))
        self._handles.append(sampler.register_step_post_hook(self._forget_loss))

    def _before_step(self, sampler: Any, *_: Any) -> None:
        """Whatever keeps a draw from being stored is an error before the update."""
        self._writer.check()
        if isinstance(sampler, SBPS):
            self._raising(self._background.check)
            return
        if self._mark is None:
            self._mark = _steps_made(sampler)
        elif int(sampler.param_groups[0]["step"]) < self._mark - 1:
            raise RuntimeError(
                f"the sampler went back to step {_steps_made(sampler)}, and its "
                f"collector is at {self._mark}: load the collector's state dict too"
            )
        if self._schedule.keeps(self._count + 1):
            self._chosen.now()  # raises if there is no such draw
            self._raising(self._background.wait_for_room)
        else:
            self._raising(self._background.check)

    def _after_step(self, sampler: Any, *_: Any) -> None:
        step = int(sampler.param_groups[0]["step"])
        if step > self._mark and self._schedule.keeps(self._count + 1):
            # A GPU tells late that it has left out the step.
            step = _steps_made(sampler)
        if step > self._mark:
            self._take(step, step)

    def _forget_loss(self, *_: Any) -> None:
        if isinstance(self.loss, Tensor) or self.loss == self.loss:
            self._trace.add(self.loss)
        self.loss = math.nan  # it was this step's

    def _at_sample(self, sampler: SBPS, time: float) -> None:
        # A step that another hook has undone comes by its samples again.
        if self._mark is not None and time <= self._mark:
            return
        if self._schedule.keeps(self._count + 1):
            self._raising(self._background.wait_for_room)
        self._take(int(sampler.param_groups[0]["step"]) + 1, time)

    def run(self, block: Callable[..., Tensor], *batches: Tensor) -> Tensor:
        """Makes a block of :func:`compiled_steps`, and takes its draw if one is due.

        The draw is the chain at the block's end: with blocks whose length divides
        ``burn_in`` and ``every`` it is that of single steps.

        Args:
            block: what :func:`compiled_steps` returned for this sampler.
            batches: what it takes.

        Returns:
            The losses, [steps].

        Raises:
            ValueError: more than one draw would be due in the block, or there is a
                ``when``. Nothing has changed.
            RuntimeError: of the block, or as at any step.
        """
        if not self._stores:
            return block(*batches)
        ahead = range(self._count + 1, self._count + len(batches[0]) + 1)
        due = sum(map(self._schedule.keeps, ahead))
        if due > 1 or self._when is not None:
            raise ValueError(
                f"Invalid block: {len(batches[0])} steps (must have one draw at most, "
                f"of a collector with every={self._settings['every']} and no when)"
            )
        self._before_step(self.sampler)
        if due:
            self._raising(self._background.wait_for_room)
        before, mark = self._count, _steps_made(self.sampler)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            losses = block(*batches)
        finally:
            self._listen()
            step = _steps_made(self.sampler)
            self._count, self._mark = before + step - mark, step
        for loss in losses:
            self._trace.add(loss)
        self.loss = losses[-1]
        for count in range(before + 1, self._count + 1):
            if self._schedule.keeps(count) or self._schedule.thins(count):
                self._count = count - 1
                self._take(step, step)
        self._count, self.loss = before + step - mark, math.nan
        return losses

    def _take(self, step: int, mark: float) -> None:
        """Counts a step, and stores the draw if it is one."""
        if self._when is not None and not self._when():
            self._mark = mark
            return
        count = self._count + 1
        number = self._schedule.number(count)
        if self._schedule.thins(count):
            interval = self._schedule.interval(number)
            self._background.put(partial(self._writer.thin, interval))
        if self._schedule.keeps(count):
            group = self.sampler.param_groups[0]
            values = {
                "step": step,
                "lr": group.get("lr", group.get("step_size", math.nan)),
                "temperature": group["temperature"],
                "weight": self._weight(self.sampler),
                "loss": self.loss,
                "prior_precision": [
                    g["prior_precision"] for g in self.sampler.param_groups
                ],
            }
            of_draw = record(values, number)
            self._temperature = float(values["temperature"])
            memory = self._free.popleft() if self._free else self._writer.blank()
            draw = copied(self._chosen.now(), memory)
            self._background.put(
                partial(_write, self._writer, draw, of_draw, self._free)
            )
        self._count, self._mark = count, mark
        if self._gauges is not None and count == self._settings["burn_in"]:
            self._gauges.reset()

    def _raising(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except Exception as error:
            raise RuntimeError(f"{error}. {self._safe()}") from error

    def _safe(self) -> str:
        last, count = self._writer.last_step, len(self._writer)
        chain = f"chain {self._writer.chain} of {self._writer.path}"
        safe = f"{chain} has no draw yet"
        if last is not None:
            safe = f"{count} draws of {chain}, up to step {last}, are safe"
        waiting = len(self._background)
        return f"{safe}; {waiting} more wait in memory, and the next step tries again"

    # ---- Checkpoints ----------------------------------------------------------

    def flush(self) -> None:
        """Waits until all draws so far are on the disk.

        Raises:
            RuntimeError: one cannot be written; the next call tries again.
        """
        self._raising(self._background.flush)

    def state_dict(self) -> dict[str, Any]:
        """How far collecting is; it waits until all draws so far are on the disk.

        Files of draws that are dropped after a checkpoint stay until the next but one,
        so that the store can be cut back to it.
        """
        self.flush()
        self._tell()
        return {
            "gauges": None if self._gauges is None else self._gauges.state_dict(),
            "losses": self._trace.state_dict(),
            "temperature": self._temperature,
            "count": self._count,
            "mark": self._mark,
            "position": self._writer.checkpoint(),
            **self._settings,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Cuts the store back to a checkpoint, and goes on from there.

        Raises:
            ValueError: the checkpoint is of another store or an earlier run, or made
                with another ``burn_in``, ``every`` or ``max_samples``. The store is as
                before.
        """
        for name, value in self._settings.items():
            if state_dict[name] != value:
                given, former = value, state_dict[name]
                if name == "max_samples":  # 0 is none
                    given, former = given or None, former or None
                raise ValueError(
                    f"Invalid {name}: {given} (the run in progress has {former})"
                )
        if self._stores and state_dict["position"] is None:
            raise ValueError(
                "Invalid state_dict: of a rank that stores nothing (must be that of "
                "the first rank of the sampler's process_group)"
            )
        self.flush()
        self._writer.cut_back(state_dict["position"])
        # Which C++ does not keep.
        if self._gauges is not None and state_dict.get("gauges") is not None:
            self._gauges.load_state_dict(state_dict["gauges"])
        if "losses" in state_dict:
            self._trace.load_state_dict(state_dict["losses"])
        self._temperature = state_dict.get("temperature")
        self._count, self._mark = state_dict["count"], state_dict["mark"]

    def restart(self) -> None:
        """Deletes the chain's draws, for a run that begins anew."""
        self.flush()
        self._writer.restart()
        self._count, self._mark, self._trace = 0, None, Trace()
        if self._gauges is not None:
            self._gauges.reset()
        if self._stores:
            write_ran(None, Path(self._writer.path), self._writer.chain)
            write_base(self._base, self._chosen.rest)

    # ---- The end --------------------------------------------------------------

    def close(self) -> None:
        """Waits until all draws are on the disk, and leaves the sampler.

        A UserWarning says if all draws are the same, or all steps were left out.

        Raises:
            RuntimeError: a draw cannot be written; the message says which ones are. The
                collector is closed.
        """
        if self._finish.alive:
            self._close()
            self._tell()
            self._look_back()

    def _tell(self) -> None:
        """Writes what ran beside the draws."""
        if not self._stores or self._mark is None:
            return
        heat = self._temperature
        ran = ran_of(self.sampler, self._gauges, self._trace, temperature=heat)
        write_ran(ran, Path(self._writer.path), self._writer.chain)

    def _close(self) -> None:
        try:
            self.flush()
        finally:
            self._finish.detach()
            _end(self._handles, self._background, self._writer)

    def _look_back(self) -> None:
        """Warns of a chain that has stayed where it was."""
        if not self._stores:
            return
        path, chain = self._writer.path, self._writer.chain
        skipped = self.sampler.num_skipped - self._skipped
        kind = type(self.sampler).__name__
        if self._count == 0 and skipped >= _MANY:
            warnings.warn(
                f"all {skipped} steps of {kind} were left out, as gradients were not "
                f"finite: chain {chain} of {path} has no draw of them",
                stacklevel=3,
            )
            return
        draws = _C.read_index(path, chain).draws
        # The sum of a file's header, in which each tensor has its own.
        if len(draws) >= _MANY and len({draw.crc32 for draw in draws}) == 1:
            reason = "it has not moved"
            if isinstance(self.sampler, HMC):
                reason = (
                    f"{self.sampler.acceptance_rate:.2g} of its trajectories were "
                    "accepted: a smaller step_size, or warmup(), is needed"
                )
            warnings.warn(
                f"all {len(draws)} draws of chain {chain} of {path} are the same: "
                f"{reason}",
                stacklevel=3,
            )

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        elif self._finish.alive:
            self._close()


def _steps_made(sampler: Sampler) -> int:
    """The sampler's step counter, once a GPU has told what came of the last step."""
    _ = sampler.num_skipped  # which waits for that
    return int(sampler.param_groups[0]["step"])


def _sign(sampler: Any) -> float:
    return getattr(sampler, "sign", 1.0)


def _write(
    writer: SampleWriter,
    draw: dict[str, Tensor],
    of_draw: _C.DrawRecord,
    free: deque[dict[str, Tensor]],
) -> None:
    writer.write(draw, of_draw)
    free.append(draw)


def _end(handles: Iterable[Any], background: Background, writer: SampleWriter) -> None:
    for handle in handles:
        handle.remove()
    background.end()
    writer.close()


def _finish(
    handles: Iterable[Any], background: Background, writer: SampleWriter, process: int
) -> None:
    """What is due if nobody has called close(); not in a child that was forked."""
    if os.getpid() != process:
        return
    try:
        background.flush()
    finally:
        _end(handles, background, writer)
