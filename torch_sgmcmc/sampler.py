"""What all samplers share: a torch optimizer that keeps track of its noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from torch_sgmcmc.core import distributed, numbering, shards
from torch_sgmcmc.core.absence import Absences
from torch_sgmcmc.core.checks import (
    check_capturable,
    check_choice,
    draw_seed,
    number_of_lr,
    plain,
)
from torch_sgmcmc.core.fit import check_fits
from torch_sgmcmc.core.given import complete_given, given, has_more
from torch_sgmcmc.core.master import has_master
from torch_sgmcmc.core.method import Method
from torch_sgmcmc.core.momentum import blank, state_dtype
from torch_sgmcmc.core.nonfinite import (
    Pending,
    Seen,
    StepLeftOut,
    catch_up,
    check_finite,
    gate_of,
    leave_out,
    raise_what_was_found,
)
from torch_sgmcmc.core.operators import HAS_CUDA
from torch_sgmcmc.core.param_groups import (
    check_keys,
    check_later_keys,
    with_known_arguments,
)
from torch_sgmcmc.core.parameters import (
    check_chains,
    check_memory,
    check_parameter,
)
from torch_sgmcmc.core.placement import Placement, placement_of
from torch_sgmcmc.core.prior import (
    PRIOR_MEAN,
    copies,
    number_or,
)
from torch_sgmcmc.core.settings import Setting, check_settings
from torch_sgmcmc.core.state_checks import (
    check_equal,
    check_state_dict,
    in_our_order,
)
from torch_sgmcmc.core.turns import take_turn

__all__ = ["Sampler"]

# A group, its parameters that have a gradient and are on one device, their gradients,
# and their noise offsets.
Work = tuple[dict[str, Any], list[Tensor], list[Tensor], list[int]]

# Counters that are equal in all groups, on the device if ``capturable``.
_COUNTERS = ("step", "num_skipped")
# What a group has of its own.
_OF_GROUP = (numbering.OFFSETS, numbering.SIZES)


class Sampler(Optimizer):
    r"""Base class of the samplers: a :class:`torch.optim.Optimizer`.

    A subclass is its signature and its ``_METHOD``, the operator whose row says what it
    keeps of a parameter and how it updates a list of them; what no row can say it does
    in ``_STATE``, :meth:`_check_group`, :meth:`_prepare` and :meth:`_update`.
    Everything else is here: param groups, seeds and noise offsets, missing gradients,
    closures, state dicts.

    All bookkeeping is shown in the param groups, and so goes through ``state_dict``,
    pickle and deepcopy. It is the sampler's: what is written there by hand, or put back
    with hyperparameters that were saved, is what it was again at the next step.

    * ``seed``: the key of the noise, equal in all groups;
    * ``step``: number of updates made, equal in all groups; an int, or with
      ``capturable`` an int64 scalar on the parameters' device;
    * ``offsets`` and ``sizes``: for each parameter, the index of its first element in
      the noise stream, and how many it has; ``next_offset``, equal in all groups,
      where nothing has been numbered yet (:meth:`renumber`);
    * ``nonfinite`` and ``num_skipped`` (as ``step``, an int or a scalar), equal in
      all groups.

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

    #: Keys that the sampler manages itself; a param group must not set them. But for
    #: offsets and sizes they are equal in all groups.
    _MANAGED: ClassVar[tuple[str, ...]] = (
        *("seed", "step", "offsets", "sizes", "next_offset", "capturable"),
        *("nonfinite", "num_skipped"),
    )
    #: Its hyperparameters.
    _SETTINGS: ClassVar[tuple[Setting, ...]] = ()
    #: Those that must be equal in all groups.
    _SHARED: ClassVar[tuple[str, ...]] = ()
    #: What it counts besides steps, equal in all groups, and what that is at first.
    _PROGRESS: ClassVar[Mapping[str, Any]] = {}
    _WHY_EQUAL: ClassVar[str] = "there is one stream of noise for all"
    #: Values of ``nonfinite`` that it takes.
    _NONFINITE: ClassVar[tuple[str, ...]] = ("raise", "skip", "allow")

    #: Whether ``num_chains`` are numbered as one chain, with a seed each.
    _CHAINS_HAVE_SEEDS: ClassVar[bool] = False

    #: Whether it can be captured in a CUDA graph.
    _CAPTURABLE: ClassVar[bool] = True

    #: What it keeps of a parameter: tensors of the parameter's shape, and counts.
    _STATE: ClassVar[Mapping[str, type]] = {}
    #: What it keeps besides, under string keys.
    _COMMON_STATE: ClassVar[tuple[str, ...]] = ()

    #: Whether it has all the groups that it is made of.
    _is_complete: bool = True
    #: Lengths of the groups when their keys were last looked at.
    _lengths: tuple[int, ...] = ()

    # The tensors of prior_mean that the constructor got.
    _first_means: list[Tensor] | None = None

    # The Gauges that look on.
    _gauges: Any = None

    # What the device was asked in this step, what it has yet to tell of the last one,
    # and the error that this has turned out to be.
    _seen: list[Seen]
    _pending: Pending | None = None
    _error: str | None = None

    # Each group with what is the sampler's own in it: no hyperparameters, that a user
    # may put back.
    _own: list[tuple[dict[str, Any], dict[str, Any]]]
    # Parameters without a gradient, and state that a step has created so far.
    _absences: Absences
    _created: list[tuple[dict[str, Any], str]]

    #: Whether it can sample DTensors.
    _TAKES_SHARDS: ClassVar[bool] = True

    #: Where its parameters are: whole, or DTensors among them.
    _placement: Placement = Placement()
    #: The ranks that sample this chain together; None is all. Not saved.
    process_group: ProcessGroup | None = None
    # What is not saved either, see core/distributed.py.
    _seed_is_drawn = False
    _is_settled = False
    _is_laid_out = False

    #: The operator that makes its updates, if they are one; ``_STATE`` is then what its
    #: row says, but for a class that says it itself.
    _METHOD: ClassVar[Method | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__
        if own.get("_METHOD") is not None and "_STATE" not in own:
            cls._STATE = cls._METHOD.state
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
        check_choice(nonfinite, self._NONFINITE)
        defaults = {**defaults, "capturable": capturable, "nonfinite": nonfinite}
        defaults = plain(defaults)
        defaults[PRIOR_MEAN], self._first_means = number_or(defaults[PRIOR_MEAN])
        self._check_group(defaults)
        defaults["seed"] = draw_seed(seed)
        # Not to be read off ``defaults`` later, where torch puts keys of its own.
        self._group_keys = frozenset((*defaults, *self._MANAGED))
        if distributed.is_zero():
            distributed.refuse_zero(type(self).__name__)
        self._begin()
        self._is_complete = False
        super().__init__(params, defaults)
        del self._is_complete
        del self._first_means
        self._check_memory()
        self._check_ranks()
        self._seed_is_drawn = seed is None
        distributed.settle(self)
        self._note()

    def _begin(self) -> None:
        self._seen, self._own, self._created = [], [], []
        self._absences = Absences()

    def _note(self) -> None:
        """Keeps what is the sampler's own in its groups, as it is now.

        In place: Lightning's wrapper has a copy of ``__dict__``, and calls methods of
        its class with itself.
        """
        keys = ("seed", *_COUNTERS, numbering.NEXT, *_OF_GROUP, *self._PROGRESS)
        self._own[:] = [
            (group, {key: group[key] for key in keys}) for group in self.param_groups
        ]

    def _put_back(self) -> None:
        """Puts it back where users have written over it."""
        groups, own = self.param_groups, self._own
        if len(groups) == len(own):
            for group, (known, values) in zip(groups, own, strict=True):
                if group is not known:
                    break
                group.update(values)
            else:
                return
        kept = {id(group): values for group, values in own}
        # Of a dict that is new, what all groups have alike.
        alike = {k: v for k, v in own[0][1].items() if k not in _OF_GROUP}
        self._own[:] = [(g, kept.get(id(g), alike)) for g in groups]
        for group, values in self._own:
            group.update(values)

    def __getstate__(self) -> dict[str, Any]:
        catch_up(self)
        self._put_back()
        self._clear_blank_state()
        return {**super().__getstate__(), "_group_keys": self._group_keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("process_group", None)
        self._begin()
        self._absences = Absences(self)
        self._look_for_shards()
        self._note()

    # ---- For subclasses -------------------------------------------------------

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises if a hyperparameter of the group is invalid."""
        if isinstance(group.get("lr"), Tensor):
            group = {**group, "lr": number_of_lr(group["lr"], group["capturable"])}
        if isinstance(group[PRIOR_MEAN], (Tensor, list, tuple)):
            raise TypeError(
                "Invalid prior_mean: a sampler's group has a number (tensors are given "
                "to the constructor or to add_param_group, and are then "
                'state[p]["prior_mean"], which can be written to)'
            )
        check_settings(self._SETTINGS, group)

    def _check_progress(self, group: dict[str, Any]) -> None:
        """Raises if what a saved group says of the chain's progress is invalid."""

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        """Raises if what was saved of a parameter, by its parts, is invalid."""

    def _check_ranks(self) -> None:
        """Raises if other ranks would decide otherwise."""

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """State like that which the first step makes of a parameter, but blank.

        Checkpoints are read into it, and it is never used: a sampler without steps
        has no such state. (All but the master, which comes besides.)
        """
        return {} if self._METHOD is None else self._METHOD.blank_state(p)

    def _all_blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        masters = ["master"] if "master" in self._STATE and has_master(p) else []
        return {**self._blank_state(group, p), **blank(p, *masters)}

    def _prepare(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        offsets: list[int],
    ) -> Any:
        """Initialises state and makes checks that need it, before any update.

        Returns:
            The state that :meth:`_update` will be given.
        """
        if self._METHOD is None:
            return None
        return self._METHOD.prepare(self, group, params, offsets)

    def _prepare_all(self, work: list[Work]) -> list[Any]:
        """Calls :meth:`_prepare` for all lists; for what concerns them together."""
        return [self._prepare(*lists) for lists in work]

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        offsets: list[int],
        prepared: Any,
    ) -> None:
        """Makes one update of params, which are on one device."""
        if self._METHOD is None:
            raise NotImplementedError
        self._METHOD.update(self, group, params, grads, offsets, prepared)

    # ---- The optimizer interface ----------------------------------------------

    @property
    def seed(self) -> int:
        """The seed that keys all noise of this sampler."""
        return self.param_groups[0]["seed"]

    @property
    def num_skipped(self) -> int:
        """The number of steps that were left out, their gradients not being finite."""
        catch_up(self)
        return int(self.param_groups[0]["num_skipped"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group; its noise follows that of the existing groups.

        Args:
            param_group: ``{"params": ..., hyperparameters ...}``; what it leaves
                out is taken from the defaults.

        Raises:
            ValueError: a hyperparameter is unknown or out of range, or a parameter
                cannot be sampled (see the class). Nothing is added then.
        """
        self._refuse_gauges("param group")
        means: list[Tensor] | None = None
        shared = dict(self._PROGRESS)
        if self.param_groups:
            # A state dict may have been loaded.
            self._put_back()
            first = self.param_groups[0]
            each = (*_COUNTERS, *_OF_GROUP)
            shared = {key: first[key] for key in self._MANAGED if key not in each}
        if isinstance(param_group, dict):
            if distributed.is_zero():  # which says to groups what the constructor got
                param_group = {
                    key: value
                    for key, value in param_group.items()
                    if key not in self._MANAGED
                }
            for key in self._MANAGED:
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
            settable = self._group_keys.difference(self._MANAGED)
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
        _set_counters(group, self.param_groups[0])
        begin = shared.get(numbering.NEXT, 0)
        end = numbering.number(self, group, begin)
        for each_group in self.param_groups:
            each_group[numbering.NEXT] = end
        self._lengths = tuple(map(len, self.param_groups))
        self._is_settled = False
        self._look_for_shards()
        self._note()

    def renumber(self) -> None:
        """Numbers the noise of parameters that have grown, shrunk or been replaced.

        After ``p.data = longer``, or where a parameter in a group's ``params`` was
        replaced or the list has changed, :meth:`step` refuses to go on: the noise of a
        parameter that grew would be its neighbour's. This gives parameters whose size
        has changed elements of their own in the noise stream, behind all that were ever
        used; the others keep theirs. (In a group with another number of parameters, all
        get new ones.) State stays with its parameter; what belongs to none any more is
        dropped. State dicts hold the numbers, and a sampler that is built with
        parameters of the new sizes loads them.

        Momenta and other state have to be of the new shape before, as for any
        optimizer: rows of parameters and of ``state[p]`` are chosen and added alike.

        Raises:
            ValueError: a tensor of the state has not its parameter's shape, a parameter
                cannot be sampled or is listed twice, or :class:`Gauges` observe the
                sampler. Nothing has changed.
        """
        self._refuse_gauges("parameters")
        self._put_back()
        if numbering.renumber(self):
            self._look_for_shards()
            self._parameters_changed()
            self._note()

    def _parameters_changed(self) -> None:
        """Forgets what was computed of parameters that may be others now."""

    def _refuse_gauges(self, what: str) -> None:
        if self._gauges is not None:
            raise ValueError(
                f"Invalid {what}: Gauges observe the groups that there are "
                "(detach() them first, and make new ones)"
            )

    def _look_for_shards(self) -> None:
        self._placement = placement_of(
            p for group in self.param_groups for p in group["params"]
        )

    def _check_memory(self) -> None:
        check_memory(group["params"] for group in self.param_groups)

    def _check_parameter(self, p: Tensor) -> None:
        """Raises if the sampler cannot sample a parameter."""
        check_parameter(type(self).__name__, p, self._TAKES_SHARDS)
        check_chains(p, self.param_groups[0].get("num_chains"))

    def _numel_of_chain(self, p: Tensor) -> int:
        """The elements that a parameter has in the noise stream."""
        return p.numel()

    def _check_all_groups(self) -> None:
        """Raises if a hyperparameter has left its range, or its name is misspelt.

        Or if one that is shared differs between groups, or other ranks would decide
        otherwise.
        """
        self._check_ranks()
        lengths = tuple(map(len, self.param_groups))
        if lengths != self._lengths:
            for group in self.param_groups:
                check_later_keys(type(self).__name__, self._group_keys, group)
            self._lengths = lengths
        for group in self.param_groups:
            self._check_group(group)
        check_equal(self.param_groups, self._SHARED, self._WHY_EQUAL)

    def _check_sizes(self) -> None:
        """Raises if parameters are not as their noise is numbered."""
        for group in self.param_groups:
            if [p.numel() for p in group["params"]] != group["sizes"]:
                raise numbering.unlike(self, group)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps :meth:`step` for hooks and profilers, at no cost without them.

        torch's own wrapper opens a profiler record at every call, which takes
        longer than a step of a small network.
        """
        observed = Optimizer.profile_hook_step(func)

        @wraps(func)
        def wrapper(self: Sampler, *args: Any, **kwargs: Any) -> Any:
            compiling = torch.compiler.is_compiling()
            if not compiling and self._before_step():
                return None
            hooked = (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
            )
            if compiling and not hooked:
                if self.defaults["capturable"] and self._placement.is_whole:
                    return func(self, *args, **kwargs)
                # The step counter is a Python int: torch.compile would guard on it
                # and compile every step anew.
                return torch.compiler.disable(func)(self, *args, **kwargs)
            if hooked or _profiler_enabled():
                result = observed(self, *args, **kwargs)
            else:
                result = func(self, *args, **kwargs)
            if not compiling and self._absences.any:
                self._absences.look(self)
            return result

        return wrapper

    def _before_step(self) -> bool:
        """Checks what is around the sampler.

        Returns:
            Whether this is no step at all, but a checkpoint's call for state to fill.
        """
        if distributed.is_laying_out(self):
            self._lay_out()
            return True
        self._put_back()
        self._clear_blank_state()
        self._settle()
        take_turn(self)
        return False

    def _settle(self) -> None:
        """Does what is to be done where there are other ranks, once there are."""
        if not self._is_settled:
            self._check_ranks()
            self._is_settled = distributed.settle(self)

    def _lay_out(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self._all_blank_state(group, p) if p.requires_grad else {}
                if state:
                    self.state[p].update(state)
        self._is_laid_out = True

    def _clear_blank_state(self) -> None:
        if self._is_laid_out:
            # Dicts of their own: those laid out may be in a state dict.
            kept = {
                p: known
                for p, state in self.state.items()
                if (known := given(state) if isinstance(p, Tensor) else state)
            }
            self.state.clear()
            self.state.update(kept)
            self._is_laid_out = False

    def state_dict(self) -> dict[str, Any]:
        """The param groups, with seed and step, and the state of the parameters."""
        catch_up(self)
        self._put_back()
        # Where users gave any, torch does not ask for state by a step.
        by_hand = distributed.is_laid_out_by_hand(self)
        if by_hand:
            self._lay_out()
        elif not distributed.called_from(distributed.CHECKPOINT):
            self._clear_blank_state()
        state_dict = super().state_dict()
        if not by_hand:  # else torch looks at it until it has loaded
            self._clear_blank_state()
        return state_dict

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
        torch._C._set_grad_enabled(False)
        try:
            return self._make_step(closure)
        finally:
            torch._C._set_grad_enabled(enabled)

    def _make_step(self, closure: Callable[[], Any] | None) -> Any:
        if self._pending is not None or self._error is not None:
            raise_what_was_found(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        work = self._gather()
        try:
            check_finite(self, work)
            prepared = self._prepare_all(work)
            self._advance(work, prepared)
        except StepLeftOut:
            self._undo_created()
            leave_out(self)
        except Exception:
            self._undo_created()
            raise
        return loss

    def _create(self, p: Tensor, key: str, value: Any) -> None:
        """Puts what is new into a parameter's state, until the step has failed."""
        state = self.state[p]
        state[key] = value
        if not torch.compiler.is_compiling():
            self._created.append((state, key))

    def _undo_created(self) -> None:
        """Takes out of the state what a failed step has put there."""
        for state, key in self._created:
            state.pop(key, None)
        self._created.clear()
        for p, state in [*self.state.items()]:
            if isinstance(p, Tensor) and not state:
                del self.state[p]

    def _looks_later(self, work: list[Work]) -> bool:
        """Whether the host waits until the next step to see what was found."""
        if torch.compiler.is_compiling():
            return True
        device = work[0][1][0].device
        if device.type != "cuda":
            return False
        if torch.cuda.is_current_stream_capturing():
            return True
        return all(
            params[0].device == device and all(map(self._has_begun, params))
            for _, params, _, _ in work
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
        if self._absences.any:
            self._absences.begin()
        work = []
        for group in self.param_groups:
            if isinstance(group.get("lr"), Tensor):
                group = {**group, "lr": float(group["lr"])}
            work.extend(self._collect(group))
        if not work:
            self._absences.nothing_moves()
        if len(work) > 1:
            # An operator changes nothing if its arguments do not fit, but by then
            # another group's operator may have made its update.
            check_fits(self, work)
        return work

    def _advance(self, work: list[Work], prepared: list[Any]) -> None:
        """Makes the update of everything listed and counts the step."""
        if self._gauges is not None:
            self._gauges._observe(work)
        gate = gate_of(self, work)
        for (group, params, grads, offsets), state in zip(work, prepared, strict=True):
            if gate is not None:
                group = {**group, "step": gate}
            self._update(group, params, grads, offsets, state)
            self._placement.have_changed(params)
        for group, own in self._own:
            if gate is not None and torch.is_tensor(group["step"]):
                group["step"] += gate >= 0
                group["num_skipped"] += gate < 0
            else:
                group["step"] += 1  # in place if it is a tensor
                own["step"] = group["step"]
        if self._created:
            self._created.clear()

    def _note_steps(self) -> None:
        """As :meth:`_note`, where only steps can have changed."""
        for group, own in self._own:
            if isinstance(group["step"], int):
                own["step"], own["num_skipped"] = group["step"], group["num_skipped"]

    def _step_arguments(self, group: dict[str, Any]) -> dict[str, Any]:
        """The arguments seed, step and device_step of an operator."""
        step = group["step"]
        if isinstance(step, int):
            return {"seed": group["seed"], "step": step}
        return {"seed": group["seed"], "step": 0, "device_step": step}

    def _collect(self, group: dict[str, Any]) -> list[Work]:
        """The group's parameters that have a gradient, a list for each device."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        offsets: list[int] = []
        sizes = group["sizes"]
        if self._CHAINS_HAVE_SEEDS and group["num_chains"] is not None:
            sizes = [group["num_chains"] * size for size in sizes]
        if len(group["params"]) != len(sizes):
            raise numbering.unlike(self, group)
        strided, on_cpu = torch.strided, True
        name, check_gradient = type(self).__name__, self._placement.check_gradient
        for p, offset, size in zip(
            group["params"], group["offsets"], sizes, strict=True
        ):
            if not p.requires_grad:
                continue
            if p.numel() != size:
                raise numbering.unlike(self, group)
            grad = p.grad
            if grad is None:
                self._absences.add(p)
                continue
            if grad.layout is not strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients: got "
                    f"one of layout {grad.layout} for a parameter of shape "
                    f"{list(p.shape)} (for nn.Embedding, use sparse=False)"
                )
            check_gradient(name, p, grad)
            params.append(p)
            grads.append(grad)
            offsets.append(offset)
            if not p.is_cpu:
                on_cpu = False
        if not params:
            return []
        if on_cpu:
            return [(group, params, grads, offsets)]
        devices = {p.device for p in params}
        if any(device.type == "cuda" for device in devices):
            self._check_cuda(group)
        if len(devices) == 1:
            return [(group, params, grads, offsets)]
        work: dict[torch.device, Any] = {}
        for p, grad, offset in zip(params, grads, offsets, strict=True):
            lists = work.setdefault(p.device, (group, [], [], []))
            lists[1].append(p)
            lists[2].append(grad)
            lists[3].append(offset)
        return list(work.values())

    def _check_cuda(self, group: dict[str, Any]) -> None:
        if not HAS_CUDA:
            raise RuntimeError(
                f"{type(self).__name__} got parameters on a CUDA device, but "
                "torch_sgmcmc was built without CUDA kernels: reinstall it with "
                "TORCH_SGMCMC_CUDA=1"
            )
        # A step counter on the host would be frozen into the graph, and every
        # replay would inject the same noise.
        if not group["capturable"] and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__} cannot be captured in a CUDA graph: construct "
                "it with capturable=True"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; the chain then continues bit for bit.

        Args:
            state_dict: what :meth:`state_dict` returned, for the same parameters
                in the same order.

        Raises:
            ValueError: it comes from another kind of optimizer or from other
                parameters, or has a value out of range.
            TypeError: it has a value of a wrong type.

        Whatever is raised, by a hook too, nothing has been loaded.
        """
        loading: dict[str, Any] = {}

        def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loading.update(in_our_order(self, given))
            self._check_state_dict(loading)
            return loading

        def finish(_: Optimizer) -> None:
            complete_given(self, present["state"])
            self._finish_loading(loading)
            self._note()

        present, own = {**self.__dict__}, [*self._own]  # what says of the state, too
        # So that ours is the last of torch's hooks before, and the first after.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(finish, prepend=True)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.__dict__.update(present)
            self._own[:] = own
            raise
        finally:
            before.remove()
            after.remove()
        self._pending = self._error = None  # of the chain that is left
        first = self.param_groups[0]
        kept = ("seed", "capturable", "nonfinite")
        self.defaults.update({key: first[key] for key in kept})
        self._seed_is_drawn = self._is_laid_out = False
        self._absences = Absences(self)

    def _forget_blank_state(self) -> None:
        """Drops what :meth:`_blank_state` has put into a checkpoint."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                for key in self._all_blank_state(group, p):
                    state.pop(key, None)
                if not state:
                    self.state.pop(p, None)

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises if it is none of this sampler, or of other parameters."""
        check_state_dict(self, state_dict)
        num_chains = state_dict["param_groups"][0].get("num_chains")
        for group in self.param_groups:
            for p in group["params"]:
                check_chains(p, num_chains)

    def _finish_loading(self, state_dict: dict[str, Any]) -> None:
        """Does what torch leaves undone once a checked state dict is loaded."""
        groups = zip(state_dict["param_groups"], self.param_groups, strict=True)
        for theirs, ours in groups:
            for index, p in zip(theirs["params"], ours["params"], strict=True):
                # torch casts to the parameter's dtype, and shares what need not be.
                for key, value in state_dict["state"].get(index, {}).items():
                    if torch.is_tensor(value):
                        self.state[p][key] = shards.like(p, value, key).to(
                            device=p.device, dtype=state_dtype(p), copy=True
                        )
                if not has_master(p):  # the chain was one in lower precision
                    self.state.get(p, {}).pop("master", None)
            _set_counters(ours, ours)
        if int(self.param_groups[0]["step"]) == 0:
            self._forget_blank_state()

    # ---- In words -------------------------------------------------------------

    def target_summary(self) -> str:
        """Says which distribution is sampled: data scale, prior, temperature."""
        means = [self._mean_in_words(group) for group in self.param_groups]
        away = "θ" if set(means) == {"0"} else "θ − μ"
        lines = [
            f"{type(self).__name__} samples p(θ) ∝ exp(−U(θ)/T), "
            f"U(θ) = N · (mean loss) + Σ λ‖{away}‖²/2."
        ]
        for i, group in enumerate(self.param_groups):
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
                heat = "T = 1: the Bayesian posterior"
            elif t == 0:
                heat = "T = 0: no noise, an optimizer and not a sampler"
            else:
                heat = (
                    f"T = {t:.4g}: {'colder' if t < 1 else 'hotter'} than the posterior"
                )
            lines.append(f"Group {i}, {count:,} parameters: {data}; {prior}; {heat}.")
        return "\n".join(lines)

    def _mean_in_words(self, group: dict[str, Any]) -> str:
        if any(PRIOR_MEAN in self.state.get(p, {}) for p in group["params"]):
            return "μ"
        return f"{group[PRIOR_MEAN]:.4g}"


def _set_counters(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Gives a group counters with the values of these, on its device if capturable."""
    for key in _COUNTERS:
        group[key] = count = int(values.get(key, 0))
        if group["capturable"]:
            device = group["params"][0].device if group["params"] else None
            group[key] = torch.tensor(count, device=device)
