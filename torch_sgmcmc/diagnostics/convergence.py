"""Convergence of chains: R-hat and ESS of many quantities, and data for ArviZ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_sgmcmc.core.hyperparams import check_real, wrong_type
from torch_sgmcmc.core.utils import arviz, optional, plain_names

# Levels of the shown quantiles, the worst last.
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_HEADS = ("median", "90 %", "99 %", "worst")
# Fewest draws of a chain with an effective sample size.
_FEWEST = 25


@dataclass(frozen=True, eq=False)
class Convergence:
    r"""R-hat and effective sample sizes of each of many quantities.

    The rank-normalised R̂ compares all draws with the draws within the halves of the
    chains, in location and scale: it is 1 if all halves of all chains are alike. The
    effective sample size (ESS) of a chain of n draws with autocorrelations ρ is
    :math:`n / (1 + 2 \sum_t \rho_t)`. The numbers are ArviZ's (``arviz_stats``),
    whose ESS is at most n log10(n) of all n draws. Below 25 draws a chain this limit
    decides: texts and quantiles then have no ESS. Texts never show more than all draws.

    A quantity with one value in all draws of all chains is constant: its numbers are
    NaN, and quantiles ignore it. If each chain stands still at another value,
    :math:`\hat R = \infty`. A single chain is cut into two.

    Attributes:
        rhat: R̂, float64, a number for each quantity.
        ess: bulk-ESS, all chains together, like ``rhat``.
        ess_tail: tail-ESS, the smaller one of the 5 % and the 95 % quantile.
        constant: bool, like ``rhat``: the quantity is the same in all draws.
        num_chains: number of chains.
        num_draws: number of draws of each chain.
        title: name of the quantities.

    Reference:
        A. Vehtari, A. Gelman, D. Simpson, B. Carpenter and P.-C. Bürkner,
        Rank-Normalization, Folding, and Localization: An Improved R̂ for Assessing
        Convergence of MCMC, Bayesian Analysis 16, 2021.
    """

    rhat: Tensor
    ess: Tensor
    ess_tail: Tensor
    constant: Tensor
    num_chains: int
    num_draws: int
    title: str

    def __repr__(self) -> str:
        return str(self)

    @property
    def is_ess_known(self) -> bool:
        """True if chains are long enough for effective sample sizes."""
        return self.num_draws >= _FEWEST

    def quantiles(self, *levels: float) -> dict[str, Tensor]:
        """Returns quantiles over the quantities that vary, counted from the best.

        Args:
            levels: in [0, 1]; 0 is the best of all quantities and 1 the worst (the
                largest R̂, the smallest effective sample size).

        Returns:
            For "rhat", "ess" and "ess_tail" a float64 tensor with a number for each
            level, not interpolated (of two quantities, the worse); NaN where nothing
            varies, and for effective sample sizes below 25 draws a chain.

        Raises:
            ValueError: a level is out of range.
        """
        for level in levels:
            if check_real("level", level) > 1:
                raise ValueError(f"Invalid level: {level} (must be in [0, 1])")
        q = torch.tensor(levels, dtype=torch.float64, device="cpu")
        worse = {"rhat": self.rhat, "ess": -self.ess, "ess_tail": -self.ess_tail}
        found = {}
        for name, values in worse.items():
            varying = values[~self.constant]
            found[name] = torch.full_like(q, torch.nan)
            if len(varying) > 0 and (self.is_ess_known or name == "rhat"):
                found[name] = varying.quantile(q, interpolation="higher").abs()
        return found

    def shown(self, *levels: float) -> dict[str, Tensor]:
        """Returns quantiles with effective sample sizes of at most all draws."""
        most, found = self.num_chains * self.num_draws, self.quantiles(*levels)
        return {k: v if k == "rhat" else v.clamp(max=most) for k, v in found.items()}

    def __str__(self) -> str:
        """Returns a table of quantiles."""
        count, constant = self.rhat.numel(), int(self.constant.sum())
        lines = [
            f"{self.title}: {self.num_chains} chains of {self.num_draws} draws, "
            f"{count} quantities"
        ]
        if constant < count:
            lines.append(" " * 9 + "".join(f"{head:>9}" for head in _HEADS))
            labels = {"rhat": "R-hat", "ess": "bulk-ESS", "ess_tail": "tail-ESS"}
            for name, values in self.shown(*_QUANTILES).items():
                form = ".3f" if name == "rhat" else ".0f"
                row = "".join(f"{value:>9{form}}" for value in values.tolist())
                if not self.is_ess_known and name != "rhat":
                    row = f" not known below {_FEWEST} draws a chain"
                lines.append(f"{labels[name]:<9}{row}")
        if constant:
            lines.append(f"constant in all draws: {constant} of {count}")
        return "\n".join(lines)


def convergence_of(values: Tensor, title: str) -> Convergence:
    """Returns R-hat and effective sample sizes of [chains, draws, ...].

    Args:
        values: finite, at least 4 draws.
        title: the quantities' name.
    """
    chains, draws, *shape = values.shape
    flat = values.double().cpu().reshape(chains, draws, -1)
    constant = (flat == flat[:1, :1]).flatten(0, 1).all(0)
    parts = flat
    if chains == 1:  # ArviZ compares at least two chains
        parts = flat[0, draws % 2 :].reshape(2, draws // 2, -1)
    found = flat.new_full((3, flat.shape[2]), torch.nan)
    if not bool(constant.all()):
        varying = flat[:, :, ~constant]
        found[0, ~constant] = arviz("rhat", parts[:, :, ~constant], method="rank")
        found[1, ~constant] = arviz("ess", varying, method="bulk")
        found[2, ~constant] = arviz("ess", varying, method="tail", prob=(0.05, 0.95))
        still = (flat == flat[:, :1]).flatten(0, 1).all(0) & ~constant
        found[0, still] = torch.inf  # ranks would round it
    rhat, ess, tail = (row.reshape(shape) for row in found)
    return Convergence(rhat, ess, tail, constant.reshape(shape), chains, draws, title)


# Fewest draws of chains whose increments are compared; the smallest correlation that
# counts, and its distance in standard deviations from other lags.
_FEWEST_SHARED, _CORRELATION, _SIGMAS = 20, 0.1, 8.0


def never_moves(chain: Tensor) -> bool:
    """Returns whether draws [draws, ...] are all the same."""
    return len(chain) > 1 and bool((chain == chain[:1]).all())


def identical_chains(chains: Mapping[int, Tensor]) -> list[tuple[int, int]]:
    """Finds pairs of moving chains that are equal at the end.

    One seed brings chains of one mode together from any start.
    """
    found = []
    for i, j in combinations(chains, 2):
        length = min(len(chains[i]), len(chains[j]))
        part = slice(0 if length < 4 else 3 * length // 4, length)
        one, other = chains[i][part], chains[j][part]
        if length and torch.equal(one[-1], other[-1]) and torch.equal(one, other):
            if not never_moves(chains[i]):
                found.append((i, j))
    return found


def check_different(name: str, chains: Tensor) -> None:
    """Raises if two of [chains, draws, ...] are equal and move."""
    for i, j in identical_chains(dict(enumerate(chains))):
        raise ValueError(
            f"Invalid {name}: chains {i} and {j} are identical, number for number "
            "(were they run with one seed? R-hat and effective sample sizes need "
            "independent chains: give each its own seed, with torch_sgmcmc.fold_in)"
        )


def shared_noise(chains: Mapping[int, Tensor]) -> list[tuple[int, int]]:
    """Finds pairs of chains whose increments correlate, draw by draw.

    Second differences cancel a common drift. Their correlation is compared with other
    lags' correlations, which have the same law in independent chains.

    Args:
        chains: [draws, elements] of each chain, from the first draw on.
    """
    length = min(map(len, chains.values()), default=0)
    if length < _FEWEST_SHARED:
        return []
    signs, spectra = {}, {}
    for i, chain in chains.items():
        bends = chain[:length].double().diff(n=2, dim=0)
        # Bounded against heavy tails, with equal weights of elements.
        signs[i] = (bends / bends.abs().mean(0).clamp_min(1e-300)).tanh()
        spectra[i] = torch.fft.rfft(signs[i], 2 * len(bends), dim=0)
    found = []
    for i, j in combinations(chains, 2):
        product = (spectra[i].conj() * spectra[j]).sum(1)
        norm = (signs[i].square().sum() * signs[j].square().sum()).sqrt()
        by_lag = torch.fft.irfft(product, 2 * (length - 2)) / norm.clamp_min(1e-300)
        reach = length // 2 - 1  # other lags, up to a half of the draws
        others = torch.cat([by_lag[3:reach], by_lag[-reach:-2]])
        if float(by_lag[0]) > max(_CORRELATION, _SIGMAS * float(others.std())):
            found.append((i, j))
    return found


# Fewest draws of a chain, and fewest effective draws of each half: fewer cannot
# separate chance and slow movement from a difference.
_DRAWS, _EFFECTIVE = 16, 10
# A distance in standard deviations that counts with fewer draws: halves of a straight
# line are 3.5 apart, halves of a random walk up to 2.
_APART = 2.5
# Fewest draws for a check of the burn-in, and the smallest widening that counts.
_FEWEST_LATE, _WIDENED = 32, 1.3


class Difference(NamedTuple):
    """The quantity with the largest difference between chains or halves."""

    #: "chains" or "halves", and "location" or "scale".
    between: str
    what: str
    #: Probability of a larger difference without fault, over all quantities.
    probability: float
    quantity: int
    #: The chain that differs most.
    chain: int


class TooShort(NamedTuple):
    """The quantity that the first draws of a chain widen most."""

    quantity: int
    chain: int
    #: Standard deviation of all its draws over the second half's.
    factor: float


def differences(values: Tensor, tests: int | None = None) -> list[Difference]:
    """Compares the chains, and their halves, in location and scale.

    Normal scores of ranks are compared by an F-test for each quantity. Errors use
    ArviZ's effective sample size of each half; probabilities are multiplied by the
    number of tests.

    Args:
        values: [chains, draws, quantities], finite; constants are ignored.
        tests: the number of quantities from which these were chosen.
    """
    chains, draws, _ = values.shape
    varying = (values != values[:1, :1]).flatten(0, 1).any(0).nonzero().flatten()
    length = draws // 2
    if draws < _DRAWS or len(varying) == 0:
        return []
    flat = values[:, draws - 2 * length :, varying].double()
    centers = flat.median(1, keepdim=True).values
    kinds: list[tuple[str, int | None, Tensor]] = [("halves", 1, centers)]
    if chains > 1:
        kinds.append(("chains", None, flat.flatten(0, 1).median(0).values))
    found = []
    for between, axis, center in kinds:
        for what, off in (("location", flat), ("scale", (flat - center).abs())):
            found.append(_most(between, what, _normal_scores(off, axis)))
    tests = len(varying) if tests is None else tests
    pairs = ((each, min(1.0, 2 * tests * each.probability)) for each in found)
    return [
        each._replace(quantity=int(varying[each.quantity]), probability=p)
        for each, p in pairs
    ]


def _most(between: str, what: str, scores: Tensor) -> Difference:
    """Returns the quantity of [chains, draws, quantities] that differs most."""
    from scipy.stats import f

    chains, draws, count = scores.shape
    halves = scores.reshape(2 * chains, draws // 2, count)
    parts = halves.permute(1, 0, 2)[None]  # each half is a chain
    effective = arviz("ess", parts, method="mean").nan_to_num(1.0)
    effective = effective.clamp(1.0, draws // 2).mean(0)
    within = halves.var(1).mean(0).clamp_min(1e-12)
    means = halves.mean(1).reshape(chains, 2, count)
    if between == "halves":
        square = (means[:, 1] - means[:, 0]).square()
        chain, square, over = square.argmax(0), square.mean(0), chains
        ratio = square * effective / (2 * within)
    else:
        compare_chains = means.mean(1)
        chain = (compare_chains - compare_chains.median(0).values).abs().argmax(0)
        square, over = compare_chains.var(0), chains - 1
        ratio = 2 * square * effective / within
    under = (2 * chains * effective / 5).clamp_min(4.0)
    chance = torch.from_numpy(f.sf(ratio.numpy(), over, under.numpy()))
    is_far = square > _APART**2 * within
    chance[(effective < _EFFECTIVE) & ~is_far] = 1.0
    chance[is_far] = 0.0
    worst = int((chance - 1e-9 * ratio.clamp_max(1e6)).argmin())
    return Difference(between, what, float(chance[worst]), worst, int(chain[worst]))


def _normal_scores(values: Tensor, axis: int | None) -> Tensor:
    """Returns normal quantiles of ranks, within chains (axis 1) or over all."""
    from scipy.stats import rankdata

    rows = values if axis else values.reshape(1, -1, values.shape[2])
    ranks = torch.from_numpy(rankdata(rows.numpy(), axis=1)).double()
    scores = torch.special.ndtri((ranks - 0.375) / (rows.shape[1] + 0.25))
    return scores.view_as(values)


def short_burn_in(values: Tensor) -> TooShort | None:
    """Finds chains whose first draws are far outside of their second half.

    A few such draws do not change ranks, but widen standard deviations.

    Args:
        values: [chains, draws, quantities], finite.
    """
    chains, draws, count = values.shape
    if draws < _FEWEST_LATE or count == 0:
        return None
    from scipy.stats import t

    values = _unbounded(values.double())
    last = values[:, draws // 2 :]
    center, spread = last.mean(1), last.std(1)
    off = (values - center[:, None]) / spread[:, None]
    far = values.new_zeros(chains, count)
    lengths = [2**i for i in range(int(math.log2(draws // 8)) + 1)]
    for length in lengths:
        windows = off[:, draws // 2 :].unfold(1, length, length).mean(3).abs()
        first = off[:, :length].mean(1).abs()
        is_out = first > 3 * windows.amax(1)
        far = torch.maximum(far, first.where(is_out, 0.0))
    factor = (values.std(1) / spread).where(spread > 0, 0.0)
    places = (far > _APART) & (factor >= _WIDENED)
    if not bool(places.any()):
        return None
    # The second half of a slow chain may be too narrow by chance.
    parts = last.permute(1, 0, 2)[:, places][None]
    freedom = arviz("ess", parts, method="mean").clamp(2.0, len(last[0])) - 1
    limit = t.isf(0.001 / (2 * chains * count * len(lengths)), freedom.numpy())
    is_sure = far[places] > 1.5 * torch.from_numpy(limit)
    if not bool(is_sure.any()):
        return None
    factors = torch.zeros_like(far)
    factors[places] = factor[places].where(is_sure, 0.0)
    place = int(factors.argmax())
    return TooShort(place % count, place // count, float(factors.max()))


def _unbounded(values: Tensor) -> Tensor:
    """Returns log-odds of probabilities and logarithms of positive quantities."""
    positive = (values >= 0).flatten(0, 1).all(0)
    parts = positive & (values <= 1).flatten(0, 1).all(0)
    logs = values.clamp_min(1e-38).log()
    odds = logs - torch.log1p(-values.clamp(0, 1 - 6e-8))
    return torch.where(parts, odds, torch.where(positive, logs, values))


# Most numbers of a draw that are converted without a choice.
_FEW = 10_000
# Optional attributes of draws.
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
    r"""Converts chains of draws for ArviZ.

    Makes one pass over the draws and keeps the chosen quantities only: for a network, a
    few parameters or some outputs.

    Args:
        draws: ``draws[chain][draw]``, or draws one after the other that have an
            attribute ``chain`` (without one they are all of one chain): mappings from
            names to Tensors, or modules.
        names: names of tensors to take. None takes all of a floating dtype, if there
            are no probes and at most 10,000 numbers. Default: None.
        probes: ``{name: function}`` of a draw that returns a Tensor, an array or a
            number; labels of its elements are taken from the function's attribute
            ``names``. Default: none.
        log_likelihood: ``{name: function}`` of a draw that returns :math:`\log p(y_i |
            x_i, \theta)` of each datum, for ``arviz.loo`` and ``arviz.compare``; a
            group of that name. Default: none.
        posterior_predictive: ``{name: function}`` of a draw that returns new data, for
            ``arviz.plot_ppc``. Default: none.

    Returns:
        An ``arviz.InferenceData``, or with ArviZ 1.x an ``xarray.DataTree``: the
        variables in the group "posterior", with chains in the order of their numbers.
        Attributes ``weight`` and ``step`` that all draws have are in "sample_stats";
        ArviZ's own statistics ignore weights.

    Raises:
        ValueError: there are no draws, chains have different lengths or are identical,
            a draw lacks a name or has another shape, or too much would be taken.
        TypeError: a draw is neither a mapping nor a module.
        ImportError: ArviZ is not installed.
    """
    arviz = optional("arviz", "ArviZ", "convergence.to_arviz()", "posterior")
    probes, chosen = dict(probes or {}), None if names is None else list(names)
    functions = {("posterior", name): probe for name, probe in probes.items()}
    more = {"log_likelihood": log_likelihood or {}}
    more["posterior_predictive"] = posterior_predictive or {}
    for group, given in more.items():
        functions |= {(group, name): function for name, function in given.items()}
    chains = _rows(draws, chosen, functions, has_probes=bool(probes))
    ordered = [chains[chain] for chain in sorted(chains)]
    lengths = [*map(len, ordered)]
    if not lengths or min(lengths) != max(lengths):
        raise ValueError(
            f"Invalid draws: chains of {lengths} draws (must be chains of one length)"
        )
    groups: dict[str, Any] = {"posterior": {}}
    rows: list[Tensor] = []
    for group, name in ordered[0][0]:
        # Not every draw may have a weight.
        if all((group, name) in row for of_chain in ordered for row in of_chain):
            values = _stacked(ordered, (group, name))
            groups.setdefault(group, {})[name] = values.numpy()
            if group == "posterior":
                rows.append(values.double().reshape(*values.shape[:2], -1))
    if rows:
        check_different("draws", torch.cat(rows, 2))
    coords, dims = {}, {}
    for name, probe in probes.items():
        labels = getattr(probe, "names", None)
        if labels is not None and groups["posterior"][name].ndim == 3:
            coords[f"{name}_of"] = list(labels)
            dims[name] = [f"{name}_of"]
    if int(arviz.__version__.partition(".")[0]) >= 1:
        return arviz.from_dict(groups, coords=coords, dims=dims)
    return arviz.from_dict(**groups, coords=coords, dims=dims)


def _rows(
    draws: Iterable[Any],
    chosen: list[str] | None,
    functions: Mapping[tuple[str, str], Probe],
    *,
    has_probes: bool,
) -> dict[int, list[dict[tuple[str, str], Tensor]]]:
    """Returns the quantities of each draw by group and name, for each chain."""
    chains: dict[int, list[dict[tuple[str, str], Tensor]]] = {}
    for chain, draw in _numbered(draws):
        if not isinstance(draw, Mapping | nn.Module):
            wanted = "a mapping from names to Tensors, or a module"
            raise wrong_type("draw", draw, wanted)
        tensors = _tensors(draw)
        if chosen is None:
            chosen = [] if has_probes else _all(tensors)
        missing = [name for name in chosen if name not in tensors]
        if missing:
            raise ValueError(f"Invalid names: a draw has no tensor {missing[0]!r}")
        row = {("posterior", name): tensors[name] for name in chosen}
        for place, function in functions.items():
            value = function(draw)
            dtype = torch.float64 if isinstance(value, float) else None
            row[place] = torch.as_tensor(value, dtype=dtype)
        for name in _STATISTICS:
            if not isinstance(draw, nn.Module) and hasattr(draw, name):
                value = getattr(draw, name)
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                number = torch.tensor(value, dtype=dtype, device="cpu")
                row["sample_stats", name] = number
        kept = {place: _kept(tensor) for place, tensor in row.items()}
        chains.setdefault(chain, []).append(kept)
    return chains


def _tensors(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not isinstance(model, nn.Module):
        return model
    named = dict(model.named_parameters())
    return {plain: named[name] for name, plain in plain_names(model, named).items()}


def _numbered(draws: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    for i, item in enumerate(draws):
        if isinstance(item, Iterable) and not isinstance(item, Mapping | nn.Module):
            yield from ((i, draw) for draw in item)
        else:
            is_module = isinstance(item, nn.Module)
            yield 0 if is_module else getattr(item, "chain", 0), item


def _all(tensors: Mapping[str, Tensor]) -> list[str]:
    names = [name for name in tensors if tensors[name].is_floating_point()]
    count = sum(tensors[name].numel() for name in names)
    if count > _FEW:
        raise ValueError(
            f"Invalid draws: {count:,} numbers each, of which some must be chosen: "
            "with names, or with functions as probes"
        )
    return names


def _kept(tensor: Tensor) -> Tensor:
    # In float32 ArviZ rounds distances from a median so that their ranks change.
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


def _stacked(chains: list[list[dict[Any, Tensor]]], place: tuple[str, str]) -> Tensor:
    shapes = {tuple(draw[place].shape) for chain in chains for draw in chain}
    if len(shapes) > 1:
        some = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise ValueError(f"Invalid draws: {place[1]!r} has shapes {some}")
    return torch.stack([torch.stack([row[place] for row in chain]) for chain in chains])
