"""Param groups of a sampler: checks, new groups, new parameters, blank state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.core import distributed, parameters
from torch_sgmcmc.core.context import (
    Replicated,
    StepContext,
    blank,
    context_of,
    has_master,
)
from torch_sgmcmc.core.dtensor import Sharded, is_dtensor
from torch_sgmcmc.core.hooks import Hooks
from torch_sgmcmc.core.hyperparams import check_keys, plain
from torch_sgmcmc.core.state import PRIOR_MEAN, copies, given, note_given, number_or


def target_summary(context: StepContext) -> str:
    """Describes data scale, prior and temperature of each group."""
    means = [_mean(context, group) for group in context.groups]
    away = "θ" if set(means) == {"0"} else "θ − μ"
    lines = [
        f"{context.name} samples p(θ) ∝ exp(−U(θ)/T), "
        f"U(θ) = N · (mean loss) + Σ λ‖{away}‖²/2."
    ]
    for i, group in enumerate(context.groups):
        n, t = group["num_data"], group["temperature"]
        precision = group["prior_precision"]
        count = sum(p.numel() for p in group["params"] if p.requires_grad)
        data = (
            "the loss is U itself (N = 1)"
            if n == 1
            else f"the loss is a mean over N = {n:,} data"
        )
        prior = (
            "flat prior (λ = 0)"
            if precision == 0
            else f"prior N({means[i]}, {1 / precision:.4g}) on each "
            f"(λ = {precision:.4g})"
        )
        if t == 1:
            tail = "T = 1: the Bayesian posterior"
        elif t == 0:
            tail = "T = 0: no noise, an optimizer and not a sampler"
        else:
            side = "below" if t < 1 else "above"
            tail = f"T = {t:.4g}: {side} the posterior's temperature"
        lines.append(f"Group {i}, {count:,} parameters: {data}; {prior}; {tail}.")
    return "\n".join(lines)


def _mean(context: StepContext, group: dict[str, Any]) -> str:
    if any(PRIOR_MEAN in context.state.get(p, {}) for p in group["params"]):
        return "μ"
    return f"{group[PRIOR_MEAN]:.4g}"


class NewGroup:
    """A user's param group that is being added, and must fit the former ones.

    Raises a ValueError if a hyperparameter is unknown or out of range.
    """

    def __init__(self, sampler: Hooks, given: dict[str, Any]) -> None:
        self.sampler, self.given = sampler, given
        self.means: list[Tensor] | None = None
        self.shared: dict[str, Any] = {}
        context, spec = context_of(sampler), sampler._SPEC
        if context.groups:
            # A state dict may have been loaded.
            context.rng.check(context.name, context.groups)
            first = context.groups[0]
            keys = ("capturable", "nonfinite", *spec.shared)
            self.shared = {key: first[key] for key in keys}
        if not isinstance(given, dict):
            return  # torch has an error for it
        if distributed.is_zero():  # it repeats the constructor's values
            given = {key: v for key, v in given.items() if key not in spec.managed}
        for key in spec.managed:
            if key in given:
                raise ValueError(
                    f"Invalid param group: {key!r} is managed by {context.name} and "
                    "cannot be set for a group"
                )
        given = plain(given)  # torch would write into the caller's
        if PRIOR_MEAN in given:
            given[PRIOR_MEAN], self.means = number_or(given[PRIOR_MEAN])
        else:
            self.means = sampler._first_means
        group = {**sampler.defaults, **self.shared, **given}
        sampler._check_group(group)
        settable = context.keys.difference(spec.managed)
        check_keys(context.name, settable, given, group["num_data"])
        self.given = given

    def complete(self) -> None:
        """Checks the parameters and gives them noise, after torch has added the group.

        Raises:
            ValueError: a parameter cannot be sampled. Nothing has been added.
        """
        sampler, context = self.sampler, context_of(self.sampler)
        place = len(context.groups) - 1
        group = context.groups[place]
        group.update(self.shared)
        try:
            for p in group["params"]:
                parameters.check_parameter(context, p)
            if sampler._is_complete:  # else once for all groups
                parameters.check_memory(context)
            if self.means is not None:
                if self.means is sampler._first_means and place > 0:
                    raise ValueError(
                        "Invalid prior_mean: tensors for a sampler of several param "
                        "groups (give each group its own prior_mean)"
                    )
                kept = copies(self.means, group["params"])
                for p, mean in zip(group["params"], kept, strict=True):
                    context.state[p][PRIOR_MEAN] = mean
        except BaseException:
            del context.groups[place]
            raise
        context.rng.add_group([*map(context.numel, group["params"])])
        context.chains = context.groups[0].get("num_chains")
        context.is_settled = False
        find_placement(context)


def find_placement(context: StepContext) -> None:
    """Records whether parameters are whole, or DTensors are among them."""
    is_sharded = any(map(is_dtensor, context.params))
    context.placement = Sharded() if is_sharded else Replicated()


def show_values(context: StepContext) -> None:
    """Shows the sampler's own values in the groups, and drops the plan."""
    context.plan = None
    params = context.params
    is_on_device = context.groups[0]["capturable"] and params
    context.rng.put_on(params[0].device if is_on_device else torch.device("cpu"))
    context.rng.show(context.groups)
    note_given(context)
    context.lengths = tuple(map(len, context.groups))
    context.chains = context.groups[0].get("num_chains")
    if context.state and context.rng.steps > 0:
        context.link_step()
        context.keep_created()


def blank_state(sampler: Hooks, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """Returns a parameter's blank state with its master."""
    has_one = "master" in sampler._SPEC.state and has_master(p)
    return {**sampler._blank_state(group, p), **blank(p, *["master"] * has_one)}


def fill_state(sampler: Hooks) -> None:
    """Fills a chain's state at its start, for torch's checkpoints.

    torch.distributed.checkpoint makes a step with lr = 0 to create state, unless there
    is some. So samplers that need a closure, and samplers with state from the user, get
    state from the beginning.
    """
    context = context_of(sampler)
    if context.rng.steps > 0:
        return
    context.clear_blank_state()
    for group in context.groups:
        for p in group["params"]:
            if p.requires_grad:
                context.add_blank_state(p, blank_state(sampler, group, p))
    context.link_step()
    context.keep_created()


def fill_state_early(sampler: Hooks) -> None:
    """Fills the state where torch would make no step to create it."""
    context = context_of(sampler)
    if context.spec.needs_closure or any(
        given(state) for p, state in context.state.items() if isinstance(p, Tensor)
    ):
        fill_state(sampler)
