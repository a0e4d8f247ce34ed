"""From a model's outputs to what is averaged over draws, and its entropy."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Link"]

NAMES = ("softmax", "sigmoid", "identity", "gaussian")


class Link:
    """The function from outputs to values: one that is named, or any.

    Raises:
        TypeError, ValueError: neither a name nor a function; a dim that is no int.
    """

    def __init__(self, link: str | Callable[[Tensor], Tensor], dim: int) -> None:
        if not callable(link) and link not in NAMES:
            raise ValueError(
                f"Invalid link: {link!r} (must be 'softmax', 'sigmoid', 'identity', "
                "'gaussian' or a function of the outputs)"
            )
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"Invalid dim: {dim!r} (must be an int)")
        self._link = link
        self._dim = dim
        self._has_looked = False

    @property
    def has_entropy(self) -> bool:
        """Whether the values are probabilities."""
        return self._link in ("softmax", "sigmoid")

    @property
    def has_noise(self) -> bool:
        """Whether the outputs are means and log σ."""
        return self._link == "gaussian"

    def aleatoric(self, values: Tensor, outputs: Tensor) -> Tensor | None:
        """A draw's uncertainty of new data: an entropy, or a variance."""
        if self.has_noise:
            return outputs.chunk(2, -1)[1].mul(2).exp()
        return self.entropy(values) if self.has_entropy else None

    def values(self, outputs: Tensor, *, overwrite: bool = False) -> Tensor:
        """What is averaged, perhaps in the memory of the outputs."""
        if callable(self._link):
            return self._link(outputs)
        if self._link == "identity":
            return outputs
        if self._link == "gaussian":
            if outputs.dim() < 2 or outputs.shape[-1] % 2:
                raise ValueError(
                    f"Invalid outputs: shape {list(outputs.shape)} (for "
                    "link='gaussian' the last dimension must have means and log σ)"
                )
            return outputs.chunk(2, -1)[0]
        if not outputs.is_floating_point():
            raise TypeError(
                f"Invalid outputs: dtype {outputs.dtype} (must be a floating dtype for "
                f"link={self._link!r})"
            )
        if self._link == "sigmoid":
            return outputs.sigmoid()
        dims = outputs.dim()
        if dims < 2 or not -dims < self._dim < dims or self._dim == 0:
            raise ValueError(
                f"Invalid dim: {self._dim} is not the classes' in outputs of shape "
                f"{list(outputs.shape)}"
            )
        if outputs.shape[self._dim] < 2:
            raise ValueError(
                f"Invalid outputs: shape {list(outputs.shape)} has one class (with "
                "one number for two classes, link='sigmoid')"
            )
        if not self._has_looked:
            self._has_looked = True
            _warn_of_probabilities(outputs, self._dim)
        return _softmax(outputs, self._dim, overwrite)

    def entropy(self, values: Tensor) -> Tensor:
        """Of probabilities, in nats."""
        if self._link == "sigmoid":
            return -_logarithms(values) - _logarithms(1 - values)
        return -_logarithms(values).sum(self._dim)


def _warn_of_probabilities(outputs: Tensor, dim: int) -> None:
    """Warns of outputs that a softmax has been applied to."""
    sums = outputs.sum(dim)
    if bool((outputs >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
        warnings.warn(
            "The outputs are probabilities already, and link='softmax' would flatten "
            "them: return logits, as by forward=lambda model, x: model(x).log()",
            UserWarning,
            stacklevel=2,
        )


# On a CPU torch's softmax over a few classes takes seven times as long as this, and
# special.entr thrice as long as p log p: together a fifth of a small network.
# So do pages of memory that is asked for at each draw: hence the overwriting.
def _softmax(outputs: Tensor, dim: int, overwrite: bool) -> Tensor:
    powers = outputs if overwrite else outputs.clone()
    powers.sub_(powers.amax(dim, keepdim=True)).exp_()
    return powers.div_(powers.sum(dim, keepdim=True))


def _logarithms(p: Tensor) -> Tensor:
    """Of p: p log p, and 0 where p is."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log_().mul_(p)
