"""What all samplers share: a torch optimizer that keeps track of its noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from torch_sgmcmc.chain import distributed, summary
from torch_sgmcmc.chain.again import Again, can_be_made_again, goes_on, is_plain
from torch_sgmcmc.chain.arguments import documented
from torch_sgmcmc.chain.bookkeeping import Bookkeeping
from torch_sgmcmc.chain.dtypes import has_master
from torch_sgmcmc.chain.gathering import gather
from torch_sgmcmc.chain.given import has_more
from torch_sgmcmc.chain.group_settings import (
    ESTIMATE_SETTINGS,
    is_drawn,
    noise_estimate,
    records_of,
    rests,
    scales,
)
from torch_sgmcmc.chain.method import Method
from torch_sgmcmc.chain.nonfinite import (
    StepLeftOut,
    check_finite,
    choice_of,
    gate_of,
    leave_out,
    raise_what_was_found,
)
from torch_sgmcmc.chain.operators import any_nonfinite
from torch_sgmcmc.chain.param_groups import (
    with_known_arguments,
)
from torch_sgmcmc.chain.record import Chain, Work
from torch_sgmcmc.chain.rescaling import (
    finish_rescaling,
    leaves_momenta,
    note_estimate,
    redraw_momenta,
    rescale_now,
)
from torch_sgmcmc.chain.turns import take_turn

__all__ = ["Sampler", "check_sampler"]


class Sampler(Bookkeeping):
    r"""Base class of the samplers: a :class:`torch.optim.Optimizer`.

    A subclass is its signature and its ``_METHOD``, the operator whose row says what it
    keeps of a parameter and how it updates a list of them; what no row can say it does
    in ``_STATE``, :meth:`_check_group`, :meth:`_prepare` and :meth:`_update`.
    Everything else is here: param groups, seeds and noise offsets, missing gradients,
    closures, state dicts.

    All bookkeeping is shown in the param groups, and so goes through ``state_dict``,
    pickle and deepcopy. It is the sampler's: what is written there by hand, or put back
    with hyperparameters that were saved, is what it was again at the next step.

    * ``sampler``: the name of its class; another class refuses the state dict;
    * ``seed``: the key of the noise, equal in all groups;
    * ``step``: number of updates made, equal in all groups; an int, or with
      ``capturable`` an int64 scalar on the parameters' device;
    * ``offsets`` and ``sizes``: for each parameter, the index of its first element in
      the noise stream, and how many it has; ``next_offset``, equal in all groups,
      where nothing has been numbered yet (:meth:`renumber`);
    * ``momentum_settings`` and ``noise_estimate_settings``: the lr, T and N that a
      group's momenta and its noise estimate belong to; they follow where these change
      (docs/changing_settings.md);
    * ``nonfinite`` and ``num_skipped`` (as ``step``, an int or a scalar), equal in
      all groups.

    In a state dict the seed and all counters are int64 tensors.

    **Gradients that are not finite** reach neither parameters nor state, noise and step
    counter: ``nonfinite="raise"`` raises a RuntimeError that names the parameter (on a
    GPU at the next step; with ``capturable`` or in ``torch.compile`` none, and the step
    is left out), ``"skip"`` leaves the step out and counts it in :attr:`num_skipped`,
    ``"allow"`` does not look. Clipping gradients changes the target density, and so
    does leaving out steps. More: docs/samplers/sampler.md.

    **What is sampled** are the parameters that require a gradient. A parameter without
    one (None) is left out of a step, as torch does; one that has a gradient in some
    steps only has another target, which is heard once.

    **The prior** of every sampler is N(μ, 1/λ) on each parameter. ``prior_mean``, of
    the constructor or of a group, is μ: one number, or tensors, one for each parameter
    of the group and of its shape (one that has but one parameter can be given its
    tensor alone; of several groups each needs its own).
    ``prior_mean=model.parameters()`` localises a chain around where it begins. Tensors
    are copied, in the type of the arithmetic, and are then state,
    ``state[p]["prior_mean"]``, which goes before ``group["prior_mean"]``, a number.

    Args:
        params: parameters, dicts that define param groups, or named parameters,
            as for every torch optimizer: dense, on CPU or CUDA, in float32,
            float64, bfloat16 or float16, and no two in the same memory. Samplers that
            go by gradients alone, and HMC, also take DTensors, as ``fully_shard`` makes
            them.
        defaults: hyperparameters of groups that do not set their own.
        seed: the seed, any 64-bit int; None draws one from torch's default
            generator, so that ``torch.manual_seed`` makes it repeatable; ranks of
            ``process_group`` make theirs of its first rank's.
        nonfinite: "raise", "skip" or "allow", see above. Default: "raise".
        capturable: keep the step counter in device memory, see :class:`SGLD`. Excludes
            an ``lr`` that is a Tensor.
        process_group: the ranks that sample this chain together, if other ranks sample
            other chains: ``mesh.get_group("replica")``. It is not saved and not copied.
            Default: all ranks.

    Several processes:
        Where the default process group of ``torch.distributed`` is initialised, the
        constructor without a seed is a collective call of ``process_group`` (and if the
        default group is initialised later, the first step). A seed that is given is
        respected: give replicas the same, and chains of their own, or samplers of one
        process, different ones (see :func:`fold_in`). With DTensors, whose ranks need
        one seed, the constructor is a collective call in any case. More:
        docs/distributed.md.
    """

    #: The operator that makes its updates, if they are one; ``_STATE`` is then what its
    #: row says, but for a class that says it itself.
    _METHOD: ClassVar[Method | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = documented(cls.__doc__)
        own = cls.__dict__
        if own.get("_METHOD") is not None and "_STATE" not in own:
            cls._STATE = cls._METHOD.state
        state = cls._METHOD.state if cls._METHOD is not None else cls._STATE
        cls._RECORDS = records_of(state, [row.name for row in cls._SETTINGS])
        new = (key for key in cls._RECORDS if key not in cls._MANAGED)
        cls._MANAGED = (*cls._MANAGED, *new)
        if "__init__" in cls.__dict__:
            cls.__init__ = with_known_arguments(cls.__init__)  # type: ignore[method-assign]

    def _construct(self, given: dict[str, Any]) -> None:
        """Calls :class:`Sampler` with the arguments of a constructor, its locals()."""
        Sampler.__init__(
            self,
            given["params"],
            {row.name: given[row.name] for row in self._SETTINGS},
            given["seed"],
            given["nonfinite"],
            given.get("capturable", False),
            process_group=given["process_group"],
        )

    # ---- For subclasses -------------------------------------------------------

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        return {} if self._METHOD is None else self._METHOD.blank_state(p)

    def _prepare(self, chain: Chain, work: Work) -> Any:
        """Initialises state and makes checks that need it, before any update.

        Returns:
            The state that :meth:`_update` will be given.
        """
        if self._METHOD is None:
            return None
        return self._METHOD.prepare(chain, work)

    def _prepare_all(self, chain: Chain, work: list[Work]) -> list[Any]:
        """Calls :meth:`_prepare` for all lists; for what concerns them together."""
        return [self._prepare(chain, lists) for lists in work]

    def _update(self, chain: Chain, work: Work, prepared: Any) -> None:
        """Makes one update of a list."""
        if self._METHOD is None:
            raise NotImplementedError
        self._METHOD.update(chain, work, prepared, **self._instead(work.group))

    def _instead(self, group: dict[str, Any]) -> dict[str, Any]:
        """Numbers that the operator is given in place of the group's."""
        numbers: dict[str, Any] = scales(group)
        if ESTIMATE_SETTINGS in group and not isinstance(group["noise_estimate"], str):
            numbers["noise_estimate"] = noise_estimate(group)
        return numbers

    # ---- The optimizer interface ----------------------------------------------

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps :meth:`step` for hooks and profilers, at no cost without them.

        torch's own wrapper opens a profiler record at every call, which takes
        longer than a step of a small network.
        """
        observed = Optimizer.profile_hook_step(func)
        is_own = func is Sampler.step

        def is_hooked(self: Sampler) -> bool:
            return bool(
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
            )

        def traced(self: Sampler, *args: Any, **kwargs: Any) -> Any:
            if is_hooked(self):
                return observed(self, *args, **kwargs)
            if self.defaults["capturable"] and self._chain.placement.is_whole:
                return func(self, *args, **kwargs)
            # The step counter is a Python int: torch.compile would guard on it and
            # compile every step anew.
            return torch.compiler.disable(func)(self, *args, **kwargs)

        @wraps(func)
        def wrapper(self: Sampler, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return traced(self, *args, **kwargs)
            # An interrupt inside of any no_grad() may leave autograd switched off.
            enabled = torch.is_grad_enabled()
            try:
                watched = is_hooked(self) or _profiler_enabled()
                if is_own and not (watched or args or kwargs):
                    if self._make_again():
                        return None
                if self._before_step():
                    return None
                result = (observed if watched else func)(self, *args, **kwargs)
                if self._chain.absences.any:
                    self._chain.absences.look(type(self).__name__, self.param_groups)
                return result
            finally:
                torch._C._set_grad_enabled(enabled)

        return wrapper

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, as torch's, without its record for profilers.

        That takes as long as half a step of a small network.
        """
        if set_to_none and not torch.compiler.is_compiling():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            super().zero_grad(set_to_none)

    def _before_step(self) -> bool:
        """Checks what is around the sampler.

        Returns:
            Whether this is no step at all, but a checkpoint's call for state to fill.
        """
        chain = self._chain_now()
        if distributed.is_laying_out(chain):
            self._lay_out()
            return True
        chain.ledger.put_back(chain.groups)
        chain.clear_blank_state()
        self._settle()
        take_turn(chain)
        return False

    def _settle(self) -> None:
        """Does what is to be done where there are other ranks, once there are."""
        if not self._chain.is_settled and distributed.has_ranks():
            self._check_ranks()
            self._chain.is_settled = self._agree()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes one update of all parameters that have a gradient.

        Inside ``torch.compile`` it is traced if the sampler is ``capturable``;
        otherwise it runs as it is, with a graph break around it.

        Args:
            closure: computes the loss, calls ``backward()`` and returns the loss.
                Called once, before the update.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a hyperparameter has left its range (through a scheduler,
                say). No parameter has changed.
            RuntimeError: a gradient is sparse, does not fit its parameter, or is not
                finite (see :class:`Sampler`; on a GPU, the last step's). No parameter
                has changed.
        """
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return self._make_step(closure)
        # As no_grad() does, in a third of its time.
        enabled = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return self._make_step(closure)
        finally:
            torch._C._set_grad_enabled(enabled)

    def _make_step(self, closure: Callable[[], Any] | None) -> Any:
        chain = self._chain_now()
        if chain.pending is not None or chain.error is not None:
            raise_what_was_found(chain)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            chain = self._chain_now()  # which may have put other groups or state there

        if self._make_again():
            return loss
        work = self._gather()
        if all(map(rests, chain.groups)):
            return loss
        if self._RECORDS and self.defaults["capturable"]:
            self._rescale_now(chain)
        try:
            check_finite(chain, work, looks_later=self._looks_later)
            redraw_momenta(chain)
            prepared = self._prepare_all(chain, work)
            self._advance(chain, work, prepared)
            if work and self._repeats(work[0].group) and can_be_made_again(chain, work):
                instead = self._instead(work[0].group)
                chain.again = Again(chain, self._METHOD, work[0], prepared[0], instead)
        except StepLeftOut:
            chain.undo_created()
            leave_out(chain)
        except Exception:
            chain.undo_created()
            raise
        return loss

    def _repeats(self, group: dict[str, Any]) -> bool:
        """Whether steps prepare alike, once there is state."""
        cls = type(self)
        return (
            cls._METHOD is not None
            and cls._gather is Sampler._gather
            and cls._prepare is Sampler._prepare
            and cls._prepare_all is Sampler._prepare_all
            and cls._check_ranks is Sampler._check_ranks
            and cls._update is Sampler._update
            and cls._advance is Sampler._advance
        )

    def _make_again(self) -> bool:
        """Makes a step like the last one; False if it is to be a whole one."""
        chain = self._chain_now()
        again, chain.again = chain.again, None
        if again is None or not goes_on(chain):
            return False
        grads = again.gradients(chain.groups, chain.state)
        if grads is None:
            return False
        group = again.work.group
        is_same = again.has_same_numbers()
        if not is_same:
            if distributed.is_laying_out(chain) or not is_plain(group):
                return False
            self._check_all_groups()
            choice_of(chain)
            if not self._repeats(group) or rests(group) or is_drawn(group):
                return False
            if self._RECORDS:
                note_estimate(chain)
        if not is_same or again.rescales:
            again.note(chain, self._instead(group))
        enabled = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            if chain.gauges is not None:
                if group["nonfinite"] != "allow" and any_nonfinite(grads):
                    return False
            if not self._advance_again(chain, again, grads):
                return False  # a whole one says of what
        except RuntimeError:
            if chain.gauges is not None:
                raise
            return False  # a whole one says whose
        finally:
            torch._C._set_grad_enabled(enabled)
        return True

    def _advance_again(self, chain: Chain, again: Again, grads: list[Tensor]) -> bool:
        """As :meth:`_advance`; False, and nothing has changed, if it cannot be."""
        if chain.gauges is not None:
            chain.gauges._observe([again.work._replace(grads=grads)])
        if not again.update(grads):
            return False
        if not again.is_recorded:
            finish_rescaling(chain, [again.work])
            again.is_recorded = True
        chain.placement.have_changed(again.work.params)
        chain.again = again
        return True

    def _looks_later(self, work: list[Work]) -> bool:
        """Whether the host waits until the next step to see what was found."""
        if torch.compiler.is_compiling():
            return True
        device = work[0].params[0].device
        if device.type != "cuda":
            return False
        if torch.cuda.is_current_stream_capturing():
            return True
        if self._RECORDS and leaves_momenta(self._chain, work):
            return False
        return all(
            lists.params[0].device == device and all(map(self._has_begun, lists.params))
            for lists in work
        )

    def _has_begun(self, p: Tensor) -> bool:
        """Whether a parameter has the state that its first step creates."""
        method = self._METHOD
        if method is not None and not method.keeps_state and not has_master(p):
            return True
        return has_more(self.state.get(p, {}))

    def _gather(self, *, checked: bool = False) -> list[Work]:
        """Checks gradients, and groups if need be, and lists what is to be updated."""
        if not checked:
            self._check_all_groups()
        if self._RECORDS:
            note_estimate(self._chain_now())
        return gather(self._chain_now())

    def _advance(self, chain: Chain, work: list[Work], prepared: list[Any]) -> None:
        """Makes the update of everything listed and counts the step."""
        if chain.gauges is not None:
            chain.gauges._observe(work)
        gate = gate_of(chain, work)
        for lists, state in zip(work, prepared, strict=True):
            if gate is not None:
                lists = lists._replace(group={**lists.group, "step": gate})
            self._update(chain, lists, state)
            chain.placement.have_changed(lists.params)
        if self._RECORDS:
            finish_rescaling(chain, work)
        for group, own in chain.ledger.entries:
            if gate is not None and torch.is_tensor(group["step"]):
                group["step"] += gate >= 0
                group["num_skipped"] += gate < 0
            else:
                group["step"] += 1  # in place if it is a tensor
                own["step"] = group["step"]
        if chain.created:
            chain.created.clear()

    def _rescale_now(self, chain: Chain) -> None:
        """Brings the momenta of a capturable sampler to its lr, T and N."""
        redraw_momenta(chain)
        rescale_now(chain)

    # ---- In words -------------------------------------------------------------

    def target_summary(self) -> str:
        """Says which distribution is sampled: data scale, prior, temperature."""
        return summary.target_summary(self._chain_now())


def check_sampler(sampler: object) -> None:
    """Raises unless it is one of this library's."""
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"Invalid sampler: got {type(sampler).__name__} (must be a torch_sgmcmc "
            "sampler)"
        )
