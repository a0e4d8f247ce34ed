"""Draws as ArviZ takes them, for its plots and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.chain.checks import wrong_type
from torch_sgmcmc.chain.optional import optional
from torch_sgmcmc.chain.wrappers import plain_names
from torch_sgmcmc.judge.convergence.chains import check_different

__all__ = ["to_arviz"]

# Numbers a draw that are taken without having been chosen.
_FEW = 10_000
# What draws may say of themselves.
_STATISTICS = ("weight", "step")

Probe = Callable[[Any], Tensor]


def to_arviz(
    draws: Iterable[Any],
    *,
    names: Iterable[str] | None = None,
    probes: Mapping[str, Probe] | None = None,
    log_likelihood: Mapping[str, Probe] | None = None,
    posterior_predictive: Mapping[str, Probe] | None = None,
) -> Any:
    r"""Chains of draws for ArviZ, with what is to be looked at.

    There is one pass over the draws, of which only what is chosen is kept: of a network
    a few parameters or what it puts out, since nobody looks at millions of traces.

    Args:
        draws: ``draws[chain][draw]``, or draws one after the other that have an
            attribute ``chain`` (without one they are all of one chain): mappings from
            names to Tensors, or modules.
        names: of tensors that are taken as they are. None takes all of a floating
            dtype, if there are no probes and at most 10,000 numbers. Default: None.
        probes: ``{name: function}`` of a draw that returns a Tensor; labels of its
            elements are taken from the function's attribute ``names``. Default: none.
        log_likelihood: ``{name: function}`` of a draw that returns :math:`\log p(y_i |
            x_i, \theta)` of each datum, in a group of that name: for ``arviz.loo`` and
            ``arviz.compare``. Default: none.
        posterior_predictive: ``{name: function}`` of a draw that returns new data, for
            ``arviz.plot_ppc``. Default: none.

    Returns:
        An ``arviz.InferenceData``, or with ArviZ 1.x an ``xarray.DataTree``: the
        variables in the group "posterior", with chains in the order of their numbers.
        Attributes ``weight`` and ``step`` that all draws have are in "sample_stats";
        ArviZ's own statistics do not look at weights.

    Raises:
        ValueError: there are no draws, chains are of different lengths or identical, a
            name or a shape is not there in each draw, or too much would be taken.
        TypeError: a draw is neither a mapping nor a module.
        ImportError: ArviZ is not installed.

    Example:
        >>> data = convergence.to_arviz(
        ...     store, names=["2.bias"],
        ...     probes={"some": lambda draw: draw["0.weight"].flatten()[::1000]})
        >>> arviz.summary(data)
    """
    arviz = optional("arviz", "ArviZ", "convergence.to_arviz()", "posterior")
    probes = dict(probes or {})
    others = {
        "log_likelihood": dict(log_likelihood or {}),
        "posterior_predictive": dict(posterior_predictive or {}),
    }
    extra = {
        f"{group}/{name}": f for group in others for name, f in others[group].items()
    }
    chosen = None if names is None else list(names)
    chains: dict[int, list[dict[str, Tensor]]] = {}
    statistics: dict[int, list[dict[str, Any]]] = {}
    for chain, draw in _numbered(draws):
        if not isinstance(draw, Mapping | nn.Module):
            wanted = "a mapping from names to Tensors, or a module"
            raise wrong_type("draw", draw, wanted)
        if chosen is None:
            chosen = [] if probes else _all(_tensors(draw))
        taken = _taken(draw, chosen, {**probes, **extra})
        chains.setdefault(chain, []).append(taken)
        statistics.setdefault(chain, []).append(
            {}
            if isinstance(draw, nn.Module)  # its weight is a parameter
            else {k: getattr(draw, k) for k in _STATISTICS if hasattr(draw, k)}
        )
    lengths = [len(chains[chain]) for chain in sorted(chains)]
    if not lengths or min(lengths) != max(lengths):
        raise ValueError(
            f"Invalid draws: chains of {lengths} draws (must be chains of one length)"
        )
    assert chosen is not None
    ordered = [chains[chain] for chain in sorted(chains)]
    posterior = {name: _stacked(ordered, name) for name in [*chosen, *probes]}
    _check_different(posterior)
    told = [statistics[chain] for chain in sorted(chains)]
    stats = {
        key: _numbers([[of[key] for of in chain] for chain in told])
        for key in _STATISTICS
        if all(key in of for chain in told for of in chain)
    }
    groups: dict[str, Any] = {"posterior": posterior}
    for group, functions in others.items():
        if functions:
            groups[group] = {n: _stacked(ordered, f"{group}/{n}") for n in functions}
    if stats:
        groups["sample_stats"] = stats
    coords, dims = {}, {}
    for name, probe in probes.items():
        labels = getattr(probe, "names", None)
        if labels is not None and posterior[name].ndim == 3:
            coords[f"{name}_of"] = list(labels)
            dims[name] = [f"{name}_of"]
    if int(arviz.__version__.partition(".")[0]) >= 1:
        return arviz.from_dict(groups, coords=coords, dims=dims)
    return arviz.from_dict(**groups, coords=coords, dims=dims)


def _check_different(posterior: Mapping[str, Any]) -> None:
    rows = [torch.from_numpy(values).double() for values in posterior.values()]
    if rows:
        flat = [row.reshape(*row.shape[:2], -1) for row in rows]
        check_different("draws", torch.cat(flat, 2))


def _tensors(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not isinstance(model, nn.Module):
        return model
    named = dict(model.named_parameters())
    return {plain: named[name] for name, plain in plain_names(model, named).items()}


def _numbers(rows: list[list[float]]) -> Any:
    exact = torch.float64 if isinstance(rows[0][0], float) else torch.int64
    return torch.tensor(rows, dtype=exact).numpy()


def _numbered(draws: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Each draw with its chain."""
    for i, item in enumerate(draws):
        if isinstance(item, Iterable) and not isinstance(item, Mapping | nn.Module):
            for draw in item:
                yield i, draw
        else:
            chain = 0
            if not isinstance(item, nn.Module):
                chain = getattr(item, "chain", 0)
            yield chain, item


def _all(tensors: Mapping[str, Tensor]) -> list[str]:
    names = [name for name in tensors if tensors[name].is_floating_point()]
    count = sum(tensors[name].numel() for name in names)
    if count > _FEW:
        raise ValueError(
            f"Invalid draws: {count:,} numbers each, of which some must be chosen: "
            "with names, or with functions as probes"
        )
    return names


def _taken(
    draw: Any, names: list[str], probes: Mapping[str, Probe]
) -> dict[str, Tensor]:
    tensors = _tensors(draw) if names else {}
    taken = {}
    for name in names:
        if name not in tensors:
            raise ValueError(f"Invalid names: a draw has no tensor {name!r}")
        taken[name] = _kept(tensors[name])
    for name, probe in probes.items():
        taken[name] = _kept(probe(draw))
    return taken


def _kept(tensor: Tensor) -> Tensor:
    # In float32 ArviZ rounds distances from a median so that their ranks change.
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


def _stacked(chains: list[list[dict[str, Tensor]]], name: str) -> Any:
    """[chains, draws, ...]."""
    shapes = {tuple(draw[name].shape) for chain in chains for draw in chain}
    if len(shapes) > 1:
        some = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise ValueError(f"Invalid draws: {name!r} has shapes {some}")
    return torch.stack(
        [torch.stack([draw[name] for draw in chain]) for chain in chains]
    ).numpy()
