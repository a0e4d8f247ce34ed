"""Temperatures of steps, their means over time, and their issues.

Let x = θ - c for any constant c, d the number of coordinates of a sum, N the number of
data, and g the gradient that a step uses at θ, prior included. In equilibrium a step
changes no expectation. SGLD's step θ' = θ - lr g + noise keeps E|x|², which says 2 lr
E[x·g] = lr² E|g|² + 2 lr T d / N:

    T_conf = N E[x·g] / d,   T_kin = T + lr N E|g|² / (2 d),   T_conf = T_kin.

With momentum m, v' = m v - lr g + noise and θ' = θ + v', E|x'|² = E|x|² and E[x'·v'] =
E[x·v] give E[x·v] = E|v|² / 2 and lr E[x·g] = (1 + m) E|v|² / 2:

    T_conf as above,   T_kin = N (1 + m) E|v|² / (2 lr d).

Neither the potential, nor the minibatches' noise, nor a noise estimate enters: T_kin ≠
T_conf means that there is no equilibrium, or that the step has other dynamics. T_kin /
T - 1 is the excess by minibatches and by discretisation; on a quadratic T_kin is N k
Var(θ). The minibatches' part is, per coordinate,

    (lr N Var(grad) / (2 T) - β) / α,   α = 1 - m (SGLD: 1),

β the noise estimate, Var(grad) half the mean squared difference of the gradients of two
consecutive steps. It is unknown for SGNHT, whose thermostat removes it, and with
redrawn momenta. The other samplers:

* Momenta drawn afresh before every k-th step: that step takes 1 / (1 + m) of
  its gradient and none of the old momentum. Summed over k steps, v the momentum before
  a step: Σ (|v|² / 2 + m x·v [not drawn]) = lr Σ x·g ([drawn] / (1 + m) + [not drawn]).
* SGNHT's momentum is 1 - A - s, A its constant and s its learnt friction: lr E[x·g] =
  (2 - A) E|v|² / 2 - E[x·(s v)], by coordinate.
* BAOA: a kick u = v - lr g, a drift of u / 2, friction v' = m u + noise, whose variance
  is s², a drift of v' / 2. With f = 2 (1 - m) / (1 + m) in the place of α and s² = lr T
  (1 + m)² (f - β) / (2 N), T_kin = N (1 + m)² E|u|² / (4 lr d) + T (1 + m) (3 + m) (f -
  β) / 8.
* SGLRW: θ' = θ ± δ, up with probability (1 - clip(lr g / δ)) / 2. |θ' - θ|² is always
  2 lr T d / N, and E|x'|² = E|x|² says N E[x·clip(g)] / d = T, clip(g) within δ / lr:
  T_kin = T + N E[x·(g - clip(g))] / d. Minibatches raise T_kin by clipping alone.
* pSGLD multiplies by G: in the sums of g, and for |g|² and Var(grad), each coordinate
  is weighted with G. This holds if G is constant during the time in which θ moves.

Note [Shuffled minibatches]
The errors e_t of a pass of M minibatches without replacement sum to 0: their covariance
is -Var(e) / (M - 1) between two steps of one pass. On a quadratic, θ and v are linear
in the errors, with autocorrelations ρ_j, and their mean squares over a pass are

    1 - 2 / (M (M - 1)) Σ_{j < M} (M - j) ρ_j

of those with independent errors of the same variance. With k = lr h (half drifts: k (1
+ m) / 2), ρ_{j+1} = (1 + m - k) ρ_j - m ρ_{j-1} for both, ρ_1 = m - k / 2 of v and 1 -
k / (1 + m) of θ. For k to 0 the variance of θ has none of the heat, T_kin and T_conf
keep what a momentum sees within its memory. Both temperatures then overstate the
variance. Their identity holds for means over whole passes.

The identities hold for any g that a step uses. An unbiased gradient h, computed at the
same θ on other minibatches, tests whether g is the loss's: the gradient bias N E[x·(g -
h)] / d is T_conf of the used gradients minus T_conf of unbiased ones.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch_sgmcmc.core.spec import Motion, traits_of
from torch_sgmcmc.core.utils import BatchMeans

# Observations between two measurements of the minibatches' noise, which take a copy of
# the gradients; observations that a device keeps before the host waits for them.
NOISE_EVERY, MOST_ROWS = 5, 64
# The largest excess or bias that is not an issue, in units of T.
_LEAST_EXCESS = 0.01


def roots(m: float, k: float) -> tuple[complex, complex]:
    """Returns the solutions of r² - (1 + m - k) r + m = 0, the larger one first.

    A step of momentum m multiplies a deviation by them where k = lr h.
    """
    half = (1 + m - k) / 2
    away = cmath.sqrt(((1 - m - k) ** 2 - 4 * k * m) / 4)
    first = half + away if half >= 0 else half - away
    return first, m / first if first else 0j


def relaxation(kind: str, group: Mapping[str, Any], curvature: float = 0.0) -> float:
    """Returns the steps in which the start of a direction decays by a factor of e.

    NaN for samplers and settings without a closed form, infinite if nothing pulls back.

    Args:
        kind: the sampler's name.
        group: lr, prior_precision, num_data and momentum of its param group.
        curvature: h of the mean loss; 0 for directions without data.
    """
    traits, redraws = traits_of(kind), group.get("resample_momentum_every")
    needs_momentum = traits.motion not in (Motion.LANGEVIN, Motion.LATTICE)
    if traits.pull is None or redraws or (needs_momentum and "momentum" not in group):
        return math.nan
    m = float(group["momentum"]) if needs_momentum else 0.0
    h = curvature + group["prior_precision"] / group["num_data"]
    k = traits.pull(m) * float(group["lr"]) * h
    r = max(map(abs, roots(m, k)))
    if r >= 1:  # rounded, or unstable
        return math.inf if k < 1 else math.nan
    return -1 / math.log(r) if r else 0.0


def _sum_of_powers(r: complex, batches: float) -> complex:
    """Returns the sum of (M - j) r^j over 0 < j < M."""
    away = 1 - r
    if abs(away) * batches < 1e-4:
        return batches * (batches - 1) / 2 * (1 - away * (batches + 1) / 3)
    return r * (batches * away - (1 - r**batches)) / away**2


class Step(NamedTuple):
    """The settings that a tensor's step was made with."""

    motion: Motion = Motion.LANGEVIN
    lr: float = 0.0
    num_data: float = 0.0
    temperature: float = 0.0
    momentum: float = 0.0
    noise_estimate: float = 0.0  # NaN if unknown
    resample_momentum_every: int = 0
    step: int = 0  # the number of steps before this one

    @property
    def friction(self) -> float:
        """The fraction of the excess kinetic energy that a step removes."""
        if self.motion == Motion.LANGEVIN:
            return 1.0
        kept = 1 - self.momentum
        half_drifts = self.motion == Motion.HALF_DRIFTS
        return 2 * kept / (1 + self.momentum) if half_drifts else kept

    def shuffled_parts(self, curvature: float, batches: float) -> tuple[float, float]:
        """Returns the parts of independent minibatches' heat that shuffled ones add.

        Of T_kin, and of the variance; Note [Shuffled minibatches].

        Args:
            curvature: h of the mean loss and the prior.
            batches: M, the minibatches of a pass; infinite if they are independent.
        """
        m = 0.0 if self.motion == Motion.LANGEVIN else self.momentum
        k = self.lr * curvature
        k *= (1 + m) / 2 if self.motion == Motion.HALF_DRIFTS else 1.0
        if not 2 <= batches < math.inf or k >= 2 * (1 + m):  # no equilibrium
            return (0.0, 0.0) if batches < 2 else (1.0, 1.0)
        r = roots(m, k)
        if abs(r[0] - r[1]) < 1e-6:
            k += 1e-5
            r = roots(m, k)
        sums = [_sum_of_powers(root, batches) for root in r]
        parts = []
        for first in (m - k / 2, 1 - k / (1 + m)):  # the autocorrelation at 1
            weight = (first - r[1]) / (r[0] - r[1])
            total = (weight * sums[0] + (1 - weight) * sums[1]).real
            parts.append(max(0.0, 1 - 2 * total / (batches * (batches - 1))))
        return parts[0], parts[1]

    def temperatures(
        self, sums: Sequence[float], numel: int, has_noise: bool
    ) -> tuple[float, float, float, float]:
        """Returns T_kin, T_conf, minibatches' excess, and the clipped fraction.

        Unknown numbers are NaN.

        Args:
            sums: x·g, Σ w g², v·v (of half drifts u·u), x·v (SGNHT: Σ x s v), Σ w (grad
                - grad before)² / 2, x·clip(g), the number of clipped coordinates
                (csrc/ops/temperature_sums.h).
            numel: the number of elements.
            has_noise: whether the fifth sum is known.
        """
        force, grad_square, square, position, noise, clipped_force, clipped = sums
        m, t, scale = self.momentum, self.temperature, self.num_data / max(numel, 1)
        kinetic, configurational, every = t, scale * force, self.resample_momentum_every
        if self.motion == Motion.NONE:
            return kinetic, configurational, math.nan, math.nan
        if self.motion == Motion.LATTICE:
            kinetic += scale * (force - clipped_force)
            return kinetic, configurational, math.nan, clipped / max(numel, 1)
        per_lr = scale / self.lr if self.lr else math.nan
        if self.motion == Motion.LANGEVIN:
            kinetic += self.lr * scale / 2 * grad_square
        elif self.motion == Motion.HALF_DRIFTS:
            rest = t * (3 + m) * (self.friction - self.noise_estimate)
            kinetic = (1 + m) / 8 * (2 * per_lr * (1 + m) * square + rest)
        elif self.motion == Motion.THERMOSTAT:
            kinetic = per_lr * ((1 + m) / 2 * square - position)
        elif every == 0:
            kinetic = per_lr * (1 + m) / 2 * square
        else:
            is_drawn = self.step % every == 0
            part = 1 / (1 + m) if is_drawn else 1.0
            mean_part = (every - 1 + 1 / (1 + m)) / every
            kept = 0.0 if is_drawn else m * position
            kinetic = per_lr / mean_part * (square / 2 + kept)
            configurational *= part / mean_part
        minibatch = self.minibatch_excess(noise / max(numel, 1))
        return kinetic, configurational, minibatch if has_noise else math.nan, math.nan

    def minibatch_excess(self, variance: float) -> float:
        """Returns the minibatches' part of T_kin, NaN if unknown.

        Args:
            variance: of a gradient's element by minibatches.
        """
        # The thermostat removes the minibatches' excess, redrawn momenta a part of it.
        unknown = Motion.THERMOSTAT, Motion.LATTICE, Motion.NONE
        if self.motion in unknown or self.resample_momentum_every:
            return math.nan
        excess = self.lr * self.num_data / 2 * variance
        return (excess - self.noise_estimate * self.temperature) / self.friction


class TemperatureMeans(NamedTuple):
    """Means over time of one tensor, one group, or all tensors."""

    kinetic: BatchMeans
    configurational: BatchMeans
    excess: BatchMeans  # T_conf - T_kin
    minibatch: BatchMeans
    gradient_bias: BatchMeans
    clipped: BatchMeans


class Means:
    """Temperatures of each tensor, each group, and all.

    Args:
        numels: sizes of the tensors.
        groups: the group of each tensor, from 0 in order.
    """

    def __init__(self, numels: Sequence[int], groups: Sequence[int]) -> None:
        self._numels, self._groups = numels, groups
        self.num_tensors, self.num_groups = len(numels), 1 + max(groups, default=-1)
        total = self.num_tensors + self.num_groups + 1
        #: Series of tensors, then of groups, then of all: means over coordinates.
        self.series = [
            TemperatureMeans(*(BatchMeans() for _ in range(6))) for _ in range(total)
        ]
        self._steps = [Step()] * self.num_tensors

    def _sums_of(self, tensor: int) -> tuple[int, int]:
        return self.num_tensors + self._groups[tensor], len(self.series) - 1

    def readings(self, place: int) -> list[tuple[float, float]]:
        """Returns means, and half widths of 95 % intervals, of a place's series.

        The errors of shuffled minibatches cancel partly: where independent ones would
        surely add more than T_kin - T, their part is T_kin - T.
        """
        means = self.series[place]
        found = [(series.mean, series.half_width(0.95)) for series in means]
        tensors = range(self.num_tensors)
        sizes = {i: self._numels[i] for i in tensors if place in (i, *self._sums_of(i))}
        total = sum(n * self._steps[i].temperature for i, n in sizes.items())
        excess = means.kinetic.mean - total / max(1, sum(sizes.values()))
        if means.minibatch.mean > excess + found[0][1]:
            found[3] = max(0.0, excess), found[0][1]
        return found

    def add(
        self, observed: Iterable[tuple[int, Sequence[float], Step]], has_noise: bool
    ) -> None:
        """Adds an observation: tensors with their sums and settings."""
        values: dict[int, list[float]] = {}
        sizes: dict[int, int] = {}
        for tensor, sums, step in observed:
            numel = self._numels[tensor]
            found = step.temperatures(sums, numel, has_noise)
            if numel == 0 or not (math.isfinite(found[0]) and math.isfinite(found[1])):
                continue
            self._steps[tensor] = step
            group, every = self._sums_of(tensor)
            for place, size in ((tensor, 1), (group, numel), (every, numel)):
                totals = values.setdefault(place, [0.0] * 4)
                for i, value in enumerate(found):
                    totals[i] += size * value
                sizes[place] = sizes.get(place, 0) + size
        for place, totals in values.items():
            means, size = self.series[place], sizes[place]
            kinetic, configurational, minibatch, clipped = (v / size for v in totals)
            means.kinetic.add(kinetic)
            means.configurational.add(configurational)
            means.excess.add(configurational - kinetic)
            if math.isfinite(minibatch):
                means.minibatch.add(minibatch)
            if math.isfinite(clipped):
                means.clipped.add(clipped)

    def add_forces(
        self,
        used: Iterable[tuple[int, Sequence[float], Step]],
        others: Iterable[tuple[int, Sequence[float], Step]],
    ) -> None:
        """Adds x·g of a step's gradient, and of another gradient at the same θ."""
        forces = {tensor: sums[0] for tensor, sums, _ in others}
        totals: dict[int, tuple[float, int]] = {}
        for tensor, sums, step in used:
            bias = step.num_data * (sums[0] - forces.get(tensor, math.nan))
            if self._numels[tensor] == 0 or not math.isfinite(bias):
                continue
            temperature = step.temperature
            self._steps[tensor] = self._steps[tensor]._replace(temperature=temperature)
            for place in (tensor, *self._sums_of(tensor)):
                total, size = totals.get(place, (0.0, 0))
                totals[place] = total + bias, size + self._numels[tensor]
        for place, (total, size) in totals.items():
            self.series[place].gradient_bias.add(total / size)

    @property
    def state(self) -> list[list[float]]:
        """All means, and the last settings of each tensor."""
        means = [series.state for means in self.series for series in means]
        steps = [[*map(float, step)] for step in self._steps]
        # NaN != NaN, and states are compared.
        return means + [[-1.0 if x != x else x for x in step] for step in steps]

    @state.setter
    def state(self, state: Sequence[Sequence[float]]) -> None:
        count = 6 * len(self.series)
        if len(state) != count + self.num_tensors:
            raise ValueError(
                f"Invalid state: {len(state)} series (must be "
                f"{count + self.num_tensors})"
            )
        means = [BatchMeans(one) for one in state[:count]]
        steps = []
        for numbers in state[count:]:
            if len(numbers) != 8 or not all(0 <= numbers[i] < 2**53 for i in (0, 6, 7)):
                raise ValueError("Invalid state: settings of a tensor")
            motion, lr, num_data, temperature, momentum, estimate, every, step = numbers
            estimate = math.nan if estimate < 0 else estimate
            kind, every, step = Motion(int(motion)), int(every), int(step)
            steps.append(
                Step(kind, lr, num_data, temperature, momentum, estimate, every, step)
            )
        self.series = [TemperatureMeans(*means[i : i + 6]) for i in range(0, count, 6)]
        self._steps = steps

    def issues(self, budget: float, rate: float) -> list[tuple[int, str, float]]:
        """Returns issues, worst first: tensor, fault, deviation in units of T."""
        found: list[tuple[int, str, float]] = []
        # Each tensor is tested twice, or thrice.
        tests = 3 if self.series[-1].gradient_bias.count else 2
        sure = 1 - rate / (tests * max(self.num_tensors, 1))
        for i, (step, means) in enumerate(zip(self._steps, self.series, strict=False)):
            t = step.temperature
            if t <= 0:
                continue
            if means.kinetic.count:
                fault, deviation = self._deviation(i, budget, sure)
                if fault:
                    found.append((i, fault, deviation))
            for series, fault in (
                (means.gradient_bias, "biased gradient"),
                (means.excess, "not in equilibrium"),
            ):
                size = abs(series.mean) / t
                width = series.half_width(sure, widest=series is means.excess) / t
                # Significantly different from 0.
                if size > width and size > _LEAST_EXCESS:
                    found.append((i, fault, size))
        return sorted(found, key=lambda each: -each[2])

    def _deviation(self, tensor: int, budget: float, sure: float) -> tuple[str, float]:
        step, series = self._steps[tensor], self.series[tensor].kinetic
        numel, count, tail = self._numels[tensor], series.count, 0.5 - sure / 2
        ratio = series.mean / step.temperature
        width = series.half_width(sure) / step.temperature
        is_sum = step.motion in (Motion.LANGEVIN, Motion.MOMENTUM, Motion.HALF_DRIFTS)
        if ratio - width > 1 + budget or (
            # Treats few observations as one.
            math.isnan(width)
            and count > 1
            and is_sum
            and ratio > (1 + budget) * _squares_quantile(1 - tail, numel)
        ):
            return "above T", ratio - 1
        # Squares of few elements are skewed: a mean that is too small by chance has a
        # width that is too small.
        is_below = ratio <= 0 and ratio + width < 1 - budget
        lowest = math.log(1 - budget) if budget < 1 else -math.inf
        if ratio > 0 and math.log(ratio) + width / ratio < lowest:
            is_below = ratio < (1 - budget) * _squares_quantile(tail, numel * count)
        return ("below T", 1 - ratio) if is_below else ("", 0.0)

    def summary(
        self, names: Sequence[str], takes_estimate: bool, budget: float, rate: float
    ) -> str:
        """Returns a table of all tensors, and the issues with advice."""
        every = self.series[-1]
        compared = every.gradient_bias.count > 0
        if every.kinetic.count == 0 and not compared:
            return "No step was observed yet."
        found = self.issues(budget, rate)
        order = dict.fromkeys([*(i for i, *_ in found), *range(self.num_tensors)])
        widest = max(6, *map(len, names), 0)
        last = "clipped" if every.clipped.count else "minibatches"
        lines = [
            f"Temperatures over {every.kinetic.count} observed steps (T_kin: of the "
            "motion, T_conf: of the position; equal in equilibrium, and T without "
            "excess)",
            f"  {'tensor':<{widest}}    elements"
            + f"  {'T_kin':<18}  {'T_conf':<18}  {last}",
        ]
        rows = [(names[i], self._numels[i], i) for i in order if self._numels[i]]
        last_place = len(self.series) - 1
        for name, numel, place in [*rows, ("all", sum(self._numels), last_place)]:
            means = self.series[place]
            cells = map(_interval, (means.kinetic, means.configurational))
            line = f"  {name:<{widest}}  {numel:>10}"
            line += "".join(f"  {cell:<18}" for cell in cells)
            if means.minibatch.count:
                line += f"  {self.readings(place)[3][0]:+.3g}"
            if means.clipped.count:
                line += f"  {100 * means.clipped.mean:.3g} %"
            lines.append(line.rstrip())
        if not found and not math.isfinite(every.kinetic.error):
            lines.append("Too few steps to find an issue.")
        elif not found:
            more = ", or with other gradients than the closure's" if compared else ""
            lines.append(
                "No issue was found: no tensor is shown to be above T by more than "
                f"{100 * budget:.3g} %, or out of equilibrium{more}."
            )
        for tensor, fault, size in found:
            text = self._describe(tensor, fault, size, budget, takes_estimate)
            lines.append(f"- {names[tensor]} {text}.")
        return "\n".join(lines)

    def _describe(
        self, i: int, fault: str, size: float, budget: float, takes_estimate: bool
    ) -> str:
        step, means = self._steps[i], self.series[i]
        ratio = means.kinetic.mean / step.temperature
        is_lattice = step.motion == Motion.LATTICE
        if fault == "above T":
            heat = self.readings(i)[3][0]
            advice = _advice(step, means, size, heat, budget, takes_estimate)
            return f"is above T: T_kin is {ratio:.3g} T{advice}"
        if fault == "below T":
            why = (
                "steps clip on the way outward (more steps, or a smaller lr)"
                if is_lattice
                else "noise is missing (a noise estimate that is too large, momenta "
                "that were changed)"
            )
            return f"is below T: T_kin is {ratio:.3g} T; {why}"
        bias = _interval(means.gradient_bias)
        if fault == "biased gradient":
            return (
                "has gradients that differ from the closure's: T_conf of the former "
                f"minus T_conf of the latter is {bias}"
                " (clipped, stale or summed gradients, a penalty in the loss, "
                "minibatches that depend on parameters, batch norm in training mode)"
            )
        kinetic, configurational = means.kinetic.mean, means.configurational.mean
        way = "outward" if configurational < kinetic else "inward"
        text = (
            f"is not in equilibrium: T_conf is {configurational:.3g} and T_kin "
            f"{kinetic:.3g}; it still moves {way}. Make more steps, not smaller ones"
        )
        # A lattice's excess is clipping, which rises abruptly.
        if step.lr > 0 and not is_lattice and 0 < ratio - 1 < budget / 2:
            times = budget / (ratio - 1)
            text += f": lr could be {times:.2g} times as large within the budget"
        return text


def _squares_quantile(p: float, freedom: float) -> float:
    """Returns a quantile of the mean of squares of so many normal numbers."""
    from scipy.special import chdtri

    return float(chdtri(freedom, 1 - p)) / freedom


def _interval(means: BatchMeans) -> str:
    if means.count == 0:
        return "-"
    width = means.half_width(0.95)
    return f"{means.mean:.3g}" + (f" ± {width:.2g}" if math.isfinite(width) else "")


def _advice(
    step: Step,
    means: TemperatureMeans,
    excess: float,
    heat: float,
    budget: float,
    takes_estimate: bool,
) -> str:
    if step.motion == Motion.NONE:
        return ""
    if step.motion == Motion.LATTICE:
        return (
            f"; the cause is clipping, of {100 * means.clipped.mean:.3g} % of its "
            "coordinates' steps: a smaller lr clips fewer, and so do larger minibatches"
        )
    times = excess / budget
    text = f"; the excess grows with lr: within {100 * budget:.3g} % it takes lr <= "
    text += f"{step.lr / times:.2g}"
    minibatch, friction = heat / step.temperature, step.friction
    if not minibatch > excess / 2:
        return text + (
            " (minibatches cause little of it: the step is long for the curvature)"
        )
    times = min(math.ceil(10 * times) / 10, step.num_data)
    text += f", or minibatches {times:.3g} times as large (at most all data)"
    wanted = friction * excess / budget
    drifts_twice = step.motion == Motion.HALF_DRIFTS
    momentum = (2 - wanted) / (2 + wanted) if drifts_twice else 1 - wanted
    if (drifts_twice or step.motion == Motion.MOMENTUM) and momentum > 0:
        text += f", or momentum <= {momentum:.3g}"
    estimate = minibatch * friction + step.noise_estimate
    if takes_estimate and estimate <= friction:
        text += (
            ", or an estimate of the minibatches' noise (noise_estimate; beta is "
            f"{estimate:.2g} here)"
        )
    return text
