"""Monitors the temperatures of a chain."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_sgmcmc.core import hyperparams
from torch_sgmcmc.core.context import StepContext, TensorLists, context_of
from torch_sgmcmc.core.parameters import fresh_gradients, kept_gradients
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import traits_of
from torch_sgmcmc.core.state_dict import (
    check_count,
    check_keys,
    check_keys_of,
    check_tensor,
)
from torch_sgmcmc.core.steps import gather_work
from torch_sgmcmc.core.utils import panels
from torch_sgmcmc.diagnostics.temperature_means import MOST_ROWS, NOISE_EVERY, Means
from torch_sgmcmc.diagnostics.temperature_sums import (
    Row,
    StepSums,
    centers_of,
    names_of,
    observed,
)


class Reading(NamedTuple):
    """A mean over the observed steps and half the width of its 95 % interval."""

    mean: float
    half_width: float


class Temperatures(NamedTuple):
    """Readings of a tensor, a group (mean over coordinates), or all parameters."""

    kinetic: Reading
    configurational: Reading
    #: T_conf − T_kin: 0 in equilibrium.
    excess: Reading
    #: The part of the minibatches' noise, computed from differences of gradients; T_kin
    #: - T where shuffled minibatches' errors cancel. NaN if unknown: SGNHT, SGLRW,
    #: redrawn momenta, and "online" noise estimates.
    minibatch_heating: Reading
    #: T_conf of the used gradients minus T_conf of the gradients of
    #: :meth:`TemperatureMonitor.observe`: 0 if the former are unbiased.
    gradient_bias: Reading
    #: The fraction of coordinates whose step was clipped: SGLRW, else NaN.
    clipped: Reading


class TemperatureIssue(NamedTuple):
    """An issue of a tensor: its name, the fault, and the deviation in units of T."""

    name: str
    fault: str
    size: float


class TemperatureMonitor:
    r"""Monitors the temperatures of a chain, by tensor.

    .. code-block:: python

        monitor = torch_sgmcmc.TemperatureMonitor(sampler)
        ...  # the training loop as it was
        print(monitor.summary())

    With d the elements of a tensor, N ``num_data``, m the momentum and g the gradient
    that a step uses (prior included), the readings are means over steps of

    .. math::
        T_\text{conf} = \frac{N}{d}\, (\theta - c) \cdot g, \qquad
        T_\text{kin} = \frac{N (1 + m)}{2\, \mathrm{lr}\, d} \|v\|^2
        \quad\text{or (SGLD)}\quad T + \frac{\mathrm{lr}\, N}{2 d} \|g\|^2,

    c any constant. **In equilibrium both are equal**, for any potential, step size,
    noise of minibatches and estimate, since E‖θ − c‖² and E[θ·v] do not change.
    Therefore

    * T_kin ≠ T_conf: the chain is not in equilibrium (or has other dynamics);
    * T_kin / T − 1 is the **excess** by minibatches and by the step's length, on a
      quadratic the relative error of the variance. The minibatches' part is lr N Var(ḡ)
      / (2 T α), α = 1 − m (SGLD: 1), minus the part of ``noise_estimate``. Shuffled
      minibatches add less, and less to variances than to T (docs/temperatures.md).

    Equations of other samplers are in docs/temperatures.md, and derived in
    ``temperature_means.py``. Intervals are by batch means (16 to 31 batches that grow
    with the chain). They account for autocorrelation, but not for modes that a chain
    has never visited. Equality holds for any g. :meth:`observe` tests that g is the
    loss's gradient, unlike clipped, stale or summed gradients.

    Args:
        sampler: the sampler to observe, from its next step until :meth:`detach`. One
            monitor for each sampler, not ``capturable``. Not for HMC, HMCECS and SBPS:
            use their acceptance and violation rates.
        every: steps between observations (slightly more with
            ``resample_momentum_every``), from 10 on as a mean: observed steps go round
            the places of a pass. An observation costs about as much as an update.
            Default: 20.
        center: c, a tensor or number for each parameter in the order of the groups, or
            "current" for the present parameters, or "prior_mean"; None is 0. A good
            center (a mode, the prior's mean) makes intervals shorter. Default: None.
        names: names of the parameters, for tables; None takes the names of named
            parameters.

    Note:
        Skipped steps and steps without some parameter's gradient are not observed.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        every: int = 20,
        center: Iterable[Tensor | float] | str | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise hyperparams.wrong_type(
                "sampler", sampler, "a sampler of torch_sgmcmc"
            )
        hyperparams.check_integer("every", every, low=1)
        context_of(sampler).placement.refuse(
            "Invalid sampler: it has DTensors, and a monitor sums over whole "
            "parameters (observe replicas under DistributedDataParallel)"
        )
        if sampler.defaults["capturable"]:
            raise ValueError(
                "Invalid sampler: it is capturable, and a monitor is read on the host"
            )
        if not has_temperatures(sampler):
            why = traits_of(sampler).instead
            name = type(sampler).__name__
            raise ValueError(f"Invalid sampler: {name} cannot be monitored ({why})")
        chain = context_of(sampler)
        if chain.monitor is not None:
            raise ValueError(
                "Invalid sampler: it has a TemperatureMonitor already (detach() it)"
            )
        self._sampler = weakref.ref(sampler)
        # The context outlives a wrapper of the sampler.
        self._context: weakref.ref[StepContext] = weakref.ref(chain)
        motion = traits_of(sampler).motion
        assert motion is not None
        self._compares = not traits_of(sampler).is_biased
        groups = sampler.param_groups
        self._params = [p for group in groups for p in group["params"]]
        self._group_of = [i for i, g in enumerate(groups) for _ in g["params"]]
        self._names = names_of(groups) if names is None else [str(n) for n in names]
        if len(self._names) != len(self._params):
            raise ValueError(
                f"Invalid names: {len(self._names)} (must be one for each of the "
                f"{len(self._params)} parameters)"
            )
        centers = centers_of(center, sampler, self._params)
        self._sums = StepSums(motion, self._params, centers)
        self._every = every
        self._interval = _interval_of(every, groups)
        self._previous: tuple[int, dict[Tensor, Tensor]] | None = None
        self._rows: list[tuple[list[Row], bool]] = []
        # Forces of observe() at the present θ, and pairs with the step's.
        self._others: list[Row] = []
        self._others_at: list[int] = []
        self._forces: list[tuple[list[Row], list[Row]]] = []
        self.reset()
        chain.monitor = self

    def reset(self) -> None:
        """Drops all observations, for example after a burn-in."""
        self._rows.clear()
        self._others = []
        self._forces.clear()
        self._means = Means([p.numel() for p in self._params], self._group_of)

    def detach(self) -> None:
        """Ends the observation; readings stay."""
        sampler = self._sampler()
        if sampler is not None and context_of(sampler).monitor is self:
            context_of(sampler).monitor = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the observations as lists of numbers.

        Also the gradients of the last step, ``previous_gradients``, if the next
        observation compares with them.
        """
        self._read()
        kept: dict[str, Any] = {"every": self._every, "interval": self._interval}
        kept["series"] = self._means.state
        if self._previous is not None:
            step, grads = self._previous
            by_place = {self._sums.place[p]: grad for p, grad in grads.items()}
            kept["previous_gradients"] = {"step": step, "gradients": by_place}
        return kept

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from the result of :meth:`state_dict`, for the same parameters.

        Raises:
            ValueError: the state belongs to other parameters. Nothing has been loaded.
        """
        check_keys(state_dict, type(self).__name__, "every", "series")
        hyperparams.check_integer("every", state_dict["every"], low=1)
        previous = _read_previous(state_dict.get("previous_gradients"), self._params)
        interval = _interval_of(state_dict["every"], self._attached().param_groups)
        interval = check_count("interval", state_dict.get("interval", interval))
        self._means.state = state_dict["series"]
        self._rows.clear()
        self._others = []
        self._forces.clear()
        self._every, self._previous = state_dict["every"], previous
        self._interval = interval

    @torch.no_grad()
    def observe(self, closure: Callable[[], Any]) -> None:
        r"""Observes the present θ by an unbiased gradient.

        For :class:`EWSG`, at every sample or at some of them: adds T_conf beside T to
        the observations (a large ``every`` suppresses the others).

        For other samplers, before a step: tests whether the sampler's gradients are the
        loss's. With h the closure's gradient and g the next step's, at one θ,

        .. math::
            \text{gradient\_bias} = \frac{N}{d}\, \overline{(\theta - c) \cdot (g - h)},

        whose expectation is 0 if g is unbiased. It is not 0 if gradients are clipped,
        stale, summed in place of averaged, of minibatches that depend on θ, or of batch
        norm in training mode while predictions use evaluation mode. (A constant bias
        shows only if c is not the mean: use c = 0.) Parameters' ``grad`` are restored.

        Args:
            closure: computes the mean loss, without the prior, of a fresh minibatch
                that is drawn uniformly, or of all data, and calls ``backward()``.
        """
        sampler = self._attached()
        with kept_gradients(self._params):
            fresh_gradients(sampler, closure)
            work = gather_work(sampler)
            if self._compares:
                self._others_at = _versions(self._params)
                self._others = self._sums.of(self._observed_context(), work)
            else:
                self._add(work, plain=True)

    def _observed_context(self) -> StepContext:
        chain = self._context()
        if chain is None:
            raise RuntimeError("this TemperatureMonitor is detached from its sampler")
        return chain

    def _attached(self) -> Sampler:
        sampler = self._sampler()
        if sampler is None or context_of(sampler).monitor is not self:
            raise RuntimeError("this TemperatureMonitor is detached from its sampler")
        return sampler

    def _is_due(self, ahead: range = range(1)) -> bool:
        """Returns whether one of the next steps must be shown to the monitor."""
        step, interval = self._observed_context().rng.steps, self._interval
        for s in range(step + ahead.start, step + ahead.stop):
            if _observes(s, interval) or _observes(s + 1, interval, NOISE_EVERY):
                return True
        return bool(self._others)

    def _observe(self, work: list[TensorLists]) -> None:
        """Observes an update that is due; the sampler calls this before it."""
        if not work:
            return
        self._compare(work)
        # Cycles explore at T = 0, where ratios to T are undefined.
        work = [lists for lists in work if lists.group["temperature"] > 0]
        if not work:
            return
        step, interval = self._observed_context().rng.steps, self._interval
        if _observes(step, interval):
            at, previous = self._previous or (-1, {})
            has_noise = at == step - 1 and all(
                p in previous for _, params, _, _ in work for p in params
            )
            self._add(work, before=previous if has_noise else None)
            self._previous = None
            groups = [lists.group for lists in work]
            self._interval = interval = _interval_of(self._every, groups)
        if _observes(step + 1, interval, NOISE_EVERY):
            # A clone: a later backward pass may add to the same memory.
            pairs = (zip(w.params, w.grads, strict=True) for w in work)
            kept = {p: g.detach().clone() for some in pairs for p, g in some}
            self._previous = step, kept

    def _compare(self, work: list[TensorLists]) -> None:
        if not self._others:
            return
        # Something else, such as a checkpoint, may have moved the parameters.
        if _versions(self._params) == self._others_at:
            used = self._sums.of(self._observed_context(), work)
            self._forces.append((self._others, used))
        self._others = []
        if len(self._forces) >= MOST_ROWS:
            self._read()

    def _add(
        self,
        work: list[TensorLists],
        *,
        plain: bool = False,
        before: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        rows = self._sums.of(self._observed_context(), work, plain, before)
        self._rows.append((rows, before is not None))
        if len(self._rows) >= MOST_ROWS:
            self._read()

    def _read(self) -> Means:
        for rows, has_noise in self._rows:
            self._means.add(observed(rows), has_noise)
        self._rows.clear()
        for others, used in self._forces:
            self._means.add_forces(observed(used), observed(others))
        self._forces.clear()
        return self._means

    @property
    def sampler(self) -> Any:
        """The observed sampler; None if it no longer exists."""
        return self._sampler()

    @property
    def num_observed(self) -> int:
        """The number of observed steps."""
        return self._read().series[-1].kinetic.count

    @property
    def interval(self) -> int:
        """The number of steps from one observation to the next."""
        return self._interval

    @property
    def names(self) -> list[str]:
        """The tensors' names."""
        return list(self._names)

    def tensor(self, name: str | int) -> Temperatures:
        """Returns the temperatures of a tensor, by its name or index."""
        return self._temperatures(_index_of(self._names, name))

    def group(self, index: int) -> Temperatures:
        """Returns the temperatures of a param group."""
        hyperparams.check_integer("index", index, low=0)
        count = self._means.num_groups
        if index >= count:
            raise ValueError(f"Invalid index: {index} (there are {count} groups)")
        return self._temperatures(self._means.num_tensors + index)

    def all(self) -> Temperatures:
        """Returns the temperatures of all parameters together."""
        return self._temperatures(len(self._means.series) - 1)

    def _temperatures(self, place: int) -> Temperatures:
        self._read()
        return Temperatures(*(Reading(*each) for each in self._means.readings(place)))

    def over_time(self, name: str | int | None = None) -> tuple[list[float], ...]:
        """Returns T_kin and T_conf of a tensor, or of all, by batches of steps."""
        place = -1 if name is None else _index_of(self._names, name)
        series = self._read().series[place]
        return list(series.kinetic.means), list(series.configurational.means)

    def issues(
        self, budget: float = 0.05, rate: float = 0.01
    ) -> list[TemperatureIssue]:
        """Returns issues, worst first; empty if there are none.

        Args:
            budget: allowed excess of T_kin, as a fraction of T. Default: 0.05.
            rate: the probability that a chain without fault has any issue. Default:
                0.01.

        Returns:
            Tensors that are "above T", "below T", "not in equilibrium" or have a
            "biased gradient".
        """
        hyperparams.check_real("budget", budget, low_open=True)
        hyperparams.check_real("rate", rate, high=1.0, low_open=True)
        self._read()
        found = self._means.issues(budget, rate)
        return [
            TemperatureIssue(self._names[i], fault, size) for i, fault, size in found
        ]

    def summary(self, budget: float = 0.05, rate: float = 0.01) -> str:
        """Returns the temperatures of all tensors, the issues and advice as text.

        The arguments are as for :meth:`issues`.
        """
        hyperparams.check_real("budget", budget, low_open=True)
        hyperparams.check_real("rate", rate, high=1.0, low_open=True)
        self._read()
        sampler = self.sampler
        takes = sampler is not None and "noise_estimate" in sampler.defaults
        return self._means.summary(self._names, takes, budget, rate)

    def plot(self, names: Sequence[str] | None = None) -> Any:
        """Draws T_kin and T_conf of each tensor over time, by batches of observations.

        Args:
            names: the tensors to show; None shows all, 24 at most.

        Returns:
            A matplotlib figure.
        """
        shown = self._names[:24] if names is None else list(names)
        figure, axes = panels("TemperatureMonitor.plot()", len(shown), 3.6, 2.4)
        for name, axis in zip(shown, axes, strict=True):
            series = zip(self.over_time(name), ("T_kin", "T_conf"), strict=True)
            for means, label in series:
                each = self.num_observed / max(1, len(means))
                times = [(i + 0.5) * each for i in range(len(means))]
                axis.plot(times, means, label=label)
            axis.set_title(name, fontsize="small")
            axis.set_xlabel("observation")
        if len(shown) > 0:
            axes[0].legend(fontsize="small")
        return figure


def _interval_of(every: int, groups: Iterable[Mapping[str, Any]]) -> int:
    """Returns an interval that observes all of the cycles of redrawn momenta."""
    redraws = [group.get("resample_momentum_every", 0) or 1 for group in groups]
    while math.gcd(every, math.lcm(*redraws)) > 1:
        every += 1
    return every


def _observes(step: int, interval: int, kth: int = 1) -> bool:
    """Returns whether a step is observed, as the one of every k-th interval.

    With shuffled minibatches temperatures depend on the place in a pass. Places in long
    intervals go round by the golden ratio, so that no place of a pass is left out.
    """
    number, place = divmod(step, interval)
    return number % kth == 0 and place == _shift_of(interval) * number % interval


@functools.cache
def _shift_of(interval: int) -> int:
    golden = itertools.count(round(0.618 * interval))
    return next(n for n in golden if math.gcd(n, interval) == 1) * (interval > 9)


def has_temperatures(sampler: Sampler) -> bool:
    """Returns whether a monitor can observe the sampler: not HMC, HMCECS and SBPS."""
    return traits_of(sampler).motion is not None


def _read_previous(
    saved: Mapping[str, Any] | None, params: list[Tensor]
) -> tuple[int, dict[Tensor, Tensor]] | None:
    if saved is None:
        return None
    check_keys_of("previous_gradients", saved, ("step", "gradients"))
    step = check_count("step", saved["step"])
    grads = {}
    for place, grad in saved["gradients"].items():
        if place not in range(len(params)):
            raise ValueError(
                "Invalid state_dict: previous_gradients (must be of the "
                f"{len(params)} parameters, by their numbers)"
            )
        p = params[place]
        what = f"previous gradient of parameter {place}"
        check_tensor(what, grad, p.shape)
        if not bool(grad.isfinite().all()):
            raise ValueError(
                f"Invalid state_dict: {what} has elements that are not finite"
            )
        grads[p] = grad.detach().to(p.device, p.dtype, copy=True)
    return step, grads


def _versions(params: list[Tensor]) -> list[int]:
    return [0 if p.is_inference() else p._version for p in params]


def _index_of(names: list[str], name: str | int) -> int:
    if isinstance(name, int) and 0 <= name < len(names):
        return name
    if name not in names:
        raise ValueError(f"Invalid name: {name!r} (must be one of {names})")
    return names.index(name)
