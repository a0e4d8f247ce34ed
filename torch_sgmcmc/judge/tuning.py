"""Which lr? From short runs of the chain itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch_sgmcmc.chain.checks import check_integer, check_real
from torch_sgmcmc.chain.nonfinite import raise_what_was_found
from torch_sgmcmc.chain.progress import progress_bar
from torch_sgmcmc.chain.record import chain_of, check_groups_of
from torch_sgmcmc.chain.rehearsal import rehearsal
from torch_sgmcmc.chain.shards import refuse
from torch_sgmcmc.judge.search import Search
from torch_sgmcmc.judge.tuned import Tuning, friction_of
from torch_sgmcmc.psgld import PSGLD
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sghmc import SGHMC
from torch_sgmcmc.sgld import SGLD

__all__ = ["tune"]

_INSTEAD = {
    "HMC": "warmup() adapts its lr",
    "HMCECS": "warmup() adapts its lr",
    "SBPS": "it has no lr",
    "SGNHT": "its thermostats take the heat off, which is then no measure of lr",
    "SGLRW": "what heats it is clipping: Gauges read how much clips",
    "EWSG": "it chooses its gradients; Gauges show how they heat",
}
_GAUGES = "how lr heats it is not known here; Gauges show it"


def tune(
    sampler: Sampler,
    closure: Callable[[], Any],
    *,
    budget: float = 0.05,
    gradients: int = 3000,
    over: str = "all",
    room: float = 1e4,
    batch_size: int | None = None,
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

    Call it at a trained or burnt-in point (elsewhere F and T_kin are larger, and lr
    comes out too small), and again after burn-in at its lr: V may have changed.

    **Where no lr will do.** Noise limits lr / α, the speed of the chain. If it is more
    than ``room`` times below the lr that is still stable (50 steps, in which no
    tensor's T_kin exceeds 100 times what noise explains, and V stays and F / V grows
    with lr as in a quadratic), ``feasible`` is False, and ``summary()`` says how much
    larger minibatches must be, and what else there is. More: docs/gauges.md.

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
        batch_size: of the closure's minibatches, for advice in numbers of data. None:
            not known. Default: None.
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
    friction = min(friction_of(group) for group in sampler.param_groups)
    check_integer("gradients", gradients, low=math.ceil(1200 + 12 / friction - 1e-9))
    if batch_size is not None:
        check_integer("batch_size", batch_size, low=1)
    raise_what_was_found(chain_of(sampler))
    bar = progress_bar(range(gradients), "tune", progress)
    try:
        with rehearsal(sampler):
            settings = (budget, gradients, over, batch_size)
            return Search(sampler, closure, *settings, iter(bar)).run(room)
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
        why = next((_INSTEAD[n] for n in names if n in _INSTEAD), _GAUGES)
        raise ValueError(
            f"Invalid sampler: a {type(sampler).__name__} cannot be tuned: {why}"
        )
    if sampler.defaults["capturable"]:
        raise ValueError(
            "Invalid sampler: it is capturable, and gauges are read on the host"
        )
    check_groups_of(sampler)
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
