"""Exponentially weighted stochastic gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.context import StepContext, TensorLists, blank, context_of
from torch_sgmcmc.core.finite_check import SkipStep, check_finite, count_skipped_step
from torch_sgmcmc.core.hyperparams import rests, scales, settings, warn
from torch_sgmcmc.core.ops import ewsg_log_ratio, metropolis_decide, select_chains_
from torch_sgmcmc.core.parameters import (
    OTHER_PARAMETERS,
    check_comparable,
    fresh_gradients,
    lightning_module,
    refuse_accumulation,
    refuse_scaler,
)
from torch_sgmcmc.core.sampler import SharedSettings
from torch_sgmcmc.core.spec import Motion, SamplerSpec, Takes, Traits
from torch_sgmcmc.core.state import prior_of, rescalings, start_masters, start_momenta
from torch_sgmcmc.core.state_dict import check_count, check_part
from torch_sgmcmc.core.step_plan import Operator, StepPlan
from torch_sgmcmc.core.steps import check_groups, gather, gather_work, settle_created
from torch_sgmcmc.core.utils import Interrupts

_SURROGATES = next(s.words for s in settings("EWSG") if s.name == "surrogate")

_MANUAL = (
    "set self.automatic_optimization = False, and in training_step call "
    "self.optimizers().step(closure) with a closure that draws a minibatch and calls "
    "self.manual_backward(loss)"
)

_NO_CLOSURE = """\
EWSG.step() needs a closure, since it draws several minibatches a step:

    def closure():
        x, y = draw_minibatch()  # a fresh one at each call, uniform
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    sampler.step(closure)"""

_NOT_ASKED = (
    "EWSG got gradients from a closure that did not read sampler.minibatches: with "
    "persistent_index_chain=True a step begins with the minibatch that the last one "
    "ended with, and the closure must evaluate the minibatches of the numbers "
    "minibatches"
)


class EWSG(SharedSettings):
    r"""SGHMC with exponentially weighted stochastic gradients.

    The minibatch of each update is drawn with weights that let the update with a
    minibatch follow the law of the update with the full gradient. With
    :math:`\bar g` the gradient of the mean loss of a minibatch,
    :math:`g = \bar g + \tfrac{\lambda}{N} (\theta - \mu)` and
    :math:`\alpha = 1 - \mathrm{momentum}`, a minibatch has the weight :math:`e^W`,

    .. math::
        W(g) = \frac{N}{4 \alpha\, \mathrm{lr}\, T}
               \| \alpha v + \mathrm{lr}\, g \|^2,

    summed over all parameters of the sampler. One step draws a minibatch, then
    ``index_chain_length`` times another one, with gradient :math:`g'`, which replaces
    the current one with probability :math:`\min(1, e^{W(g') - W(g)})`. The step then
    makes one update with the last gradient:

    .. math::
        v \leftarrow (1 - \alpha) v - \mathrm{lr}\, g
            + \sqrt{2 \alpha\, \mathrm{lr}\, T / N}\; \xi, \qquad
        \theta \leftarrow \theta + v.

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`, up to an error
    of the order of ``lr`` and the minibatch noise that the weights leave. Neither
    ``lr`` nor ``momentum`` changes the target. With ``persistent_index_chain`` the
    state of the Markov chain is (θ, v, minibatch); at large ``lr`` it lags behind the
    weights.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`.
        lr: step size on SGD's scale, >= 0. In the paper's notation h² = lr / N.
        momentum: 1 - α in [0, 1); α = γh is the friction. 0 is the overdamped variant:
            no momentum is kept (v = 0 in W), the update is :class:`SGLD`'s, and
            :math:`W(g) = \mathrm{lr}\, N \|g\|^2 / (4T)`. Default: 0.9.
        {num_data} {prior_precision} {prior_mean} {temperature}
        index_chain_length: M >= 0, the number of further minibatches that a step draws;
            a step costs M + 1 gradients, so use minibatches of n / (M + 1) in place of
            n. With 0 the chain is :class:`SGHMC`'s. Default: 1.
        persistent_index_chain: whether the chain over minibatches continues from step
            to step. A step then begins with the last step's final minibatch, evaluated
            again at the new θ, in place of a fresh one; see :attr:`minibatches`. M must
            be >= 1, and a step still costs M + 1 gradients. Default: False.
        surrogate: replacement of the new momentum, which the exact weights depend on,
            in :math:`W = \|u + \mathrm{lr}\, g\|^2 / (2 \nu^2)` with :math:`\nu^2 = 2
            \alpha\, \mathrm{lr}\, T / N`: ``"momentum"``, the old momentum, u = αv;
            ``"zero"``, u = 0; ``"one"``, u = ν; ``"full_momentum"``, u = -(1 - α)v.
            Default: "momentum".
        num_chains: K makes K independent chains at once: every parameter has a leading
            dimension K, the closure returns the sum of the chains' losses, each on its
            own minibatch, and weights and decisions are made for each chain. None is
            one chain. Default: None.
        {seed}
        nonfinite: policy for gradients that are not finite: "raise", "skip" or
            "ignore", see :class:`Sampler`, also on clipping. One such minibatch skips
            the whole step. Default: "raise".
        {process_group}

    State:
        ``momentum`` (shape of the parameter; fp64 for fp64 parameters, else fp32): v,
        drawn from its stationary law N(0, lr T / N) at first. None if ``momentum`` is
        0. ``master`` (same shape, fp32), only of parameters in bf16 or fp16: θ, see
        :class:`SGLD`.

    Raises:
        ValueError: a hyperparameter out of range, here or at a later step.
        TypeError: a hyperparameter of the wrong type, or ``step()`` without a closure.
        RuntimeError: the closure leaves no gradients, or other parameters' than at its
            first call, or writes over the gradients of its last call, or draws the same
            minibatch each time (detected after 100 proposals), or with
            ``persistent_index_chain`` does not read :attr:`minibatches`.

    Example:
        >>> sampler = EWSG(model.parameters(), lr=0.03, momentum=0.9,
        ...                num_data=50_000, prior_precision=1.0, seed=0)
        >>> def closure():
        ...     x, y = next(minibatches)
        ...     loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(steps):
        ...     loss = sampler.step(closure)
        >>> sampler.acceptance_rate

    Note:
        Gradients are cleared before each call of the closure. After a step ``p.grad``
        is the gradient of the update, with ``num_chains`` chain by chain. Running
        statistics of batch norm are updated M + 1 times. Ranks of a process group
        decide alike if the closure leaves the mean of their gradients, as
        ``DistributedDataParallel`` does. Not for ``torch.amp.GradScaler``: use bfloat16
        autocast. More: docs/samplers/ewsg.md.

    Reference:
        Improving Sampling Accuracy of Stochastic Gradient MCMC Methods via
        Non-uniform Subsampling of Gradients (2021), algorithm 1, theorem 2, eq. 5.
    """

    # Number of nonzero proposals in a row with the previous minibatch's gradient; None
    # after a proposal with another.
    _num_equal: int | None = 0
    _warned = False
    # During a call of the closure: its minibatches, and whether it has read them.
    _asked: list[int] | None = None
    _has_asked = False
    # The group's num_drawn, plus the minibatches of the step in progress.
    _num_drawn = 0

    _SPEC = SamplerSpec(
        "EWSG",
        "sghmc_step_",
        needs_closure=True,
        shared=("index_chain_length", "persistent_index_chain", "num_chains"),
        why_equal="there is one decision for all",
        # The last two: the number of minibatches numbered so far, and the minibatches
        # at which a persistent index chain resumes.
        progress={
            "num_proposals": 0,
            "num_accepted": 0,
            "num_drawn": 0,
            "minibatches": [],
        },
        waits=True,  # minibatches are compared on the host
        traits=Traits(
            takes=Takes.GRADIENTS,
            motion=Motion.MOMENTUM,
            pull=lambda m: 1.0,
            is_biased=True,
        ),
    )
    _OVERDAMPED = Operator("sgld_step_")
    _LOG_RATIO = Operator("ewsg_log_ratio")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        *,
        num_data: float,
        prior_precision: float = 0.0,
        prior_mean: float | Tensor | Iterable[Tensor] = 0.0,
        temperature: float = 1.0,
        index_chain_length: int = 1,
        persistent_index_chain: bool = False,
        surrogate: str = "momentum",
        num_chains: int | None = None,
        seed: int | None = None,
        nonfinite: str = "raise",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**self._SPEC.arguments(locals()))

    @property
    def minibatches(self) -> Tensor:
        """The numbers of the minibatches that the closure must evaluate.

        An int64 tensor of shape [``num_chains`` or 1] on the CPU: 0, 1, ... for fresh
        minibatches, one for each chain, and an earlier number for the very same
        minibatch again. Numbers do not depend on ``seed``, and state dicts continue
        them. Batch samplers return the minibatch of a number:

        >>> batches = IndependentBatchSampler(len(x), 50, seed=0)
        >>> def closure():
        ...     (index,) = batches.at(sampler.minibatches)
        ...     loss = F.cross_entropy(model(x[index]), y[index])
        ...     loss.backward()
        ...     return loss

        A closure may draw fresh minibatches in any other way, unless
        ``persistent_index_chain`` is set.

        Raises:
            RuntimeError: no step is calling its closure.
        """
        if self._asked is None:
            raise RuntimeError("EWSG.minibatches is for the closure that step() calls")
        self._has_asked = True
        return torch.tensor(self._asked, device="cpu")

    @property
    def acceptance_rate(self) -> float:
        """The fraction of proposed minibatches that was accepted; NaN before any.

        A rate near 1 means that minibatches hardly differ in weight (as for small
        ``lr``), and that EWSG hardly differs from SGHMC.
        """
        progress = self._context.rng.progress
        return _C.ratio(progress["num_accepted"], progress["num_proposals"])

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["persistent_index_chain"] and group["index_chain_length"] == 0:
            raise ValueError(
                "Invalid index_chain_length: 0 (must be >= 1 with "
                "persistent_index_chain=True: the first minibatch would stay for ever)"
            )

    def _check_progress(self, group: dict[str, Any]) -> None:
        super()._check_progress(group)
        check_part(group, "num_accepted", "num_proposals")
        drawn = check_count("num_drawn", group["num_drawn"])
        numbers = group["minibatches"]
        if not isinstance(numbers, list) or any(type(n) is not int for n in numbers):
            raise TypeError(
                "Invalid minibatches in a state dict (must be a list of ints)"
            )
        chains = group["num_chains"] or 1
        are_drawn = all(0 <= n < drawn for n in numbers)
        if not are_drawn or len(numbers) not in (0, chains):
            raise ValueError(
                f"Invalid minibatches: {len(numbers)} numbers (must be {chains} in [0, "
                f"num_drawn = {drawn}), or none)"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Draws minibatches, chooses one of them and makes one update with it.

        Args:
            closure: draws a fresh minibatch, uniformly, or takes the one of
                :attr:`minibatches`, computes its mean loss, calls ``backward()`` and
                returns the loss. Called ``index_chain_length`` + 1 times.

        Returns:
            The closure's result at its first call.
        """
        return super().step(closure)

    def _run_step(self, closure: Callable[[], Any] | None) -> Any:
        refuse_scaler(self)
        if closure is None:
            raise TypeError(_NO_CLOSURE)
        context = context_of(self)
        if context.plan is None or not context.plan.has_same_numbers():
            check_groups(self)
        first, progress = self.param_groups[0], context.rng.progress
        length = first["index_chain_length"]
        refuse_accumulation(self, closure)
        if length > 0 and not self._warned and lightning_module(closure) is not None:
            self._warned = True
            warn(
                "EWSG draws several minibatches a step, but in Lightning's automatic "
                "optimization training_step is given the same batch each time: "
                + _MANUAL
            )

        persistent = first["persistent_index_chain"]
        former = progress["minibatches"] if persistent else []
        self._num_drawn = progress["num_drawn"]
        numbers = list(former) if former else self._fresh()
        loss = self._evaluate_minibatch(closure, numbers)
        if all(map(rests, self.param_groups)):
            return loss
        context, plan = context_of(self), None
        try:
            plan, grads = self._plan(context)
            if plan is None:
                return loss
            try:
                self._choose(closure, context, plan, grads, numbers)
            except RuntimeError:
                gather_work(self)  # its error names the parameter
                raise
        except BaseException as error:
            settle_created(context, plan)
            if not isinstance(error, SkipStep):
                raise
            count_skipped_step(context)
            # Its minibatches are not drawn again, and the index chain restarts.
            self._set(num_drawn=self._num_drawn, minibatches=[])
        return loss

    def _choose(
        self,
        closure: Callable[[], Any],
        context: StepContext,
        plan: StepPlan,
        grads: list[Tensor],
        numbers: list[int],
    ) -> None:
        """Runs the index chain, and makes the update with the final gradients."""
        length = self.param_groups[0]["index_chain_length"]
        chains = self.param_groups[0]["num_chains"]
        if length == 0 or (chains or 1) > 1:  # else the comparison checks them
            check_finite(context, plan.observed(grads))
        accepted: int | Tensor = 0
        is_fused = False
        for proposal in range(length):
            fresh = self._fresh()
            self._evaluate_minibatch(closure, fresh)
            proposed = self._gradients_like(context, plan)
            work, other = plan.observed(grads), plan.observed(proposed)
            check_comparable(work, other, context.placement)
            self._check_draws(work, other)
            if not plan.has_same_values():  # the closure has set hyperparameters
                check_groups(self)
                plan.note_numbers()
                changes = rescalings(context)
                values = [self._operator_numbers(each.group) for each in plan.work]
                plan.pack(values, changes)
            is_last = proposal == length - 1 and context.monitor is None
            is_fused = is_last and chains is None and plan.decides
            more: int | Tensor
            if is_fused:
                of_ratio = (self._LOG_RATIO, self._ratio_numbers, proposal)
                with Interrupts():  # the step is counted with its minibatches
                    more = plan.decide(grads, proposed, *of_ratio)
                    grads, numbers = (proposed, fresh) if more else (grads, numbers)
                    if more >= 0:
                        self._count(accepted + more, numbers)
                if more < 0:
                    check_finite(context, work)
                    check_finite(context, other)
            else:
                grads, numbers, more = self._decide(
                    context, plan, grads, proposed, numbers, fresh, proposal
                )
            accepted = accepted + more
        for p, grad in zip(plan.params, grads, strict=True):
            p.grad = grad
        if not is_fused:  # else the decision has made the update
            with Interrupts():
                self._launch(context, plan, grads)
                self._count(accepted, numbers)

    def _count(self, accepted: int | Tensor, numbers: list[int]) -> None:
        """Counts the proposals of a step, and its minibatches as drawn."""
        first, progress = self.param_groups[0], self._context.rng.progress
        proposals = first["index_chain_length"] * (first["num_chains"] or 1)
        self._set(
            num_proposals=progress["num_proposals"] + proposals,
            num_accepted=progress["num_accepted"] + accepted,
            num_drawn=self._num_drawn,
            minibatches=numbers if first["persistent_index_chain"] else [],
        )

    def _gradients_like(self, context: StepContext, plan: StepPlan) -> list[Tensor]:
        """Returns the closure's gradients, in the plan's order."""
        grads = plan.gradients()
        if grads is not None:
            return grads
        found = {
            id(p): grad
            for lists in gather(context)
            for p, grad in zip(lists.params, lists.grads, strict=True)
        }
        if {id(p) for p in plan.params} != found.keys():
            raise RuntimeError(OTHER_PARAMETERS)
        return [found[id(p)] for p in plan.params]

    def _handle_no_gradients(self, context: StepContext) -> None:
        raise RuntimeError(
            "EWSG got no gradients from the closure (does it call backward()?)"
        )

    def _fresh(self) -> list[int]:
        begin = self._num_drawn
        self._num_drawn += self.param_groups[0]["num_chains"] or 1
        return [*range(begin, self._num_drawn)]

    def _evaluate_minibatch(
        self, closure: Callable[[], Any], numbers: list[int]
    ) -> Any:
        """Calls the closure for the gradients of these minibatches."""
        self._asked, self._has_asked = numbers, False
        try:
            loss = fresh_gradients(self, closure)
        finally:
            self._asked = None
        if self.param_groups[0]["persistent_index_chain"] and not self._has_asked:
            raise RuntimeError(_NOT_ASKED)
        return loss

    def _ratio_numbers(self, work: TensorLists) -> dict[str, Any]:
        """Returns the comparison's numbers that replace the group's."""
        group = work.group
        return {
            "lr": float(group["lr"]),
            "momentum_scale": scales(group).get("momentum_scale", 1.0),
            "surrogate": _SURROGATES.index(group["surrogate"]),
            "num_chains": group["num_chains"] or 1,
        }

    def _decide(
        self,
        context: StepContext,
        plan: StepPlan,
        grads: list[Tensor],
        proposed: list[Tensor],
        numbers: list[int],
        fresh: list[int],
        proposal: int,
    ) -> tuple[list[Tensor], list[int], int | Tensor]:
        """Makes one step of the index chain.

        Returns:
            The current gradients, the numbers of their minibatches, and the number of
            chains that accepted the proposal.
        """
        chains = self.param_groups[0]["num_chains"] or 1
        work, other = plan.observed(grads), plan.observed(proposed)
        pairs = [(lists, new.grads) for lists, new in zip(work, other, strict=True)]
        if chains > 1:
            check_finite(context, other)
        ratios: list[Tensor] = []
        for (group, params, current, _), proposals in pairs:
            has_momenta = group["momentum"] > 0
            momenta = [self.state[p]["momentum"] for p in params if has_momenta]
            ratios += context.placement.sums(
                ewsg_log_ratio,
                params,
                current,
                proposals,
                momenta,
                momentum=group["momentum"],
                num_data=group["num_data"],
                prior_precision=group["prior_precision"],
                temperature=group["temperature"],
                **self._ratio_numbers(work[0]._replace(group=group)),
                **prior_of(context.state, group, params),
            )
        stream = context.noise()
        if chains == 1:
            log_ratio = 0.0
            for ratio in ratios:  # sum() does not round alike in all versions
                log_ratio += float(ratio)
            # The ratio sums (g' - g)(lr (g + g') + ...) over all elements, so that any
            # value that is not finite makes the ratio not finite.
            if not math.isfinite(log_ratio):
                check_finite(context, work)
                check_finite(context, other)
            if _C.index_chain_accepts(log_ratio, **stream, proposal=proposal):
                return proposed, fresh, 1
            return grads, numbers, 0
        total = ratios[0]
        for ratio in ratios[1:]:
            total = total + ratio.to(total.device)
        mask = metropolis_decide(
            total, **stream, proposal=proposal, purpose=_C.Purpose.INDEX_CHAIN
        )
        for (_, params, current, _), proposals in pairs:
            select_chains_(current, proposals, mask.to(params[0].device))
        if self.param_groups[0]["persistent_index_chain"]:
            triples = zip(mask.tolist(), fresh, numbers, strict=True)
            numbers = [new if chosen else old for chosen, new, old in triples]
        return grads, numbers, mask.sum()

    def _check_draws(
        self, current: list[TensorLists], proposed: list[TensorLists]
    ) -> None:
        """Raises if the closure evidently does not draw minibatches."""
        if self._num_equal is None:
            return
        local = self._context.placement.local
        equal = all(
            all(map(torch.equal, local(old), local(new)))
            for (_, _, old, _), (_, _, new, _) in zip(current, proposed, strict=True)
        )
        zero = equal and not any(
            bool(g.any()) for work in proposed for g in local(work.grads)
        )
        # The rank with the largest difference decides.
        params = [p for work in proposed for p in work.params]
        found = self._context.placement.largest(params, 2.0 - equal - zero)
        equal, zero = found < 2, found == 0
        self._num_equal = _C.equal_running(
            self._num_equal,
            equal,
            zero,
            hint=f" (in Lightning, {_MANUAL})",
            off="index_chain_length=0",
        )

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        return blank(p, "momentum") if group["momentum"] > 0 else {}

    def _operator_of(self, group: dict[str, Any]) -> Operator:
        is_overdamped = group["momentum"] == 0
        return self._OVERDAMPED if is_overdamped else super()._operator_of(group)

    def _prepare(self, context: StepContext, work: TensorLists) -> list[list[Tensor]]:
        """Returns the lists of the operator, the momenta first if it has any."""
        group, params, _, offsets = work
        masters = start_masters(context, params)
        if group["momentum"] == 0:
            for p in params:  # left by a schedule of momentum
                context.remove(p, "momentum")
            return [masters]
        start_momenta(context, group, params, offsets)
        return [[self.state[p]["momentum"] for p in params], [], masters]
