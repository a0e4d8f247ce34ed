"""The search for an lr: rounds of short runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.closures import fresh_gradients
from torch_sgmcmc.chain.rehearsal import Place
from torch_sgmcmc.judge.gauges import Gauges
from torch_sgmcmc.judge.pairs import Pairs
from torch_sgmcmc.judge.readings import Reading
from torch_sgmcmc.judge.tuned import Tuning, friction_of, set_lrs
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sghmc import SGHMC

__all__ = ["Search"]

# Temperatures that only an unstable chain has, in those that noise explains.
_UNSTABLE = 100.0
# Heating that noise explains is right up to this part of it: it is of first order.
_MODEL_ERROR = 0.05
# How much larger V is where a chain has left for.
_OTHER = 4.0
# Heating with which a chain is not where it was any more.
_FAR = 0.5
# Losses that are compared, and what part of them may be lost on the way.
_ENDS, _FALL = 20, 0.1
# Steps of a coarse round and of a look at stability, and between pairs of gradients.
_COARSE, _LOOK, _PAIRS = 40, 50, 2


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


class Search:
    """The rounds, in units of the lrs that the sampler has at first."""

    def __init__(
        self,
        sampler: Sampler,
        closure: Callable[[], Any],
        budget: float,
        limit: int,
        over: str,
        batch_size: int | None,
        bar: Any,
    ) -> None:
        self.sampler, self.closure, self.budget = sampler, closure, budget
        self.limit, self.over, self.bar = limit, over, bar
        self.batch_size = batch_size
        groups = sampler.param_groups
        for group in groups:
            group["lr"] = float(group["lr"])
        self.base = [group["lr"] for group in groups]
        self.params = [p for group in groups for p in group["params"]]
        self.friction = min(map(friction_of, groups))
        self.temperature = groups[0]["temperature"]
        self.factor, self.used = 1.0, 0
        self.losses: list[Tensor | float] = []
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
        set_lrs(self.sampler, self.lrs)
        if self.gauges is not None:
            self.gauges.detach()
        self.gauges = Gauges(self.sampler, every=every)
        self.pairs = Pairs()
        self.skipped = self.sampler.num_skipped

    @property
    def lrs(self) -> tuple[float, ...]:
        """Those of the groups now."""
        return tuple(self.factor * lr for lr in self.base)

    def draw(self) -> list[Tensor | None]:
        """The gradients of another minibatch."""
        loss = fresh_gradients(self.sampler, self.closure)
        if isinstance(loss, Tensor):
            loss = loss.detach()
        if isinstance(loss, Tensor | float):
            self.losses.append(loss)
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
        """All rounds, until what is left is for the last one."""
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
        """Whether a chain with other lrs stays where it is, by a short run."""
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
        """Why the lr is no larger."""
        wanted = self.factor * self.budget / max(heat, 1e-12)
        return "stability" if wanted > 1.25 * self.high / 2 else "heating"

    def fall(self) -> tuple[float, float]:
        """The mean loss at first and in the end, if it is another; else NaN twice."""
        if len(self.losses) < 4 * _ENDS:
            return math.nan, math.nan
        first, last = (
            torch.tensor([float(loss) for loss in some], dtype=torch.float64)
            for some in (self.losses[:_ENDS], self.losses[-_ENDS:])
        )
        error = math.sqrt(float(first.var() + last.var()) / _ENDS)
        start, end = float(first.mean()), float(last.mean())
        if start - end > max(5 * error, _FALL * abs(start)):
            return start, end
        return math.nan, math.nan

    def result(self, *, limit: str = "noise", room: float = 0.0) -> Tuning:
        """What has been found."""
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
            num_data=int(self.sampler.param_groups[0]["num_data"]),
            batch_size=self.batch_size,
            noise_estimate=ratio * minibatch * self.friction,
            gradients=self.used,
            friction=self.friction,
            room=self.most_room,
            fall=self.fall(),
            takes_noise_estimate=isinstance(self.sampler, SGHMC),
        )
