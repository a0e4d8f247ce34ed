"""The four methods of the SGHMC paper's figure 4, and their step sizes.

Step sizes, friction and weight decay were chosen on the validation set by
``mnist_bnn.py --tune``, with the same budget for every method: six settings,
60 epochs each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import torch_sgmcmc as sg

__all__ = ["METHODS", "SEARCH", "build_model", "build_optimizer"]

#: The settings in use. `precision` is the regulariser λ of the point estimates;
#: the samplers start from λ = 1 and draw it.
METHODS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 2.0, "precision": 1.0},
    "sgdm": {"lr": 0.3, "momentum": 0.9, "precision": 1.0},
    "sgld": {"lr": 3.0},
    "sghmc": {"lr": 0.1, "momentum": 0.99},
}

#: What --tune tries.
SEARCH: dict[str, list[dict[str, float]]] = {
    "sgd": [
        {"lr": lr, "precision": precision}
        for lr in (0.3, 1.0, 2.0)
        for precision in (0.1, 1.0)
    ],
    "sgdm": [
        {"lr": lr, "momentum": 0.9, "precision": precision}
        for lr in (0.03, 0.1, 0.3)
        for precision in (0.1, 1.0)
    ],
    "sgld": [{"lr": lr} for lr in (0.3, 0.6, 1.0, 2.0, 3.0, 4.0)],
    "sghmc": [
        {"lr": lr, "momentum": momentum}
        for lr in (0.05, 0.1, 0.2)
        for momentum in (0.9, 0.99)
    ],
}


def build_model(inputs: int, seed: int, device: torch.device) -> nn.Sequential:
    """The paper's network, 784-100-10 with sigmoid units, weights N(0, 0.01²)."""
    model = nn.Sequential(nn.Linear(inputs, 100), nn.Sigmoid(), nn.Linear(100, 10))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("weight"):
                p.normal_(0.0, 0.01, generator=generator)
            else:
                p.zero_()
    return model.to(device)


def build_optimizer(
    method: str, settings: dict[str, float], model: nn.Module, num_data: int, seed: int
) -> tuple[Optimizer, sg.GammaPrecision | None]:
    """The optimizer or sampler, and the hyperprior where there is one."""
    # A group for each layer: each has a prior precision of its own.
    groups: list[dict[str, Any]] = [
        {"params": list(layer.parameters())}
        for layer in model.children()
        if isinstance(layer, nn.Linear)
    ]
    lr = settings["lr"]
    if method in ("sgd", "sgdm"):
        sgd = torch.optim.SGD(
            groups,
            lr=lr,
            momentum=settings.get("momentum", 0.0),
            weight_decay=settings["precision"] / num_data,
        )
        return sgd, None
    common: dict[str, Any] = {
        "num_data": num_data,
        "prior_precision": 1.0,
        "seed": seed,
    }
    sampler: sg.Sampler
    if method == "sgld":
        sampler = sg.SGLD(groups, lr, **common)
    else:
        sampler = sg.SGHMC(groups, lr, settings["momentum"], **common)
    return sampler, sg.GammaPrecision(sampler)
