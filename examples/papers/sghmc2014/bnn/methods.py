"""The four methods of the SGHMC paper's figure 4 and SBPS, and their settings.

Step sizes, friction and weight decay were chosen on the validation set by runs of 800
epochs, those of ``--paper``; for SBPS among three sizes of minibatches, 20 epochs each.
docs/mnist.md has what came of it; ``sghmc2014.mnist --tune`` tries what is in `SEARCH`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import torch_sgmcmc as sg

# Not searched for: the sampler's defaults, and two or three samples an epoch.
_BOUNCY = {
    "num_std": 3.0,
    "refresh_rate": 0.0,
    "sample_interval": 0.5,
    "start_epochs": 5,
    "precision": 1.0,
}

#: The settings in use. `precision` is λ, fixed: the regulariser of the point estimates.
#: Samplers without it start from λ = 1 and draw it.
METHODS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 1.0, "precision": 3.0},
    "sgdm": {"lr": 0.3, "momentum": 0.9, "precision": 3.0},
    "sgld": {"lr": 4.0},
    "sghmc": {"lr": 0.1, "momentum": 0.99},
    "sbps": {"minibatch": 100} | _BOUNCY,
    "psbps": {"minibatch": 100} | _BOUNCY,
}

#: Those of the paper's figure, which run if no others are asked for.
FIGURE_4 = ("sgd", "sgdm", "sgld", "sghmc")

_BOUNCY_SEARCH = [{"minibatch": minibatch} | _BOUNCY for minibatch in (100, 200, 500)]

#: What --tune tries: with --paper what was chosen from, the best and, in every
#: direction, what is next to it.
SEARCH: dict[str, list[dict[str, float]]] = {
    "sgd": [
        {"lr": lr, "precision": precision}
        for lr, precision in (
            (0.5, 3.0),
            (1.0, 1.0),
            (1.0, 3.0),
            (1.0, 10.0),
            (2.0, 3.0),
        )
    ],
    "sgdm": [
        {"lr": lr, "momentum": 0.9, "precision": precision}
        for lr, precision in (
            (0.1, 3.0),
            (0.3, 1.0),
            (0.3, 3.0),
            (0.3, 10.0),
            (0.6, 3.0),
            (1.0, 3.0),
        )
    ],
    "sgld": [{"lr": lr} for lr in (2.0, 3.0, 4.0, 6.0)],
    "sghmc": [
        {"lr": lr, "momentum": momentum}
        for lr, momentum in (
            (0.05, 0.99),
            (0.1, 0.98),
            (0.1, 0.99),
            (0.1, 0.995),
            (0.2, 0.99),
        )
    ],
    "sbps": _BOUNCY_SEARCH,
    "psbps": _BOUNCY_SEARCH,
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


def _layers(model: nn.Module) -> list[dict[str, Any]]:
    """A param group for each layer: each has a prior precision of its own."""
    return [
        {"params": list(layer.parameters())}
        for layer in model.children()
        if isinstance(layer, nn.Linear)
    ]


def build_optimizer(
    method: str, settings: dict[str, float], model: nn.Module, num_data: int, seed: int
) -> tuple[Optimizer, sg.GammaPrecision | None]:
    """The optimizer or sampler, and the hyperprior where there is one."""
    groups, lr = _layers(model), settings["lr"]
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
        "prior_precision": settings.get("precision", 1.0),
        "seed": seed,
    }
    sampler: sg.Sampler
    if method == "sgld":
        sampler = sg.SGLD(groups, lr, **common)
    else:
        sampler = sg.SGHMC(groups, lr, settings["momentum"], **common)
    return sampler, _hyperprior(sampler, settings)


def _hyperprior(
    sampler: sg.Sampler, settings: dict[str, float]
) -> sg.GammaPrecision | None:
    return None if "precision" in settings else sg.GammaPrecision(sampler)


def build_sbps(
    method: str, settings: dict[str, float], model: nn.Module, num_data: int, seed: int
) -> tuple[sg.SBPS, sg.GammaPrecision | None]:
    """SBPS, or for the method ``psbps`` pSBPS, and the hyperprior if there is one."""
    sampler = sg.SBPS(
        _layers(model),
        num_data=num_data,
        prior_precision=settings.get("precision", 1.0),
        num_std=settings["num_std"],
        refresh_rate=settings["refresh_rate"],
        preconditioned=method == "psbps",
        sample_interval=settings["sample_interval"],
        model=model,
        seed=seed,
    )
    return sampler, _hyperprior(sampler, settings)
