"""A sampler's bookkeeping: param groups, counters, state, and checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torch_sgmcmc.core import distributed, parameters
from torch_sgmcmc.core.context import (
    MissingGrads,
    StepContext,
    blank,
    check_equal,
    context_of,
    has_master,
)
from torch_sgmcmc.core.dtensor import placement_of
from torch_sgmcmc.core.finite_check import read_pending
from torch_sgmcmc.core.hyperparams import (
    check_capturable,
    check_choice,
    check_keys,
    check_later_keys,
    check_meaningful,
    check_noise_scale,
    check_settings,
    draw_seed,
    plain,
)
from torch_sgmcmc.core.random_state import OF_GROUP, STEP, RandomState
from torch_sgmcmc.core.spec import SamplerSpec
from torch_sgmcmc.core.state import (
    PRIOR_MEAN,
    check_records,
    complete_given,
    copied,
    copies,
    given,
    number_or,
    record_estimate,
    restore_given,
)
from torch_sgmcmc.core.state_dict import (
    Expected,
    check_state_dict,
    drop_blank_state,
    finish_loading,
    matched_by_name,
    saved_number,
    saved_numbers,
)


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


class Bookkeeping(Optimizer):
    """The part of :class:`Sampler` that is used between steps."""

    _SPEC: ClassVar[SamplerSpec]
    state: defaultdict[Any, Any]  # also by a name: common_state

    #: Whether the constructor has added all groups.
    _is_complete: bool = True
    #: Lengths of the groups at the last check of their keys.
    _lengths: tuple[int, ...] = ()

    # The constructor's tensors of prior_mean.
    _first_means: list[Tensor] | None = None

    #: The ranks that sample this chain together; None is all. Not saved.
    process_group: ProcessGroup | None = None
    #: Data of this process, not saved.
    _context: StepContext

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        seed: int | None,
        nonfinite: str = "raise",
        capturable: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        check_capturable(capturable)
        distributed.check_group(process_group)
        self.process_group = process_group
        check_choice(nonfinite, self._SPEC.nonfinite)
        defaults = {**defaults, "capturable": capturable, "nonfinite": nonfinite}
        defaults = plain(defaults)
        defaults[PRIOR_MEAN], self._first_means = number_or(defaults[PRIOR_MEAN])
        self._check_group(defaults)
        # Recorded now: torch adds keys to ``defaults`` later.
        self._group_keys = frozenset((*defaults, *self._SPEC.managed))
        if distributed.is_zero():
            distributed.refuse_zero(type(self).__name__)
        rng = RandomState(self._saved_name(), self._SPEC.progress, self._SPEC.records)
        rng.seed = draw_seed(seed)
        self._begin(rng)
        self._is_complete = False
        super().__init__(params, defaults)
        del self._is_complete
        del self._first_means
        self._check_memory()
        self._check_ranks()
        self._context.seed_is_drawn = seed is None
        self._agree()
        self._fill_state_early()

    def _begin(self, rng: RandomState) -> None:
        self._context = StepContext(
            type(self).__name__,
            self._group_keys,
            rng,
            self._SPEC,
        )

    @property
    def _rng(self) -> RandomState:
        return self._context.rng

    def _show(self) -> None:
        """Shows the sampler's own values in the groups, and drops the plan."""
        self._context.plan = None
        params = [p for group in self.param_groups for p in group["params"]]
        is_on_device = self.param_groups[0]["capturable"] and params
        self._rng.put_on(params[0].device if is_on_device else torch.device("cpu"))
        self._rng.show(self.param_groups)
        self._note_given()
        self._lengths = tuple(map(len, self.param_groups))
        if self.state and self._rng.steps > 0:
            context_of(self).link_step()
            self._context.keep_created()

    def _note_given(self) -> None:
        """Records the state that the user has given, in place of what was known."""
        context = context_of(self)
        context.given = {}
        restore_given(context)

    def __getstate__(self) -> dict[str, Any]:
        read_pending(context_of(self))
        self._rng.check(type(self).__name__, self.param_groups)
        context_of(self).clear_blank_state()  # a copy could not recognise it
        state = {**super().__getstate__(), "_group_keys": self._group_keys}
        kept = {p: dict(each) for p, each in self.state.items()}
        state["state"] = defaultdict(dict, kept)
        self._fill_state_early()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("process_group", None)
        groups = self.param_groups
        is_copied = not hasattr(self, "_context")  # else it loads a state dict
        if is_copied:
            progress, records = self._SPEC.progress, self._SPEC.records
            self._begin(RandomState.of(groups, progress, records))
        self._context.keep_created()
        self._context.missing_grads = MissingGrads(groups)
        self._find_placement()
        if is_copied:
            self._show()
            self._fill_state_early()
        context_of(self)

    def _check_group(self, group: dict[str, Any]) -> None:
        if isinstance(group.get("lr"), Tensor):
            group = {**group, "lr": _number_of_lr(group["lr"], group["capturable"])}
        if isinstance(group[PRIOR_MEAN], (Tensor, list, tuple)):
            raise TypeError(
                "Invalid prior_mean: a sampler's group has a number (tensors are given "
                "to the constructor or to add_param_group, and are then "
                'state[p]["prior_mean"], which can be written to)'
            )
        check_settings(self._SPEC.settings, group)
        check_noise_scale(group)

    def _check_progress(self, group: dict[str, Any]) -> None:
        check_records(group, self._SPEC.records)

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        """Raises if a parameter's saved state is invalid."""

    def _check_ranks(self) -> None:
        """Raises if ranks would decide differently."""

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """Returns zeros in place of the state that a parameter's first step creates.

        Checkpoints are read into them; steps never use them. The master is added
        elsewhere.
        """
        return {}

    def _all_blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        masters = ["master"] if "master" in self._SPEC.state and has_master(p) else []
        return {**self._blank_state(group, p), **blank(p, *masters)}

    @property
    def seed(self) -> int:
        """The seed that keys all noise of this sampler."""
        return self._rng.seed

    @property
    def num_skipped(self) -> int:
        """The number of steps skipped because gradients were not finite."""
        read_pending(context_of(self))
        return int(self._rng.num_skipped)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, whose noise offsets follow the existing ones.

        Args:
            param_group: ``{"params": ..., hyperparameters ...}``; missing
                hyperparameters are taken from the defaults.

        Raises:
            ValueError: a hyperparameter is unknown or out of range, or a parameter
                cannot be sampled (see the class). Nothing has been added.
        """
        self._refuse_monitor("param group")
        means: list[Tensor] | None = None
        shared: dict[str, Any] = {}
        if self.param_groups:
            # A state dict may have been loaded.
            self._rng.check(type(self).__name__, self.param_groups)
            first = self.param_groups[0]
            keys = ("capturable", "nonfinite", *self._SPEC.shared)
            shared = {key: first[key] for key in keys}
        if isinstance(param_group, dict):
            if distributed.is_zero():  # it repeats the constructor's values
                param_group = {
                    key: value
                    for key, value in param_group.items()
                    if key not in self._SPEC.managed
                }
            for key in self._SPEC.managed:
                if key in param_group:
                    raise ValueError(
                        f"Invalid param group: {key!r} is managed by "
                        f"{type(self).__name__} and cannot be set for a group"
                    )
            param_group = plain(param_group)  # torch would write into the caller's
            if PRIOR_MEAN in param_group:
                param_group[PRIOR_MEAN], means = number_or(param_group[PRIOR_MEAN])
            else:
                means = self._first_means
            group = {**self.defaults, **shared, **param_group}
            self._check_group(group)
            settable = self._group_keys.difference(self._SPEC.managed)
            check_keys(type(self).__name__, settable, param_group, group["num_data"])
        before = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[before]
        group.update(shared)
        try:
            for p in group["params"]:
                self._check_parameter(p)
            if self._is_complete:  # else once for all groups
                self._check_memory()
            if means is not None:
                if means is self._first_means and before > 0:
                    raise ValueError(
                        "Invalid prior_mean: tensors for a sampler of several param "
                        "groups (give each group its own prior_mean)"
                    )
                kept = copies(means, group["params"])
                for p, mean in zip(group["params"], kept, strict=True):
                    self.state[p][PRIOR_MEAN] = mean
        except BaseException:
            del self.param_groups[before]
            raise
        self._rng.add_group([*map(context_of(self).numel, group["params"])])
        self._context.is_settled = False
        self._find_placement()
        self._show()
        record_estimate(context_of(self))
        if self._is_complete:
            self._fill_state_early()

    def reassign_noise_offsets(self) -> None:
        """Assigns offsets to parameters that have grown, shrunk or been replaced.

        After ``p.data = longer``, or a change of a group's ``params``, :meth:`step`
        raises, since a grown parameter would use its neighbour's noise. This method
        gives each parameter with a new size its own elements in the noise stream,
        behind all that were ever used; other parameters keep theirs. (In a group with
        another number of parameters, all get new ones.) State stays with its parameter;
        state without a parameter is dropped. State dicts hold the offsets, and a
        sampler that is built with parameters of the new sizes loads them.

        Momenta and other state must have the new shape before, as for any optimizer:
        select and add rows of parameters and of ``state[p]`` alike.

        Raises:
            ValueError: a tensor of the state does not have its parameter's shape, a
                parameter cannot be sampled or is listed twice, or a
                :class:`TemperatureMonitor` observes the sampler. Nothing has changed.
        """
        self._refuse_monitor("parameters")
        self._rng.check(type(self).__name__, self.param_groups)
        if parameters.reassign_noise_offsets(context_of(self), self._check_parameter):
            self._find_placement()
            self._parameters_changed()
            self._show()

    def _parameters_changed(self) -> None:
        """Drops cached results of parameters that may have been replaced."""

    def _refuse_monitor(self, what: str) -> None:
        if self._context.monitor is not None:
            raise ValueError(
                f"Invalid {what}: a TemperatureMonitor observes the present groups "
                "(detach() it first, and make a new one)"
            )

    def _find_placement(self) -> None:
        self._context.placement = placement_of(
            p for group in self.param_groups for p in group["params"]
        )

    def _check_memory(self) -> None:
        parameters.check_memory(group["params"] for group in self.param_groups)

    def _check_parameter(self, p: Tensor) -> None:
        parameters.check_parameter(type(self).__name__, p, self._SPEC.takes_shards)
        parameters.check_chains(p, self.param_groups[0].get("num_chains"))

    def _check_all_groups(self) -> None:
        """Raises if a hyperparameter is out of range or misspelt.

        Also raises if a shared one differs between groups, or ranks would decide
        differently.
        """
        self._check_ranks()
        lengths = tuple(map(len, self.param_groups))
        if lengths != self._lengths:
            for group in self.param_groups:
                check_later_keys(type(self).__name__, self._group_keys, group)
            self._lengths = lengths
        for group in self.param_groups:
            check_meaningful(
                type(self).__name__, self._group_keys, group, group["num_data"]
            )
            self._check_group(group)
        check_equal(self.param_groups, self._SPEC.shared, self._SPEC.why_equal)

    def _agree(self) -> bool:
        return distributed.settle(context_of(self))

    def _fill_state(self) -> None:
        """Fills a chain's state at its start, for torch's checkpoints.

        torch.distributed.checkpoint makes a step with lr = 0 to create state, unless
        there is some. So samplers that need a closure, and samplers with state from the
        user, get state from the beginning.
        """
        context = context_of(self)
        if self._rng.steps > 0:
            return
        context.clear_blank_state()
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    context.add_blank_state(p, self._all_blank_state(group, p))
        context.link_step()
        context.keep_created()

    def _fill_state_early(self) -> None:
        """Fills the state where torch would make no step to create it."""
        if self._SPEC.needs_closure or any(
            given(state) for p, state in self.state.items() if isinstance(p, Tensor)
        ):
            self._fill_state()

    def state_dict(self) -> dict[str, Any]:
        """Returns the param groups, with seed and step, and the parameters' state.

        The result is a snapshot: later steps do not change it. (A state dict of torch's
        optimizers shares its tensors with the optimizer.)
        """
        read_pending(context_of(self))
        restore_given(self._context)
        state_dict = super().state_dict()
        counters = frozenset(self._SPEC.managed).difference(self._SPEC.shared)
        groups = []
        for i, group in enumerate(state_dict["param_groups"]):
            owned = {**self._rng.owned(i), **self._rng.progress}
            owned |= {key: owned[key] or None for key in self._SPEC.records}
            whole = {key: copied(value) for key, value in {**group, **owned}.items()}
            groups.append(saved_numbers(whole, counters))
        step = self._rng.step.clone()
        state = {
            key: self._saved_state(kept, step) if isinstance(key, int) else kept
            for key, kept in state_dict["state"].items()
        }
        return {**state_dict, "state": state, "param_groups": groups}

    @classmethod
    def _saved_name(cls) -> str:
        """Returns the name of the sampler's first class that this library defines."""
        library = __name__.partition(".")[0] + "."
        classes = (c for c in cls.__mro__ if c.__module__.startswith(library))
        return next(classes).__name__

    def _saved_state(self, kept: Any, step: Tensor) -> dict[str, Any]:
        counts = [key for key, kind in self._SPEC.state.items() if kind is int]
        saved = {
            key: saved_number(value) if key in counts else copied(value)
            for key, value in kept.items()
        }
        return {**saved, STEP: step} if STEP in saved else saved

    def _starts_of(self, group: dict[str, Any]) -> Collection[str]:
        """Returns the keys of state that a group's first step creates by its spec."""
        return self._SPEC.operator.starts if self._SPEC.operator else ()

    def _expected(self) -> Expected:
        of_group = *OF_GROUP, *self._SPEC.records
        return Expected(
            spec=self._SPEC,
            equal=[key for key in self._SPEC.managed if key not in of_group],
            starts_of=self._starts_of,
            check_group=self._check_group,
            check_progress=self._check_progress,
            check_saved_state=self._check_saved_state,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; the resumed chain is bitwise identical.

        Args:
            state_dict: the result of :meth:`state_dict`, for the same parameters in the
                same order.

        Raises:
            ValueError: it comes from another kind of optimizer or from other
                parameters, or has a value out of range.
            TypeError: it has a value of a wrong type.

        After any error, also of a hook, nothing has been loaded.
        """
        loading: dict[str, Any] = {}

        def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loading.update(matched_by_name(context_of(self), self._expected(), given))
            self._check_state_dict(loading)
            return loading

        def finish(_: Optimizer) -> None:
            complete_given(self.param_groups, self.state, present["state"])
            self._finish_loading(loading)
            self._rng.load(self.param_groups)
            self._show()

        present, context = {**self.__dict__}, self._context.saved()
        # Makes this check the last pre hook, and finish() the first post hook.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(finish, prepend=True)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.__dict__.update(present)
            self._context.restore(context)
            context_of(self)
            raise
        finally:
            before.remove()
            after.remove()
        first = self.param_groups[0]
        kept = ("capturable", "nonfinite")
        self.defaults.update({key: first[key] for key in kept})
        self._context.pending = self._context.error = None  # of the former chain
        self._context.seed_is_drawn = False
        self._context.blank = []
        self._fill_state_early()
        self._context.missing_grads = MissingGrads(self.param_groups)

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises unless the state dict fits this sampler and its parameters."""
        check_state_dict(context_of(self), self._expected(), state_dict)
        num_chains = state_dict["param_groups"][0].get("num_chains")
        for group in self.param_groups:
            for p in group["params"]:
                parameters.check_chains(p, num_chains)

    def _finish_loading(self, state_dict: dict[str, Any]) -> None:
        """Completes torch's loading of a checked state dict."""
        finish_loading(context_of(self), state_dict)
        if int(state_dict["param_groups"][0]["step"]) == 0:
            drop_blank_state(context_of(self), self._all_blank_state)


def _number_of_lr(lr: Tensor, capturable: bool) -> float | Tensor:
    """Returns the number of a Tensor with one element, other Tensors unchanged."""
    if lr.numel() != 1 or not lr.is_floating_point():
        return lr
    if capturable:
        raise ValueError(
            "Invalid lr: a Tensor is read on the host at every step and excludes "
            "capturable=True"
        )
    return float(lr)
