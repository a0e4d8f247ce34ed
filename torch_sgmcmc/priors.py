"""Gaussian priors by layer, as param groups of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd

from torch_sgmcmc._impl.hyperparams import check_real
from torch_sgmcmc._impl.utils import resolved

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# The prior of norms' scales and offsets: standard deviation 0.2 around 1 and 0.
_NORM_PRECISION = 25.0


class _Layer(NamedTuple):
    """A module with parameters of its own, and its name."""

    name: str
    module: nn.Module

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for key, p in self.module.named_parameters(self.name, recurse=False):
            if p.requires_grad:
                yield key, p

    def weight(self) -> Tensor | None:
        """Returns the first parameter with two or more dimensions."""
        return next((p for _, p in self.params() if p.dim() > 1), None)

    def fan_in(self) -> int:
        """Returns the number of inputs of an output."""
        weight = self.weight()
        if weight is None or isinstance(self.module, nn.Embedding):
            return 1
        if isinstance(self.module, _ConvTransposeNd):
            inputs = weight.shape[0] // self.module.groups
            return max(1, inputs * math.prod(weight.shape[2:]))
        return max(1, math.prod(weight.shape[1:]))


def prior_groups(
    model: nn.Module,
    inputs: Any = None,
    *,
    gain: float = math.sqrt(2),
    lr: Mapping[str, float] | None = None,
    params: Iterable[tuple[str, Tensor]] | None = None,
) -> list[dict[str, Any]]:
    r"""Returns param groups with a Gaussian prior for each layer.

    The weights and the bias of a layer have the prior precision

    .. math::
        \lambda = \mathrm{fan\_in} \cdot \overline{x^2} / \mathrm{gain}^2,

    with :math:`\overline{x^2}` the mean square of the layer's inputs. Its outputs then
    have the variance gain² under the prior (He et al. 2015; Neal 1996). Such a prior
    lets a chain reach its posterior in few passes (docs/priors.md).

    Args:
        model: the module whose parameters are sampled. It is left as it is.
        inputs: the model's inputs for a minibatch: a tensor, a tuple of arguments or a
            dict of keywords. The model is called once, with weights drawn from the
            prior layer by layer. None takes standardised inputs, :math:`\overline{x^2}
            = 1`, for all layers (``fan_in`` alone). Default: None.
        gain: > 0, as in :func:`torch.nn.init.kaiming_normal_`: a larger one widens all
            priors. Default: √2.
        lr: step sizes of layers, by their names, in place of the sampler's. Default:
            None.
        params: named parameters to sample in place of the model's: of a wrapped model,
            or stacked for ``num_chains``. Default: None.

    Returns:
        Param groups for a sampler, with named parameters. Layers of equal priors are in
        one group. Scales of norms have ``prior_mean`` 1 and, as their offsets, the
        precision 25; embeddings have fan_in 1; other vectors and numbers, such as a log
        σ, have the precision 1. Precisions are rounded to three digits.

    Raises:
        ValueError: the model has no parameter that requires a gradient, ``gain`` is out
            of range, or ``lr`` or ``params`` have a name that the model lacks.

    Example:
        >>> sampler = sg.SGHMC(sg.prior_groups(model, x[:500]), lr=0.03, num_data=N)
    """
    check_real("gain", gain, low_open=True)
    layers = [_Layer(name, module) for name, module in model.named_modules()]
    squares = {} if inputs is None else _mean_squares(model, layers, inputs, gain)
    rates = dict(lr or {})
    found: dict[tuple[float, float, float | None], list[tuple[str, Tensor]]] = {}
    seen: set[int] = set()
    for layer in layers:
        rate = rates.pop(layer.name, None)
        for name, p in layer.params():
            if id(p) not in seen:  # else shared
                seen.add(id(p))
                prior = _prior(layer, name, squares.get(layer.name, 1.0), gain)
                found.setdefault((*prior, rate), []).append((name, p))
    if rates:
        raise ValueError(f"Invalid lr: the model has no layer {next(iter(rates))!r}")
    if not found:
        raise ValueError("Invalid model: no parameter requires a gradient")
    groups = [
        {"params": named, "prior_precision": precision, "prior_mean": mean}
        | ({} if rate is None else {"lr": rate})
        for (precision, mean, rate), named in found.items()
    ]
    return groups if params is None else with_params(groups, params)


def with_params(
    groups: Iterable[Mapping[str, Any]], params: Iterable[tuple[str, Tensor]]
) -> list[dict[str, Any]]:
    """Returns groups with other parameters of the same names.

    Raises:
        ValueError: a name is in one of both only.
    """
    given = dict(params)
    known = {name: i for i, group in enumerate(groups) for name, _ in group["params"]}
    names = {name: resolved(name, known) for name in given}
    other = {*names.values()}.symmetric_difference(known)
    if other:
        raise ValueError(
            f"Invalid params: {min(other)!r} is in the groups or in params, not in "
            "both (must have the same names)"
        )
    result: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
    for name, p in given.items():
        result[known[names[name]]]["params"].append((name, p))
    return result


def _prior(layer: _Layer, name: str, square: float, gain: float) -> tuple[float, float]:
    """Returns a parameter's prior precision and mean."""
    if isinstance(layer.module, _NORMS):
        return _NORM_PRECISION, float(name.endswith("weight"))
    if layer.weight() is None:
        return 1.0, 0.0
    precision = layer.fan_in() * square / gain**2
    return float(f"{precision:.3g}"), 0.0


@torch.no_grad()
def _mean_squares(
    model: nn.Module, layers: list[_Layer], inputs: Any, gain: float
) -> dict[str, float]:
    """Measures layers' inputs while weights are drawn from the prior, in order."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, float] = {}

    def hook(layer: _Layer) -> Callable[..., None]:
        def measure(_: nn.Module, given: tuple[Any, ...]) -> None:
            x = given[0] if given else None
            if layer.name in found or not isinstance(x, Tensor):
                return
            square = float(x.double().square().mean()) if x.is_floating_point() else 1.0
            if not (math.isfinite(square) and square > 0):
                return
            found[layer.name] = square
            for name, p in layer.params():
                precision, mean = _prior(layer, name, square, gain)
                noise = torch.randn(p.shape, generator=generator)
                p.copy_(mean + noise / math.sqrt(precision))

        return measure

    kept = {t: t.clone() for t in (*model.parameters(), *model.buffers())}
    handles = [
        layer.module.register_forward_pre_hook(hook(layer))
        for layer in layers
        if next(layer.params(), None) is not None
    ]
    try:
        with torch.random.fork_rng():
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    finally:
        for handle in handles:
            handle.remove()
        for tensor, value in kept.items():
            tensor.copy_(value)
    return found
