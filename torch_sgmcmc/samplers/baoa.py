"""BAOA: SGHMC with an exact friction step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torch_sgmcmc.core.hyperparams import check_noise_estimate
from torch_sgmcmc.core.preconditioner import PreconditionedSampler
from torch_sgmcmc.core.spec import Motion, SamplerSpec, Traits
from torch_sgmcmc.core.state import PRECONDITIONER
from torch_sgmcmc.core.step_plan import Operator


class BAOA(PreconditionedSampler):
    r"""BAOA, SGHMC with an exact friction step (Leimkuhler and Matthews 2013).

    Replaces :class:`SGHMC` and ``torch.optim.SGD(params, lr, momentum)``. The
    friction's step is exact and stands between two halves of the drift. With
    :math:`\bar g` = ``p.grad``, the gradient of the *mean* loss of a minibatch, m =
    ``momentum`` and :math:`\alpha = 2 (1 - m) / (1 + m)`,

    .. math::
        g &= \bar g + \tfrac{\lambda}{N} (\theta - \mu), \\
        u &= v - \mathrm{lr}\, g, \\
        v &\leftarrow m u
            + (1 + m) \sqrt{(\alpha - \hat\beta)\, \mathrm{lr}\, T / (2 N)}\; \xi,
            \qquad \xi \sim N(0, I), \\
        \theta &\leftarrow \theta + \tfrac12 (u + v) \quad \text{(the new } v).

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`. On a quadratic
    the variances of θ and v are **exact at any lr** at which the chain is stable, lr k
    < 4 with k the curvature of U / N. Elsewhere the error is of the order of lr, as
    with SGHMC, but small. As in SGHMC, minibatch noise raises the temperature, by lr N
    Var(ḡ) / (2 T α) minus ``noise_estimate``'s part. Neither ``lr`` nor ``momentum``
    changes the target.

    **With a preconditioner** G, a number for each coordinate that never changes, this
    is the sampler of θ / √G: lr G stands in the place of lr in all of the above, also
    in the root.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`.
        lr: step size on SGD's scale, >= 0.
        momentum: m in [0, 1), the part of v that a step keeps. Default: 0.9.
        {num_data} {prior_precision} {prior_mean}
        temperature: T >= 0; 1 is the Bayesian posterior, 0 gives SGD with momentum.
            Default: 1.
        noise_estimate: β̂, the part of the friction's noise that the minibatches
            already bring: β̂ = lr N Var(ḡ) / (2T), in [0, α], equal for all
            coordinates. It belongs to the current lr, T and N and is rescaled when they
            change. β̂ > α is an error that names both numbers. Default: 0.
        preconditioner: G, a number > 0 for each coordinate, which stays: the step size
            is lr G. A :class:`PSGLD` sampler of the same parameters, whose burn-in has
            learned :math:`1 / (\sqrt V + \epsilon)`, here divided by its mean over all
            elements; or a tensor or number for each parameter, in the order of the
            groups. Tensors are copied and are then state. Parameters of later groups
            have G = 1. None is 1 for all. Default: None.
        {num_chains} {seed} {capturable} {nonfinite} {process_group}

    State:
        * ``momentum`` (shape of the parameter; fp64 for fp64 parameters, else fp32):
          v. Starts from its stationary law N(0, lr T / N).
        * ``preconditioner`` (same shape and dtype): G, only if given.
        * ``master`` (same shape, fp32), only of parameters in bf16 or fp16: θ, see
          :class:`SGLD`.

    Note:
        More: docs/samplers/baoa.md.

    Reference:
        B. Leimkuhler and C. Matthews, Rational Construction of Stochastic Numerical
        Methods for Molecular Sampling, AMRX 2013.
    """

    _SPEC = SamplerSpec(
        "BAOA",
        "baoa_step_",
        {PRECONDITIONER: Tensor},
        traits=Traits(
            motion=Motion.HALF_DRIFTS, pull=lambda m: (1 + m) / 2, has_known_heat=True
        ),
    )
    _PRECONDITIONED = Operator("baoa_preconditioned_step_")

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
        noise_estimate: float = 0.0,
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
        friction = 2 * (1 - group["momentum"]) / (1 + group["momentum"])
        check_noise_estimate(group, friction, "2 (1 - momentum) / (1 + momentum)")
