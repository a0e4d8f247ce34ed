"""Simulation-based calibration of a sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.checks import check_integer, draw_seed
from torch_sgmcmc.chain.progress import progress_bar
from torch_sgmcmc.judge.calibration.chain import Chain
from torch_sgmcmc.judge.calibration.result import Calibration
from torch_sgmcmc.judge.convergence.report import arviz
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.seeds import fold_in

__all__ = ["sbc"]

Quantity = Callable[[Any, Any], Tensor]

# More coordinates than these have to be chosen from.
_MOST_COORDINATES = 64

# Steps in which draws' correlation is measured: first, and at most.
_FIRST_PILOT, _LONGEST_PILOT = 256, 65_536
# Fewest effective draws of a pilot that tell how many it has.
_FEWEST = 40

# What is left of it does not show in ranks.
_CORRELATED = 0.2


def sbc(
    prior: Callable[[int, torch.Generator], Any],
    simulate: Callable[[Any, torch.Generator], Any],
    loss: Callable[[Any, Any], Tensor],
    sampler: Callable[[list[Tensor], int], Sampler],
    *,
    simulations: int = 200,
    draws: int = 63,
    thin: int | None = None,
    warmup: int = 1000,
    prepare: Callable[[Sampler, Callable[..., Any]], object] | None = None,
    batch_size: int | None = None,
    quantities: Mapping[str, Quantity] | None = None,
    at_once: int | None = None,
    seed: int | None = None,
    progress: bool = True,
) -> Calibration:
    r"""Simulation-based calibration: is what a sampler samples the posterior?

    Each of S simulations draws :math:`\tilde\theta` from the prior, data from the model
    with :math:`\tilde\theta`, and then has the sampler draw
    :math:`\theta_1, \dots, \theta_L` from the posterior of these data, begun at a draw
    from the prior of its own. :math:`\tilde\theta` is a draw from the posterior too, so
    that for any quantity f the rank

    .. math:: \#\{l : f(\theta_l) < f(\tilde\theta)\}

    is uniform on 0, ..., L, if the sampler, its warm-up and all of its settings are
    right, as far as the quantities see it.

    All functions work on n simulations at once, a leading dimension of all tensors:
    independent blocks of one sampler's parameters, each with the gradient that it would
    have alone, so that ``num_data``, ``lr`` and all else are those of one. Which
    samplers need ``num_chains`` or a small ``at_once``: docs/sbc.md. A minibatch has
    the same places of each simulation's data.

    Ranks of correlated draws look like a sampler that is too narrow. With ``thin=None``
    one draw is kept in as many steps as one effective draw takes: by batch means of a
    pilot run, after the first warm-up, the median over simulations of the slowest
    quantity; and in more, while draws that far apart correlate by more than 0.2, of
    whatever sign. What correlation is left is in the result.

    Args:
        prior: ``prior(n, generator)`` returns n draws of the parameters: a Tensor
            [n, ...], or a dict of such.
        simulate: ``simulate(theta, generator)`` returns the data of each, N of them: a
            Tensor [n, N, ...] or a tuple of such. N is always the same.
        loss: ``loss(theta, data)`` returns the negative log-likelihoods [n, N'] of some
            or all data, given as by ``simulate``. Of a prior that is not the sampler's
            Gaussian, it takes in the negative log density divided by N.
        sampler: ``sampler(params, seed)`` returns a sampler of a list of parameters,
            with ``num_data=N`` and the prior's precision.
        simulations: S, >= 10. With S = 200 a quantity's distribution has to be off by
            some 0.1 to be noticed, with 2000 by 0.03. Default: 200.
        draws: L, >= 3. Default: 63.
        thin: steps from one draw to the next, >= 1; of an SBPS, samples. None measures
            it. Default: None.
        warmup: steps before the first, >= 0. Default: 1000.
        prepare: ``prepare(sampler, closure)``, called before the warm-up, with a
            closure such as ``sampler.step(closure)`` takes: for ``sampler.warmup``, or
            to freeze what adapts. None does nothing. Default: None.
        batch_size: of minibatches, drawn afresh at every call of the closure, without
            replacement; in [1, N]. None is all data. Not for HMCECS, which chooses
            itself. Default: None.
        quantities: f by their names: ``f(theta, data)`` returns [n]. None is all
            coordinates of all parameters, at most 64, their "squared norm" and the "log
            likelihood", which see what coordinates do not (a sampler without a prior,
            or with too high a temperature). Default: None.
        at_once: how many simulations share a sampler, >= 1. None is all. Default: None.
        seed: of all that is random, a 64-bit int. None draws one from torch's default
            generator. Default: None.
        progress: show a progress bar, if tqdm is installed. Default: True.

    Returns:
        Ranks, and what they say.

    Raises:
        ValueError: an argument is out of range; a function returns another shape than
            above, or quantities that are not finite; ``num_data`` is not N.
        TypeError: an argument is not what it should be.
        RuntimeError: draws still correlate over the longest pilot run, of 65536 steps:
            give ``thin``.

    Example:
        >>> def prior(n, generator):
        ...     return torch.randn(n, 3, generator=generator)
        >>> def simulate(theta, generator):  # x is [N, 3]
        ...     return torch.bernoulli((theta @ x.T).sigmoid(), generator=generator)
        >>> def loss(theta, y): ...  # of a minibatch: see docs/sbc.md
        >>> result = sbc(prior, simulate, loss, lambda params, seed: SGHMC(
        ...     params, lr=0.1, num_data=len(x), prior_precision=1.0, seed=seed))
        >>> print(result.summary()), result.passed(rate=0.01)

    Reference:
        S. Talts et al. 2018, algorithm 2, see :class:`Calibration`. For quantities that
        depend on the data: M. Modrák et al., Simulation-Based Calibration Checking for
        Bayesian Computation: The Choice of Test Quantities Shapes Sensitivity, Bayesian
        Analysis 20, 2025.
    """
    check_integer("simulations", simulations, low=10)
    check_integer("draws", draws, low=3)
    check_integer("warmup", warmup)
    if thin is not None:
        check_integer("thin", thin, low=1)
    if batch_size is not None:
        check_integer("batch_size", batch_size, low=1)
    at_once = simulations if at_once is None else at_once
    check_integer("at_once", at_once, low=1)
    seed = draw_seed(seed)
    sizes = [
        min(at_once, simulations - begin) for begin in range(0, simulations, at_once)
    ]
    truths: list[Tensor] = []
    values: list[Tensor] = []
    names: list[str] = []
    for i in progress_bar(
        range(len(sizes)), "calibration", progress and len(sizes) > 1
    ):
        model = _Simulated(
            prior, simulate, loss, sizes[i], batch_size, fold_in(seed, 2 * i)
        )
        names, found = model.quantities(quantities)
        chain = model.chain(sampler, fold_in(seed, 2 * i + 1))
        if prepare is not None:
            prepare(chain.sampler, chain.closure)
        shown = progress and len(sizes) == 1
        for _ in progress_bar(range(warmup), "warm-up", shown):
            chain.move()
        if thin is None:
            thin = _measured_thin(chain, found)
        kept = []
        for _ in progress_bar(range(draws), "draws", shown):
            for _ in range(thin - 1):
                chain.move()
            kept.append(found(chain.move()))
        truths.append(found(model.truth))
        values.append(torch.stack(kept))
    assert thin is not None
    return _ranked(
        names, torch.cat(truths), torch.cat(values, 1), thin, fold_in(seed, 2**62)
    )


class _Simulated:
    """Some simulations: parameters drawn from the prior, and data of each."""

    def __init__(
        self,
        prior: Callable[[int, torch.Generator], Any],
        simulate: Callable[[Any, torch.Generator], Any],
        loss: Callable[[Any, Any], Tensor],
        size: int,
        batch_size: int | None,
        seed: int,
    ) -> None:
        self._size, self._loss, self._batch_size = size, loss, batch_size
        self._generator = torch.Generator().manual_seed(seed)
        theta = prior(size, self._generator)
        #: The parameters' names; None where there is one Tensor without a name.
        self._names = list(theta) if isinstance(theta, Mapping) else None
        self.truth = self._parameters(theta)
        self.start = self._parameters(prior(size, self._generator))
        data = simulate(theta, self._generator)
        self._is_tuple = isinstance(data, (tuple, list))
        self._data = tuple(data) if self._is_tuple else (data,)
        for each in self._data:
            if (
                not isinstance(each, Tensor)
                or each.dim() < 2
                or len(each) != size
                or each.shape[1] != self._data[0].shape[1]
            ):
                raise ValueError(
                    f"Invalid data: simulate() returned {_what(each)} (must be Tensors "
                    f"[{size}, N, ...] with one N)"
                )
        self.num_data = self._data[0].shape[1]
        self._everything = torch.arange(self.num_data)
        if batch_size is not None and batch_size > self.num_data:
            raise ValueError(
                f"Invalid batch_size: {batch_size} (must be in [1, {self.num_data}])"
            )

    def _parameters(self, theta: Any) -> list[Tensor]:
        values = list(theta.values()) if isinstance(theta, Mapping) else [theta]
        for value in values:
            if (
                not isinstance(value, Tensor)
                or not value.is_floating_point()
                or value.dim() < 1
                or len(value) != self._size
            ):
                raise ValueError(
                    f"Invalid theta: prior() returned {_what(value)} (must be a Tensor "
                    f"[{self._size}, ...] of a floating dtype, or a dict of such)"
                )
        return [value.detach().clone() for value in values]

    def _theta(self, params: list[Tensor]) -> Any:
        if self._names is None:
            return params[0]
        return dict(zip(self._names, params, strict=True))

    def _some(self, indices: Tensor) -> Any:
        some = tuple(each[:, indices.to(each.device)] for each in self._data)
        return some if self._is_tuple else some[0]

    def losses(self, params: list[Tensor], indices: Tensor) -> Tensor:
        """[simulations, len(indices)]."""
        losses = self._loss(self._theta(params), self._some(indices))
        wanted = [self._size, len(indices)]
        if not isinstance(losses, Tensor) or list(losses.shape) != wanted:
            raise ValueError(
                f"Invalid loss: loss() returned {_what(losses)} (must be a Tensor of "
                f"shape {wanted}, a negative log-likelihood for each datum)"
            )
        return losses

    def chain(self, make: Callable[[list[Tensor], int], Sampler], seed: int) -> Chain:
        """A sampler of these posteriors, at its start."""
        params = [value.requires_grad_() for value in self.start]
        sampler = make(params, seed)
        if not isinstance(sampler, Sampler):
            raise TypeError(
                f"Invalid sampler: sampler() returned {_what(sampler)} (must be a "
                "Sampler)"
            )
        losses = partial(self.losses, params)
        return Chain(sampler, params, losses, self.num_data, self._draw_indices)

    def _draw_indices(self) -> Tensor:
        """Of a minibatch without replacement, or of all data, in order."""
        if self._batch_size is None:
            return self._everything
        order = torch.randperm(self.num_data, generator=self._generator)
        return order[: self._batch_size]

    def quantities(
        self, chosen: Mapping[str, Quantity] | None
    ) -> tuple[list[str], Callable[[list[Tensor]], Tensor]]:
        """Names, and a function of the parameters that returns [simulations, names]."""
        if chosen is not None:
            names = list(chosen)
            if not names:
                raise ValueError("Invalid quantities: there are none")
        else:
            names = [*self._coordinates(), "squared norm", "log likelihood"]

        @torch.no_grad()
        def found(params: list[Tensor]) -> Tensor:
            if chosen is None:
                flat = [p.reshape(self._size, -1).double() for p in params]
                theta = torch.cat(flat, 1)
                log_likelihood = -self.losses(params, self._everything).double().sum(1)
                both = (theta.square().sum(1), log_likelihood)
                values = torch.cat([theta, torch.stack(both, 1)], 1)
            else:
                given = self._theta(params), self._some(self._everything)
                columns = [
                    self._quantity(name, f(*given)) for name, f in chosen.items()
                ]
                values = torch.stack(columns, 1)
            if not bool(values.isfinite().all()):
                wrong = names[int((~values.isfinite()).any(0).nonzero()[0])]
                raise ValueError(f"Invalid quantity: {wrong!r} is not finite")
            return values.cpu()

        return names, found

    def _quantity(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or list(value.shape) != [self._size]:
            raise ValueError(
                f"Invalid quantity: {name!r} is {_what(value)} (must be a Tensor of "
                f"shape [{self._size}], a number for each simulation)"
            )
        return value.double()

    def _coordinates(self) -> list[str]:
        named = zip(self._names or ["theta"], self.truth, strict=True)
        names = []
        for name, value in named:
            shape = value.shape[1:]
            names += _coordinate_names(name, shape)
        if len(names) > _MOST_COORDINATES:
            raise ValueError(
                f"Invalid quantities: None (there are {len(names)} coordinates, more "
                f"than {_MOST_COORDINATES}: choose)"
            )
        return names


def _measured_thin(chain: Chain, found: Callable[[list[Tensor]], Tensor]) -> int:
    """Steps that one effective draw takes, of the slowest quantity."""
    values, length = [], _FIRST_PILOT
    while length <= _LONGEST_PILOT:
        values += [found(chain.move()) for _ in range(length - len(values))]
        traces = torch.stack(values)  # [steps, simulations, quantities]
        ess = arviz("ess", traces[None], method="mean")
        # Of so few the number is hardly more than an estimate of none gives.
        if bool(((ess < _FEWEST).double().mean(0) < 0.1).all()):
            ratio = (length / ess).nan_to_num(1.0).median(0).values.max()
            thin = max(1, math.ceil(float(ratio)))
            # Draws that alternate are worth more than one each, and not independent.
            while thin < length // 4:
                correlation = _autocorrelation(traces, thin).nan_to_num(0.0)
                if float(correlation.abs().max()) <= _CORRELATED:
                    break
                thin += 1
            return thin
        length *= 2
    raise RuntimeError(
        f"The chains' draws still correlate over {_LONGEST_PILOT} steps: they mix too "
        "slowly for their correlation to be measured (give thin, or larger steps)"
    )


def _autocorrelation(values: Tensor, lag: int) -> Tensor:
    """Of [steps, simulations, quantities], over all simulations together.

    NaN where nothing varies.
    """
    off = values - values.mean(0)
    lagged = (off[lag:] * off[:-lag]).sum((0, 1)) / (len(off) - lag)
    return lagged / (off.square().sum((0, 1)) / len(off))


def _ranked(
    names: list[str], truth: Tensor, values: Tensor, thin: int, seed: int
) -> Calibration:
    """Of values [draws, simulations, names]."""
    draws, simulations, _ = values.shape
    # Where values are equal, any order is as good as any other.
    equal = (values == truth).sum(0)
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(equal.shape, generator=generator, dtype=torch.float64)
    ranks = (values < truth).sum(0) + (chance * (equal + 1)).long()
    # The mean of few draws is near them all, which takes about 1 / L off.
    lagged = _autocorrelation(values, 1) + 1 / draws
    return Calibration(
        ranks={name: ranks[:, j] for j, name in enumerate(names)},
        draws=draws,
        simulations=simulations,
        thin=thin,
        autocorrelation={name: float(lagged[j]) for j, name in enumerate(names)},
    )


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def _coordinate_names(name: str, shape: torch.Size) -> list[str]:
    """Those of a tensor's elements: "weight[3, 5]"."""
    if not shape:
        return [name]
    places = torch.unravel_index(torch.arange(shape.numel()), shape)
    return [f"{name}{row}" for row in torch.stack(places, 1).tolist()]
