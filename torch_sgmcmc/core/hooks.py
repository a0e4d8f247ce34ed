"""Methods by which a sampler says what its tables cannot."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from torch_sgmcmc.core import distributed
from torch_sgmcmc.core.context import StepContext, TensorLists, context_of
from torch_sgmcmc.core.hyperparams import (
    check_noise_scale,
    check_settings,
    noise_estimate,
)
from torch_sgmcmc.core.spec import SamplerSpec
from torch_sgmcmc.core.state import (
    PRECONDITIONER,
    PRIOR_MEAN,
    check_records,
    check_saved_diagonal,
    is_preconditioned,
    preconditioners_of,
    restore_given,
)
from torch_sgmcmc.core.step_plan import Operator


class Hooks(Optimizer):
    """The methods that a sampler overrides, with their defaults from its spec."""

    _SPEC: ClassVar[SamplerSpec]
    #: The operator with preconditioners (preconditioner.py), if there is one.
    _PRECONDITIONED: ClassVar[Operator | None] = None
    #: Data of this process, not saved.
    _context: StepContext
    #: Whether the constructor has added all groups.
    _is_complete: bool = True
    # The constructor's tensors of prior_mean.
    _first_means: list[Tensor] | None = None

    def _begin_step(self) -> None:
        """Checks what the sampler owns, and its ranks and seed, before a step."""
        context = context_of(self)
        context.rng.check(context.name, context.groups)
        restore_given(context)
        if not context.is_settled and distributed.has_ranks():
            self._check_ranks()
            context.is_settled = distributed.settle(context)
        distributed.claim_seed(context)

    def _note_changes(self) -> None:
        """Records changes of the target since the last step, before a copy is made."""

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises if a hyperparameter of a group is invalid."""
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
        """Raises if the counters or records of a saved group are invalid."""
        check_records(group, self._SPEC.records)

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        """Raises if a parameter's saved state is invalid."""
        if self._PRECONDITIONED is not None and PRECONDITIONER in state:
            check_saved_diagonal(PRECONDITIONER, index, state[PRECONDITIONER], p)

    def _check_ranks(self) -> None:
        """Raises if ranks would decide differently."""

    def _parameters_changed(self) -> None:
        """Drops cached results of parameters that may have been replaced."""

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """Returns zeros in place of the state that a parameter's first step creates.

        Checkpoints are read into them; steps never use them. The master is added
        elsewhere.
        """
        operator = self._SPEC.operator
        return {} if operator is None else operator.blank_state(p)

    def _operator_of(self, group: dict[str, Any]) -> Operator:
        """Returns the operator of a group's update."""
        operator = self._SPEC.operator
        if self._is_preconditioned(group):
            operator = self._PRECONDITIONED
        assert operator is not None
        return operator

    def _is_preconditioned(self, group: dict[str, Any]) -> bool:
        """Returns whether the user has given a group's preconditioners."""
        context = self.__dict__.get("_context")
        if self._PRECONDITIONED is None or context is None or not context.given:
            return False
        # A new or loaded group is checked before it is the sampler's.
        is_own = any(group is each for each in self.param_groups)
        return is_own and is_preconditioned(self.state, group)

    def _operator_numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns numbers that replace the group's as arguments of the operator."""
        numbers: dict[str, Any] = {}
        given = group.get("noise_estimate", 0)
        if given and not isinstance(given, str):
            numbers["noise_estimate"] = noise_estimate(group)
        if isinstance(group.get("lr"), Tensor):
            numbers["lr"] = float(group["lr"])
        return numbers

    def _uses_gradients(self, group: dict[str, Any]) -> bool:
        """Returns whether the gradients change a group's state before the update.

        Gradients are then checked first, and each step has its own plan.
        """
        return False

    def _is_adapting(self, group: dict[str, Any]) -> bool:
        """Returns whether the next step may change a group's hyperparameters."""
        return False

    def _record(self) -> Tensor | None:
        """Returns what steps record of each chain, which a compiled block updates."""
        return None

    def _kept_record(self) -> Tensor | None:
        """Returns the record so far; None before the first."""
        return None

    def _keep_record(self, record: Tensor | None) -> None:
        """Continues a record; None begins a new one."""

    def _is_repeated(self, group: dict[str, Any]) -> bool:
        """Returns whether a plan holds for further steps of a group."""
        return not self._uses_gradients(group)

    def _prepare(self, context: StepContext, work: TensorLists) -> Any:
        """Initialises state and makes checks that need it, before any update.

        Returns the state lists that the operator takes, in its row's order.
        """
        lists = self._operator_of(work.group).prepare(context, work)
        if self._is_preconditioned(work.group):
            lists.insert(-1, preconditioners_of(context, work.params))
        return lists

    def _prepare_all(self, context: StepContext, work: list[TensorLists]) -> list[Any]:
        """Calls :meth:`_prepare` for all lists, for checks that concern several."""
        return [self._prepare(context, lists) for lists in work]

    def _handle_no_gradients(self, context: StepContext) -> None:
        """Counts a step in which no parameter has a gradient."""
        context.rng.count()


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
