"""Methods on one posterior: how they find it, and how they move in it.

Every method runs twice: from points far out, and from draws of the posterior. All
methods start at the same points.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from reproduce.kept import kept_arrays
from reproduce.report import standard_error

from .logistic import Array, Problem
from .methods import Method, chains
from .paths import EPOCH, autocorrelation, effective_size

FAR = 10.0  # chains start at draws of N(ŵ, so much times the Laplace covariance)
LAGS = 50 * EPOCH
JUMP = 10  # epochs


@dataclass(frozen=True)
class Size:
    """The size of the runs: seeds, epochs from afar, epochs in the posterior.

    ``reference`` is the number of draws that the posterior's moments are taken from.
    """

    seeds: int
    epochs: int
    stationary_epochs: int
    reference: int


def summarised(
    problem: Problem,
    method: Method,
    start: Array,
    epochs: int,
    seed: int,
    stride: int,
    label: str,
) -> dict[str, Array]:
    """Traces of the chains: epochs, distances along extreme directions, and U.

    U is less that of the mode, of every ``stride``-th sample.
    """
    costs, samples, diagnostics = chains(problem, method, start, epochs, seed, label)
    low = problem.energy(problem.mode)
    return {
        "epochs": costs,
        "extremes": problem.along_extremes(samples),
        "excess": np.stack([problem.energy(s[::stride]) - low for s in samples]),
        **{key: np.array(values) for key, values in diagnostics.items()},
    }


def first_time(epochs: Array, excess: Array, limit: float) -> float | None:
    """The epochs until U's excess is first below a limit; None if never."""
    below = np.flatnonzero(excess < limit)
    return float(epochs[below[0]]) if len(below) else None


def autocorrelations(extremes: Array, lags: int, mean: Array) -> Array:
    """Autocorrelations of chains [chains, m, 2]: [chains, 2, lags]."""
    return np.array(
        [
            [autocorrelation(z, lags, m) for z, m in zip(chain.T, mean, strict=True)]
            for chain in extremes
        ]
    )


@dataclass(frozen=True)
class Reference:
    """The posterior's draws, and U at its mode."""

    draws: Array
    mean: Array  # along the extreme directions, from the mode
    variance: Array
    low: float

    @classmethod
    def of(cls, problem: Problem, count: int, cache: Path) -> Reference:
        """Draws by HMC with all data, one draw a chain."""
        draws = kept_arrays(
            cache,
            "reference",
            [problem.digest, count],
            lambda: {"draws": problem.posterior_draws(count, seed=100)},
        )["draws"]
        z = problem.along_extremes(draws)
        low = float(problem.energy(problem.mode))
        return cls(draws, z.mean(axis=0), z.var(axis=0), low)

    def summary(self, problem: Problem) -> dict[str, Any]:
        """The result as JSON values."""
        laplace = np.linalg.eigvalsh(problem.covariance)
        return {
            "mode_energy": self.low,
            "mean": self.mean.tolist(),
            "variance": self.variance.tolist(),
            "laplace_variance": [float(laplace[-1]), float(laplace[0])],
            "excess": float(problem.energy(self.draws).mean()) - self.low,
        }


def measure(
    first: dict[str, Array], later: dict[str, Array], reference: Reference, epochs: int
) -> dict[str, Any]:
    """The numbers of a method, each by chain: of its two runs, the later of ``epochs``.

    In both extreme directions: ``effective_size`` is that of 100 epochs, ``jump`` the
    mean squared distance between samples 10 epochs apart, over that of independent
    draws of the posterior. The latter needs no chain that mixes.
    """
    # 2 (U - U(ŵ)) would be χ²(d), were the posterior normal: two deviations above.
    half = reference.draws.shape[1] / 2
    limit = half + 2 * half**0.5
    lag = min(JUMP * EPOCH, later["extremes"].shape[1] // 2)
    jumps = (later["extremes"][:, lag:] - later["extremes"][:, :-lag]) ** 2
    squares = (later["extremes"] - reference.mean) ** 2
    return {
        "epochs_to_posterior": [
            first_time(spent, excess, limit)
            for spent, excess in zip(first["epochs"], first["excess"], strict=True)
        ],
        "excess": later["excess"].mean(axis=1).tolist(),
        "variance_ratio": (squares.mean(axis=1) / reference.variance).tolist(),
        "jump": (jumps.mean(axis=1) / (2 * reference.variance)).tolist(),
        "effective_size": [
            [100 / epochs * effective_size(z) for z in chain.T]
            for chain in later["extremes"]
        ],
        "diagnostics": {
            key: later[key].tolist()
            for key in later.keys() - {"epochs", "extremes", "excess"}
        },
    }


def compare(
    problem: Problem,
    methods: dict[str, Method],
    size: Size,
    cache: Path,
    figure: str,
    *,
    scale: float = FAR,
) -> dict[str, Any]:
    """Runs all methods; returns numbers, and under "curves" what pictures show."""
    reference = Reference.of(problem, size.reference, cache)
    far = problem.laplace_draws(size.seeds, seed=1, scale=scale)
    inside = reference.draws[-size.seeds :]
    document: dict[str, Any] = {
        "size": asdict(size),
        "reference": reference.summary(problem),
        "methods": {},
        "curves": {},
    }
    for name, method in methods.items():
        label = f"{figure}, {name}"
        settings = [problem.digest, asdict(size), method.options, scale]
        run = partial(summarised, problem, method, label=label)
        first = kept_arrays(
            cache,
            f"{label}, far",
            settings,
            partial(run, far, size.epochs, seed=10, stride=1),
        )
        later = kept_arrays(
            cache,
            f"{label}, inside",
            settings,
            partial(run, inside, size.stationary_epochs, seed=50, stride=EPOCH),
        )
        document["methods"][name] = measure(
            first, later, reference, size.stationary_epochs
        )
        lags = min(LAGS, later["extremes"].shape[1] // 2)
        document["curves"][name] = {
            "epochs": first["epochs"],
            "excess": first["excess"],
            "extremes": first["extremes"],
            "autocorrelation": autocorrelations(
                later["extremes"], lags, reference.mean
            ),
        }
    return document


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several data sets; ``excess`` is over E[U] of their posteriors."""
    methods: dict[str, Any] = {}
    for result in results:
        for name, numbers in result["methods"].items():
            own = result["reference"]["excess"]
            numbers["excess"] = [value - own for value in numbers["excess"]]
            pooled = methods.setdefault(name, {key: [] for key in numbers})
            diagnostics = numbers.pop("diagnostics")
            pooled["diagnostics"] = [*pooled.get("diagnostics", []), diagnostics]
            for key, values in numbers.items():
                pooled[key] += values
    return {
        "size": results[0]["size"],
        "methods": methods,
        "references": [result["reference"] for result in results],
    }


#: The head of what ``compared_rows`` returns; effective sizes (ESS) are by 100 epochs.
COMPARED = (
    "method",
    "epochs until U is near",
    "E[U] − U(ŵ)",
    "variance, widest",
    "variance, narrowest",
    "jump, widest",
    "ESS, widest",
    "ESS, narrowest",
)


def compared_rows(document: dict[str, Any]) -> list[list[str]]:
    """A table's rows, a method each: mean ± standard error over seeds."""
    rows = []
    for name, result in document["methods"].items():
        ratios = np.array(result["variance_ratio"])
        sizes = np.array(result["effective_size"])
        jumps = np.array(result["jump"])
        found = result["epochs_to_posterior"]
        near = [epochs for epochs in found if epochs is not None]
        reached = f"{len(near)} of {len(found)} in {document['size']['epochs']}"
        rows.append(
            [
                name,
                standard_error(near, 0) if len(near) == len(found) else reached,
                standard_error(result["excess"], 2),
                standard_error(ratios[:, 0], 2),
                standard_error(ratios[:, 1], 2),
                standard_error(jumps[:, 0], 3),
                standard_error(sizes[:, 0], 2),
                standard_error(sizes[:, 1], 1),
            ]
        )
    return rows


def posterior_row(document: dict[str, Any]) -> list[str]:
    """The expected results of the rows."""
    excess = f"{document['reference']['excess']:.2f}"
    return ["posterior", "", excess, "1", "1", "", "", ""]
