"""The record of a chain's run, which is kept beside its draws in ``run.json``."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torch_sgmcmc.core.context import kind_of
from torch_sgmcmc.core.preconditioner import with_relaxation
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.steps import keep_record, kept_record_of
from torch_sgmcmc.core.utils import BatchMeans
from torch_sgmcmc.diagnostics.temperature_sums import names_of
from torch_sgmcmc.diagnostics.temperatures import (
    Reading,
    TemperatureIssue,
    TemperatureMonitor,
    Temperatures,
)
from torch_sgmcmc.draws.store import Draw
from torch_sgmcmc.draws.store_files import finite, floats

# Steps of a trace's block at first.
_WIDTH = 10
# False alarm rate of a chain: 1 % for ten chains together.
_RATE = 0.001
# Settings of param groups that determine the sampled posterior and its error.
_SETTINGS = (
    "num_data",
    "prior_precision",
    "temperature",
    "lr",
    "step_size",
    "momentum",
    "resample_momentum_every",
    "tune_steps",
)


class Trace(BatchMeans):
    """Means of a number over blocks of steps, in constant memory."""

    MOST = 400

    def __init__(self, state: Sequence[float] = (0, _WIDTH, 0, 0.0)) -> None:
        super().__init__(state)

    @property
    def width(self) -> int:
        """The steps of a block."""
        return self._length

    def add(self, value: Tensor | float) -> None:
        """Adds a step's value; waits for a device once a block."""
        if isinstance(value, Tensor):
            super().add(value.detach().double())
        else:
            super().add(float(value))


@dataclass(frozen=True)
class RunRecord:
    """The record of a chain's run beside its draws."""

    sampler: str
    temperature: float
    steps: int
    num_skipped: int
    #: The rate of accepted proposals; None for samplers without.
    acceptance: float | None = None
    num_divergences: int | None = None
    #: The mean square of a step's energy error per dimension; None if not measured.
    energy_error: float | None = None
    #: Number of observations, and the temperatures by tensor.
    num_observed: int = 0
    tensors: Mapping[str, Temperatures] = field(default_factory=dict)
    all: Temperatures | None = None
    issues: tuple[TemperatureIssue, ...] = ()
    #: T_kin of all parameters over time, by batches of observations.
    kinetic: tuple[float, ...] = ()
    configurational: tuple[float, ...] = ()
    #: The mean loss of so many steps each.
    loss_width: int = 0
    losses: tuple[float, ...] = ()
    #: Steps from one observation to the next.
    interval: int = 1
    #: The sampler's seed, the key of its noise; None if its chains have their own.
    seed: int | None = None
    #: num_data, prior_precision, temperature, lr and momentum of each param group.
    settings: tuple[Mapping[str, float], ...] = ()
    #: The names of each group's parameters.
    names: tuple[Sequence[str], ...] = ()
    #: The start of the chain ("prior" of a draw from it), and steps of a pass.
    start: str | None = None
    steps_per_pass: int | None = None
    #: T of each tensor if groups differ, and by the name "" its mean over elements.
    intended: Mapping[str, float] = field(default_factory=dict)

    def intended_of(self, name: str = "") -> float:
        """Returns T of a tensor; without a name its mean over all elements."""
        return self.intended.get(name, self.temperature)


class RunRecorder:
    """Observes a run for its record: losses, temperatures, the intended temperature."""

    def __init__(
        self, sampler: Sampler, monitor: TemperatureMonitor | None = None
    ) -> None:
        self._sampler, self._monitor = sampler, monitor
        self._losses = Trace()
        #: T of the last draw; None is the sampler's present one.
        self.temperature: float | None = None

    def add_loss(self, loss: Tensor | float) -> None:
        """Adds a step's loss, unless it is the number NaN."""
        if isinstance(loss, Tensor) or not math.isnan(loss):
            self._losses.add(loss)

    def end_burn_in(self) -> None:
        """Deletes the temperatures and the energy errors so far."""
        keep_record(self._sampler, None)
        if self._monitor is not None:
            self._monitor.reset()

    def restart(self) -> None:
        """Deletes losses and temperatures."""
        self._losses = Trace()
        self.end_burn_in()

    def state_dict(self) -> dict[str, Any]:
        """Returns the observations so far."""
        return {
            "monitor": self._monitor and self._monitor.state_dict(),
            "losses": self._losses.state,
            "temperature": self.temperature,
            "energy": kept_record_of(self._sampler),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over observations."""
        if self._monitor is not None and state_dict["monitor"] is not None:
            self._monitor.load_state_dict(state_dict["monitor"])
        self._losses = Trace(state_dict["losses"])
        self.temperature = state_dict["temperature"]
        if (energy := state_dict.get("energy")) is not None:
            keep_record(self._sampler, energy)

    def record(self) -> RunRecord:
        """Returns the record of the run so far."""
        sampler, monitor = self._sampler, self._monitor
        parts: dict[str, Any] = {}
        if monitor is not None and monitor.num_observed:
            kinetic, configurational = monitor.over_time()
            parts = {
                "num_observed": monitor.num_observed,
                "interval": monitor.interval,
                "tensors": {name: monitor.tensor(name) for name in monitor.names},
                "all": monitor.all(),
                "issues": tuple(monitor.issues(rate=_RATE)),
                "kinetic": tuple(kinetic),
                "configurational": tuple(configurational),
            }
        group, temperature = sampler.param_groups[0], self.temperature
        if temperature is None:
            temperature = group["temperature"]
        acceptance = getattr(sampler, "acceptance_rate", None)
        error = getattr(sampler, "energy_error", None)
        return RunRecord(
            sampler=kind_of(sampler),
            temperature=float(temperature),
            steps=int(group["step"]),
            num_skipped=sampler.num_skipped,
            acceptance=None if acceptance != acceptance else acceptance,
            num_divergences=getattr(sampler, "num_divergences", None),
            energy_error=None if error != error else error,
            loss_width=self._losses.width,
            losses=tuple(self._losses.means),
            seed=None if group.get("num_chains") else int(sampler.seed),
            settings=tuple(
                _settings(with_relaxation(sampler.state, g))
                for g in sampler.param_groups
            ),
            names=tuple(names_of([g]) for g in sampler.param_groups),
            intended=_intended(sampler.param_groups, float(temperature)),
            **parts,
        )


def _intended(groups: Sequence[dict[str, Any]], first: float) -> dict[str, float]:
    """Returns T of each tensor and of all, where the first group's was ``first``."""
    now = [float(g["temperature"]) for g in groups for _ in g["params"]]
    if len({*now}) < 2:
        return {}
    sizes = [p.numel() for group in groups for p in group["params"]]
    mean = sum(map(operator.mul, now, sizes)) / max(1, sum(sizes))
    scale = first / now[0] if now[0] > 0 else 1.0
    pairs = zip([*names_of(groups), ""], [*now, mean], strict=True)
    return {name: scale * t for name, t in pairs}


def _settings(group: Mapping[str, Any]) -> dict[str, float]:
    values = {name: group.get(name) for name in _SETTINGS}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float)
        or (isinstance(value, Tensor) and value.numel() == 1)
    }


def read_run_record(draw: Draw) -> RunRecord | None:
    """Returns the record that a collector wrote beside a chain's draws, or None."""
    content = draw.read_run()
    if content is None:
        return None
    try:
        return _parsed(dict(content))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        assert draw.path is not None
        raise RuntimeError(
            f"Cannot read {draw.path.with_name('run.json')}: it is damaged ({error!r})"
        ) from error


def _parsed(content: dict[str, Any]) -> RunRecord:
    content = {"tensors": {}, "all": None, "issues": (), **content}  # none in C++
    content["tensors"] = {k: _temperatures(v) for k, v in content["tensors"].items()}
    if content["all"] is not None:
        content["all"] = _temperatures(content["all"])
    content["issues"] = tuple(TemperatureIssue(**f) for f in content["issues"])
    for name in ("kinetic", "configurational", "losses", "settings", "names"):
        content[name] = tuple(content.get(name, ()))
    return RunRecord(**content)


def _temperatures(content: Mapping[str, list[float | None]]) -> Temperatures:
    return Temperatures(**{k: Reading(*floats(pair)) for k, pair in content.items()})


def plain(ran: RunRecord) -> dict[str, Any]:
    """Returns a form for JSON: fields by name, null for non-finite numbers."""
    content = dict(vars(ran))
    content["tensors"] = {name: read._asdict() for name, read in ran.tensors.items()}
    content["all"] = None if ran.all is None else ran.all._asdict()
    content["issues"] = [issue._asdict() for issue in ran.issues]
    return finite(content)
