"""Averages over draws: the averaged values, their sums, and quantiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.core.hyperparams import check_integer
from torch_sgmcmc.losses import Likelihood, likelihood_of


class Link:
    """The function from outputs to values, by name or given."""

    def __init__(self, link: str | Callable[[Tensor], Tensor], dim: int) -> None:
        names = ("softmax", "sigmoid", "identity", "gaussian")
        if not callable(link) and link not in names:
            raise ValueError(
                f"Invalid link: {link!r} (must be 'softmax', 'sigmoid', 'identity', "
                "'gaussian' or a function of the outputs)"
            )
        self._link, self._is_checked = link, False
        #: The name, None for a function; the classes' dimension.
        self.name = None if callable(link) else link
        self.dim = check_integer("dim", dim, low=-(2**31))
        #: True if the values are probabilities; if the outputs are means and log σ.
        self.has_entropy = link in ("softmax", "sigmoid")
        self.has_noise = link == "gaussian"

    def aleatoric(self, values: Tensor, outputs: Tensor) -> Tensor | None:
        """Returns a draw's uncertainty of new data: an entropy, or a variance."""
        if self.has_noise:
            return outputs.chunk(2, -1)[1].mul(2).exp()
        return self.entropy(values) if self.has_entropy else None

    def values(self, outputs: Tensor, *, overwrite: bool = False) -> Tensor:
        """Returns the values to average, perhaps in the memory of the outputs."""
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
        if dims < 2 or not -dims < self.dim < dims or self.dim == 0:
            raise ValueError(
                f"Invalid dim: {self.dim} is not the classes' in outputs of shape "
                f"{list(outputs.shape)}"
            )
        if outputs.shape[self.dim] < 2:
            raise ValueError(
                f"Invalid outputs: shape {list(outputs.shape)} has one class (with "
                "one number for two classes, link='sigmoid')"
            )
        if not self._is_checked:
            self._is_checked = True
            _warn_of_probabilities(outputs, self.dim)
        return _softmax(outputs, self.dim, overwrite)

    def entropy(self, values: Tensor) -> Tensor:
        """Returns the entropy of probabilities, in nats."""
        if self._link == "sigmoid":
            return -_logarithms(values) - _logarithms(1 - values)
        return -_logarithms(values).sum(self.dim)

    def saved(self, dims: int) -> dict[str, Any]:
        """Returns its part of a state dict, for values of so many dimensions."""
        dim = self.dim % max(dims, 1) if self.name == "softmax" else None
        return {"link": self.name, "dim": dim}


def link_of(
    draw: Any,
    *,
    link: str | Callable[[Tensor], Tensor] | None = None,
    dim: int | None = None,
    likelihood: str | Likelihood | None = None,
    **_: Any,
) -> tuple[Link, Likelihood | None]:
    """Returns the link by options of a Predictive, else by a draw's likelihood."""
    if link is not None and likelihood is not None:
        raise ValueError("Invalid link: give link or likelihood, not both")
    # A module's likelihood is a part of it.
    if link is None and likelihood is None and not isinstance(draw, nn.Module):
        likelihood = getattr(draw, "likelihood", None)
    chosen = None if likelihood is None else likelihood_of(likelihood)
    if link is None:
        link = "softmax" if chosen is None else chosen.link
    if dim is None:
        dim = -1 if chosen is None else chosen.dim
    return Link(link, dim), chosen


def _warn_of_probabilities(outputs: Tensor, dim: int) -> None:
    sums = outputs.sum(dim)
    if bool((outputs >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
        warnings.warn(
            "The outputs are probabilities already, and link='softmax' would flatten "
            "them: return logits, as by forward=lambda model, x: model(x).log()",
            stacklevel=2,
        )


# On a CPU torch's softmax over a few classes takes seven times as long as this, and
# special.entr thrice as long as p log p: together a fifth of a small network. Fresh
# memory for each draw costs as much: hence the overwriting.
def _softmax(outputs: Tensor, dim: int, overwrite: bool) -> Tensor:
    powers = outputs if overwrite else outputs.clone()
    powers.sub_(powers.amax(dim, keepdim=True)).exp_()
    return powers.div_(powers.sum(dim, keepdim=True))


def _logarithms(p: Tensor) -> Tensor:
    """Returns p log p, and 0 where p is 0."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log_().mul_(p)


# Relative rounding error of a sum of many weights.
_ROUNDING = 1e-12


def weighted_quantiles(values: Tensor, weights: Tensor, levels: Tensor) -> Tensor:
    """Returns the smallest values at which the cumulative weight reaches each level.

    Args:
        values: [draws, ...].
        weights: [draws], float64, >= 0.
        levels: in [0, 1].

    Returns:
        [levels, ...], each a value of a draw; NaN where a draw has NaN.
    """
    some = weights > 0
    unknown = values[some].isnan().any(0)
    values, order = values[some].sort(0)
    weights = weights[some]
    below = weights[order].cumsum(0)
    found = []
    for level in levels.tolist():
        wanted = level * weights.sum() * (1 - _ROUNDING)
        index = (below < wanted).sum(0, keepdim=True).clamp_max(len(weights) - 1)
        found.append(values.gather(0, index)[0])
    quantiles = torch.stack(found)
    if values.is_floating_point():
        quantiles = quantiles.masked_fill(unknown, torch.nan)
    return quantiles


Function = Callable[[Tensor], Tensor]


class Terms:
    """A draw's terms of the sums; may overwrite the draw's outputs."""

    def __init__(
        self, outputs: Tensor, link: Link, functions: Mapping[str, Function]
    ) -> None:
        # Functions may return views of the outputs.
        self.values = link.values(outputs, overwrite=not functions)
        if isinstance(self.values, Tensor) and self.values.dtype is torch.bool:
            self.values = self.values.byte()  # bool tensors cannot be subtracted
        aleatoric = link.aleatoric(self.values, outputs)
        self.means = {} if aleatoric is None else {"": aleatoric}
        self.means |= {name: f(outputs) for name, f in functions.items()}
        self._check(len(outputs))

    def _check(self, rows: int) -> None:
        for name, term in (("link", self.values), *self.means.items()):
            if not isinstance(term, Tensor):
                raise TypeError(
                    f"Invalid {name}: it returned a {type(term).__name__} (must be a "
                    "Tensor)"
                )
            if term.is_complex():
                raise TypeError(
                    f"Invalid {name}: it returned {term.dtype} (must be real: return "
                    "torch.view_as_real)"
                )
            if term.dim() == 0 or len(term) != rows:
                raise ValueError(
                    f"Invalid {name}: it returned shape {list(term.shape)} for "
                    f"outputs of {rows} rows (must have a row for each)"
                )


SUMS = ("origin", "distances", "squares")


class Sums:
    r"""Weighted sums in float64; only ``kept`` grows with the number of draws.

    Values are summed as distances d from the first draw's values, so that variances of
    numbers far from 0 keep their digits.
    """

    @torch.inference_mode(False)  # its tensors could not be changed outside of it
    def __init__(self, terms: Terms) -> None:
        self.origin = terms.values.to(torch.float64, copy=True)
        self.distances, self.squares, self._distance = (
            torch.zeros_like(self.origin) for _ in range(3)
        )
        self.means = {
            name: torch.zeros_like(term, dtype=torch.float64)
            for name, term in terms.means.items()
        }
        #: The dtype of means: the values', or the default for integers.
        self.dtype = (terms.values / 1).dtype
        #: The values of all draws, if they are kept.
        self.kept: list[Tensor] = []

    def check(self, terms: Terms) -> None:
        """Raises if another draw gave other shapes."""
        pairs = [(terms.values, self.distances)]
        pairs += [(terms.means[name], sums) for name, sums in self.means.items()]
        for term, sums in pairs:
            if term.shape != sums.shape:
                raise ValueError(
                    f"Invalid outputs: shape {list(term.shape)} for inputs that had "
                    f"{list(sums.shape)} with an earlier draw"
                )

    def add(self, terms: Terms, weight: float, *, keep: bool) -> None:
        """Adds a draw's terms."""
        distance = torch.sub(terms.values, self.origin, out=self._distance)
        self.distances.add_(distance, alpha=weight)
        self.squares.addcmul_(distance, distance, value=weight)
        for name, sums in self.means.items():
            sums.add_(terms.means[name], alpha=weight)
        if keep:
            self.kept.append(terms.values.cpu())

    def mean(self, weight: float) -> Tensor:
        """Returns the mean of values, in float64."""
        return self.origin + self.distances / weight

    def variance(self, weight: float) -> Tensor:
        """Returns the variance of values."""
        return self.squares / weight - (self.distances / weight).square()

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums, as in C++; tensors are shared, not copied."""
        state: dict[str, Any] = {name: getattr(self, name) for name in SUMS}
        dtype = str(self.dtype).removeprefix("torch.")
        return state | {"means": {**self.means}, "dtype": dtype, "kept": [*self.kept]}

    @classmethod
    @torch.inference_mode(False)
    def from_state(cls, state: Mapping[str, Any], device: Any) -> Sums:
        """Returns a copy of a state dict's tensors."""
        sums = cls.__new__(cls)
        sums.dtype = getattr(torch, str(state["dtype"]).removeprefix("torch."))
        for name in SUMS:
            setattr(sums, name, state[name].to(device, copy=True))
        sums._distance = torch.empty_like(sums.origin)
        sums.means = {k: t.to(device, copy=True) for k, t in state["means"].items()}
        sums.kept = [t.clone() for t in state["kept"]]
        return sums
