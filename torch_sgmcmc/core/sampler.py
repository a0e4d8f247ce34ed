"""The base class of all samplers: a torch optimizer with reproducible noise.

Note [Chains with their own seeds]
With ``num_chains=K`` every parameter has a leading dimension of K chains, whose
elements have the same numbers. Chain k draws its noise with the seed ``fold_in(seed,
k)`` (Note [Chains side by side], csrc/launch/plan.h), and is bitwise the chain of a
sampler with that seed and chain k's gradients. A skipped step is skipped for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torch_sgmcmc.core import (
    distributed,
    finite_check,
    groups,
    hyperparams,
    parameters,
    steps,
)
from torch_sgmcmc.core.context import (
    MissingGrads,
    StepContext,
    context_of,
    has_hooks,
    kind_of,
    nonfinite_policy,
)
from torch_sgmcmc.core.hooks import Hooks
from torch_sgmcmc.core.random_state import RandomState
from torch_sgmcmc.core.state import (
    PRIOR_MEAN,
    complete_given,
    draw_from_prior,
    number_or,
    record_estimate,
    restore_given,
)
from torch_sgmcmc.core.state_dict import (
    check_state_dict,
    drop_blank_state,
    finish_loading,
    matched_by_name,
    saved_groups,
    saved_state,
)
from torch_sgmcmc.core.step_plan import StepPlan


class Sampler(Hooks):
    r"""Base class of the samplers: a :class:`torch.optim.Optimizer`.

    A subclass consists of its signature and ``_SPEC``, which reads hyperparameters,
    state and update from tables of C++. It overrides methods of
    :class:`Hooks`, or ``_run_step``, for what no table can express.

    The sampler owns its seed, counters and noise offsets. The param groups show them,
    so that ``state_dict``, pickle and deepcopy carry them. A step raises if a group
    holds another object under these keys. Hyperparameters may be set at any time.

    * ``sampler``: the name of the class; another class refuses the state dict;
    * ``seed``: the noise's key, equal in all groups (an int64 tensor in state dicts);
    * ``format``: the format of its state dicts;
    * ``step``: number of updates made, a 0-dim int64 tensor, the same in all groups and
      in ``state[p]["step"]``; with ``capturable`` on the parameters' device;
    * ``offsets`` and ``sizes``: for each parameter, the index of its first element in
      the noise stream and its number of elements; ``next_offset``, equal in all groups,
      is the first free index (:meth:`reassign_noise_offsets`);
    * ``momentum_settings`` and ``noise_estimate_settings``: the lr, T and N that a
      group's momenta and noise estimate belong to; both are rescaled when these change
      (docs/changing_settings.md);
    * ``nonfinite`` and ``num_skipped`` (as ``step``), equal in all groups.

    **Gradients that are not finite** never reach parameters, state, noise or step
    counter. ``nonfinite="raise"`` raises a RuntimeError that names the parameter. On a
    GPU the error comes at the next step; with ``capturable`` or in ``torch.compile``
    there is no error and the step is skipped. ``"skip"`` skips the step and counts it
    in :attr:`num_skipped`. ``"ignore"`` makes no check. Clipped gradients and skipped
    steps change the target density. More: docs/samplers/sampler.md.

    **Parameters that require a gradient** are sampled. A step skips a parameter whose
    gradient is None, as torch does. A parameter with a gradient in some steps only has
    another target; one warning is issued.

    **The prior** of every sampler is N(μ, 1/λ) on each parameter. ``prior_mean``, of
    the constructor or of a group, is μ: one number, or a tensor for each parameter of
    the group, of its shape. A single parameter can be given its tensor alone; with
    several groups each needs its own tensors. ``prior_mean=model.parameters()``
    localises a chain around the parameters that the model has when the sampler is made
    (with :func:`sample`, before ``start`` and ``optimizer``). Tensors are copied in the
    type of the arithmetic and become state, ``state[p]["prior_mean"]``, which overrides
    the number ``group["prior_mean"]``.

    Args:
        params: parameters, param groups, or named parameters, as for every torch
            optimizer: dense, on CPU or CUDA, in float32, float64, bfloat16 or float16,
            no two in the same memory. Gradient-only samplers and HMC also take
            DTensors, as made by ``fully_shard``.
        defaults: hyperparameters of groups that do not set their own.
        seed: any 64-bit int. None draws one from torch's default generator; ranks of
            ``process_group`` derive theirs from its first rank's.
        nonfinite: "raise", "skip" or "ignore", see above. Default: "raise".
        capturable: keep the step counter in device memory, see :class:`SGLD`. Excludes
            an ``lr`` that is a Tensor.
        process_group: the ranks that sample this chain together, if other ranks sample
            other chains: ``mesh.get_group("replica")``. Neither saved nor copied.
            Default: all ranks.

    Raises:
        ValueError, TypeError: a hyperparameter is invalid, here or at a later step, or
            a parameter cannot be sampled.

    Several processes:
        Without a seed, the constructor is a collective call of ``process_group`` where
        the default process group of ``torch.distributed`` is initialised (and the first
        step, if it is initialised later). A given seed is respected: give replicas the
        same seed, and different chains or samplers of one process different ones (see
        :func:`fold_in`). The ranks of DTensors need one seed, so there the constructor
        is always a collective call. More: docs/distributed.md.
    """

    state: defaultdict[Any, Any]  # also by a name: common_state

    #: The ranks that sample this chain together; None is all. Not saved.
    process_group: ProcessGroup | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = hyperparams.documented(cls.__doc__)
        if "__init__" in cls.__dict__:
            cls.__init__ = hyperparams.with_known_arguments(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        seed: int | None,
        nonfinite: str = "raise",
        capturable: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        hyperparams.check_capturable(capturable)
        distributed.check_group(process_group)
        self.process_group = process_group
        spec = self._SPEC
        hyperparams.check_choice(nonfinite, spec.nonfinite)
        more = {"capturable": capturable, "nonfinite": nonfinite}
        defaults = hyperparams.plain({**defaults, **more})
        defaults[PRIOR_MEAN], self._first_means = number_or(defaults[PRIOR_MEAN])
        self._check_group(defaults)
        # Recorded now: torch adds keys to ``defaults`` later.
        self._group_keys = frozenset((*defaults, *spec.managed))
        if distributed.is_zero():
            distributed.refuse_zero(type(self).__name__)
        rng = RandomState(kind_of(self), spec.progress, spec.records)
        rng.seed = hyperparams.draw_seed(seed)
        self._context = StepContext(type(self).__name__, self._group_keys, rng, spec)
        self._is_complete = False
        super().__init__(params, defaults)
        del self._is_complete
        if self._first_means is None:
            del self._first_means
        else:  # later groups give their own
            self._first_means = []
        context = context_of(self)
        parameters.check_memory(context)
        self._check_ranks()
        context.seed_is_drawn = seed is None
        distributed.settle(context)
        groups.fill_state_early(self)

    def __getstate__(self) -> dict[str, Any]:
        finite_check.read_pending(context := context_of(self))
        context.rng.check(context.name, context.groups)
        restore_given(context)
        self._note_changes()
        context.clear_blank_state()  # a copy could not recognise it
        state = {**super().__getstate__(), "_group_keys": self._group_keys}
        if self._first_means is not None:
            state["_first_means"] = []
        kept = ((p, dict(each)) for p, each in self.state.items())
        state["state"] = defaultdict(dict, kept)
        state["param_groups"] = [*map(dict, self.param_groups)]
        groups.fill_state_early(self)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("process_group", None)
        is_copied = not hasattr(self, "_context")  # else it loads a state dict
        if is_copied:
            spec, name = self._SPEC, type(self).__name__
            rng = RandomState.of(self.param_groups, spec.progress, spec.records)
            self._context = StepContext(name, self._group_keys, rng, spec)
        context = context_of(self)
        context.keep_created()
        context.missing_grads = MissingGrads(context.groups)
        groups.find_placement(context)
        if is_copied:
            groups.show_values(context)
            groups.fill_state_early(self)

    @property
    def seed(self) -> int:
        """The seed that keys all noise of this sampler."""
        return self._context.rng.seed

    @property
    def num_skipped(self) -> int:
        """The number of steps skipped because gradients were not finite."""
        finite_check.read_pending(context_of(self))
        return int(self._context.rng.num_skipped)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, whose noise offsets follow the existing ones.

        Args:
            param_group: ``{"params": ..., hyperparameters ...}``; missing
                hyperparameters are taken from the defaults.

        Raises:
            ValueError: a hyperparameter is unknown or out of range, or a parameter
                cannot be sampled (see the class). Nothing has been added.
        """
        self._context.refuse_monitor("param group")
        new = groups.NewGroup(self, param_group)
        super().add_param_group(new.given)
        new.complete()
        self._parameters_changed()
        groups.show_values(context_of(self))
        record_estimate(context_of(self), self.param_groups[-1:])
        if self._is_complete:
            groups.fill_state_early(self)

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
        context = context_of(self)
        context.refuse_monitor("parameters")
        context.rng.check(context.name, context.groups)
        if parameters.reassign_noise_offsets(context):
            groups.find_placement(context)
            self._parameters_changed()
            groups.show_values(context)

    def state_dict(self) -> dict[str, Any]:
        """Returns the param groups, with seed and step, and the parameters' state.

        The result is a snapshot: later steps do not change it. (A state dict of torch's
        optimizers shares its tensors with the optimizer.)
        """
        finite_check.read_pending(context := context_of(self))
        context.rng.reorder(context.groups)
        restore_given(context)
        self._note_changes()
        state_dict = super().state_dict()
        return {
            **state_dict,
            "state": saved_state(context, state_dict["state"]),
            "param_groups": saved_groups(context, state_dict["param_groups"]),
        }

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
            loading.update(matched_by_name(context_of(self), given))
            self._check_state_dict(loading)
            return loading

        def finish(_: Optimizer) -> None:
            complete_given(self.param_groups, self.state, present["state"])
            self._finish_loading(loading)
            self._context.rng.load(self.param_groups)
            groups.show_values(context_of(self))

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
        groups.fill_state_early(self)
        self._context.missing_grads = MissingGrads(self.param_groups)

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises unless the state dict fits this sampler and its parameters."""
        check_state_dict(self, state_dict)
        num_chains = state_dict["param_groups"][0].get("num_chains")
        for p in context_of(self).params:
            parameters.check_chains(p, num_chains)

    def _finish_loading(self, state_dict: dict[str, Any]) -> None:
        """Completes torch's loading of a checked state dict."""
        finish_loading(context_of(self), state_dict)
        if int(state_dict["param_groups"][0]["step"]) == 0:
            drop_blank_state(context_of(self), partial(groups.blank_state, self))

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps :meth:`step` for hooks and profilers, at no cost without them.

        torch's wrapper opens a profiler record at every call, which takes longer than a
        step of a small network.
        """
        observed = Optimizer.profile_hook_step(func)

        def traced(self: Sampler, *args: Any, **kwargs: Any) -> Any:
            if has_hooks(self):
                return observed(self, *args, **kwargs)
            context = self._context
            is_whole = not context.placement.is_sharded
            if self.defaults["capturable"] and is_whole and not context.blank:
                return func(self, *args, **kwargs)
            # The host reads the step counter, or replaces blank state: torch.compile
            # can trace neither.
            return torch.compiler.disable(func)(self, *args, **kwargs)

        @wraps(func)
        def wrapper(self: Sampler, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return traced(self, *args, **kwargs)
            try:
                if has_hooks(self) or _profiler_enabled():
                    return observed(self, *args, **kwargs)
                return func(self, *args, **kwargs)
            finally:
                torch.clear_autocast_cache()  # Note [Autocast around a loop]

        return wrapper

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, without torch's record for profilers.

        The record takes half the time of a step of a small network.
        """
        if set_to_none and not torch.compiler.is_compiling():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            super().zero_grad(set_to_none)

    def step(self, closure: Callable[..., Any] | None = None) -> Any:
        """Makes one update of all parameters that have a gradient.

        Inside ``torch.compile`` a ``capturable`` sampler is traced; any other causes a
        graph break. So does a first step with prior means or a preconditioner.

        Args:
            closure: computes the loss, calls ``backward()`` and returns the loss.
                Called once, before the update.

        Returns:
            The closure's result, or None.

        Raises:
            ValueError: a hyperparameter is out of range, for example through a
                scheduler. No parameter has changed.
            RuntimeError: a gradient is sparse, does not fit its parameter, or is not
                finite (see :class:`Sampler`; on a GPU the last step's). No parameter
                has changed.
        """
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return steps.trace_step(self, self._evaluate(closure))
        # Does the work of no_grad() in a third of its time. An interrupt inside of any
        # no_grad() may leave autograd switched off.
        enabled, had_blank_state = torch.is_grad_enabled(), bool(self._context.blank)
        try:
            torch._C._set_grad_enabled(False)
            result = self._run_step(closure)
        finally:
            torch._C._set_grad_enabled(enabled)
            if had_blank_state:  # the step has failed or was skipped
                groups.fill_state(self)
        if self._context.missing_grads.any:
            self._context.missing_grads.check(type(self).__name__, self.param_groups)
        return result

    def _run_step(self, closure: Callable[..., Any] | None) -> Any:
        """Makes a step without autograd and returns the closure's result."""
        loss = self._evaluate(closure)
        context, plan = context_of(self), None
        try:
            plan, grads = self._plan(context)
            if plan is not None:
                self._launch(context, plan, grads)
        except BaseException as error:
            steps.settle_created(context, plan)
            if not isinstance(error, finite_check.SkipStep):
                raise
            finite_check.count_skipped_step(context)
        return loss

    def _evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """Raises a GPU's pending error of the last step, then calls the closure."""
        context = context_of(self)
        if context.pending is not None or context.error is not None:
            finite_check.raise_pending_error(context)
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _plan(self, context: StepContext) -> tuple[StepPlan | None, list[Tensor]]:
        """Returns the step's plan (the cached one if valid) and its gradients."""
        # After any error the next step builds a plan.
        plan, context.plan = context.plan, None
        if plan is not None and distributed.holds_seed(context):
            if context.is_settled or distributed.world_size() == 1:
                grads = plan.gradients()
                if grads is not None:
                    if plan.has_same_numbers() or steps.pack_again(self, context, plan):
                        context.plan = plan
                        return plan, grads
        return steps.build_plan(self, context)

    def _launch(
        self, context: StepContext, plan: StepPlan, grads: list[Tensor]
    ) -> None:
        """Makes the updates of a plan and counts the step."""
        try:
            if context.monitor is not None and context.monitor._is_due():
                observed = plan.observed(grads)
                if plan.checks:
                    finite_check.check_finite(context, observed)
                context.monitor._observe(observed)
            is_made = plan.launch(grads)
        except RuntimeError:
            steps.gather_work(self)  # its error names the parameter
            raise
        if not is_made:
            finite_check.raise_nonfinite(context, plan.params, grads)

    def draw_from_prior(self) -> list[str]:
        """Moves the parameters to a draw from N(μ, T / λ), the start of a chain.

        It is in equilibrium in every direction without data (docs/priors.md). At
        temperature 0 T is 1. The noise has its own stream and follows from the seed and
        the number of steps, as a step's noise does.

        Returns:
            The names of parameters without a prior (λ = 0), which stay as they are.
        """
        context = context_of(self)
        context.rng.check(context.name, context.groups)
        restore_given(context)
        kept = draw_from_prior(context)
        context.start = "prior" if context.rng.steps == 0 and not kept else None
        return kept

    def target_summary(self) -> str:
        """Describes the sampled distribution: data scale, prior, temperature."""
        return groups.target_summary(context_of(self))


class SharedSettings(Sampler):
    """A sampler that makes one decision for all param groups, on the host.

    Its spec has ``needs_closure``, and names its counters and shared hyperparameters.
    """

    # GradScaler.step() then marks the sampler, and step() detects the mark.
    _step_supports_amp_scaling = True

    def _begin_step(self) -> None:
        super()._begin_step()
        context = context_of(self)
        nonfinite_policy(context)
        context.clear_blank_state()
        context.link_step()
        context.keep_created()

    def _set(self, **values: Any) -> None:
        progress = {k: v for k, v in values.items() if k in self._SPEC.progress}
        self._context.rng.set_progress(self.param_groups, **progress)
        for group in self.param_groups:
            group.update(values)


def check_sampler(sampler: object) -> None:
    """Raises TypeError unless the object is a sampler of this library."""
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"Invalid sampler: got {type(sampler).__name__} (must be a torch_sgmcmc "
            "sampler)"
        )
