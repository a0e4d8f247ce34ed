"""The five methods, their settings in the paper's notation, and what is tried.

``h`` is a step size and ``gamma`` a friction γ for the potential
U(θ) = −Σᵢ log p(xᵢ|θ) + ‖θ‖²/2 (a sum over all N examples). The samplers take SGD's
``lr``, which multiplies the gradient of the mean loss:

* EWSG, SGHMC, CP-SGHMC: dr = −(∇U + γr)dt + √(2γ)dW with step h gives, with v = hr,
  lr = h²N and momentum = 1 − γh;
* SGLD: dθ = −∇U dt + √2 dW with step h gives lr = hN;
* pSGLD: the same with ∇U preconditioned by G. If G is made of squares of ∇U, as here
  assumed, N cancels from G∇U, and lr = h.

The paper's own h and γ of the methods with momentum are of the *mean* loss (as those of
the sum nothing learns): lr = h², momentum = 1 − γh. They are kept as those of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

import torch_sgmcmc as sg

Settings = dict[str, float]

LABELS = {
    "ewsg": "EWSG",
    "sghmc": "SGHMC",
    "sghmc_at_h": "SGHMC at EWSG's h",
    "cp_sghmc": "CP-SGHMC",
    "sgld": "SGLD",
    "psgld": "pSGLD",
}

#: Whether EWSG's weights or its step is what helps: SGHMC with EWSG's settings.
CONTROL = "sghmc_at_h"

#: M: EWSG takes the gradients of M + 1 minibatches for one update.
INDEX_CHAIN_LENGTH = 1


def _of_mean(h: float, gamma: float, num_data: int = 60_000) -> Settings:
    """Settings on the sum's scale, for the mean loss's h and γ: h² N is its h²."""
    root = math.sqrt(num_data)
    return {"h": h / root, "gamma": gamma * root}


#: The paper's settings, section 5.3.
PAPER: dict[str, dict[str, Settings]] = {
    "mlp": {
        "ewsg": _of_mean(4e-3, 0.1),
        "sghmc": _of_mean(2e-3, 0.1),
        CONTROL: _of_mean(4e-3, 0.1),
        "cp_sghmc": _of_mean(2e-3, 0.1),
        "sgld": {"h": 1e-7},
        "psgld": {"h": 1e-4},
    },
    "cnn": {
        "ewsg": _of_mean(4e-3, 1.0),
        "sghmc": _of_mean(2e-3, 1.0),
        CONTROL: _of_mean(4e-3, 1.0),
        "cp_sghmc": _of_mean(2e-3, 1.0),
        "sgld": {"h": 2e-8},
        "psgld": {"h": 8e-6},
    },
}


def _at(step: float, friction: float) -> Settings:
    """Returns h and γ by h / γ, which is SGLD's h, and α = γh, 1 for SGLD itself."""
    h = math.sqrt(friction * step)
    return {"h": h, "gamma": friction / h}


def _underdamped(steps: Sequence[float], frictions: Sequence[float]) -> list[Settings]:
    return [_at(step, friction) for friction in frictions for step in steps]


def _overdamped(lowest: float, highest: float, count: int) -> list[Settings]:
    """Step sizes at equal ratios, to two digits."""
    ratio = (highest / lowest) ** (1 / (count - 1))
    return [{"h": float(f"{lowest * ratio**i:.1e}")} for i in range(count)]


_MLP = _underdamped((5e-6, 1e-5, 2e-5), (0.025, 0.1, 0.4, 1.0))
_CNN = _underdamped((2.5e-6, 5e-6, 1e-5, 2e-5), (0.025, 0.1, 0.4, 1.0))

#: What --tune tries besides the paper's settings: as many for each method.
SEARCH: dict[str, dict[str, list[Settings]]] = {
    "mlp": {
        "ewsg": _MLP,
        "sghmc": _MLP,
        CONTROL: [],
        "cp_sghmc": _MLP,
        "sgld": _overdamped(1e-6, 5e-5, 12),
        "psgld": _overdamped(3e-4, 1e-2, 12),
    },
    "cnn": {
        "ewsg": _CNN,
        "sghmc": _CNN,
        CONTROL: [],
        "cp_sghmc": _CNN,
        "sgld": [*_overdamped(1e-6, 3e-5, 12), *_overdamped(4e-6, 1e-5, 4)],
        "psgld": [*_overdamped(3e-5, 5e-3, 12), *_overdamped(6e-4, 2.5e-3, 4)],
    },
}

#: Of each method, how many settings --tune runs with all seeds.
FINALISTS = 3

#: What --tune chose.
TUNED: dict[str, dict[str, Settings]] = {
    "mlp": {
        "ewsg": _at(2e-5, 0.1),
        "sghmc": _at(1e-5, 1.0),
        CONTROL: _at(1e-5, 1.0),
        "cp_sghmc": _at(1e-5, 1.0),
        "sgld": {"h": 1.2e-5},
        "psgld": {"h": 3.8e-3},
    },
    "cnn": {
        "ewsg": _at(5e-6, 0.4),
        "sghmc": _at(5e-6, 0.1),
        CONTROL: _at(5e-6, 0.4),
        "cp_sghmc": _at(1e-5, 0.4),
        "sgld": {"h": 6.4e-6},
        "psgld": {"h": 6e-4},
    },
}


def build_sampler(
    method: str, settings: Settings, model: nn.Module, num_data: int, seed: int
) -> sg.Sampler:
    """The sampler, with the prior N(0, 1) on every weight and bias."""
    h = settings["h"]
    common: dict[str, Any] = {
        "num_data": num_data,
        "prior_precision": 1.0,
        "seed": seed,
    }
    if method == "sgld":
        return sg.SGLD(model.parameters(), h * num_data, **common)
    if method == "psgld":
        # The chain stops adaptation with burn-in, and needs no Γ from then on.
        return sg.PSGLD(model.parameters(), h, gamma=False, **common)
    lr, momentum = h**2 * num_data, 1 - settings["gamma"] * h
    if method == "ewsg":
        return sg.EWSG(
            model.parameters(),
            lr,
            momentum,
            index_chain_length=INDEX_CHAIN_LENGTH,
            **common,
        )
    return sg.SGHMC(model.parameters(), lr, momentum, **common)


def minibatches_of(method: str) -> int:
    """The minibatches whose gradients an update takes."""
    return INDEX_CHAIN_LENGTH + 1 if method == "ewsg" else 1


def minibatch_size(method: str, batch_size: int, halved: bool) -> int:
    """A budget by minibatches: EWSG may have fewer updates, or smaller minibatches."""
    return batch_size // minibatches_of(method) if halved else batch_size
