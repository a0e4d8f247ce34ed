"""Convergence of draws that are kept, as ArviZ computes it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.chain.checks import wrong_shape
from torch_sgmcmc.chain.optional import optional
from torch_sgmcmc.chain.progress import progress_bar
from torch_sgmcmc.judge.convergence.identical import check_different
from torch_sgmcmc.judge.convergence.probes import Coordinates
from torch_sgmcmc.judge.convergence.report import Convergence
from torch_sgmcmc.posterior.predictive import predict
from torch_sgmcmc.posterior.store import Draws, SampleStore

__all__ = ["outputs", "parameters", "predictions"]

_DEFAULT_COORDINATES = 1000


def predictions(probs: Any, *, progress: bool = True) -> Convergence:
    r"""Rank-normalised split R̂ and effective draws of predictions, by ArviZ.

    Each input and class is a quantity of its own: its probabilities over the draws of
    several chains, begun at different places. Chains are so judged in function space,
    as Izmailov et al. 2021 do: predictions can converge where the weights of a network
    cannot (docs/convergence.md).

    R̂ is the larger of that of the ranks and that of the ranks of distances from the
    median; rank-normalised, it is the same for probabilities and for any increasing
    function of them. Effective draws are those of ranks (bulk) and of the 5 % and 95 %
    quantiles (tail; where a tenth of the draws or so is one number, a probability of 1
    for instance, ArviZ counts all draws for that quantile).

    Args:
        probs: [chains, draws, inputs, classes], or [chains, draws, ...] in general, any
            outputs of the model; at least 2 chains and 4 draws, of a floating dtype,
            finite. A Tensor or what ``torch.as_tensor`` takes.
        progress: show a progress bar, if tqdm is installed. A quantity takes some
            milliseconds. Default: True.

    Returns:
        The report, with tensors of the shape [inputs, classes] on the CPU.

    Raises:
        ValueError: a wrong shape, a single chain, fewer than 4 draws, or numbers that
            are not finite.
        TypeError: not of a floating dtype.
        ImportError: ArviZ is not installed.

    Example:
        >>> probs = torch.stack([torch.stack(draws) for draws in chains])
        >>> report = convergence.predictions(probs)
        >>> print(report.summary())
        >>> report.rhat[i, c], report.ess_bulk[i, c], report.ess_tail[i, c]

    Reference:
        P. Izmailov, S. Vikram, M. D. Hoffman and A. G. Wilson, What Are Bayesian Neural
        Network Posteriors Really Like?, ICML 2021.
    """
    probs = torch.as_tensor(probs)
    _check("probs", probs)
    return _report(probs, "Predictions", "convergence.predictions()", progress)


def outputs(
    model: nn.Module,
    draws: Any,
    inputs: Any,
    *,
    progress: bool = True,
    **options: Any,
) -> Convergence:
    """The same of what a model puts out for some inputs, by draws that are stored.

    Args:
        model: the network that draws are put into.
        draws: a :class:`SampleStore` or its folder, of several chains; the last draws
            of each are taken, as many as the shortest has.
        inputs: as for :func:`~torch_sgmcmc.predict`; a quantity for each and for each
            class, which takes some milliseconds.
        progress: show progress bars, if tqdm is installed. Default: True.
        **options: those of :class:`~torch_sgmcmc.Predictive`, such as ``link``.

    Returns:
        The report, with tensors of the shape [inputs, classes].

    Raises:
        TypeError, ValueError, ImportError: as :func:`predictions` and
            :func:`~torch_sgmcmc.predict`.

    Example:
        >>> print(sg.convergence(model, store, x_test[:100]))
    """
    values = outputs_of(model, draws, inputs, progress=progress, **options)
    return predictions(values, progress=progress)


def by_chain(draws: Iterable[Any]) -> dict[int, list[Any]]:
    """The draws of each chain, by its number: 0 of those that have none."""
    chains: dict[int, list[Any]] = {}
    for draw in draws:
        chains.setdefault(getattr(draw, "chain", 0), []).append(draw)
    return dict(sorted(chains.items()))


def outputs_of(
    model: nn.Module,
    draws: Any,
    inputs: Any,
    *,
    max_draws: int | None = None,
    **options: Any,
) -> Tensor:
    """What draws put out, [chains, draws, inputs, ...]; at most so many of each."""
    if isinstance(draws, str | os.PathLike):
        draws = SampleStore(draws)
    chains = by_chain(draws).values()
    if not chains:
        raise ValueError("Invalid draws: there are none")
    length = min(map(len, chains))
    every = 1 if max_draws is None else -(-length // max_draws)
    found = []
    for chain in chains:
        some = chain[len(chain) - length :][every - 1 :: every]
        found.append(predict(model, some, inputs, keep_draws=True, **options).draws)
    return torch.stack(found)  # type: ignore[arg-type]


def parameters(
    draws: Any,
    probe: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
    *,
    progress: bool = True,
) -> Convergence:
    r"""Rank-normalised split R̂ and effective draws of parameters, by ArviZ.

    Of a network they need not converge where predictions have, see
    :func:`predictions`.

    Args:
        draws: ``draws[chain][draw]``, state dicts or other mappings from names to
            tensors, as many of each chain; a :class:`SampleStore`; or a Tensor
            [chains, draws, ...] of values that a probe has made, draw by draw. At least
            2 chains and 4 draws.
        probe: what is looked at: :class:`Coordinates`, :class:`Projections`, or any
            function of a mapping that returns a tensor. None is 1000 random coordinates
            (or all, if there are fewer). Not with a Tensor. Default: None.
        progress: show a progress bar, if tqdm is installed. Default: True.

    Returns:
        The report, with a number for each of the probe's.

    Raises:
        ValueError: a wrong shape, chains of different lengths, a single chain, fewer
            than 4 draws, or numbers that are not finite.
        TypeError: not of a floating dtype, or a probe with a Tensor.
        ImportError: ArviZ is not installed.

    Example:
        >>> report = convergence.parameters(
        ...     draws, convergence.Projections(model, 64, seed=0))
    """
    if isinstance(draws, Tensor):
        if probe is not None:
            raise TypeError("Invalid probe: draws are a Tensor, which takes none")
        values = draws
    else:
        if isinstance(draws, Draws):
            draws = [draws.chain(chain) for chain in draws.chains]
        values = _probed(draws, probe)
    _check("draws", values)
    return _report(values, "Parameters", "convergence.parameters()", progress)


def _probed(
    draws: Sequence[Sequence[Mapping[str, Tensor]]],
    probe: Callable[[Mapping[str, Tensor]], Tensor] | None,
) -> Tensor:
    lengths = [len(chain) for chain in draws]
    if not lengths or min(lengths) != max(lengths) or lengths[0] == 0:
        raise ValueError(
            f"Invalid draws: chains of {lengths} draws (must be chains of one length)"
        )
    if probe is None:
        probe = Coordinates(draws[0][0], _DEFAULT_COORDINATES, seed=0, at_most=True)
    return torch.stack(
        [torch.stack([probe(draw).detach() for draw in chain]) for chain in draws]
    )


def _check(name: str, values: Tensor) -> None:
    """Raises unless they are draws that have an R-hat."""
    shape = list(values.shape)
    if values.dim() < 2:
        raise wrong_shape(name, values, "[chains, draws, ...]")
    if not values.is_floating_point():
        raise TypeError(
            f"Invalid {name}: dtype {values.dtype} (must be a floating dtype)"
        )
    if shape[0] < 2:
        raise ValueError(
            f"Invalid {name}: shape {shape} (must be [chains, draws, ...] with at "
            "least 2 chains: one cannot show that there is a mode it has not seen)"
        )
    if shape[1] < 4:
        wanted = "[chains, draws, ...] with at least 4 draws of each chain"
        raise wrong_shape(name, values, wanted)
    if values.numel() == 0:
        raise ValueError(f"Invalid {name}: shape {shape} (there is no quantity)")
    wrong = ~values.detach().isfinite()
    if bool(wrong.any()):
        chain, draw, *place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"Invalid {name}: {int(wrong.sum())} of {values.numel()} numbers are not "
            f"finite, the first in chain {chain}, draw {draw}, at {place}"
        )
    check_different(name, values.detach())


def _report(values: Tensor, title: str, user: str, progress: bool) -> Convergence:
    arviz = optional("arviz", "ArviZ", user)
    chains, draws, *shape = values.shape
    # A quantity's draws side by side, as they will be read.
    rows = values.detach().reshape(chains, draws, -1).permute(2, 0, 1)
    rows = rows.to("cpu", torch.float64).contiguous()
    low, high = rows.amin((1, 2)), rows.amax((1, 2))
    constant = low == high
    half = draws // 2
    still = torch.stack(
        [
            (part.amin(2) == part.amax(2)).all(1)
            for part in (rows[:, :, :half], rows[:, :, -half:])
        ]
    ).all(0)
    rhat = torch.full([len(rows)], torch.nan, dtype=torch.float64)
    bulk, tail = rhat.clone(), rhat.clone()
    for i in progress_bar(range(len(rows)), title, progress):
        if constant[i]:
            continue
        column = rows[i].numpy()
        with warnings.catch_warnings():
            # Folded draws of two values are constant: their R-hat is no number, and
            # ArviZ takes the other.
            warnings.simplefilter("ignore", RuntimeWarning)
            rhat[i] = float(arviz.rhat(column, method="rank"))
            bulk[i] = float(arviz.ess(column, method="bulk"))
            tail[i] = float(arviz.ess(column, method="tail", prob=(0.05, 0.95)))
    rhat[still & ~constant] = torch.inf  # which rounding hides from ArviZ
    ess = {"bulk": bulk.reshape(shape), "tail": tail.reshape(shape)}
    constant = constant.reshape(shape)
    return Convergence(
        rhat=rhat.reshape(shape),
        ess=ess,
        constant=constant,
        at_most=torch.zeros_like(constant),
        num_chains=chains,
        num_draws=draws,
        title=title,
    )
