"""Step sizes that change while a chain runs, as schedulers of torch."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from torch_sgmcmc._impl.hyperparams import check_integer, check_real
from torch_sgmcmc.samplers.sampler import ManyChains, Sampler
from torch_sgmcmc.samplers.sglrw import SGLRW

__all__ = ["CyclicalSchedule", "PolynomialDecay"]


class _Schedule(LRScheduler):
    """A schedule of the lr by the number of a sampler's steps."""

    def __init__(self, sampler: Sampler) -> None:
        if not isinstance(sampler, ManyChains):
            raise TypeError(
                f"Invalid sampler: got {type(sampler).__name__} (must be one that goes "
                "by gradients alone, as SGLD and SGHMC: of the others the step has no "
                "lr, is adapted or tested, or minibatches are drawn for it)"
            )
        if sampler.defaults["capturable"]:
            raise ValueError(
                "Invalid sampler: with capturable=True a CUDA graph freezes lr and "
                "temperature, and would follow no schedule"
            )
        super().__init__(sampler)

    def _factor(self) -> float:
        """Returns the factor of the first lr for the next step."""
        raise NotImplementedError

    def step(self, epoch: Any = None) -> None:
        """Sets lr for the sampler's next step."""
        self._take_in()
        super().step(epoch)

    def _take_in(self) -> None:
        """Follows param groups that were added since, from the lr that they have."""
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))

    def get_lr(self) -> list[float | Tensor]:
        """The lr of each group; called by :meth:`step`."""
        factor = self._factor()
        return [lr * factor for lr in self.base_lrs]


class CyclicalSchedule(_Schedule):
    r"""Cycles of exploration and sampling (Zhang et al. 2020).

    A cycle of L steps begins with large steps that leave a mode, without noise, and
    ends with small ones that sample the next. In step k, counted from 0,

    .. math::
        r_k = \frac{k \bmod L}{L}, \qquad
        \mathrm{lr}_k = \frac{\mathrm{lr}_0}{2} \left( \cos(\pi r_k) + 1 \right), \qquad
        T_k = \begin{cases} 0, & r_k < \beta \quad \text{(exploration)} \\
            T, & \text{otherwise (sampling),} \end{cases}

    with ``lr`` and ``temperature`` that each param group has when the schedule is made.
    Momenta follow lr and T, and are drawn where sampling begins; other state is kept
    from phase to phase. More: docs/changing_settings.md.

    It is a :class:`torch.optim.lr_scheduler.LRScheduler`: call :meth:`step` once after
    each step of the sampler, and collect draws before it where :attr:`collecting` is
    True. State dicts of sampler and schedule together continue a chain in the middle of
    a cycle to the same bits; make the schedule before they are loaded.

    Args:
        sampler: one that goes by gradients alone, as SGLD and SGHMC, not capturable,
            with T > 0, and with ``noise_estimate=0`` unless β is 0; SGLRW if β is 0.
            Groups that are added later are taken along from the schedule's next step
            on.
        steps_per_cycle: L, >= 2.
        exploration: β in [0, 1), the part of a cycle that explores. Default: 0.8, the
            paper's for CIFAR.

    Raises:
        TypeError, ValueError: an argument is not as above.

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
        Draws of different cycles come from modes in proportion to how often exploration
        ends there, not to their masses: this is an approximation, unless cycles are
        long enough to mix. Gradients are those of the full potential at T = 0 too.

    Reference:
        R. Zhang, C. Li, J. Zhang, C. Chen and A. G. Wilson, Cyclical Stochastic
        Gradient MCMC for Bayesian Deep Learning, ICLR 2020, eq. 1 and algorithm 1.
    """

    def __init__(
        self, sampler: Sampler, steps_per_cycle: int, *, exploration: float = 0.8
    ) -> None:
        self.steps_per_cycle = check_integer("steps_per_cycle", steps_per_cycle, low=2)
        self.exploration = check_real("exploration", exploration, high=1.0)
        self.temperatures: list[float] = []
        if isinstance(sampler, SGLRW) and self.exploration > 0:
            raise ValueError(
                f"Invalid exploration: {exploration} (must be 0 with SGLRW, which has "
                "no temperature of 0 to explore at)"
            )
        super().__init__(sampler)

    def _initial_step(self) -> None:
        # Once the sampler is known to be one, and before its first step is prepared.
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
                    "without noise in each cycle, of which there is nothing to take "
                    "off (must be 0, or exploration must be)"
                )
        super()._take_in()
        self.temperatures += temperatures

    def step(self, epoch: Any = None) -> None:
        """Sets lr and temperature for the sampler's next step."""
        super().step(epoch)
        groups = zip(self.optimizer.param_groups, self.temperatures, strict=True)
        for group, temperature in groups:
            group["temperature"] = temperature if self.collecting else 0.0

    @property
    def place(self) -> float:
        """The position of the sampler's last step in its cycle, r in [0, 1).

        After :meth:`step`, that is how far the next will be.
        """
        return self.last_epoch % self.steps_per_cycle / self.steps_per_cycle

    @property
    def collecting(self) -> bool:
        """True if the sampler's last step was one of a sampling phase."""
        return self.place >= self.exploration

    def count_collecting(self, steps: int) -> int:
        """The number of sampling-phase steps among the first ``steps``."""
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

    In step t, counted from 0, and with the ``lr`` that each param group has when the
    schedule is made,

    .. math::
        \mathrm{lr}_t = \mathrm{lr}_0 \left( 1 + \frac{t}{b} \right)^{-\gamma},

    which is the paper's :math:`\epsilon_t = a (b + t)^{-\gamma}` with
    :math:`a = \epsilon_0 b^\gamma`. With 1/2 < γ <= 1 the sum of steps is infinite and
    that of their squares is not: averages over draws weighted with their steps converge
    to those under the posterior,

    .. math:: E f \approx \frac{\sum_t \mathrm{lr}_t f(\theta_t)}{\sum_t \mathrm{lr}_t}.

    It is a :class:`torch.optim.lr_scheduler.LRScheduler`: call :meth:`step` once after
    each step of the sampler, and weight a draw with :attr:`weight` before it.

    Args:
        sampler: one that goes by gradients alone, as SGLD and SGHMC, not capturable.
        b: > 0, the number of steps after which lr has fallen by the factor 2^-γ.
        gamma: γ in (1/2, 1]. Default: 0.55.

    Raises:
        TypeError, ValueError: an argument is not as above.

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

    def __init__(self, sampler: Sampler, b: float, *, gamma: float = 0.55) -> None:
        self.b = check_real("b", b, low_open=True)
        self.gamma = check_real("gamma", gamma)
        if not 0.5 < self.gamma <= 1:
            raise ValueError(f"Invalid gamma: {gamma} (must be in (0.5, 1])")
        super().__init__(sampler)

    @property
    def weight(self) -> float:
        """The lr of the sampler's last step, of the first param group.

        Those of other groups are in constant proportion to it.
        """
        return float(self.base_lrs[0]) * self._factor()

    def _factor(self) -> float:
        return float((1 + self.last_epoch / self.b) ** -self.gamma)
