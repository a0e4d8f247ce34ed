"""Records of a run: temperatures, losses, skipped steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from torch_sgmcmc.diagnostics.temperatures import (
    Reading,
    TemperatureIssue,
    TemperatureMonitor,
    Temperatures,
)
from torch_sgmcmc.posterior.store import Draw
from torch_sgmcmc.samplers.sampler import Sampler

# A trace's points at most, and steps of one at first.
_POINTS, _WIDTH = 400, 10
# Of false alarms of a chain: 1 % of ten together.
_RATE = 0.001
# Settings of param groups that say which posterior a chain samples, and with which
# error.
_SETTINGS = ("num_data", "prior_precision", "temperature", "lr", "step_size")
_NUMBERS = (int, float, Tensor)


class Trace:
    """Means of a number over as many steps each, in memory that does not grow."""

    def __init__(self) -> None:
        self.width = _WIDTH
        self.means: list[float] = []
        self._sum: Tensor | float | None = None
        self._count = 0

    def add(self, value: Tensor | float) -> None:
        """Takes in a step's, without waiting for a device but once a point."""
        now = value.detach().double() if isinstance(value, Tensor) else float(value)
        self._sum = now if self._sum is None else self._sum + now
        self._count += 1
        if self._count < self.width:
            return
        self.means.append(float(self._sum) / self.width)
        self._sum, self._count = None, 0
        if len(self.means) == _POINTS:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [(a + b) / 2 for a, b in pairs]
            self.width *= 2

    def state_dict(self) -> dict[str, Any]:
        """All that it has."""
        rest = None if self._sum is None else float(self._sum)
        kept = {"width": self.width, "means": list(self.means)}
        return {**kept, "sum": rest, "count": self._count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.width, self.means = state_dict["width"], list(state_dict["means"])
        self._sum, self._count = state_dict["sum"], state_dict["count"]


@dataclass(frozen=True)
class Ran:
    """The record of a chain's run beside its draws."""

    sampler: str
    temperature: float
    steps: int
    num_skipped: int
    #: HMC's; None of others.
    acceptance: float | None = None
    num_divergences: int | None = None
    #: Steps whose temperatures were observed, and what was read, by tensor.
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
    #: The sampler's, which is that of its noise.
    seed: int | None = None
    #: Of each param group num_data, prior_precision, temperature and lr.
    settings: tuple[Mapping[str, float], ...] = ()


def ran_of(
    sampler: Sampler,
    monitor: TemperatureMonitor | None = None,
    losses: Trace | None = None,
    *,
    temperature: float | None = None,
) -> Ran:
    """Returns the record of a chain's run.

    The temperature is the one that it is meant to have; None is that of now.
    """
    of_all: dict[str, Any] = {}
    if monitor is not None and monitor.num_observed:
        over_time = zip(
            ("kinetic", "configurational"), monitor.over_time(), strict=True
        )
        of_all = {
            **{"num_observed": monitor.num_observed, "interval": monitor.interval},
            "tensors": {name: monitor.tensor(name) for name in monitor.names},
            **{"all": monitor.all(), "issues": tuple(monitor.issues(rate=_RATE))},
            **{name: tuple(series) for name, series in over_time},
        }
    group = sampler.param_groups[0]
    return Ran(
        sampler=type(sampler).__name__,
        temperature=float(group["temperature"]) if temperature is None else temperature,
        steps=int(group["step"]),
        num_skipped=sampler.num_skipped,
        acceptance=_known(sampler, "acceptance_rate"),
        num_divergences=_known(sampler, "num_divergences"),
        loss_width=0 if losses is None else losses.width,
        losses=() if losses is None else tuple(losses.means),
        seed=int(sampler.seed),
        settings=tuple(map(_settings, sampler.param_groups)),
        **of_all,
    )


def _settings(group: Mapping[str, Any]) -> dict[str, float]:
    values = {k: group[k] for k in _SETTINGS if isinstance(group.get(k), _NUMBERS)}
    is_one = {k: not isinstance(v, Tensor) or v.numel() == 1 for k, v in values.items()}
    return {k: float(v) for k, v in values.items() if is_one[k]}


def _known(sampler: Sampler, name: str) -> Any:
    value = getattr(sampler, name, None)
    return None if isinstance(value, float) and math.isnan(value) else value


# ---- Beside the draws --------------------------------------------------------------


def read_ran(draw: Draw) -> Ran | None:
    """Returns what a collector has written beside a chain's draws, None if nothing.

    Raises:
        RuntimeError: ``run.json`` cannot be read.
    """
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


def _parsed(content: dict[str, Any]) -> Ran:
    content["tensors"] = {k: _temperatures(v) for k, v in content["tensors"].items()}
    if content["all"] is not None:
        content["all"] = _temperatures(content["all"])
    content["issues"] = tuple(TemperatureIssue(**f) for f in content["issues"])
    for name in ("kinetic", "configurational", "losses", "settings"):
        content[name] = tuple(content.get(name, ()))
    return Ran(**content)


def plain(ran: Ran) -> dict[str, Any]:
    """Returns JSON's form: names of fields, and null for non-finite numbers."""
    content = asdict(ran)
    content["tensors"] = {name: _named(read) for name, read in ran.tensors.items()}
    content["all"] = None if ran.all is None else _named(ran.all)
    content["issues"] = [finding._asdict() for finding in ran.issues]
    return finite(content)


def _named(read: Temperatures) -> dict[str, list[float]]:
    return {name: [*pair] for name, pair in read._asdict().items()}


def finite(value: Any) -> Any:
    """The same with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _temperatures(content: Mapping[str, list[float | None]]) -> Temperatures:
    pairs = {k: [math.nan if x is None else x for x in v] for k, v in content.items()}
    return Temperatures(**{name: Reading(*pair) for name, pair in pairs.items()})
