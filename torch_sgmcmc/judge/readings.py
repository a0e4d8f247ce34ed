"""What gauges have read: temperatures, findings, words and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_sgmcmc.chain.checks import check_integer, check_real
from torch_sgmcmc.judge.panels import panels

__all__ = ["Finding", "Reading", "Readings", "Temperatures"]


class Reading(NamedTuple):
    """A mean over the observed steps and half the width of its 95 % interval."""

    mean: float
    half_width: float


class Temperatures(NamedTuple):
    """Of a tensor, a group (the mean over its coordinates), or all parameters."""

    kinetic: Reading
    configurational: Reading
    #: T_conf − T_kin: 0 in equilibrium.
    excess: Reading
    #: What the minibatches' noise adds, as computed from differences of gradients.
    #: NaN where that is not known: SGNHT, SGLRW, redrawn momenta, and
    #: noise estimates that are "online".
    minibatch_heating: Reading
    #: T_conf by the gradients that were used, less T_conf by those of
    #: :meth:`Gauges.observe`: 0 if the former are unbiased.
    gradient_bias: Reading
    #: The part of coordinates whose step was clipped: SGLRW, else NaN.
    clipped: Reading


class Finding(NamedTuple):
    """Something that is wrong: with which tensor, what, and how much of T it is."""

    name: str
    fault: str
    size: float


class Readings:
    """The half of :class:`Gauges` that is read."""

    # Of each tensor, of each group and of all: what the host sums.
    _host: Any
    _names: list[str]
    # A weak reference.
    _sampler: Any
    #: Steps from one observation to the next.
    _interval: int

    def _read(self) -> None:
        """Takes in what devices have summed since the last time."""
        raise NotImplementedError

    @property
    def sampler(self) -> Any:
        """The sampler that is observed; None if it is no more."""
        return self._sampler()

    @property
    def num_observed(self) -> int:
        """The number of observed steps."""
        return self._series(-1)[0].count

    @property
    def interval(self) -> int:
        """The number of steps from one observation to the next."""
        return self._interval

    def tensor(self, name: str | int) -> Temperatures:
        """The temperatures of a tensor, by its name or place."""
        return _temperatures(self._series(self._index(name)))

    def group(self, index: int) -> Temperatures:
        """The temperatures of a param group."""
        check_integer("index", index, low=0)
        if index >= self._host.num_groups:
            raise ValueError(
                f"Invalid index: {index} (there are {self._host.num_groups} groups)"
            )
        return _temperatures(self._series(self._host.num_tensors + index))

    def all(self) -> Temperatures:
        """The temperatures of all parameters together."""
        return _temperatures(self._series(-1))

    @property
    def names(self) -> list[str]:
        """The tensors' names."""
        return list(self._names)

    def over_time(self, name: str | int | None = None) -> tuple[list[float], ...]:
        """T_kin and T_conf of a tensor, or of all, by batches of observations."""
        series = self._series(-1 if name is None else self._index(name))
        return tuple(list(each.means) for each in series[:2])

    def findings(self, budget: float = 0.05, rate: float = 0.01) -> list[Finding]:
        """What is wrong, worst first; empty if nothing is seen.

        Args:
            budget: heating that is allowed, a part of T. Default: 0.05.
            rate: the probability that a chain without fault is blamed for anything.
                Default: 0.01.

        Returns:
            Tensors that are "hot", "cold", "not in equilibrium" or have a "biased
            gradient".
        """
        check_real("budget", budget, low_open=True)
        check_real("rate", rate, high=1.0, low_open=True)
        self._read()
        found = self._host.findings(budget, rate)
        return [Finding(self._names[i], fault, size) for i, fault, size in found]

    def summary(self, budget: float = 0.05, rate: float = 0.01) -> str:
        """The temperatures of all tensors, what is wrong, and the way out, in words.

        The arguments are those of :meth:`findings`.
        """
        check_real("budget", budget, low_open=True)
        check_real("rate", rate, high=1.0, low_open=True)
        self._read()
        sampler = self.sampler
        takes = sampler is not None and "noise_estimate" in sampler.defaults
        return self._host.summary(self._names, takes, budget, rate)

    def plot(self, names: Sequence[str] | None = None) -> Any:
        """T_kin and T_conf of each tensor over time, by batches of observations.

        Args:
            names: the tensors to show; None shows all, 24 at most.

        Returns:
            A matplotlib figure.
        """
        shown = self._names[:24] if names is None else list(names)
        figure, axes = panels("Gauges.plot()", len(shown), 3.6, 2.4)
        for name, axis in zip(shown, axes, strict=True):
            for means, label in zip(
                self.over_time(name), ("T_kin", "T_conf"), strict=True
            ):
                each = self.num_observed / max(1, len(means))
                times = [(i + 0.5) * each for i in range(len(means))]
                axis.plot(times, means, label=label)
            axis.set_title(name, fontsize="small")
            axis.set_xlabel("observation")
        if len(shown) > 0:
            axes[0].legend(fontsize="small")
        return figure

    def _series(self, index: int) -> tuple[Any, ...]:
        self._read()
        total = self._host.num_tensors + self._host.num_groups
        return self._host.series(total if index < 0 else index)

    def _index(self, name: str | int) -> int:
        if isinstance(name, int) and 0 <= name < len(self._names):
            return name
        if name not in self._names:
            raise ValueError(f"Invalid name: {name!r} (must be one of {self._names})")
        return self._names.index(name)


def _temperatures(series: tuple[Any, ...]) -> Temperatures:
    return Temperatures(*(Reading(s.mean, s.half_width(0.95)) for s in series))
