"""Stochastic gradient Langevin dynamics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Motion, SamplerSpec, Traits


class SGLD(Sampler):
    r"""Stochastic gradient Langevin dynamics (Welling and Teh 2011).

    Swap it in for :class:`torch.optim.SGD`: ``lr`` keeps its meaning, and the
    iterates become samples of the posterior. With :math:`\bar g` = ``p.grad``, the
    gradient of the *mean* loss of a minibatch that ``loss.backward()`` leaves,

    .. math::
        g = \bar g + \tfrac{\lambda}{N} (\theta - \mu), \qquad
        \theta \leftarrow \theta - \mathrm{lr}\, g
            + \sqrt{2\, \mathrm{lr}\, T / N}\; \xi, \qquad \xi \sim N(0, I).

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`, up to an error
    of the order of ``lr`` and the noise of the minibatches, which adds variance. On a
    quadratic with curvature h in the mean loss the variance is 1 / (1 - lr h / 2) times
    the exact one. Keep ``lr`` small, or lower it.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`.
        lr: step size on SGD's scale, >= 0. In Welling and Teh's notation ε = 2 lr / N.
        {num_data} {prior_precision} {prior_mean}
        temperature: T >= 0; 1 is the Bayesian posterior, 0 gives plain SGD.
            Default: 1.
        {num_chains} {seed}
        capturable: keep the step counter in device memory, so that ``step()`` can be
            captured in a CUDA graph: every replay then injects fresh noise. The graph
            freezes hyperparameters. Each param group must lie on one device. With
            parameters in bf16 or fp16, capture after one ordinary step. Default: False.
        {nonfinite} {process_group}

    State:
        ``master`` (shape of the parameter, fp32), only of parameters in bf16 or fp16:
        θ, see the Note. Otherwise only a ``prior_mean`` (:class:`Sampler`); seed, step
        counter and noise offsets are in the param groups.

    Example:
        >>> sampler = SGLD(model.parameters(), lr=0.5, num_data=50_000, seed=0)
        >>> for x, y in loader:
        ...     sampler.zero_grad()
        ...     F.cross_entropy(model(x), y).backward()
        ...     sampler.step()

    Note:
        Every sampler of this library keeps θ of a parameter in bf16 or fp16 in fp32, as
        ``state[p]["master"]``. The parameter is θ rounded to nearest, and its gradient
        is evaluated at the rounded θ. A parameter that is changed between steps
        (clamped, loaded) sets θ. More: docs/samplers/sgld.md.

    Reference:
        M. Welling and Y. W. Teh, Bayesian Learning via Stochastic Gradient Langevin
        Dynamics, ICML 2011, eq. 4.
    """

    _SPEC = SamplerSpec(
        "SGLD",
        "sgld_step_",
        traits=Traits(motion=Motion.LANGEVIN, pull=lambda m: 1.0, has_known_heat=True),
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: float,
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
