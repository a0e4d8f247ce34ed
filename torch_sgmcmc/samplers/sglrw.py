"""Stochastic gradient lattice random walk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Motion, SamplerSpec, Traits


class SGLRW(Sampler):
    r"""Stochastic gradient lattice random walk (Mensch et al. 2026).

    :class:`SGLD` with steps of one length and a random sign that depends on the
    gradient. With :math:`\bar g` = ``p.grad``, the gradient of the *mean* loss of a
    minibatch, for each coordinate

    .. math::
        g = \bar g + \tfrac{\lambda}{N} (\theta - \mu), \qquad
        \delta = \sqrt{2\, \mathrm{lr}\, T / N}, \qquad
        \theta \leftarrow \theta \pm \delta, \quad \text{up with probability }
        \tfrac12 \bigl(1 - \mathrm{clip}(\mathrm{lr}\, g / \delta, -1, 1)\bigr).

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`. Where nothing
    clips, a step's mean is -lr g and its mean square is δ², **at any minibatch noise**:
    the noise adds no variance, and on a quadratic the variance is exact at any ``lr``.
    Where :math:`|\mathrm{lr}\,g|>\delta` the step clips, and θ spreads too far. Monitor
    the fraction of clipped coordinates, ``clipped`` of :class:`TemperatureMonitor`, and
    keep ``lr`` small or minibatches large. Steps are never longer than δ, so the chain
    does not diverge.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`.
        lr: step size on SGD's scale, >= 0, as for SGLD.
        {num_data} {prior_precision} {prior_mean} {temperature} {num_chains} {seed}
        {capturable} {nonfinite} {process_group}

    State:
        As :class:`SGLD`: ``master``, only of parameters in bf16 or fp16.

    Note:
        At one ``lr`` all coordinates stay on the lattice θ₀ + δ ℤ, up to rounding.
        More: docs/samplers/sglrw.md.

    Reference:
        T. Mensch et al., 2026, arXiv 2602.15925; S. Duffield et al., 2025.
    """

    _SPEC = SamplerSpec(
        "SGLRW", "sglrw_step_", traits=Traits(motion=Motion.LATTICE, pull=lambda m: 1.0)
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
