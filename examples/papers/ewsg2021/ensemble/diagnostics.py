"""The noise of the minibatches relative to the injected noise."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_sgmcmc as sg

from .chain import NetworkChain

_MINIBATCHES = 50


def diagnose(chain: NetworkChain) -> dict[str, float]:
    """The figures below, at the chain's current sample, from 50 minibatches."""
    gradients = chain.minibatch_gradients(_MINIBATCHES)
    figures = {"noise_ratio": noise_ratio(chain.sampler, gradients)}
    if isinstance(chain.sampler, sg.EWSG):
        figures["log_weight_difference"] = log_weight_difference(
            chain.sampler, gradients
        )
    return figures


def noise_ratio(sampler: sg.Sampler, gradients: Tensor) -> float:
    r"""The minibatches' part of an update's variance, relative to the injected part.

    .. math::
        \frac{\sum \mathrm{lr}^2 G^2\, \mathrm{Var}(\bar g)}
             {\sum 2 \alpha\, \mathrm{lr}\, G / N},

    summed over all parameters; G is pSGLD's preconditioner, else 1, and α the
    friction, 1 without momentum. A sampler that ignores minibatch noise is right to
    the extent that this is below 1.

    Args:
        sampler: with one param group.
        gradients: of minibatches at one sample, [minibatches, parameters].
    """
    (group,) = sampler.param_groups
    variance = gradients.double().var(0)
    scale = torch.ones_like(variance)
    if isinstance(sampler, sg.PSGLD):
        squares = _state(sampler, "square_average")
        scale = 1 / (squares.sqrt() + group["eps"])
    lr, friction = group["lr"], 1 - group.get("momentum", 0.0)
    added = (lr**2 * scale**2 * variance).sum()
    injected = (2 * friction * lr * scale / group["num_data"]).sum()
    return (added / injected).item()


def log_weight_difference(sampler: sg.EWSG, gradients: Tensor) -> float:
    r"""Median of \|W(g) − W(g')\| over pairs of minibatches, W as in EWSG.

    Far above 1 the index chain is no random choice any more: it takes whichever
    minibatch has the larger W.

    Args:
        sampler: with one param group and momentum.
        gradients: of minibatches at one sample, [minibatches, parameters].
    """
    (group,) = sampler.param_groups
    theta = torch.cat([p.detach().flatten() for p in group["params"]]).double()
    lr, friction = group["lr"], 1 - group["momentum"]
    num_data = group["num_data"]
    g = gradients.double() + group["prior_precision"] / num_data * theta
    kick = friction * _state(sampler, "momentum") + lr * g
    weights = num_data / (4 * friction * lr * group["temperature"]) * (kick**2).sum(1)
    return (weights[::2] - weights[1::2]).abs().median().item()


def _state(sampler: sg.Sampler, name: str) -> Tensor:
    (group,) = sampler.param_groups
    return torch.cat([sampler.state[p][name].flatten() for p in group["params"]])
