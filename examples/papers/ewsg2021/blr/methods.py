"""The methods: from the paper's step sizes to the library's hyperparameters.

The paper's h is a step on U itself, U = -Σ log p(yᵢ | xᵢ, θ) - log p(θ), a sum and not
a mean; the library's ``lr`` multiplies the gradient of the mean loss:

* SGHMC, EWSG: θ' = θ + h r, r' = r - h ∇U - γ h r + √(2γh) ξ. With v = h r:
  lr / N = h², 1 - momentum = γ h.
* SGLD: θ' = θ - h ∇U + √(2h) ξ: lr / N = h.
* pSGLD: θ' = θ - h G ∇U + √(2hG) ξ. G = 1 / √V with V a mean of squares of ∇U, and
  not of the mean loss's gradient, is 1/N of the library's: lr = h. (The other
  reading would make steps 74,000 times longer.)
* FlyMC: θ' = θ + h ξ is proposed. (The paper names no proposals; these are those of
  FlyMC's authors for logistic regression.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

import torch_sgmcmc as sg

from .model import PRIOR_PRECISION

#: γ of the paper, for all methods with momentum.
FRICTION = 50.0

Build = Callable[[Tensor, int, float, int, float], sg.Sampler]


@dataclass(frozen=True)
class Method:
    """A sampler in the paper's setting.

    Args:
        label: its name in the paper.
        step_size: the paper's h.
        tuned: the h of the best validation log-likelihood after one pass
            (``covertype.py --tune``).
        build: ``build(theta, num_data, h, seed, friction)`` makes the sampler.
        gradients: minibatches a step.
        stratified: whether minibatches are stratified by k-means clusters.
        power: of the data's size in :meth:`like_all_data`.
    """

    label: str
    step_size: float
    tuned: float
    build: Build
    gradients: int = 1
    stratified: bool = False
    power: int = 1

    def like_all_data(self, ratio: float) -> tuple[float, float]:
        """The h and γ with which a part of the data has the noise of the whole.

        The noise of minibatches of n is lr N Var / 2 (1 - momentum) n times as large
        as that which is injected. It is the same for all data and for a part, and so
        is momentum, if N h is, for SGLD if N² h is.

        Args:
            ratio: the size of all data over that of the part.
        """
        return self.step_size * ratio**self.power, FRICTION / ratio


@dataclass(frozen=True)
class Firefly:
    """FlyMC with bounds that are tight at the mode.

    Args:
        label: its name.
        step_size: h with the paper's step sizes, if the method is among these.
        tuned: h with step sizes tuned here, if it is among these.
        from_mode: whether chains start at the mode and not at θ = 0.
        adapted: whether proposals are N(θ, h² H⁻¹) and not N(θ, h² I), H the Hessian
            at the mode, and h is adapted in the first half of the budget.
    """

    label: str
    step_size: float | None
    tuned: float | None
    from_mode: bool = False
    adapted: bool = False


def _underdamped(
    cls: type[sg.Sampler],
    theta: Tensor,
    num_data: int,
    h: float,
    seed: int,
    friction: float = FRICTION,
) -> sg.Sampler:
    settings: dict[str, Any] = {"momentum": 1 - friction * h}
    if cls is sg.EWSG:
        settings |= {"num_chains": len(theta), "index_chain_length": 1}
    return _sampler(cls, theta, num_data, seed, lr=num_data * h**2, **settings)


def _sgld(
    theta: Tensor, num_data: int, h: float, seed: int, friction: float = FRICTION
) -> sg.Sampler:
    return _sampler(sg.SGLD, theta, num_data, seed, lr=num_data * h)


def _psgld(
    theta: Tensor, num_data: int, h: float, seed: int, friction: float = FRICTION
) -> sg.Sampler:
    return _sampler(sg.PSGLD, theta, num_data, seed, lr=h, gamma=False)


def _sampler(
    cls: Any, theta: Tensor, num_data: int, seed: int, **settings: Any
) -> sg.Sampler:
    return cls(
        [theta],
        num_data=num_data,
        prior_precision=PRIOR_PRECISION,
        seed=seed,
        **settings,
    )


METHODS: dict[str, Method | Firefly] = {
    "sgld": Method("SGLD", 2e-5, 1e-5, _sgld, power=2),
    "psgld": Method("pSGLD", 5e-3, 1e-2, _psgld),
    "sghmc": Method("SGHMC", 1e-3, 5e-4, partial(_underdamped, sg.SGHMC)),
    "cp_sghmc": Method(
        "CP-SGHMC", 1e-3, 5e-4, partial(_underdamped, sg.SGHMC), stratified=True
    ),
    "ewsg": Method("EWSG", 3e-3, 9e-4, partial(_underdamped, sg.EWSG), gradients=2),
    "flymc": Firefly("FlyMC", 5e-3, 4e-2),
    "flymc_mode": Firefly("FlyMC from the mode", 5e-3, None, from_mode=True),
    # At first 2.38 / √54, at which random walks on a Gaussian are at their best.
    "flymc_adapted": Firefly(
        "FlyMC from the mode, adapted", None, 0.32, from_mode=True, adapted=True
    ),
}
