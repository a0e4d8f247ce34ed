"""Losses that are likelihoods: minus the mean log-density of a minibatch's data."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_sgmcmc.chain.checks import check_real

__all__ = ["bernoulli", "categorical", "gaussian", "heteroscedastic"]


class _Loss:
    """``loss(model, batch)``, as for :func:`~torch_sgmcmc.sample`."""

    #: For :func:`~torch_sgmcmc.check`: its scale is what is meant.
    is_likelihood = True

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return self.of(model(x), y, model)

    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        """The mean over data of minus log p(y | x)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__.strip('_').lower()}()"


class _Categorical(_Loss):
    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        return F.cross_entropy(outputs, targets)


class _Bernoulli(_Loss):
    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        _check_shapes(outputs, targets)
        each = F.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), reduction="none"
        )
        return each.sum() / len(targets)


class _Gaussian(_Loss):
    def __init__(self, noise: float | str) -> None:
        self._noise = noise

    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        _check_shapes(outputs, targets)
        if isinstance(self._noise, str):
            log_noise = model.get_parameter(self._noise).expand(outputs.shape)
        else:
            log_noise = outputs.new_full((), math.log(self._noise)).expand(
                outputs.shape
            )
        return _of_normal(outputs, targets, log_noise)

    def __repr__(self) -> str:
        return f"gaussian(noise={self._noise!r})"


class _Heteroscedastic(_Loss):
    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        if outputs.dim() == 0 or outputs.shape[-1] % 2:
            raise ValueError(
                f"Invalid outputs: shape {list(outputs.shape)} (the last dimension "
                "must have means and log σ, as many of each)"
            )
        means, log_noise = outputs.chunk(2, -1)
        _check_shapes(means, targets)
        return _of_normal(means, targets, log_noise)


def _of_normal(means: Tensor, targets: Tensor, log_noise: Tensor) -> Tensor:
    squares = ((targets - means) * torch.exp(-log_noise)).square() / 2
    constant = math.log(2 * math.pi) / 2
    return (squares + log_noise + constant).sum() / len(targets)


def _check_shapes(outputs: Tensor, targets: Tensor) -> None:
    # Which torch would broadcast, to a loss of all pairs.
    if outputs.shape != targets.shape:
        raise ValueError(
            f"Invalid targets: shape {list(targets.shape)} (must be that of the "
            f"outputs, {list(outputs.shape)})"
        )


def categorical() -> _Loss:
    """Classes from logits: the mean cross-entropy, with a batch ``(x, y)``."""
    return _Categorical()


def bernoulli() -> _Loss:
    """Labels 0 and 1 from logits; of several outputs the sum, in the mean over data."""
    return _Bernoulli()


def gaussian(noise: float | str = 1.0) -> _Loss:
    r"""Numbers with Gaussian noise.

    .. math::
        \frac{1}{n} \sum_i \sum_k \Bigl( \frac{(y_{ik} - f_k(x_i))^2}{2 \sigma^2}
        + \log \sigma + \tfrac12 \log 2\pi \Bigr)

    ``F.mse_loss`` is another likelihood: of noise with variance 1/2, or with d outputs
    d/2, since it divides by d as well.

    Args:
        noise: σ, > 0; or the name of a parameter of the model that is log σ, one number
            or one for each output, and then is sampled, stored and predicted with like
            a weight: ``model.log_noise = nn.Parameter(torch.zeros(()))``. Its prior is
            that of its param group. Default: 1.

    Returns:
        ``loss(model, batch)`` of a batch ``(x, y)``, with y of the outputs' shape.
    """
    if not isinstance(noise, str):
        check_real("noise", noise, low_open=True)
    return _Gaussian(noise)


def heteroscedastic() -> _Loss:
    """Numbers with Gaussian noise that depends on x.

    Of the model's outputs the first half (of the last dimension) are means, the second
    log σ of each.
    """
    return _Heteroscedastic()
