"""Gaussian priors by layer, as param groups of a model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from torch_sgmcmc.core.hyperparams import check_real
from torch_sgmcmc.core.utils import Snapshot, resolved

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# The prior of norms' scales and offsets: standard deviation 0.2 around 1 and 0.
_NORM_PRECISION = 25.0
# A bias adds 2 / (fan_in mean square) to the outputs' variance, which is 2 without it:
# at less than this it would be most of it.
_LEAST = 0.1
# Draws of all weights, over which the mean squares of layers' inputs are averaged.
_DRAWS = 10
# Their seed, which no program gives to the generator of its data.
_SEED = 0x3B1F_59E2_7C46_A8D5


class _Layer(NamedTuple):
    """A module that owns parameters, and its name."""

    name: str
    module: nn.Module

    def parametrized(self) -> Iterator[tuple[str, Any]]:
        named: Any = getattr(self.module, "parametrizations", {})
        for key, module in named.items():
            yield f"{self.name}.parametrizations.{key}".removeprefix("."), module

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, module in ((self.name, self.module), *self.parametrized()):
            for key, p in module.named_parameters(name, recurse=False):
                if p.requires_grad:
                    yield key, p

    def weight(self) -> Tensor | None:
        """Returns the first parameter with two or more dimensions."""
        norms = self.norms()
        found = (p for name, p in self.params() if p.dim() > 1 and name not in norms)
        return next(found, None)

    def norms(self) -> dict[str, float]:
        """Returns by name, for weight_norm's norms, 1 / the number of their weights."""
        return {
            f"{name}.original0": each.original0.numel() / each.original1.numel()
            for name, each in self.parametrized()
            if isinstance(each[0], _WeightNorm)
        }

    def fan_in(self) -> int:
        """Returns the number of inputs of an output."""
        weight = self.weight()
        if weight is None or isinstance(self.module, nn.Embedding | nn.EmbeddingBag):
            return 1
        if isinstance(self.module, _ConvTransposeNd):
            inputs = weight.shape[0] // self.module.groups
            taken = math.prod(weight.shape[2:]) / math.prod(self.module.stride)
            return max(1, round(inputs * taken))
        return max(1, math.prod(weight.shape[1:]))


def prior_groups(
    model: nn.Module,
    inputs: Any = None,
    *,
    scale: float = 1.0,
    lr: Mapping[str, float] | None = None,
    params: Iterable[tuple[str, Tensor]] | None = None,
) -> list[dict[str, Any]]:
    r"""Returns param groups with a Gaussian prior for each layer.

    The weights and the bias of a layer have the prior precision

    .. math::
        \lambda = \mathrm{fan\_in} \cdot \overline{x^2} / (2\, \mathrm{scale}^2),

    with :math:`\overline{x^2}` the mean square of the layer's inputs. With scale 1 the
    weights give its outputs the variance 2 under the prior (He et al. 2015; Neal 1996),
    and the bias adds :math:`1 / \lambda`. Such a prior lets a chain reach its posterior
    in few passes (docs/priors.md).

    Args:
        model: the module whose parameters are sampled. It is left as it is.
        inputs: the model's inputs for a minibatch: a tensor, a tuple of arguments or a
            dict of keywords, the same on all ranks. The model is called ten times, with
            weights drawn from the priors of scale 1. None takes standardised inputs,
            :math:`\overline{x^2} = 1`, for all layers (``fan_in`` alone). Default:
            None.
        scale: > 0, multiplies the prior's standard deviation of all layers. Default: 1.
        lr: step sizes of layers, by their names, in place of the sampler's. Default:
            None.
        params: named parameters to sample in place of the model's: of a wrapped model,
            or stacked for ``num_chains``. Default: None.

    Returns:
        Param groups for a sampler, with named parameters. Layers of equal priors are in
        one group; shared weights have the largest precision of their layers. Scales of
        norms have ``prior_mean`` 1 and, as their offsets, the precision 25; embeddings
        have fan_in 1. Numbers, such as a log σ, and vectors of modules without a matrix
        have the precision 1. Precisions are rounded to two digits.

        With :func:`~torch.nn.utils.parametrizations.weight_norm`, fan_in of the norms
        is divided by the number of weights of a norm, which gives 1 for a linear layer.
        Outputs then have variance 2. Directions have the layer's λ, which has no effect
        on the outputs.

    Raises:
        ValueError: the model has no parameter that requires a gradient, ``scale`` is
            out of range, or ``lr`` or ``params`` have a name that the model lacks.

    Warns:
        UserWarning: a layer's inputs were not seen or are so small that its bias would
            dominate, or something else may change the size of its weights.

    Example:
        >>> sampler = sg.SGHMC(sg.prior_groups(model, x[:500]), lr=0.03, num_data=N)
    """
    check_real("scale", scale, low_open=True)
    layers = [
        _Layer(name, module)
        for name, module in model.named_modules()
        if not isinstance(module, ParametrizationList)
    ]
    _warn_of_sizes(layers)
    squares = {} if inputs is None else _mean_squares(model, layers, inputs)
    _warn_of_biases(layers, squares)
    rates = dict(lr or {})
    chosen: dict[nn.Parameter, tuple[str, tuple[float, float], float | None]] = {}
    for layer in layers:
        rate = rates.pop(layer.name, None)
        for name, p in layer.params():
            prior = _prior(layer, name, p, squares.get(layer.name, 1.0), scale)
            first = chosen.setdefault(p, (name, prior, rate))
            if prior > first[1]:  # of a layer that shares it
                chosen[p] = first[0], prior, first[2]
    found: dict[tuple[float, float, float | None], list[tuple[str, Tensor]]] = {}
    for p, (name, prior, rate) in chosen.items():
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


def _warn_of_sizes(layers: list[_Layer]) -> None:
    for layer in layers:
        for hook in layer.module._forward_pre_hooks.values():  # the older functions'
            if type(hook).__module__.startswith("torch.nn.utils."):
                warnings.warn(
                    f"The size of weights by {type(hook).__name__} in {layer.name!r} "
                    "is not known to prior_groups: set the prior_precision, or use "
                    "torch.nn.utils.parametrizations",
                    stacklevel=3,
                )
    for name, each in (pair for layer in layers for pair in layer.parametrized()):
        other = [type(m).__name__ for m in each if not isinstance(m, _WeightNorm)]
        if other and any(p.requires_grad for p in each.parameters()):
            warnings.warn(
                f"The size of weights by {other[0]} in {name!r} is not known to "
                "prior_groups: the layer's outputs may have another variance than 2. "
                "Compare outputs after draw_from_prior(), and set the prior_precision",
                stacklevel=3,
            )


def _prior(
    layer: _Layer, name: str, p: Tensor, square: float, scale: float
) -> tuple[float, float]:
    """Returns a parameter's prior precision and mean."""
    if isinstance(layer.module, _NORMS):
        return _NORM_PRECISION, float(name.endswith("weight"))
    part = layer.norms().get(name)
    if layer.weight() is None or (p.dim() == 0 and part is None):
        return 1.0, 0.0
    precision = layer.fan_in() * square / (2 * scale**2)
    precision *= 1.0 if part is None else part
    return float(f"{precision:.2g}"), 0.0


@torch.no_grad()
def _mean_squares(
    model: nn.Module, layers: list[_Layer], inputs: Any
) -> dict[str, float]:
    """Measures layers' inputs while weights are drawn from their priors, in order."""
    generator = torch.Generator("cpu").manual_seed(_SEED)
    squares: dict[str, list[float]] = {}
    drawn: set[str] = set()

    def hook(layer: _Layer) -> Callable[..., None]:
        def measure(_: nn.Module, given: tuple[Any, ...], named: Any) -> None:
            found = [x for x in (*given, *named.values()) if isinstance(x, Tensor)]
            if layer.name in drawn or not found:
                return
            factors = found[: 2 if isinstance(layer.module, nn.Bilinear) else 1]
            square = math.prod(
                float(x.double().square().mean()) if x.is_floating_point() else 1.0
                for x in factors
            )
            if not (math.isfinite(square) and square > 0):
                return
            drawn.add(layer.name)
            squares.setdefault(layer.name, []).append(square)
            for name, p in layer.params():
                precision, mean = _prior(layer, name, p, square, 1.0)
                noise = torch.randn(p.shape, generator=generator, device="cpu")
                p.copy_(mean + noise / math.sqrt(precision))

        return measure

    _cut(layers)
    kept = Snapshot(model, model.parameters())
    handles = [
        layer.module.register_forward_pre_hook(hook(layer), with_kwargs=True)
        for layer in layers
        if layer.weight() is not None or isinstance(layer.module, _NORMS)
    ]
    try:
        with torch.random.fork_rng():
            for _ in range(_DRAWS):
                drawn.clear()
                if isinstance(inputs, Mapping):
                    model(**inputs)
                else:
                    model(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    finally:
        for handle in handles:
            handle.remove()
        _cut(layers)
        kept.restore()
    unseen = [layer.name for layer in layers if layer.weight() is not None]
    if unseen := [name for name in unseen if name not in squares]:
        warnings.warn(
            f"No inputs of the layers {', '.join(map(repr, unseen))} were seen (they "
            "are not called as modules, or not with a tensor that is finite and not "
            "0): mean squares of 1 are taken. Set the prior_precision of their groups",
            stacklevel=4,
        )
    return {name: math.fsum(found) / len(found) for name, found in squares.items()}


def _warn_of_biases(layers: list[_Layer], squares: Mapping[str, float]) -> None:
    for layer in layers:
        total = layer.fan_in() * squares.get(layer.name, 1.0)
        if getattr(layer.module, "bias", None) is not None and total < _LEAST:
            warnings.warn(
                f"Inputs of {layer.name!r} are small (fan_in times mean square is "
                f"{total:.2g}): under the prior the bias, of standard deviation "
                f"{math.sqrt(2 / total):.2g}, outweighs them. Standardise the inputs",
                stacklevel=3,
            )


def _cut(layers: list[_Layer]) -> None:
    """Frees whole parameters that fully_shard keeps after a call."""
    for layer in layers:
        reshard = getattr(layer.module, "reshard", None)
        if callable(reshard):
            reshard()
