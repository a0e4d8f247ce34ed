"""Stochastic gradient Nosé-Hoover thermostats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Motion, SamplerSpec, Traits


class SGNHT(Sampler):
    r"""Stochastic gradient Nosé-Hoover thermostats (Ding et al. 2014), multivariate.

    :class:`SGHMC` whose friction regulates itself. The thermostat of each coordinate
    measures the momentum's kinetic energy and adds as much friction as the minibatches
    add noise, without knowing the noise. With :math:`\bar g` = ``p.grad``, the gradient
    of the *mean* loss of a minibatch, and A = 1 - ``momentum``, elementwise

    .. math::
        g &= \bar g + \tfrac{\lambda}{N} (\theta - \mu), \\
        v &\leftarrow (1 - \alpha) v - \mathrm{lr}\, g
            + \sqrt{2 A\, \mathrm{lr}\, T / N}\; \xi, \qquad \xi \sim N(0, I), \\
        \theta &\leftarrow \theta + v \quad \text{(the new } v), \\
        \alpha &\leftarrow \alpha
            + \kappa \left( \frac{u^2 N}{\mathrm{lr}\, T} - 1 \right),
            \qquad u = \tfrac12 (v_\text{old} + v_\text{new}),
            \qquad \alpha \text{ starts at } A.

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`, up to an error
    of the order of ``lr``, jointly with v ~ N(0, lr T / N) and α ~ N(A + β̂, κ), where
    β̂ = lr N Var(ḡ) / (2T) is the noise of the minibatches. Noise is absorbed if it is
    Gaussian, independent between coordinates, and the same for all θ. Neither ``lr``
    nor ``momentum`` nor ``thermostat_rate`` changes the target.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`.
        lr: step size on SGD's scale, >= 0. In the paper's notation lr / N = h².
        momentum: 1 - A in [0, 1); A is the injected noise, and the friction without
            minibatch noise. In the paper's notation A h. Default: 0.9.
        {num_data}
        thermostat_rate: κ >= 0, how fast friction adapts: the thermostats settle within
            about (A + β̂) / κ steps. None is lr T / N, the papers' unit thermostat mass;
            0 leaves the friction at A, which is SGHMC. Default: None.
        {prior_precision} {prior_mean}
        temperature: T >= 0; 1 is the Bayesian posterior, 0 gives SGD with momentum.
            Default: 1.
        {num_chains} {seed} {capturable} {nonfinite} {process_group}

    State:
        * ``momentum`` (shape of the parameter; fp64 for fp64 parameters, else fp32):
          v. Starts from its stationary law N(0, lr T / N).
        * ``thermostat`` (same shape and dtype): α - A, starts at 0. Its mean over time
          estimates β̂, the ``noise_estimate`` that SGHMC would need.
        * ``master`` (same shape, fp32), only of parameters in bf16 or fp16: θ, see
          :class:`SGLD`.

    Note:
        With large N the default κ is small and the thermostats are slow. Raise
        ``thermostat_rate`` if burn-in is shorter than (A + β̂) / κ steps, but keep its
        root, the spread of α, well below A. Where lr T = 0 the thermostats rest. More:
        docs/samplers/sgnht.md.

    Reference:
        N. Ding, Y. Fang, R. Babbush, C. Chen, R. D. Skeel and H. Neven, Bayesian
        Sampling Using Stochastic Gradient Thermostats, NIPS 2014, algorithm 2;
        C. Li, C. Chen, K. Fan and L. Carin, High-Order Stochastic Gradient Thermostats
        for Bayesian Learning of Deep Models, AAAI 2016 (one thermostat a coordinate).
    """

    _SPEC = SamplerSpec(
        "SGNHT",
        "sgnht_step_",
        traits=Traits(motion=Motion.THERMOSTAT, pull=lambda m: 1.0),
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        *,
        num_data: float,
        thermostat_rate: float | None = None,
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

    def _operator_numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        rate = group["thermostat_rate"]
        if rate is None:
            rate = group["lr"] * group["temperature"] / group["num_data"]
        return {**super()._operator_numbers(group), "thermostat_rate": rate}
