"""Which lr? From short runs of the chain itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.checks import check_integer, check_real
from torch_sgmcmc.chain.closures import fresh_gradients
from torch_sgmcmc.chain.dtypes import state_dtype
from torch_sgmcmc.chain.given import GIVEN_MASS
from torch_sgmcmc.chain.nonfinite import raise_what_was_found
from torch_sgmcmc.chain.prior import away_from_mean
from torch_sgmcmc.chain.progress import progress_bar
from torch_sgmcmc.chain.record import chain_of
from torch_sgmcmc.chain.rehearsal import Place, rehearsal
from torch_sgmcmc.chain.shards import refuse
from torch_sgmcmc.judge.gauges import Gauges, Reading
from torch_sgmcmc.psgld import PSGLD
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sghmc import SGHMC
from torch_sgmcmc.sgld import SGLD

__all__ = ["Tuning", "tune"]

# Temperatures that only an unstable chain has, in those that noise explains.
_UNSTABLE = 100.0
# Heating that noise explains is right up to this part of it: it is of first order.
_MODEL_ERROR = 0.05
# How much larger V is where a chain has left for.
_OTHER = 4.0
# Heating with which a chain is not where it was any more.
_FAR = 0.5
# Steps of a coarse round and of a look at stability, and between pairs of gradients.
_COARSE, _LOOK, _PAIRS = 40, 50, 2

_INSTEAD = {
    "HMC": "warmup() adapts its lr",
    "HMCECS": "warmup() adapts its lr",
    "SBPS": "it has no lr",
    "SGNHT": "its thermostats take the heat off, which is then no measure of lr",
    "EWSG": "it chooses its gradients; Gauges show how they heat",
}


@dataclass(frozen=True)
class Tuning:
    """What :func:`tune` measured, and what it recommends."""

    #: Of each param group.
    lrs: tuple[float, ...]
    budget: float
    #: Whether the chain gets anywhere with it, see :func:`tune`.
    feasible: bool
    #: What limits lr: "heating", "stability" or "noise" (not feasible).
    limit: str
    #: T_kin / T - 1 that is expected at ``lrs``.
    heating: Reading
    #: The minibatches' part of it.
    minibatch_heating: float
    #: T_kin / T - 1 as the gauges saw it at an lr that may differ by a quarter. NaN
    #: if not feasible.
    kinetic_heating: Reading
    #: Whether that was seen to a fifth of the budget, in 95 % intervals.
    verified: bool
    #: Heating expected of each tensor, by name.
    tensors: Mapping[str, float]
    #: Steps in which a direction of mean curvature forgets.
    relaxation: float
    #: By how much minibatches must grow, at least, for a feasible lr.
    batch_factor: float
    #: lr N Var / (2 T), the mean over coordinates, as SGHMC's noise_estimate.
    noise_estimate: float
    #: Gradients that were used.
    gradients: int
    friction: float
    room: float
    takes_noise_estimate: bool

    @property
    def lr(self) -> float:
        """The lr, if it is one for all groups.

        Raises:
            ValueError: groups differ, see ``lrs``.
        """
        if len({*self.lrs}) > 1:
            raise ValueError(f"groups have different lrs: {[*self.lrs]}")
        return self.lrs[0]

    def apply(self, sampler: Sampler) -> None:
        """Sets lr in the sampler's groups. Momenta are scaled to its temperature.

        Raises:
            ValueError: no lr is feasible, or the sampler has other groups. Nothing has
                changed.
        """
        if not self.feasible:
            raise ValueError(self.summary())
        if len(sampler.param_groups) != len(self.lrs):
            raise ValueError(
                f"Invalid sampler: {len(sampler.param_groups)} groups (must be "
                f"{len(self.lrs)})"
            )
        _set_lrs(sampler, self.lrs)

    def summary(self) -> str:
        """The lr, what it rests on, and what else would help, in words."""
        lrs = ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(self.lrs))
        budget = f"{100 * self.budget:.3g} %"
        lines = []
        if self.feasible:
            lines.append(f"lr = {lrs}, found with {self.gradients:,} gradients.")
        else:
            lines.append(
                f"No lr will do: within {budget} it takes lr = {lrs}, more than "
                f"{self.friction * self.room:.3g} times below what is stable. The "
                "gradients are too noisy."
            )
        heat = f"{100 * self.heating.mean:.2g} ± {100 * self.heating.half_width:.2g} %"
        part = f"{100 * self.minibatch_heating:.2g} %"
        lines.append(
            f"Heating expected: {heat}, of which the minibatches' is {part}"
            + (" (lr is limited by stability)." if self.limit == "stability" else ".")
        )
        if math.isfinite(self.kinetic_heating.half_width):
            seen = 100 * self.kinetic_heating.mean
            width = 100 * self.kinetic_heating.half_width
            lines.append(
                f"The gauges saw {seen:.2g} ± {width:.2g} %"
                + (
                    "."
                    if self.verified
                    else f": not to a fifth of {budget}, look again in the run."
                )
            )
        worst = sorted(self.tensors.items(), key=lambda item: -item[1])
        lines += [f"  {name}: {100 * heat:+.2g} %" for name, heat in worst[:8]]
        if math.isfinite(self.relaxation):
            lines.append(
                f"A direction of mean curvature forgets in about {self.relaxation:.2g} "
                "steps, flatter ones take longer in proportion."
            )
        if not self.feasible or self.minibatch_heating > self.heating.mean / 2:
            if self.feasible:
                ways = ["Larger steps take larger minibatches (lr grows as they do)"]
            else:
                ways = [f"Take minibatches {self.batch_factor:.2g} times as large"]
            if self.takes_noise_estimate and self.noise_estimate <= self.friction:
                ways.append(
                    "noise_estimate (beta is "
                    f"{self.noise_estimate:.2g} here, and must not exceed the friction "
                    f"{self.friction:.2g})"
                )
            ways += ["ControlVariates", "EWSG"]
            lines.append(", or ".join(ways) + ".")
            if self.friction < 1:
                lines.append(
                    "Another momentum would not help: it is lr / (1 - momentum) that "
                    "the noise limits."
                )
        return "\n".join(lines)


def tune(
    sampler: Sampler,
    closure: Callable[[], Any],
    *,
    budget: float = 0.05,
    gradients: int = 3000,
    over: str = "all",
    room: float = 1e4,
    progress: bool = True,
) -> Tuning:
    r"""Finds the largest lr whose heating is within a budget.

    Samples are right up to the heating T_kin / T − 1 (see :class:`Gauges`): on a
    quadratic it is the error of their variance. With m the momentum, α = 1 − m
    (SGLD and pSGLD: m = 0, α = 1), two parts of it are known from pairs of gradients
    :math:`g_1, g_2` of two minibatches at the same θ, prior included (pSGLD: weighted
    with G),

    .. math::
        \frac{T_\text{kin}}{T} - 1 \approx
        \underbrace{\frac{\mathrm{lr}\, N}{2 \alpha T}\, V}_\text{minibatches}
        + \underbrace{\frac{\mathrm{lr}\, N}{2 (1 + m) T}\, F}_\text{length of steps},
        \qquad V = \frac{E\|g_1 - g_2\|^2}{2 d}, \quad F = \frac{E[g_1 \cdot g_2]}{d},

    and in equilibrium N F / T is the mean curvature, for any potential. Short runs
    begin at the sampler's lr and go on at the one that follows. At the last lr the
    gauges measure T_kin until its interval is ± a tenth of the budget, or
    the gradients are used up; both estimates enter with the weight of their precision,
    and T_kin alone where the two contradict each other.

    Call it at a trained or burnt-in point: T_kin settles within some 1/α steps wherever
    θ is, but where the full gradient is much larger than in equilibrium, F and T_kin
    are too, and lr comes out too small. V may change on the way to equilibrium, as that
    of a network does: call it again after burn-in at its lr.

    **Where no lr will do.** Noise limits lr / α, the speed of the chain. If it is more
    than ``room`` times below the lr that is still stable (50 steps, in which no
    tensor's T_kin exceeds 100 times what noise explains, and V stays and F / V grows
    with lr as in a quadratic), a chain takes more than about ``room`` / 2 steps to
    forget even in its stiffest direction: ``feasible`` is False, and ``summary()`` says
    how much larger minibatches must be, and what else there is.

    Parameters, their gradients, the sampler's state, settings and noise, and torch's
    default generators are afterwards as before, whatever is raised; hooks and gauges
    of the sampler are not called. What else a closure changes stays changed, as
    the place of an iterator over minibatches, or running means of batch norm.

    Args:
        sampler: :class:`SGLD`, :class:`SGHMC` without ``noise_estimate`` and without
            ``resample_momentum_every``, or :class:`PSGLD` whose adaptation has ended.
            Param groups keep the ratios of their lrs.
        closure: computes the mean loss of a fresh minibatch and calls ``backward()``.
        budget: heating, a part of T. Default: 0.05.
        gradients: the most calls of the closure, >= 1200 + 12/α (a few hundred more to
            find the limit of stability, where no lr will do). Default: 3000.
        over: "all", the heating is the mean over all coordinates; "worst", that of the
            hottest tensor, be it a bias of few elements. Default: "all".
        room: how far noise may keep lr / α below the limit of stability, > 1.
            Default: 10,000.
        progress: show a progress bar, if tqdm is installed. Default: True.

    Returns:
        A :class:`Tuning`, to be read, and to be applied.

    Raises:
        TypeError, ValueError: an argument is not as it should be.
        RuntimeError: the chain is stable at no lr; or no parameter has a gradient.

    Example:
        >>> result = tune(sampler, closure)
        >>> print(result.summary())
        >>> result.apply(sampler)
    """
    _check(sampler, closure)
    check_real("budget", budget, low_open=True, high=1.0)
    if over not in ("all", "worst"):
        raise ValueError(f"Invalid over: {over!r} (must be 'all' or 'worst')")
    check_real("room", room, low=1.0, low_open=True)
    friction = min(_friction(group) for group in sampler.param_groups)
    check_integer("gradients", gradients, low=math.ceil(1200 + 12 / friction - 1e-9))
    raise_what_was_found(chain_of(sampler))
    bar = progress_bar(range(gradients), "tune", progress)
    try:
        with rehearsal(sampler):
            search = _Search(sampler, closure, budget, gradients, over, iter(bar))
            return search.run(room)
    finally:
        getattr(bar, "close", lambda: None)()


def _check(sampler: Sampler, closure: object) -> None:
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"Invalid sampler: a {type(sampler).__name__} (must be a sampler of "
            "torch_sgmcmc)"
        )
    if not callable(closure):
        raise TypeError(f"Invalid closure: {closure!r} (must be callable)")
    if not isinstance(sampler, (SGLD, SGHMC, PSGLD)):
        names = [base.__name__ for base in type(sampler).__mro__]
        why = next((_INSTEAD[n] for n in names if n in _INSTEAD), "it is not known")
        raise ValueError(
            f"Invalid sampler: a {type(sampler).__name__} cannot be tuned: {why}"
        )
    if sampler.defaults["capturable"]:
        raise ValueError(
            "Invalid sampler: it is capturable, and gauges are read on the host"
        )
    sampler.check_groups()
    for group in sampler.param_groups:
        refuse("parameters", group["params"])
        for key in ("lr", "temperature"):
            if float(group[key]) == 0:
                raise ValueError(f"Invalid {key}: 0 (must be > 0 to be tuned)")
        if group["temperature"] != sampler.param_groups[0]["temperature"]:
            raise ValueError("Invalid temperature: it differs between groups")
        for key in ("noise_estimate", "resample_momentum_every"):
            if group.get(key, 0) != 0:
                raise ValueError(
                    f"Invalid {key}: {group[key]!r} (must be 0 to be tuned, the "
                    "minibatches' heat is then known)"
                )
        if group.get("adapt", False):
            raise ValueError(
                "Invalid adapt: True (must be False to be tuned, its step sizes would "
                "change)"
            )
        if isinstance(sampler, PSGLD) and any(
            p.requires_grad and "square_average" not in sampler.state.get(p, {})
            for p in group["params"]
        ):
            raise ValueError("Invalid sampler: a PSGLD that has not adapted yet")
        if any(GIVEN_MASS in sampler.state.get(p, {}) for p in group["params"]):
            raise ValueError(
                "Invalid sampler: it has masses, by which heat differs between "
                "coordinates (tune lr without, then set_mass())"
            )


def _friction(group: Mapping[str, Any]) -> float:
    return 1.0 - group.get("momentum", 0.0)


def _set_lrs(sampler: Sampler, lrs: tuple[float, ...]) -> None:
    """Sets them, and what momenta there are to the same temperature."""
    for group, lr in zip(sampler.param_groups, lrs, strict=True):
        before = float(group["lr"])
        for p in group["params"]:
            momentum = sampler.state.get(p, {}).get("momentum")
            if momentum is not None and before > 0:
                momentum.mul_(math.sqrt(lr / before))
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _cool(sampler: Sampler) -> None:
    """Takes off the heat of momenta that belong to a larger lr, set since by others."""
    for group in sampler.param_groups:
        for p in group["params"]:
            momentum = sampler.state.get(p, {}).get("momentum")
            if momentum is None or p.numel() == 0:
                continue
            per_heat = 2 * group["lr"] * group["temperature"] / group["num_data"]
            square = float(momentum.square().sum()) / p.numel()
            heat = square * (1 + group["momentum"]) / per_heat
            momentum.div_(math.sqrt(max(heat, 1.0)))


class _Pairs:
    """Heating as pairs of gradients at the same θ tell it, a row for each pair."""

    def __init__(self) -> None:
        # [tensors, 2]: the minibatches' part, the length of steps.
        self._rows: list[Tensor] = []

    @torch.no_grad()
    def add(
        self, sampler: Sampler, first: list[Tensor | None], second: list[Tensor | None]
    ) -> None:
        parts = []
        ours = ((g, p) for g in sampler.param_groups for p in g["params"])
        for (group, p), a, b in zip(ours, first, second, strict=True):
            if a is None or b is None or p.numel() == 0:
                parts.append(torch.full((2,), math.nan))
                continue
            away = away_from_mean(sampler, group, p).to(state_dtype(p))
            prior = group["prior_precision"] / group["num_data"] * away
            a, b = a.to(prior) + prior, b.to(prior) + prior
            weighted = b - a, b
            if "square_average" in sampler.state.get(p, {}):
                root = sampler.state[p]["square_average"].sqrt()
                weighted = tuple(x / (root + group["eps"]) for x in weighted)
            sums = torch.stack(
                [((b - a) * weighted[0]).sum() / 2, (a * weighted[1]).sum()]
            )
            lr, momentum = group["lr"], group.get("momentum", 0.0)
            scale = lr * group["num_data"] / (2 * group["temperature"] * p.numel())
            over = torch.tensor([1 - momentum, 1 + momentum], dtype=torch.float64)
            parts.append(scale * sums.cpu().double() / over)
        self._rows.append(torch.stack([x.double() for x in parts]))

    def parts(self) -> Tensor:
        """Means over pairs; the second one is no less than 0."""
        means = torch.stack(self._rows).mean(0)
        means[:, 1].clamp_(min=0)
        return means

    def drift(self) -> tuple[float, bool]:
        """Heating by the length of steps, in that by minibatches, and if it is seen."""
        series = _C.BatchMeans()
        rows = torch.stack(self._rows).nan_to_num()
        for row in rows.tolist():
            series.add(sum(length for _, length in row))
        noise = float(rows[:, :, 0].sum(1).mean())
        return series.mean / max(noise, 1e-300), series.mean > 6 * series.error

    def error(self, weights: Tensor) -> float:
        """The standard error of their weighted sum."""
        series = _C.BatchMeans()
        for row in self._rows:
            series.add(float(row.sum(1).nan_to_num() @ weights))
        return series.error


class _Search:
    """The rounds, in units of the lrs that the sampler has at first."""

    def __init__(
        self,
        sampler: Sampler,
        closure: Callable[[], Any],
        budget: float,
        limit: int,
        over: str,
        bar: Any,
    ) -> None:
        self.sampler, self.closure, self.budget = sampler, closure, budget
        self.limit, self.over, self.bar = limit, over, bar
        groups = sampler.param_groups
        for group in groups:
            group["lr"] = float(group["lr"])
        self.base = [group["lr"] for group in groups]
        self.params = [p for group in groups for p in group["params"]]
        self.friction = min(map(_friction, groups))
        self.temperature = groups[0]["temperature"]
        self.factor, self.used = 1.0, 0
        self.low, self.high = 0.0, math.inf  # stable, and not
        _cool(sampler)
        self.place = Place(sampler)
        self.noise = torch.zeros(len(self.params), dtype=torch.float64)
        self.noise_at = 1.0
        self.gauges: Gauges | None = None
        self.begin(1.0, every=1)

    # ---- Steps ----------------------------------------------------------------

    def begin(self, factor: float, *, every: int) -> None:
        """Measures anew, at another lr."""
        self.factor = factor
        _set_lrs(self.sampler, self.lrs)
        if self.gauges is not None:
            self.gauges.detach()
        self.gauges = Gauges(self.sampler, every=every)
        self.pairs = _Pairs()
        self.skipped = self.sampler.num_skipped

    @property
    def lrs(self) -> tuple[float, ...]:
        return tuple(self.factor * lr for lr in self.base)

    def draw(self) -> list[Tensor | None]:
        fresh_gradients(self.sampler, self.closure)
        self.used += 1
        next(self.bar, None)
        return [p.grad for p in self.params]

    def steps(self, count: int, *, pairs: bool, at_home: bool = True) -> bool:
        """Makes steps; returns whether the chain is stable.

        That is judged by the noise here, or if it is not at home by that which was
        there.
        """
        for i in range(count):
            grads = self.draw()
            if pairs and i % _PAIRS == 0:
                first = [None if g is None else g.detach().clone() for g in grads]
                self.pairs.add(self.sampler, first, self.draw())
            # Not what a scheduler may have put around it.
            type(self.sampler).step(self.sampler)
            if i % 10 == 9 and self.sampler.num_skipped > self.skipped:
                return False
        if self.sampler.num_skipped > self.skipped:
            return False
        if pairs:
            noise = self.pairs.parts()[:, 0]
            if bool(noise.isnan().all()):
                raise RuntimeError("no parameter has a gradient")
            if at_home:
                self.noise, self.noise_at = noise, self.factor
        explained = 1 + self.noise * (self.factor / self.noise_at)
        for i, most in enumerate((_UNSTABLE * explained).tolist()):
            # NaN: it has no gradient, and is never observed.
            heat = self.gauges.tensor(i).kinetic.mean / self.temperature
            if not math.isnan(most) and not heat <= most:
                return False
        return True

    def leave_unstable(self) -> None:
        """Goes back to where the chain was stable, with a smaller lr."""
        self.high = min(self.high, self.factor)
        if self.high < 1e-12 or self.used >= self.limit:
            raise RuntimeError(
                f"the chain is not stable at lr = {self.lrs[0]:.3g}, and was not at "
                "larger ones: is the model trained, and num_data right?"
            )
        self.place.restore()

    # ---- Estimates ------------------------------------------------------------

    def weights(self, parts: Tensor) -> Tensor:
        """Of tensors in what counts."""
        heat = parts.sum(1)
        weights = torch.zeros_like(heat)
        seen = ~heat.isnan()
        if self.over == "all":
            sizes = torch.tensor([float(p.numel()) for p in self.params])
            weights[seen] = sizes.double()[seen]
            return weights / weights.sum()
        weights[heat.nan_to_num(-1.0).argmax()] = 1.0
        return weights

    def expected(self) -> tuple[float, float]:
        """Heating as pairs tell it, and its error."""
        parts = self.pairs.parts()
        weights = self.weights(parts)
        heat = float(parts.sum(1).nan_to_num() @ weights)
        return heat, math.hypot(self.pairs.error(weights), _MODEL_ERROR * heat)

    def kinetic(self) -> Reading:
        """Heating as the gauges saw it, with its 95 % interval."""
        gauges = self.gauges
        if self.over == "all":
            mean, half_width = gauges.all().kinetic
        else:
            worst = int(self.weights(self.pairs.parts()).argmax())
            mean, half_width = gauges.tensor(worst).kinetic
        return Reading(mean / self.temperature - 1, half_width / self.temperature)

    def estimate(self) -> tuple[float, float]:
        """Both together, and the error."""
        heat, error = self.expected()
        seen, error_seen = self.kinetic()
        error_seen /= 2
        if not math.isfinite(error_seen):
            return heat, error
        if not math.isfinite(error) or abs(heat - seen) > 3 * math.hypot(
            error, error_seen
        ):
            return seen, error_seen
        a, b = error_seen**2, error**2
        return (a * heat + b * seen) / (a + b), math.sqrt(a * b / (a + b))

    # ---- Rounds ---------------------------------------------------------------

    def run(self, room: float) -> Tuning:
        self.most_room = room
        self.approach()
        found = self.room()
        return self.result(room=found) if found > room else self.verify()

    def proposal(self, heat: float) -> float:
        """The lr for the budget, short of what is not stable."""
        wanted = self.factor * min(max(self.budget / max(heat, 1e-12), 1e-3), 16.0)
        if wanted >= self.high:
            wanted = math.sqrt(self.factor * self.high)
        return wanted

    def approach(self) -> None:
        """Coarse rounds, up to a factor 1.5; what pairs tell needs no long run."""
        while True:
            if not self.steps(_COARSE, pairs=True):
                self.leave_unstable()
                lower = self.low if self.low else self.high / 16
                self.begin(math.sqrt(lower * self.high), every=1)
                continue
            self.low = max(self.low, self.factor)
            heat = self.expected()[0]
            if heat > _FAR:
                self.place.restore()
            else:
                self.place = Place(self.sampler)
            wanted = self.proposal(heat)
            near = max(wanted / self.factor, self.factor / wanted) < 1.5
            at_limit = self.high / self.factor < 2.0 and wanted > self.factor
            if near or at_limit or self.used > self.limit // 3:
                return
            self.begin(wanted, every=1)

    def is_stable(self, factor: float) -> bool:
        """Whether the chain is, in the potential that it is in now.

        Where that is a quadratic, V stays, the full gradient grows with the heat, and
        F / V at least as lr. Bounded gradients do not tell an unstable chain from a hot
        one: if V has changed a lot or F / V has ceased to grow, the chain has left.
        """
        if not self.look(factor):
            return False
        ratio, _ = self.pairs.drift()
        if not self.look(factor / 4):
            return False
        before, is_seen = self.pairs.drift()
        return not is_seen or ratio > 2 * before

    def look(self, factor: float) -> bool:
        self.begin(factor, every=1)
        stable = self.steps(_LOOK, pairs=True, at_home=False)
        self.place.restore()
        if not stable:
            return False
        noise = self.pairs.parts()[:, 0].nansum()
        return bool(noise <= _OTHER * self.noise.nansum() * factor / self.noise_at)

    def room(self) -> float:
        """How far noise keeps lr / α below the limit of stability, if that is too far.

        Else 0.
        """
        kept, pairs = self.factor, self.pairs
        heat = self.expected()[0]
        speed = kept * self.budget / max(heat, 1e-12) / self.friction
        room = 0.0
        low = self.most_room
        if self.high > low * speed and self.is_stable(low * speed):
            high = 2 * low
            while high < 1e6 * self.most_room and self.is_stable(high * speed):
                low, high = high, 2 * high
            for _ in range(3):
                middle = math.sqrt(low * high)
                if self.is_stable(middle * speed):
                    low = middle
                else:
                    high = middle
            room = math.sqrt(low * high)
        self.begin(kept, every=1)
        self.pairs = pairs
        return room

    def verify(self) -> Tuning:
        """Lets the gauges see it, and goes on from what they saw."""
        relax = math.ceil(2 / self.friction)
        block = max(200, relax)
        cost = block + math.ceil(block / _PAIRS)
        every = max(1, int(0.2 / self.friction))
        self.begin(self.proposal(self.expected()[0]), every=every)
        while True:
            stable = self.steps(relax, pairs=False)
            self.begin(self.factor, every=every)
            heat = error = math.nan
            while stable:
                stable = self.steps(block, pairs=True)
                if not stable:
                    break
                self.low = max(self.low, self.factor)
                heat, error = self.estimate()
                if self.used + relax + cost > self.limit:
                    return self.result(limit=self.what_limits(heat))
                away = abs(math.log(max(heat, 1e-12) / self.budget))
                if away > math.log(1.25) + 2 * error / max(heat, 1e-12):
                    if self.what_limits(heat) == "heating":
                        break
                if self.kinetic().half_width <= self.budget / 10:
                    return self.result(limit=self.what_limits(heat))
            if stable:
                self.place = Place(self.sampler)
                wanted = self.proposal(heat)
            else:
                self.leave_unstable()
                wanted = math.sqrt(self.factor * min(self.low, self.factor / 2))
                if self.used + relax + cost > self.limit:
                    raise RuntimeError(
                        f"the chain is not stable at lr = {self.lrs[0]:.3g}, and the "
                        "gradients are used up: begin with a smaller lr, or from a "
                        "trained model"
                    )
            self.begin(wanted, every=every)

    def what_limits(self, heat: float) -> str:
        wanted = self.factor * self.budget / max(heat, 1e-12)
        return "stability" if wanted > 1.25 * self.high / 2 else "heating"

    def result(self, *, limit: str = "noise", room: float = 0.0) -> Tuning:
        feasible = limit != "noise"
        heat, error = self.estimate() if feasible else self.expected()
        seen = self.kinetic() if feasible else Reading(math.nan, math.nan)
        parts = self.pairs.parts()
        weights = self.weights(parts)
        minibatch = float(parts[:, 0].nan_to_num() @ weights)
        # Heating is about linear in lr; what is left is small, or in what no one uses.
        ratio = self.budget / max(heat, 1e-12) if limit != "stability" else 1.0
        if limit == "stability" and self.factor > self.high / 2:
            ratio = self.high / 2 / self.factor
        ratio = min(max(ratio, 0.5), 2.0) if feasible else ratio
        drift = parts[:, 1].nan_to_num() @ weights
        # lr times the mean curvature.
        curvature = 2 * (2 - self.friction) * float(drift) * ratio
        relaxation = math.nan
        if curvature > 0:
            relaxation = max(1 / self.friction, self.friction / curvature)
        return Tuning(
            lrs=tuple(ratio * lr for lr in self.lrs),
            budget=self.budget,
            feasible=feasible,
            limit=limit,
            heating=Reading(ratio * heat, 2 * ratio * error),
            minibatch_heating=ratio * minibatch,
            kinetic_heating=seen,
            verified=feasible and seen.half_width <= self.budget / 5,
            tensors={
                name: heat
                for name, heat in zip(
                    self.gauges.names, (ratio * parts.sum(1)).tolist(), strict=True
                )
                if not math.isnan(heat)
            },
            relaxation=relaxation,
            batch_factor=max(1.0, room / self.most_room),
            noise_estimate=ratio * minibatch * self.friction,
            gradients=self.used,
            friction=self.friction,
            room=self.most_room,
            takes_noise_estimate=isinstance(self.sampler, SGHMC),
        )
