"""A frozen diagonal preconditioner G: samplers in the coordinates θ / √G.

Note [A frozen preconditioner]
Let G > 0 be a number for each coordinate that never changes. In the coordinates θ / √G
the gradient is √G g, and the momentum of a move of θ by v is v / √G. The same update
there is, in terms of θ and v, that of the sampler with lr G in the place of lr in each
coordinate: G g, noise √G ξ, momenta of variance lr T G / N. A change of coordinates
with a constant Jacobian leaves the law exp(-U / T) as it is.

G is a parameter's state from the user, as a mass is. A parameter without has G = 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_sgmcmc.core.context import StepContext, TensorLists, context_of, state_dtype
from torch_sgmcmc.core.groups import fill_state
from torch_sgmcmc.core.hyperparams import least_root
from torch_sgmcmc.core.ops import sum_of_squares
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.state import (
    PRECONDITIONER,
    check_saved_diagonal,
    diagonals,
    note_given,
    root,
)
from torch_sgmcmc.core.step_plan import Operator

#: The key of V, from which a burn-in's G follows.
_SQUARES = "square_average"


def preconditioners(
    given: Optimizer | Iterable[Tensor | float], params: Sequence[Tensor]
) -> list[Tensor]:
    r"""Returns G of each parameter: new tensors of its shape, in its state's dtype.

    Args:
        given: a :class:`PSGLD` sampler of these parameters, whose :math:`G = 1 /
            (\sqrt V + \epsilon)` is divided by its mean over all elements (of each of
            several chains). Or a tensor or number for each parameter, finite and > 0,
            that broadcasts to the parameter's shape, for a DTensor placed as it.
        params: all parameters of a sampler, in the order of its groups.

    Raises:
        TypeError: ``given`` is something else.
        ValueError: the burn-in lacks V of a parameter that requires a gradient, or has
            DTensors; the number of tensors is wrong; or one of them has a wrong shape
            or elements out of range.
    """
    if isinstance(given, Tensor):
        given = [given]
    elif isinstance(given, Sampler):
        operator = given._SPEC.operator
        if operator is not None and _SQUARES in operator.state:
            given = _of_burn_in(given, params)
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(
            f"Invalid {PRECONDITIONER}: got {type(given).__name__} (must be a PSGLD "
            "sampler of the same parameters, or a tensor for each of them)"
        )
    return diagonals(PRECONDITIONER, given, params)


def _of_burn_in(given: Optimizer, params: Sequence[Tensor]) -> list[Tensor]:
    context = context_of(given)
    context.placement.refuse(
        f"Invalid {PRECONDITIONER}: a burn-in of DTensors, and G is divided by its "
        "mean over whole parameters (give a tensor for each)"
    )
    eps = {p: least_root(g) for g in context.groups for p in g["params"]}
    roots: dict[int, Tensor] = {}
    for i, p in enumerate(params):
        squares = context.state.get(p, {}).get(_SQUARES)
        if p in eps and squares is not None and context.rng.steps > 0:
            # These operations round alike on every processor.
            own = root(context, root(context, squares).add_(eps[p]))
            roots[i] = own.reciprocal_()
        elif p in eps and not p.requires_grad:
            continue
        else:
            lacks = f"{_SQUARES} of" if p in eps else "the"
            raise ValueError(
                f"Invalid {PRECONDITIONER}: the {context.name} sampler lacks {lacks} "
                f"parameter {i} (must have made steps with gradients of the same "
                "parameters)"
            )
    _divide_by_mean([*roots.values()], context.num_chains)
    return [
        roots[i] if i in roots else torch.ones_like(p) for i, p in enumerate(params)
    ]


def _divide_by_mean(roots: list[Tensor], num_chains: int | None) -> None:
    """Replaces √G by G over its mean, for each chain; all processors round alike."""
    chains = [roots] if num_chains is None else zip(*roots, strict=True)
    for parts in chains:
        total = 0.0
        for part in parts:  # sum() does not round alike in all versions
            total += float(sum_of_squares([part]))
        numel = sum(part.numel() for part in parts)
        for part in parts if numel else ():
            part.square_().mul_(numel / total)


def is_preconditioned(state: Mapping[Any, Any], group: Mapping[str, Any]) -> bool:
    """Returns whether a parameter of a sampler's group has a preconditioner."""
    return any(PRECONDITIONER in state.get(p, ()) for p in group["params"])


def with_relaxation(
    state: Mapping[Any, Any], group: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns a group for ``relaxation``: with G it lacks the momentum.

    Each element relaxes by its own lr G, and the result is NaN.
    """
    if not is_preconditioned(state, group):
        return group
    return {key: value for key, value in group.items() if key != "momentum"}


def root_preconditioners(
    context: StepContext, params: Sequence[Tensor]
) -> list[Tensor] | None:
    """Returns √G of parameters, None if the first has none."""
    states = [context.state.get(p, {}) for p in params]
    if PRECONDITIONER not in states[0]:  # a step has filled all of a group
        return None
    return [root(context, state[PRECONDITIONER]) for state in states]


class PreconditionedSampler(Sampler):
    """A sampler that takes a frozen preconditioner; see the Note above."""

    #: The operator of the update with G, whose lists are momenta, G and masters.
    _PRECONDITIONED: ClassVar[Operator]

    def _precondition(self, given: Optimizer | Iterable[Tensor | float] | None) -> None:
        """Sets G, at the end of the constructor."""
        if given is None:
            return
        context = context_of(self)
        new = preconditioners(given, context.params)
        context.clear_blank_state()
        for p, g in zip(context.params, new, strict=True):
            self.state[p][PRECONDITIONER] = g
        note_given(context)
        for group in self.param_groups:
            self._check_group(group)
        fill_state(self)

    def _is_preconditioned(self, group: Mapping[str, Any]) -> bool:
        context = self.__dict__.get("_context")
        if context is None or not context.given:
            return False
        # A new or loaded group is checked before it is the sampler's.
        is_own = any(group is each for each in self.param_groups)
        return is_own and is_preconditioned(self.state, group)

    def _operator_of(self, group: dict[str, Any]) -> Operator:
        if self._is_preconditioned(group):
            return self._PRECONDITIONED
        return super()._operator_of(group)

    def _preconditioners(self, context: StepContext, work: TensorLists) -> list[Tensor]:
        """Returns G of a group's parameters, 1 where one lacks it; else nothing."""
        if not self._is_preconditioned(work.group):
            return []
        for p in work.params:
            if PRECONDITIONER not in context.state[p]:
                ones = torch.ones_like(p, dtype=state_dtype(p))
                context.create(p, PRECONDITIONER, ones)
        return [context.state[p][PRECONDITIONER] for p in work.params]

    def _prepare(self, context: StepContext, work: TensorLists) -> Any:
        own = self._preconditioners(context, work)
        lists = super()._prepare(context, work)
        return [lists[0], own, lists[1]] if own else lists

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        if PRECONDITIONER in state:
            check_saved_diagonal(PRECONDITIONER, index, state[PRECONDITIONER], p)
