"""The four methods of the paper's table 1, and their settings.

In the library's scale, where the gradient is that of a mean, the authors' program has
lr = 8 for SGLD and lr = 0.4, momentum = exp(-0.05) for SGHMC. Point estimates have
τ = 1, so that λ is what the paper's λ/τ is, and their lr is τ times a sampler's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import torch_sgmcmc as sg

LABELS = {
    "sgd": "SGD",
    "sgdm": "SGD with momentum",
    "sgld": "SGLD",
    "sghmc": "SGHMC",
}
COLORS = {"sgd": "C7", "sgdm": "C0", "sgld": "C2", "sghmc": "C3"}

Settings = dict[str, float]

#: Of point estimates the best that --tune has found, of samplers the authors'.
SETTINGS: dict[str, Settings] = {
    "sgd": {"lr": 100.0, "precision": 1.5},
    "sgdm": {"lr": 10.0, "momentum": 0.9, "precision": 1.5},
    "sgld": {"lr": 8.0},
    "sghmc": {"lr": 0.4, "momentum": 0.95},
}

# lr and λ of point estimates: one best, and its neighbours.
_CROSS = ((100.0, 1.0), (100.0, 1.5), (100.0, 2.0), (50.0, 1.5), (200.0, 1.5))

#: What --tune tries, five settings of each.
SEARCH: dict[str, list[Settings]] = {
    "sgd": [{"lr": lr, "precision": precision} for lr, precision in _CROSS],
    "sgdm": [
        {"lr": lr / 10, "momentum": 0.9, "precision": precision}
        for lr, precision in _CROSS
    ],
    "sgld": [{"lr": lr} for lr in (6.0, 8.0, 12.0, 16.0, 24.0)],
    "sghmc": [{"lr": lr, "momentum": 0.95} for lr in (0.3, 0.4, 0.6, 0.8, 1.2)],
}


def samples(method: str) -> bool:
    """True if the method predicts by a mean over samples."""
    return method in ("sgld", "sghmc")


def build(
    method: str,
    settings: Settings,
    parameters: Iterable[Tensor],
    num_data: int,
    seed: int,
) -> Optimizer:
    """The optimizer or sampler, with a param group for each tensor."""
    groups = [{"params": [p]} for p in parameters]
    chosen = dict(settings)
    if not samples(method):
        chosen["weight_decay"] = chosen.pop("precision") / num_data
        return torch.optim.SGD(groups, **chosen)
    cls: Any = sg.SGLD if method == "sgld" else sg.SGHMC
    return cls(groups, num_data=num_data, prior_precision=1.0, seed=seed, **chosen)
