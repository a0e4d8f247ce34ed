"""Schedules of step sizes and temperatures, and Gibbs updates of prior precisions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import dtensor
from torch_sgmcmc.core.context import context_of, kind_of, local
from torch_sgmcmc.core.hyperparams import check_integer, check_real, settings
from torch_sgmcmc.core.ops import sum_of_squares
from torch_sgmcmc.core.sampler import Sampler, SharedSettings, check_sampler
from torch_sgmcmc.core.state import away_from_mean, restore_given
from torch_sgmcmc.core.state_dict import check_count, check_keys, saved_number


class _Schedule(LRScheduler):
    # Keys of the state dict beside torch's.
    _KEYS: tuple[str, ...] = ()

    def __init__(self, sampler: Sampler) -> None:
        if not isinstance(sampler, Sampler) or isinstance(sampler, SharedSettings):
            raise TypeError(
                f"Invalid sampler: got {type(sampler).__name__} (must be "
                "gradient-only, such as SGLD and SGHMC: other samplers have no lr, "
                "adapt or test their steps, or draw their minibatches)"
            )
        if sampler.defaults["capturable"]:
            raise ValueError(
                "Invalid sampler: with capturable=True a CUDA graph freezes lr and "
                "temperature, and no schedule could change them"
            )
        self._check(sampler)
        super().__init__(sampler)

    def _check(self, sampler: Sampler) -> None:
        """Raises if the sampler does not suit, before anything has changed."""

    def _factor(self) -> float:
        """Returns the factor of the first lr for the next step."""
        raise NotImplementedError

    def step(self, epoch: Any = None) -> None:
        """Sets lr for the sampler's next step."""
        self._take_in()
        super().step(epoch)

    def _take_in(self) -> None:
        """Includes param groups that were added since, with their present lr."""
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            lr = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
            if self.base_lrs and "lr" in context_of(self.optimizer).spec.shared:
                lr = self.base_lrs[0]
            self.base_lrs.append(group.setdefault("initial_lr", lr))

    def get_lr(self) -> list[float | Tensor]:
        """Returns the lr of each group; called by :meth:`step`."""
        self._take_in()  # SequentialLR begins a schedule without step()
        factor = self._factor()
        return [lr * factor for lr in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the schedule's state; a ValueError refuses another object's."""
        keys = ("last_epoch", "base_lrs", *self._KEYS)
        check_keys(state_dict, type(self).__name__, *keys)
        saved, own = len(state_dict["base_lrs"]), len(self.optimizer.param_groups)
        if saved > own:
            raise ValueError(
                f"Invalid state_dict: it is of {saved} param groups (the sampler has "
                f"{own})"
            )
        super().load_state_dict(state_dict)


def _parts_of(schedules: Iterable[Any], *, due: bool = False) -> Iterator[Any]:
    """Yields schedules, and those of which torch's SequentialLR and others consist.

    With ``due``, those only of a SequentialLR whose turn it is.
    """
    for schedule in schedules:
        yield schedule
        parts = getattr(schedule, "_schedulers", ())
        if due and hasattr(schedule, "_milestones"):
            first = bisect_right(schedule._milestones, schedule.last_epoch)
            parts = parts[first : first + 1]
        yield from _parts_of(parts, due=due)


def collecting_with(
    schedules: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a collector's options, with weights and phases of a chain's schedules."""
    options = dict(given)
    for part in _parts_of(schedules):
        if isinstance(part, PolynomialDecay):
            options.setdefault("weight", lambda _, part=part: part.weight)
    if not any(hasattr(part, "collecting") for part in _parts_of(schedules)):
        return options
    when = options.get("when")

    def is_collecting() -> bool:
        parts = _parts_of(schedules, due=True)
        found = [part.collecting for part in parts if hasattr(part, "collecting")]
        return bool(found) and all(found) and (when is None or when())

    return {**options, "when": is_collecting}


class CyclicalSchedule(_Schedule):
    r"""Cycles of exploration and sampling (Zhang et al. 2020).

    A cycle of L steps starts with large steps that leave a mode, without noise, and
    ends with small steps that sample the next mode. In step k, counted from 0,

    .. math::
        r_k = \frac{k \bmod L}{L}, \qquad
        \mathrm{lr}_k = \frac{\mathrm{lr}_0}{2} \left( \cos(\pi r_k) + 1 \right), \qquad
        T_k = \begin{cases} 0, & r_k < \beta \quad \text{(exploration)} \\
            T, & \text{otherwise (sampling),} \end{cases}

    with the ``temperature`` of each param group when the schedule is made, and its
    ``initial_lr``: the ``lr`` when its first schedule was made, as in torch (``del
    group["initial_lr"]`` starts again).
    Momenta follow lr and T, and are drawn where sampling begins; other state persists
    over phases. More: docs/changing_settings.md.

    The schedule is a :class:`torch.optim.lr_scheduler.LRScheduler`: call :meth:`step`
    once after each step of the sampler, and collect draws before it where
    :attr:`collecting` is True. In torch's ``SequentialLR``, such as after a warm-up of
    lr, T is not changed before its turn. State dicts of sampler and schedule together
    resume a chain in the middle of a cycle bitwise identically; make the schedule
    before loading them.

    Args:
        sampler: a gradient-only sampler, such as SGLD and SGHMC, not capturable, with T
            > 0, and with ``noise_estimate=0`` unless β is 0; SGLRW if β is 0. Groups
            that are added later follow from the schedule's next step on.
        steps_per_cycle: L, >= 2.
        exploration: β in [0, 1), the fraction of a cycle that explores. Default: 0.8,
            as in the paper for CIFAR.

    Example:
        >>> schedule = sg.CyclicalSchedule(sampler, steps_per_cycle=50 * len(loader))
        >>> for x, y in batches:
        ...     sampler.zero_grad()
        ...     F.cross_entropy(model(x), y).backward()
        ...     sampler.step()
        ...     if schedule.collecting:
        ...         predictive.update()
        ...     schedule.step()

    Note:
        Draws of different cycles come from modes in proportion to the frequency with
        which exploration ends there, not to their masses. This is an approximation,
        unless cycles are long enough to mix. At T = 0 gradients are the full
        potential's too.

    Reference:
        R. Zhang, C. Li, J. Zhang, C. Chen and A. G. Wilson, Cyclical Stochastic
        Gradient MCMC for Bayesian Deep Learning, ICLR 2020, eq. 1 and algorithm 1.
    """

    _KEYS = ("steps_per_cycle", "exploration", "temperatures")

    def __init__(
        self, sampler: Sampler, steps_per_cycle: int, *, exploration: float = 0.8
    ) -> None:
        self.steps_per_cycle = check_integer("steps_per_cycle", steps_per_cycle, low=2)
        self.exploration = check_real("exploration", exploration, high=1.0)
        self.temperatures: list[float] = []
        super().__init__(sampler)

    def _check(self, sampler: Sampler) -> None:
        kind = kind_of(sampler)
        rows = {row.name: row for row in settings(kind)}
        if self.exploration > 0 and rows["temperature"].low_open:
            raise ValueError(
                f"Invalid exploration: {self.exploration} (must be 0 with {kind}, "
                "which has no updates at temperature 0)"
            )

    def _initial_step(self) -> None:
        # After the check of the sampler, and before its first step is prepared.
        self.temperatures = []
        super()._initial_step()

    def _take_in(self) -> None:
        groups = self.optimizer.param_groups
        temperatures = [g["temperature"] for g in groups[len(self.temperatures) :]]
        if 0 in temperatures:
            raise ValueError(
                "Invalid temperature: 0 in a param group, which would never be sampled "
                "(make the schedule before a state dict is loaded)"
            )
        for group in groups:
            estimate = group.get("noise_estimate", 0)
            if estimate != 0 and self.exploration > 0:
                raise ValueError(
                    f"Invalid noise_estimate: {estimate!r}, of a sampler that explores "
                    "without noise in each cycle, where there is none to subtract "
                    "from (must be 0, or exploration must be 0)"
                )
        super()._take_in()
        self.temperatures += temperatures

    def get_lr(self) -> list[float | Tensor]:
        """Returns the lr of each group, and sets its temperature."""
        found = super().get_lr()
        self._set_temperatures(explores=not self.collecting)
        return found

    def _set_temperatures(self, *, explores: bool) -> None:
        groups = zip(self.optimizer.param_groups, self.temperatures, strict=False)
        for group, temperature in groups:
            group["temperature"] = 0.0 if explores else temperature

    def __setattr__(self, name: str, value: object) -> None:
        """Restores temperatures when SequentialLR takes the first step back."""
        super().__setattr__(name, value)
        if name == "last_epoch" and value == -1 and self.temperatures:
            self._set_temperatures(explores=False)

    @property
    def place(self) -> float:
        """The position r in [0, 1) of the sampler's last step in its cycle.

        After :meth:`step`, the position of the next step.
        """
        step = max(self.last_epoch, 0)  # -1 before its turn in a SequentialLR
        return step % self.steps_per_cycle / self.steps_per_cycle

    @property
    def collecting(self) -> bool:
        """True if the sampler's last step was in a sampling phase of this schedule."""
        return self.last_epoch >= 0 and self.place >= self.exploration

    def count_collecting(self, steps: int) -> int:
        """Returns the number of sampling-phase steps among the first ``steps``."""
        length = self.steps_per_cycle
        each = [k / length >= self.exploration for k in range(length)]
        return steps // length * sum(each) + sum(each[: steps % length])

    @property
    def cycle(self) -> int:
        """The cycle of the sampler's last step, counted from 0."""
        return self.last_epoch // self.steps_per_cycle

    def _factor(self) -> float:
        return (math.cos(math.pi * self.place) + 1) / 2


class PolynomialDecay(_Schedule):
    r"""Step sizes that decrease polynomially (Welling and Teh 2011).

    In step t, counted from 0, and with the ``initial_lr`` of each param group, see
    :class:`CyclicalSchedule`,

    .. math::
        \mathrm{lr}_t = \mathrm{lr}_0 \left( 1 + \frac{t}{b} \right)^{-\gamma},

    which is the paper's :math:`\epsilon_t = a (b + t)^{-\gamma}` with :math:`a =
    \epsilon_0 b^\gamma`. With 1/2 < γ <= 1 the sum of steps is infinite and the sum of
    their squares is finite: averages over draws weighted with their steps converge to
    posterior averages,

    .. math:: E f \approx \frac{\sum_t \mathrm{lr}_t f(\theta_t)}{\sum_t \mathrm{lr}_t}.

    The schedule is a :class:`torch.optim.lr_scheduler.LRScheduler`: call :meth:`step`
    once after each step of the sampler, and weight a draw with :attr:`weight` before
    it.

    Args:
        sampler: a gradient-only sampler, such as SGLD and SGHMC, not capturable.
        b: > 0, the number of steps after which lr has fallen by the factor 2^-γ.
        gamma: γ in (1/2, 1]. Default: 0.55.

    Example:
        >>> schedule = sg.PolynomialDecay(sampler, b=1000)
        >>> for x, y in batches:
        ...     sampler.zero_grad()
        ...     F.cross_entropy(model(x), y).backward()
        ...     sampler.step()
        ...     predictive.update(weight=schedule.weight)
        ...     schedule.step()

    Reference:
        M. Welling and Y. W. Teh, Bayesian Learning via Stochastic Gradient Langevin
        Dynamics, ICML 2011, eq. 2 and section 4.
    """

    _KEYS = ("b", "gamma")

    def __init__(self, sampler: Sampler, b: float, *, gamma: float = 0.55) -> None:
        self.b = check_real("b", b, low_open=True)
        self.gamma = check_real("gamma", gamma)
        if not 0.5 < self.gamma <= 1:
            raise ValueError(f"Invalid gamma: {gamma} (must be in (0.5, 1])")
        super().__init__(sampler)

    @property
    def weight(self) -> float:
        """The lr of the sampler's last step, of the first param group.

        The lr of other groups is in constant proportion to it.
        """
        return float(self.optimizer.param_groups[0]["lr"])

    def _factor(self) -> float:
        step = max(self.last_epoch, 0)  # -1 before its turn in a SequentialLR
        return float((1 + step / self.b) ** -self.gamma)


class GammaPrecision:
    r"""A Gamma hyperprior on the prior precision of every param group, or of some.

    Used like a learning-rate scheduler: each :meth:`step` draws each group's
    ``prior_precision`` λ from its full conditional given the group's d sampled
    parameters θ (that require a gradient). With
    λ ~ Gamma(shape a, rate b) and θ | λ ~ N(μ, I/λ),

    .. math::
        \lambda | \theta \sim
            \mathrm{Gamma}\bigl(a + \tfrac{d}{2},\;
            b + \tfrac12 \|\theta - \mu\|^2\bigr).

    At temperature T the joint density is raised to the power 1/T, which gives Gamma((a
    + d/2 - 1)/T + 1, (b + ‖θ - μ‖²/2)/T). For a precision per layer, put each layer in
    its own param group.

    Args:
        sampler: the sampler whose param groups are updated.
        shape: a > 0. Default: 1.
        rate: b > 0. Default: 1.
        groups: positions of the param groups with this hyperprior; others keep their
            ``prior_precision``. None is all. Default: None.

    Draws are keyed by the sampler's seed and a counter, ``num_updates``. A chain
    restored through both ``state_dict`` s is bitwise identical.

    The path of :class:`SBPS` follows the posterior at times that do not depend on it,
    as refreshments are; bounces are more frequent where U is steep. Call :meth:`step`
    only where ``num_refreshments`` has grown. :func:`sample` does so.

    Raises:
        ValueError: shape, rate or groups out of range, a sampler of several chains, or,
            in :meth:`step`, T = 0 or a shape too small for T < 1.
        RuntimeError: in :meth:`step`, a parameter is not finite. No group has changed.

    Example:
        >>> groups = [{"params": layer.parameters()} for layer in layers]
        >>> sampler = SGHMC(groups, lr=0.03, momentum=0.9, num_data=50_000,
        ...                 prior_precision=1.0)
        >>> precision = GammaPrecision(sampler)
        >>> for epoch in range(epochs):
        ...     train_one_epoch(model, sampler)
        ...     precision.step()

    Reference:
        T. Chen, E. B. Fox and C. Guestrin, Stochastic Gradient Hamiltonian Monte
        Carlo, ICML 2014, section 4.2.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        shape: float = 1.0,
        rate: float = 1.0,
        groups: Iterable[int] | None = None,
    ) -> None:
        check_sampler(sampler)
        if sampler.param_groups[0].get("num_chains") is not None:
            raise ValueError(
                "Invalid sampler: it has num_chains, and a group's prior_precision "
                "would be drawn for all of them (use a sampler for each chain)"
            )
        self.sampler = sampler
        self.shape = check_real("shape", shape, low_open=True)
        self.rate = check_real("rate", rate, low_open=True)
        self.num_updates = 0
        #: Positions of the groups with the hyperprior; None is all.
        self.groups = None if groups is None else [*groups]
        every, chosen = [*range(len(sampler.param_groups))], self._chosen
        if not chosen or len({*chosen} & {*every}) < len(chosen):
            raise ValueError(
                f"Invalid groups: {chosen} (must be some of {every}, each once)"
            )

    @property
    def _chosen(self) -> list[int]:
        every = range(len(self.sampler.param_groups))  # groups may have been added
        return [*every] if self.groups is None else self.groups

    def step(self) -> list[float]:
        """Draws each group's ``prior_precision`` and returns the new values."""
        restore_given(context_of(self.sampler))
        groups = {i: self.sampler.param_groups[i] for i in self._chosen}
        for group in groups.values():
            check_real("temperature", group["temperature"], low_open=True)
        precisions = [self._draw(group, index) for index, group in groups.items()]
        for group, precision in zip(groups.values(), precisions, strict=True):
            group["prior_precision"] = precision
        self.num_updates += 1
        return precisions

    def _draw(self, group: dict[str, Any], index: int) -> float:
        t = group["temperature"]
        params = [p for p in group["params"] if p.requires_grad]
        dimension = sum(p.numel() for p in params)
        # Parameters by device and the ranks that share them.
        together: dict[Any, list[Tensor]] = {}
        for p in params:
            away = local(away_from_mean(self.sampler.state, group, p))
            together.setdefault((p.device, dtensor.groups_of(p)), []).append(away)
        squares = sum(
            float(dtensor.sum_over_ranks(groups, sum_of_squares(ps)))
            for (_, groups), ps in together.items()
        )
        shape = (self.shape + dimension / 2 - 1) / t + 1
        rate = (self.rate + squares / 2) / t
        if shape <= 0:
            raise ValueError(
                f"Invalid shape: {self.shape:g} (the density of group {index}'s "
                f"prior_precision, with d = {dimension} and temperature {t:g}, has no "
                "finite integral: shape + d / 2 must be > 1 - temperature)"
            )
        if not math.isfinite(rate):
            raise RuntimeError(
                f"Cannot draw prior_precision of group {index}: the sum of squares of "
                f"its parameters is {squares}. No group has changed. Begin again with "
                "a smaller lr"
            )
        unit = _C.gamma(
            shape, seed=self.sampler.seed, step=self.num_updates, element=index
        )
        return unit / rate

    def state_dict(self) -> dict[str, Any]:
        """Returns the counter and the hyperprior; the sampler saves the precisions."""
        chosen = {} if self.groups is None else {"groups": [*self.groups]}
        return {
            "shape": self.shape,
            "rate": self.rate,
            "num_updates": saved_number(self.num_updates),
            **chosen,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned; a ValueError refuses other dicts."""
        check_keys(state_dict, type(self).__name__, "shape", "rate", "num_updates")
        shape = check_real("shape", state_dict["shape"], low_open=True)
        rate = check_real("rate", state_dict["rate"], low_open=True)
        num_updates = check_count("num_updates", state_dict["num_updates"])
        groups = state_dict.get("groups", [*range(len(self.sampler.param_groups))])
        if groups != self._chosen:
            raise ValueError(
                f"Invalid groups: {self._chosen} (the state_dict has {groups})"
            )
        self.shape, self.rate, self.num_updates = shape, rate, num_updates
