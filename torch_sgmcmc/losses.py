"""Losses that are likelihoods: minus the mean log-density of a minibatch's data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_sgmcmc.core.hyperparams import check_real, wrong_shape

__all__ = [
    "Likelihood",
    "bernoulli",
    "categorical",
    "gaussian",
    "heteroscedastic",
    "likelihood_of",
]

Forward = Callable[[nn.Module, Any], Tensor]


class Likelihood:
    """``loss(model, batch)``, as for :func:`~torch_sgmcmc.sample`."""

    #: Tells :func:`~torch_sgmcmc.check_setup` that the scale is intended.
    is_likelihood = True
    #: The link of :class:`~torch_sgmcmc.Predictive`.
    link = "softmax"
    #: The classes' dimension, for "softmax".
    dim = -1

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Returns the loss of a batch (x, y)."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(
                f"Invalid batch: a {type(batch).__name__} of {len(batch)} (must be a "
                "pair (x, y); for others, a function with loss.of(outputs, y, model))"
            )
        x, y = batch
        return self.of(model(x), y, model)

    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        """Returns the mean over data of minus log p(y | x)."""
        raise NotImplementedError

    def forward(self, forward: Forward) -> Forward:
        """Wraps a function (model, batch) so that its outputs fit ``link``."""
        return forward

    def settings(self) -> dict[str, Any] | None:
        """Returns arguments that rebuild this likelihood; None for a user's class."""
        name = next((k for k, v in _NAMED.items() if type(self) is v), None)
        return None if name is None else {"name": name}

    def __repr__(self) -> str:
        return f"{type(self).__name__.strip('_').lower()}()"


class _Categorical(Likelihood):
    dim = 1  # cross_entropy's

    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum") / len(targets)


class _Bernoulli(Likelihood):
    link = "sigmoid"

    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        _check_shapes(outputs, targets)
        each = F.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), reduction="none"
        )
        return each.sum() / len(targets)


class _Gaussian(Likelihood):
    link = "gaussian"

    def __init__(self, noise: float | str) -> None:
        self._noise = noise

    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        _check_shapes(outputs, targets)
        return _of_normal(outputs, targets, self._log_noise(model, outputs))

    def forward(self, forward: Forward) -> Forward:
        """Wraps a function so that it returns means and log σ."""

        def both(model: nn.Module, batch: Any) -> Tensor:
            means = forward(model, batch)
            if means.dim() == 0:
                raise wrong_shape("outputs", means, "[inputs, outputs]")
            if means.dim() == 1:
                means = means[:, None]
            return torch.cat([means, self._log_noise(model, means)], -1)

        return both

    def _log_noise(self, model: nn.Module, means: Tensor) -> Tensor:
        if isinstance(self._noise, str):
            log_noise = _named_in(model, self._noise)
        else:
            log_noise = means.new_full((), math.log(self._noise))
        return log_noise.expand(means.shape)

    def settings(self) -> dict[str, Any] | None:
        return {"name": "gaussian", "noise": self._noise}

    def __repr__(self) -> str:
        return f"gaussian(noise={self._noise!r})"


class _Heteroscedastic(Likelihood):
    link = "gaussian"

    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        if outputs.dim() == 0 or outputs.shape[-1] % 2:
            raise ValueError(
                f"Invalid outputs: shape {list(outputs.shape)} (the last dimension "
                "must have means and log σ, as many of each)"
            )
        means, log_noise = outputs.chunk(2, -1)
        _check_shapes(means, targets)
        return _of_normal(means, targets, log_noise)


def _named_in(model: nn.Module, name: str) -> Tensor:
    """Returns a parameter, or a draw's tensor in its place."""
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Tensor):
        raise ValueError(f"Invalid noise: the model has no parameter {name!r}")
    return found


def _of_normal(means: Tensor, targets: Tensor, log_noise: Tensor) -> Tensor:
    squares = ((targets - means) * torch.exp(-log_noise)).square() / 2
    constant = math.log(2 * math.pi) / 2
    return (squares + log_noise + constant).sum() / len(targets)


def _check_shapes(outputs: Tensor, targets: Tensor) -> None:
    # Torch would broadcast other shapes to a loss of all pairs.
    if outputs.shape != targets.shape:
        wanted = f"the outputs' shape, {list(outputs.shape)}"
        raise wrong_shape("targets", targets, wanted)


class _Regression(Likelihood):
    link = "identity"

    def of(self, outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
        raise TypeError("a regression's loss needs its noise: losses.gaussian(noise)")


def likelihood_of(given: str | Likelihood | Mapping[str, Any]) -> Likelihood:
    """Returns a likelihood by name or settings, or a given one."""
    if isinstance(given, Likelihood):
        return given
    if isinstance(given, Mapping):
        if given.get("name") == "gaussian":
            return gaussian(given["noise"])
        given = given["name"]
    if given not in _NAMED:
        raise ValueError(
            f"Invalid likelihood: {given!r} (must be {', '.join(map(repr, _NAMED))} or "
            "one of torch_sgmcmc.losses)"
        )
    return _NAMED[given]()


_NAMED = {
    "classification": _Categorical,
    "bernoulli": _Bernoulli,
    "regression": _Regression,
    "heteroscedastic": _Heteroscedastic,
}


def categorical() -> Likelihood:
    """Classes from logits: cross-entropy, summed over the targets of a datum.

    Outputs are [inputs, classes, ...], as for ``F.cross_entropy``.
    """
    return _Categorical()


def bernoulli() -> Likelihood:
    """Labels 0 and 1 from logits, summed over outputs, averaged over data."""
    return _Bernoulli()


def gaussian(noise: float | str = 1.0) -> Likelihood:
    r"""Numbers with Gaussian noise.

    .. math::
        \frac{1}{n} \sum_i \sum_k \Bigl( \frac{(y_{ik} - f_k(x_i))^2}{2 \sigma^2}
        + \log \sigma + \tfrac12 \log 2\pi \Bigr)

    ``F.mse_loss`` is another likelihood: its noise has variance 1/2, or d/2 with d
    outputs, since it divides by d as well.

    Args:
        noise: σ, > 0; or the name of a parameter of the model that is log σ, one number
            or one for each output. It is sampled, stored and predicted with like a
            weight, with its param group's prior: ``model.log_noise =
            nn.Parameter(torch.zeros(()))``. Default: 1.

    Returns:
        ``loss(model, batch)`` of a batch ``(x, y)``, with y of the outputs' shape.
        Predictions of outputs [inputs] have the shape [inputs, 1].
    """
    if not isinstance(noise, str):
        check_real("noise", noise, low_open=True)
    return _Gaussian(noise)


def heteroscedastic() -> Likelihood:
    """Numbers with Gaussian noise that depends on x.

    The first half of the model's outputs (in the last dimension) are means, the second
    half log σ.
    """
    return _Heteroscedastic()
