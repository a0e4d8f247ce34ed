"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import hyperparams
from torch_sgmcmc.core.context import StepContext, TensorLists, blank, state_dtype
from torch_sgmcmc.core.ops import gradient_variance_
from torch_sgmcmc.core.parameters import check_fits
from torch_sgmcmc.core.preconditioner import PreconditionedSampler
from torch_sgmcmc.core.spec import Motion, SamplerSpec, Traits
from torch_sgmcmc.core.state import PRECONDITIONER, start_masters, start_momenta
from torch_sgmcmc.core.step_plan import Operator

_FRICTION = "1 - momentum"

# State of "online".
_ONLINE = {"grad_variance": Tensor, "num_grads": int, "previous_grad": Tensor}


class SGHMC(PreconditionedSampler):
    r"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014).

    Swap it in for ``torch.optim.SGD(params, lr, momentum)``: both numbers keep their
    meaning, and the iterates become samples of the posterior. With
    :math:`\bar g` = ``p.grad``, the gradient of the *mean* loss of a minibatch,
    and :math:`\alpha = 1 - \mathrm{momentum}`,

    .. math::
        g &= \bar g + \tfrac{\lambda}{N} (\theta - \mu), \\
        v &\leftarrow (1 - \alpha) v - \mathrm{lr}\, g
            + \sqrt{2 (\alpha - \hat\beta)\, \mathrm{lr}\, T / N}\; \xi,
            \qquad \xi \sim N(0, I), \\
        \theta &\leftarrow \theta + v \quad \text{(the new } v).

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`, up to an error
    of the order of ``lr`` and the minibatch noise that ``noise_estimate`` does not
    remove. Neither ``lr`` nor ``momentum`` changes the target.

    **With a preconditioner** G, a number for each coordinate that never changes, this
    is the sampler of θ / √G, with lr G in the place of lr:

    .. math::
        v \leftarrow (1 - \alpha) v - \mathrm{lr}\, G g
            + \sqrt{2 (\alpha - \hat\beta)\, \mathrm{lr}\, T G / N}\; \xi.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`.
        lr: step size on SGD's scale, >= 0. In the paper's notation η = lr / N.
        momentum: 1 - α in [0, 1); α is the friction. Default: 0.9.
        {num_data} {prior_precision} {prior_mean}
        temperature: T >= 0; 1 is the Bayesian posterior, 0 gives SGD with momentum.
            Default: 1.
        noise_estimate: β̂, the part of the friction's noise that the minibatches
            already bring: β̂ = lr N Var(ḡ) / (2T). A float in [0, α], equal for all
            coordinates, or ``"online"``: estimated for each coordinate as half the mean
            squared difference of consecutive gradients, and used after the first 100
            gradients. A float belongs to the current lr, T and N and is rescaled when
            they change. β̂ > α is an error that names both numbers. Default: 0.
        resample_momentum_every: k >= 0; before every k-th update the momentum is drawn
            afresh from its stationary law given θ. 0 never does. Default: 0.
        initial_momentum: ``"stationary"`` draws the first momentum from its stationary
            law N(0, lr T / N), ``"zeros"`` starts at rest. Default: "stationary".
        preconditioner: G, a number > 0 for each coordinate, which stays: the step size
            is lr G. A :class:`PSGLD` sampler of the same parameters, whose burn-in has
            learned :math:`1 / (\sqrt V + \epsilon)`, here divided by its mean over all
            elements; or a tensor or number for each parameter, in the order of the
            groups. Tensors are copied and are then state. Parameters of later groups
            have G = 1. Excludes "online"
            and ``resample_momentum_every``. None is 1 for all. Default: None.
        {num_chains} {seed}
        capturable: keep the step counter in device memory, so that ``step()`` can be
            captured in a CUDA graph after one ordinary step. Excludes "online", which
            needs the host. Default: False.
        {nonfinite} {process_group}

    State:
        * ``momentum`` (shape of the parameter; fp64 for fp64 parameters, else fp32): v.
        * ``previous_grad``, ``grad_variance`` (same shape and dtype) and
          ``num_grads`` (int), only with ``noise_estimate="online"``.
        * ``preconditioner`` (same shape and dtype): G, only if given.
        * ``master`` (same shape, fp32), only of parameters in bf16 or fp16: θ, see
          :class:`SGLD`.

    Example:
        >>> sampler = SGHMC(model.parameters(), lr=0.03, momentum=0.9,
        ...                 num_data=50_000, prior_precision=1.0, seed=0)
        >>> for x, y in loader:
        ...     sampler.zero_grad()
        ...     F.cross_entropy(model(x), y).backward()
        ...     sampler.step()

    Note:
        ``momentum = 0`` carries no momentum over and is SGLD. If β̂ > α stops the chain
        early in training, where gradients are noisiest, start with 0 and set
        ``group["noise_estimate"] = "online"`` after burn-in. More:
        docs/samplers/sghmc.md.

    Reference:
        T. Chen, E. B. Fox and C. Guestrin, Stochastic Gradient Hamiltonian Monte
        Carlo, ICML 2014, eq. 15. For G: J. T. Springenberg, A. Klein, S. Falkner and F.
        Hutter, Bayesian Optimization with Robust Bayesian Neural Networks, NIPS 2016.
    """

    _SPEC = SamplerSpec(
        "SGHMC",
        "sghmc_step_",
        {**_ONLINE, PRECONDITIONER: Tensor},
        traits=Traits(motion=Motion.MOMENTUM, pull=lambda m: 1.0, has_known_heat=True),
    )
    _PRECONDITIONED = Operator("sghmc_preconditioned_step_")

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
        noise_estimate: float | str = 0.0,
        resample_momentum_every: int = 0,
        initial_momentum: str = "stationary",
        preconditioner: Optimizer | Iterable[Tensor | float] | None = None,
        num_chains: int | None = None,
        seed: int | None = None,
        capturable: bool = False,
        nonfinite: str = "raise",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**self._SPEC.arguments(locals()))
        self._precondition(preconditioner)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["noise_estimate"] == "online" and group["capturable"]:
            raise ValueError(
                "Invalid noise_estimate: 'online' is checked on the host at every step "
                "and excludes capturable=True"
            )
        hyperparams.check_noise_estimate(group, 1.0 - group["momentum"], _FRICTION)
        if self._is_preconditioned(group):
            if group["noise_estimate"] == "online":
                raise ValueError(
                    "Invalid noise_estimate: 'online' (must be a number with a "
                    "preconditioner)"
                )
            if group["resample_momentum_every"] > 0:
                raise ValueError(
                    "Invalid resample_momentum_every: "
                    f"{group['resample_momentum_every']} (must be 0 with a "
                    "preconditioner)"
                )

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        state = super()._blank_state(group, p)
        if group["noise_estimate"] == "online":
            state |= {**blank(p, "grad_variance", "previous_grad"), "num_grads": 0}
        return state

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        super()._check_saved_state(index, p, state)
        missing = [key for key in _ONLINE if key not in state]
        if 0 < len(missing) < len(_ONLINE):
            raise ValueError(
                f"Invalid state_dict: the state of parameter {index} lacks "
                f"{', '.join(missing)}"
            )

    def _prepare(
        self, context: StepContext, work: TensorLists
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns momenta, gradient variances (empty unless used) or G, and masters."""
        group, params, _, offsets = work
        statistics = self._preconditioners(context, work)
        stationary = group["initial_momentum"] == "stationary"
        start_momenta(context, group, params, offsets, stationary=stationary)
        if group["noise_estimate"] == "online":
            statistics = self._observe_gradients(context, work)
        momenta = [self.state[p]["momentum"] for p in params]
        return momenta, statistics, start_masters(context, params)

    def _uses_gradients(self, group: dict[str, Any]) -> bool:
        return group["noise_estimate"] == "online"

    def _observe_gradients(
        self, context: StepContext, work: TensorLists
    ) -> list[Tensor]:
        """Updates the gradients' variances and checks them against the friction.

        Returns:
            The variances once all rest on enough gradients; an empty list before.
        """
        group, params, grads, _ = work
        # Checked first: an operator that refuses the momenta must not find changed
        # estimates.
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            momentum = state["momentum"]
            if momentum.dtype is not state_dtype(p) or momentum.shape != p.shape:
                check_fits(context, [work])
        by_count: dict[int, list[tuple[dict[str, Any], Tensor]]] = {}
        for p, state, grad in zip(params, states, grads, strict=True):
            count = state.get("num_grads", 0)
            if count == 0:
                zeros = partial(torch.zeros_like, p, dtype=state_dtype(p))
                context.create(p, "grad_variance", zeros())
                context.create(p, "previous_grad", zeros().copy_(grad))
                context.create(p, "num_grads", 0)
            else:
                by_count.setdefault(count, []).append((state, grad))
            state["num_grads"] = count + 1
        for count, members in by_count.items():
            self._context.placement.without_noise(gradient_variance_)(
                [grad for _, grad in members],
                [state["grad_variance"] for state, _ in members],
                [state["previous_grad"] for state, _ in members],
                weight=max(1.0 / count, _C.VARIANCE_DECAY),
            )
        if min(state["num_grads"] for state in states) <= _C.MIN_GRADIENTS:
            return []
        variances = [state["grad_variance"] for state in states]
        self._check_variances(group, params, variances)
        return variances

    def _check_variances(
        self, group: dict[str, Any], params: list[Tensor], variances: list[Tensor]
    ) -> None:
        local = [v for v in self._context.placement.local(variances) if v.numel()]
        largest = max((float(v.max()) for v in local), default=0.0)
        largest = self._context.placement.largest(params, largest)
        scale = group["lr"] * group["num_data"] / (2 * group["temperature"])
        hyperparams.check_friction(
            scale * largest,
            1.0 - group["momentum"],
            _FRICTION,
            " in the noisiest coordinate. No parameter has changed; the gradients have "
            "entered the estimate",
        )

    def _operator_numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        numbers = super()._operator_numbers(group)
        if group["noise_estimate"] == "online":
            numbers["noise_estimate"] = 0.0
        return numbers
