"""Simulation-based calibration of a sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.core.hyperparams import check_integer, draw_seed
from torch_sgmcmc.core.random_state import fold_in
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Takes, traits_of
from torch_sgmcmc.core.utils import arviz, progress_bar
from torch_sgmcmc.data import closure_of
from torch_sgmcmc.diagnostics.ranks import CORRELATED, HOST, Calibration

__all__ = ["Calibration", "sbc"]

# Most events of an SBPS between two samples.
_MOST_EVENTS = 100_000


class Chain:
    """A sampler with a fitting closure, which makes one move after another.

    Parameters are [simulations, ...] each. ``losses(indices)`` returns the negative
    log-likelihoods [simulations, len(indices)] of these data.
    """

    def __init__(
        self,
        sampler: Sampler,
        params: list[Tensor],
        losses: Callable[[Tensor], Tensor],
        num_data: int,
        draw_indices: Callable[[], Tensor],
    ) -> None:
        self.sampler, self._params = sampler, params
        self._losses, self._draw_indices = losses, draw_indices
        groups = sampler.param_groups
        for group in groups:
            if group["num_data"] != num_data:
                raise ValueError(
                    f"Invalid num_data: {group['num_data']} of the sampler (simulate() "
                    f"makes {num_data} data)"
                )
        if {*map(id, params)} != {id(p) for g in groups for p in g["params"]}:
            raise ValueError(
                "Invalid sampler: it lacks some of the parameters that it was given"
            )
        self.closure: Callable[..., Any]
        self._samples: list[list[Tensor]] | None = None
        traits = traits_of(sampler)
        if traits.is_path:
            self._samples = []
            sampler.register_sample_hook(self._keep)  # type: ignore[attr-defined]
        if traits.takes is Takes.EXAMPLES:
            self.closure = self._examples
        elif traits.takes is Takes.SUBSAMPLES:
            self.closure = self._log_likelihoods
        elif traits.takes is Takes.POTENTIAL:
            self.closure = self._each_chain
        else:
            self.closure = closure_of(sampler, self._sum)

    def move(self) -> list[Tensor]:
        """Makes a step, or a sample of an SBPS; returns the new parameters."""
        if self._samples is None:
            self.sampler.step(self.closure)
            return [p.detach() for p in self._params]
        for _ in range(_MOST_EVENTS):
            if self._samples:
                return self._samples.pop(0)
            self.sampler.step(self.closure)
        raise RuntimeError(
            f"There was no sample in {_MOST_EVENTS} events: sample_interval is too long"
        )

    def _keep(self, sampler: Sampler, time: float) -> None:
        assert self._samples is not None
        self._samples.append([p.detach().clone() for p in self._params])

    # The mean loss of each simulation: the sum is over independent chains, each with
    # the gradient that it would have alone.

    def _sum(self) -> Tensor:
        return self._losses(self._draw_indices()).mean(1).sum()

    def _each_chain(self) -> Tensor:
        rows = self._losses(self._draw_indices()).mean(1)
        rows.sum().backward()
        chains = self.sampler.param_groups[0]["num_chains"]
        return rows.detach() if chains is not None else rows.sum().detach()

    # One chain for all simulations, in the product of their posteriors.

    def _examples(self) -> Tensor:
        return self._losses(self._draw_indices()).sum(0)

    def _log_likelihoods(self, indices: Tensor) -> Tensor:
        return -self._losses(indices).sum(0)


Quantity = Callable[[Any, Any], Tensor]

# Most coordinates that are quantities by default.
_MOST_COORDINATES = 64

# Steps of the first and the longest pilot run, which measure correlation.
_FIRST_PILOT, _LONGEST_PILOT = 256, 65_536
# Fewest effective draws of a pilot whose estimate is trusted.
_FEWEST = 40


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
    r"""Simulation-based calibration: tests whether a sampler samples the posterior.

    Each of S simulations draws :math:`\tilde\theta` from the prior and data from the
    model with :math:`\tilde\theta`. The sampler then draws :math:`\theta_1, \dots,
    \theta_L` from the posterior of these data, from another draw of the prior on. Since
    :math:`\tilde\theta` is a draw from the posterior too, for any quantity f the rank

    .. math:: \#\{l : f(\theta_l) < f(\tilde\theta)\}

    is uniform on 0, ..., L, if the sampler, its warm-up and all of its settings are
    correct, up to errors that no quantity shows.

    All functions work on n simulations at once, a leading dimension of all tensors:
    independent blocks of one sampler's parameters, each with the gradient that it would
    have alone. ``num_data``, ``lr`` and all other settings are those for one
    simulation. Which samplers need ``num_chains`` or a small ``at_once``: docs/sbc.md.
    A minibatch has the same places of each simulation's data.

    Ranks of correlated draws resemble a sampler that is too narrow. ``thin=None``
    measures the number of steps of one effective draw: by batch means of a pilot run
    after the first warm-up, the median over simulations of the slowest quantity.
    ``thin`` grows further while draws that far apart correlate by more than 0.2 in
    absolute value. The remaining correlation is in the result.

    Args:
        prior: ``prior(n, generator)`` returns n draws of the parameters: a Tensor
            [n, ...], or a dict of such.
        simulate: ``simulate(theta, generator)`` returns the data of each, N of them: a
            Tensor [n, N, ...] or a tuple of such. N is always the same.
        loss: ``loss(theta, data)`` returns the negative log-likelihoods [n, N'] of some
            or all data, given as by ``simulate``. For a prior that is not the sampler's
            Gaussian, it includes the negative log prior density divided by N.
        sampler: ``sampler(params, seed)`` returns a sampler of a list of parameters,
            with ``num_data=N`` and the prior's precision.
        simulations: S, >= 10. S = 200 detects a quantity's distribution that is off by
            some 0.1, 2000 by 0.03. Default: 200.
        draws: L, >= 3. Default: 63.
        thin: steps (of an SBPS, samples) from one draw to the next, >= 1. None measures
            it. Default: None.
        warmup: steps before the first draw, >= 0. Default: 1000.
        prepare: ``prepare(sampler, closure)``, called before the warm-up, with a
            closure as for ``sampler.step(closure)``: for ``sampler.warmup``, or to
            freeze adaptation. None does nothing. Default: None.
        batch_size: size of minibatches, drawn afresh at every call of the closure,
            without replacement; in [1, N]. None is all data. Not for HMCECS, which
            draws its own subsamples. Default: None.
        quantities: f by their names: ``f(theta, data)`` returns [n]. None is all
            coordinates of all parameters, at most 64, their "squared norm" and the "log
            likelihood", which detect faults that coordinates hide (a missing prior, too
            high a temperature). Default: None.
        at_once: number of simulations that share a sampler, >= 1. None is all. Default:
            None.
        seed: key of all randomness, a 64-bit int. None draws one from torch's default
            generator. Default: None.
        progress: show a progress bar, if tqdm is installed. Default: True.

    Returns:
        A :class:`Calibration`: the ranks and their tests.

    Raises:
        ValueError: an argument is out of range; a function returns another shape than
            above, or quantities that are not finite; ``num_data`` is not N.
        TypeError: an argument has a wrong type.
        RuntimeError: draws still correlate over the longest pilot run, of 65536 steps:
            give ``thin``.

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
    begins = range(0, simulations, at_once)
    sizes = [min(at_once, simulations - begin) for begin in begins]
    truths, values, names = [], [], list[str]()
    several = len(sizes) > 1
    for i in progress_bar(range(len(sizes)), "calibration", progress and several):
        model = _Simulated(
            prior, simulate, loss, sizes[i], batch_size, fold_in(seed, 2 * i)
        )
        names, found = model.quantities(quantities)
        chain = model.chain(sampler, fold_in(seed, 2 * i + 1))
        if prepare is not None:
            prepare(chain.sampler, chain.closure)
        shown = progress and not several
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
        #: The parameters' names; None for one Tensor without a name.
        self._names = list(theta) if isinstance(theta, Mapping) else None
        self.truth = self._parameters(theta)
        self.start = self._parameters(prior(size, self._generator))
        data = simulate(theta, self._generator)
        self._is_tuple = isinstance(data, (tuple, list))
        self._data = tuple(data) if self._is_tuple else (data,)
        for each in self._data:
            fits = isinstance(each, Tensor) and each.dim() > 1 and len(each) == size
            if not fits or each.shape[1] != self._data[0].shape[1]:
                wanted = f"Tensors [{size}, N, ...] with one N"
                raise _invalid("data: simulate() returned", each, wanted)
        self.num_data = self._data[0].shape[1]
        self._everything = torch.arange(self.num_data, device="cpu")
        if batch_size is not None and batch_size > self.num_data:
            raise ValueError(
                f"Invalid batch_size: {batch_size} (must be in [1, {self.num_data}])"
            )

    def _parameters(self, theta: Any) -> list[Tensor]:
        values = list(theta.values()) if isinstance(theta, Mapping) else [theta]
        for value in values:
            fits = isinstance(value, Tensor) and value.is_floating_point()
            if not fits or value.dim() < 1 or len(value) != self._size:
                wanted = f"a Tensor [{self._size}, ...] of a floating dtype, or a dict "
                raise _invalid("theta: prior() returned", value, wanted + "of such")
        return [value.detach().clone() for value in values]

    def _theta(self, params: list[Tensor]) -> Any:
        if self._names is None:
            return params[0]
        return dict(zip(self._names, params, strict=True))

    def _minibatch(self, indices: Tensor) -> Any:
        some = tuple(each[:, indices.to(each.device)] for each in self._data)
        return some if self._is_tuple else some[0]

    def losses(self, params: list[Tensor], indices: Tensor) -> Tensor:
        """Returns losses [simulations, len(indices)]."""
        losses = self._loss(self._theta(params), self._minibatch(indices))
        wanted = [self._size, len(indices)]
        if not isinstance(losses, Tensor) or list(losses.shape) != wanted:
            shape = f"a Tensor of shape {wanted}, "
            each = "a negative log-likelihood for each datum"
            raise _invalid("loss: loss() returned", losses, shape + each)
        return losses

    def chain(self, make: Callable[[list[Tensor], int], Sampler], seed: int) -> Chain:
        """Makes the chain of these posteriors, at its start."""
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
        if self._batch_size is None:
            return self._everything
        order = torch.randperm(self.num_data, generator=self._generator, device="cpu")
        return order[: self._batch_size]

    def quantities(
        self, chosen: Mapping[str, Quantity] | None
    ) -> tuple[list[str], Callable[[list[Tensor]], Tensor]]:
        """Returns names, and a function from parameters to [simulations, names]."""
        names = [*self._coordinates()] if chosen is None else list(chosen)
        names += ["squared norm", "log likelihood"] if chosen is None else []
        if not names:
            raise ValueError("Invalid quantities: there are none")

        @torch.no_grad()
        def found(params: list[Tensor]) -> Tensor:
            if chosen is None:
                flat = [p.reshape(self._size, -1).double() for p in params]
                theta = torch.cat(flat, 1)
                log_likelihood = -self.losses(params, self._everything).double().sum(1)
                both = (theta.square().sum(1), log_likelihood)
                values = torch.cat([theta, torch.stack(both, 1)], 1)
            else:
                given = self._theta(params), self._minibatch(self._everything)
                columns = (self._quantity(k, f(*given)) for k, f in chosen.items())
                values = torch.stack([*columns], 1)
            if not bool(values.isfinite().all()):
                wrong = names[int((~values.isfinite()).any(0).nonzero()[0])]
                raise ValueError(f"Invalid quantity: {wrong!r} is not finite")
            return values.cpu()

        return names, found

    def _quantity(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or list(value.shape) != [self._size]:
            wanted = f"a Tensor of shape [{self._size}], a number for each simulation"
            raise _invalid(f"quantity: {name!r} is", value, wanted)
        return value.double()

    def _coordinates(self) -> list[str]:
        names = []
        for name, value in zip(self._names or ["theta"], self.truth, strict=True):
            names += _coordinate_names(name, value.shape[1:])
        if len(names) > _MOST_COORDINATES:
            raise ValueError(
                f"Invalid quantities: None (there are {len(names)} coordinates, more "
                f"than {_MOST_COORDINATES}: choose)"
            )
        return names


def _measured_thin(chain: Chain, found: Callable[[list[Tensor]], Tensor]) -> int:
    values, length = list[Tensor](), _FIRST_PILOT
    while length <= _LONGEST_PILOT:
        values += [found(chain.move()) for _ in range(length - len(values))]
        traces = torch.stack(values)  # [steps, simulations, quantities]
        ess = arviz("ess", traces[None], method="mean")
        # With fewer effective draws the estimate is hardly above its minimum.
        if bool(((ess < _FEWEST).double().mean(0) < 0.1).all()):
            ratio = (length / ess).nan_to_num(1.0).median(0).values.max()
            thin = max(1, math.ceil(float(ratio)))
            # Alternating draws have an ESS above their number, and are not independent.
            while thin < length // 4:
                correlation = _autocorrelation(traces, thin).nan_to_num(0.0)
                if float(correlation.abs().max()) <= CORRELATED:
                    break
                thin += 1
            return thin
        length *= 2
    raise RuntimeError(
        f"The chains' draws still correlate over {_LONGEST_PILOT} steps: they mix too "
        "slowly for their correlation to be measured (give thin, or larger steps)"
    )


def _autocorrelation(values: Tensor, lag: int) -> Tensor:
    off = values - values.mean(0)
    lagged = (off[lag:] * off[:-lag]).sum((0, 1)) / (len(off) - lag)
    return lagged / (off.square().sum((0, 1)) / len(off))


def _ranked(
    names: list[str], truth: Tensor, values: Tensor, thin: int, seed: int
) -> Calibration:
    draws, simulations, _ = values.shape
    # Ties are broken at random.
    equal = (values == truth).sum(0)
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(equal.shape, generator=generator, **HOST)
    ranks = (values < truth).sum(0) + (chance * (equal + 1)).long()
    # Subtracting the mean of L draws lowers the autocorrelation by about 1 / L.
    lagged = _autocorrelation(values, 1) + 1 / draws
    return Calibration(
        ranks={name: ranks[:, j] for j, name in enumerate(names)},
        draws=draws,
        simulations=simulations,
        thin=thin,
        autocorrelation={name: float(lagged[j]) for j, name in enumerate(names)},
    )


def _invalid(what: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"Invalid {what} {_what(value)} (must be {wanted})")


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def _coordinate_names(name: str, shape: torch.Size) -> list[str]:
    """Returns names of a tensor's elements: "weight[3, 5]"."""
    if not shape:
        return [name]
    return [f"{name}{[*place]}" for place in product(*map(range, shape))]
