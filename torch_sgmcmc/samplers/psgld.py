"""Preconditioned stochastic gradient Langevin dynamics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.context import (
    StepContext,
    TensorLists,
    blank,
    context_of,
    state_dtype,
)
from torch_sgmcmc.core.distributed import refuse_several_ranks
from torch_sgmcmc.core.finite_check import check_finite
from torch_sgmcmc.core.hyperparams import least_root
from torch_sgmcmc.core.ops import gaussian_, sum_of_squares
from torch_sgmcmc.core.parameters import refuse_scaler
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Motion, SamplerSpec, Traits, needs_graph
from torch_sgmcmc.core.state import check_not_capturing, root, start_masters
from torch_sgmcmc.core.step_plan import Operator

# DistributedDataParallel averages gradients, but not their graphs.
_BY_THE_HESSIAN = (
    "Hessian",
    "Set gamma=False, and stop adaptation (adapt=False) after burn-in",
)


class PSGLD(Sampler):
    r"""Preconditioned SGLD (Li, Chen, Carlson and Carin 2016): SGLD with RMSprop.

    Each coordinate has a step size from a running mean of squared gradients. With
    :math:`\bar g` = ``p.grad``, the gradient of the *mean* loss of a minibatch, and a =
    ``decay``, elementwise

    .. math::
        V &\leftarrow a V + (1 - a)\, \bar g^2, \qquad
            G = 1 / (\sqrt{V} + \max(\epsilon, 10\, \mathrm{lr} \lambda / N)),
            \qquad
            g = \bar g + \tfrac{\lambda}{N} (\theta - \mu), \\
        \theta &\leftarrow \theta - \mathrm{lr}\, G g
            + \tfrac{\mathrm{lr}\, T}{N}\, \Gamma
            + \sqrt{2\, \mathrm{lr}\, T G / N}\; \xi, \qquad \xi \sim N(0, I), \\
        W &\leftarrow a J W + 2 (1 - a)\, \bar g\, h, \qquad
            \Gamma = -\frac{G^2}{2 \sqrt{V}}\, W, \qquad
            J = 1 - \mathrm{lr}\, G\, (h + \tfrac{\lambda}{N}),

    where h is the diagonal of the minibatch loss's Hessian. W uses the J of the step
    before, kept in [0, 1/a].

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`,
    up to an error of the order of ``lr`` G and the noise of the minibatches, *if*

    * ``adapt`` is False: V stays fixed, and this is SGLD with a step size for each
      coordinate. Adapt during burn-in, then set ``group["adapt"] = False`` in every
      group: the chain is correct from then on; or
    * ``adapt`` and ``gamma`` are True and the Hessian is diagonal: Γ makes up for the
      movement of G. With correlated coordinates some bias stays (docs/samplers).

    The literature's usual practice, ``adapt=True, gamma=False``, does **not** sample
    the target: V follows θ, and the chain samples :math:`e^{-U/T} / E[G | \theta]`, too
    wide wherever large gradients mark the tails.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`.
        lr: step size, >= 0; multiplies G g as in :class:`torch.optim.RMSprop`. In the
            paper's notation ε_t = 2 lr / N.
        {num_data}
        decay: a in [0, 1), the memory of V. Default: 0.99.
        eps: ε > 0, added to the root of V; the paper's λ. Where 10 lr λ / N is larger,
            it is added instead: where gradients are 0, the prior's part of a step is
            then at most a tenth of θ - μ. Default: 1e-5.
        adapt: whether V follows the gradients; can be set in a group at any time.
            Default: True.
        gamma: whether Γ is added while V adapts. It needs second derivatives: call
            ``loss.backward(create_graph=True)``; a step costs about one more backward
            pass. Default: True.
        {prior_precision} {prior_mean}
        temperature: T >= 0; 1 is the Bayesian posterior, 0 gives RMSprop. Default: 1.
        {num_chains} {seed}
        capturable: keep the step counter in device memory, so that ``step()`` can be
            captured in a CUDA graph after one ordinary step. Excludes Γ, which needs
            autograd. Default: False.
        {nonfinite} {process_group}

    State:
        * ``square_average`` (shape of the parameter; fp64 for fp64 parameters, else
          fp32): V. Starts as the first gradient's square, with Γ plus (T/N) \|h\|.
        * ``sensitivity`` (same shape and dtype), with Γ only: J W. Starts as 2 ḡ h
          (as 0 if V was there before).
        * ``master`` (same shape, fp32), only of parameters in bf16 or fp16: θ, see
          :class:`SGLD`.

    Raises:
        ValueError: a hyperparameter out of range, here or at a later step.
        TypeError: a hyperparameter that is not a number, or not a bool.
        RuntimeError: Γ is on, and no gradient carries a graph, a parameter in the graph
            has changed since, other ranks of a process group have other graphs, or a
            GradScaler calls, whose scale h would contain. Nothing has changed.

    Example:
        Adaptation that ends with burn-in, in an ordinary training loop:

        >>> sampler = PSGLD(model.parameters(), lr=1e-3, num_data=50_000, gamma=False)
        >>> for epoch in range(epochs):
        ...     if epoch == burn_in:
        ...         for group in sampler.param_groups:
        ...             group["adapt"] = False
        ...     for x, y in loader:
        ...         sampler.zero_grad()
        ...         F.cross_entropy(model(x), y).backward()
        ...         sampler.step()

        Adaptation throughout, with Γ, takes ``backward(create_graph=True)``.

    Note:
        This Γ differs from the paper's, which leaves nearly all of the bias. Call
        ``zero_grad()`` before every backward pass with ``create_graph=True``: the graph
        lives as long as ``p.grad``. Not for ``torch.amp.GradScaler`` while Γ is on: use
        bfloat16 autocast. Where gradients are always 0, only a prior keeps θ from
        spreading. With ``decay`` near 0, or gradients that are mostly 0, do not trust
        the chain with Γ. More: docs/samplers/psgld.md.

    Reference:
        C. Li, C. Chen, D. Carlson and L. Carin, Preconditioned Stochastic Gradient
        Langevin Dynamics for Deep Neural Networks, AAAI 2016, algorithm 1.
    """

    _SPEC = SamplerSpec(
        "PSGLD",
        "psgld_step_",
        traits=Traits(
            motion=Motion.LANGEVIN,
            needs_graph=lambda group: group["adapt"] and group["gamma"],
        ),
    )
    _FROZEN = Operator("psgld_frozen_step_")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: float,
        decay: float = 0.99,
        eps: float = 1e-5,
        adapt: bool = True,
        gamma: bool = True,
        prior_precision: float = 0.0,
        prior_mean: float | Tensor | Iterable[Tensor] = 0.0,
        temperature: float = 1.0,
        num_chains: int | None = None,
        seed: int | None = None,
        capturable: bool = False,
        nonfinite: str = "raise",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**self._SPEC.arguments(locals()))
        self._roots: dict[Tensor, _Root] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._roots = {}

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["capturable"] and group["adapt"] and group["gamma"]:
            raise ValueError(
                "Invalid gamma: True needs second derivatives from autograd and "
                "excludes capturable=True (set gamma=False, or adapt=False)"
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Returns whether GradScaler.step() has left a scale, which h would contain."""
        return needs_graph(self)

    def _begin_step(self) -> None:
        more = ", or gamma=False and adapt=False after burn-in"
        refuse_scaler(self, "PSGLD with Γ", "the loss and so its curvature", more)
        super()._begin_step()

    def _operator_of(self, group: dict[str, Any]) -> Operator:
        return super()._operator_of(group) if group["adapt"] else self._FROZEN

    def _uses_gradients(self, group: dict[str, Any]) -> bool:
        return group["adapt"] and group["gamma"]

    def _is_repeated(self, group: dict[str, Any]) -> bool:
        # No guard detects writes to a fixed preconditioner.
        return group["adapt"] and not group["gamma"]

    def _check_ranks(self) -> None:
        if needs_graph(self):
            refuse_several_ranks(context_of(self), *_BY_THE_HESSIAN)
            self._context.placement.refuse(
                "Invalid gamma: True needs second derivatives, which are not taken of "
                f"DTensors ({_BY_THE_HESSIAN[1]})"
            )

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        corrected = group["adapt"] and group["gamma"]
        return blank(p, "square_average", *(["sensitivity"] if corrected else []))

    def _prepare_all(
        self, context: StepContext, work: list[TensorLists]
    ) -> list[tuple[list[Tensor], ...]]:
        """Returns V, sensitivities, curvatures, masters; √G, masters if V is fixed."""
        probed = [of for of in work if of.group["adapt"] and of.group["gamma"]]
        curvatures = self._curvatures(context, probed) if probed else {}
        second = [[curvatures[p] for p in lists.params] for lists in probed]
        what = "second derivative (for Γ)"
        check_finite(context, probed, second, what)
        roots = self._roots
        prepared: list[tuple[list[Tensor], ...]] = []
        for group, params, grads, _ in work:
            states = [self.state[p] for p in params]
            corrected = params[0] in curvatures
            for state, p, grad in zip(states, params, grads, strict=True):
                is_new = "square_average" not in state
                if is_new:
                    check_not_capturing(context.name, p, "square_average")
                    start = torch.zeros_like(p, dtype=state_dtype(p))
                    context.create(p, "square_average", start.copy_(grad).square_())
                if corrected and "sensitivity" not in state:
                    start = _begin_gamma(context, group, p, grad, curvatures[p], is_new)
                    context.create(p, "sensitivity", start)
                elif group["adapt"] and not corrected:  # V adapts without it
                    context.remove(p, "sensitivity")
            squares = [state["square_average"] for state in states]
            masters = start_masters(context, params)
            if group["adapt"]:
                for p in params:
                    roots.pop(p, None)
                sensitivities = [state["sensitivity"] for state in states if corrected]
                second_ones = [curvatures[p] for p in params if corrected]
                prepared.append((squares, sensitivities, second_ones, masters))
                continue
            eps = least_root(group)
            for p, square in zip(params, squares, strict=True):
                if p not in roots or not roots[p].is_of(square, eps):
                    check_not_capturing(context.name, p, "preconditioner that stays")
                    roots[p] = _Root(context, square, eps)
            prepared.append(([roots[p].value for p in params], masters))
        return prepared

    def _curvatures(
        self, context: StepContext, work: list[TensorLists]
    ) -> dict[Tensor, Tensor]:
        """Estimates the diagonal of the Hessian of all groups (Hutchinson)."""
        params, grads, probes = [], [], []
        stream = {"purpose": _C.Purpose.PROBE, **context.noise()}
        for _, some, theirs, offsets in work:
            normal = [torch.empty_like(p) for p in some]
            gaussian_(normal, std=1.0, offsets=offsets, **stream)
            params += some
            grads += theirs
            probes += [torch.ones_like(z).copysign_(z) for z in normal]
        with_graph = [i for i, grad in enumerate(grads) if grad.requires_grad]
        if not with_graph:
            raise RuntimeError(
                "PSGLD got gradients without a graph, and Γ needs second derivatives: "
                "call loss.backward(create_graph=True), or set gamma=False and stop "
                "adaptation (adapt=False) after burn-in"
            )
        try:
            roots, along = ([ts[i] for i in with_graph] for ts in (grads, probes))
            more = {"retain_graph": True, "allow_unused": True}
            products = torch.autograd.grad(roots, params, along, **more)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(
                "PSGLD got gradients of parameters that have changed since, and Γ "
                "needs second derivatives: step once for each backward pass, after "
                "it, and sample all parameters of a loss with one sampler"
            ) from error
        return {
            p: torch.zeros_like(z) if product is None else product * z
            for p, z, product in zip(params, probes, products, strict=True)
        }


def _begin_gamma(
    context: StepContext,
    group: dict[str, Any],
    p: Tensor,
    grad: Tensor,
    curvature: Tensor,
    is_new: bool,
) -> Tensor:
    """Starts V so that Γ is bounded, and returns W: docs/samplers/psgld.md."""
    square = context.state[p]["square_average"]
    sensitivity = torch.zeros_like(p, dtype=square.dtype)
    h = curvature.to(square.dtype)
    if is_new:
        sensitivity.copy_(grad).mul_(h).mul_(2)
    square.add_(h.abs().mul_(group["temperature"] / group["num_data"]))
    # Where V is 0, V starts at its chain's mean.
    for own in [square] if group["num_chains"] is None else square:
        mean = sum_of_squares([root(context, own)]).div_(own.numel()).to(own.dtype)
        own.copy_(torch.where(own == 0, mean, own))
    return sensitivity


class _Root:
    """√G, and the V and eps that it belongs to."""

    def __init__(self, context: StepContext, square: Tensor, eps: float) -> None:
        self._square, self._eps, self._version = square, eps, _version(square)
        # These operations round alike on every processor, as all updates do.
        self.value = root(context, root(context, square).add_(eps)).reciprocal_()

    def is_of(self, square: Tensor, eps: float) -> bool:
        """Returns whether the root belongs to V's present values."""
        now = square is self._square, eps, _version(square)
        return now == (True, self._eps, self._version)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
