"""Figure 1: noise in the gradients makes the particle bounce more, and no bias.

The target is a Gaussian (x, y) with variances 1 and correlation 0.7: G is linear along
lines, so that without noise nothing else is amiss. The noise is N(0, 5²) in each
component of the gradient, fresh each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.kept import kept_arrays
from reproduce.report import markdown, plt, save, standard_error
from scipy import stats
from torch import Tensor, nn
from tqdm import tqdm

import torch_sgmcmc as sg

from .logistic import Array
from .paths import autocorrelation, effective_size

NOISE = 5.0  # standard deviation in each component
CORRELATION = 0.7
EXAMPLES = 100  # whose losses share the noise, and from which SBPS estimates it
REFRESH_RATE = 0.1
INTERVAL = 0.5  # trajectory time between samples
BURN_IN = 10.0
SHOWN = 50  # bounces in the picture

# Is there noise, and how wide is the band of proposals? With noise wide enough that
# hardly any bounce is lost: the theorem is about the process without such losses.
CASES = {"exact gradient": (False, 3.0), "noisy gradient": (True, 4.0)}
COLORS = {"exact gradient": "C0", "noisy gradient": "C3"}

MOMENTS = {
    "E[x]": 0.0,
    "E[x²]": 1.0,
    "E[y]": 0.0,
    "E[y²]": 1.0,
}


@dataclass(frozen=True)
class Size:
    """The size of the runs: seeds, and trajectory time of each."""

    seeds: int
    time: float


def energy(w: Tensor) -> Tensor:
    """U of points [..., 2]."""
    x, y = w[..., 0], w[..., 1]
    squares = x * x + y * y - 2 * CORRELATION * x * y
    return squares / (2 * (1 - CORRELATION**2))


def exact_draws(count: int, seed: int) -> Array:
    """Independent draws [count, 2] of the target."""
    x, z = np.random.default_rng(seed).standard_normal((2, count))
    y = CORRELATION * x + (1 - CORRELATION**2) ** 0.5 * z
    return np.stack([x, y], axis=-1)


def closure_of(w: Tensor, noisy: bool, seed: int) -> Callable[[], Tensor]:
    """Losses whose mean is U and has a gradient with the noise, or without.

    The examples' own noise is √n times larger than their mean's.
    """
    generator = torch.Generator().manual_seed(seed)

    def closure() -> Tensor:
        if not noisy:
            return energy(w).expand(2)
        noise = torch.randn(EXAMPLES, 2, generator=generator, dtype=w.dtype)
        return energy(w) + NOISE * EXAMPLES**0.5 * (noise @ w)

    return closure


def simulate(case: str, time: float, seed: int) -> dict[str, Array]:
    """One trajectory of so much time from a draw of the target, after a burn-in.

    Returns:
        ``samples`` [m, 2] at regular times; ``moments``, in the order of MOMENTS, of
        the continuous trajectory; ``bounces``, the times of bounces; ``corners`` up to
        the 50th bounce; and ``violations``, of the proposals.
    """
    noisy, num_std = CASES[case]
    w = nn.Parameter(torch.from_numpy(exact_draws(1, 1000 + seed)[0]))
    sampler = sg.SBPS(
        [w],
        num_data=1,
        num_std=num_std,
        refresh_rate=REFRESH_RATE,
        sample_interval=INTERVAL,
        replacement=True,
        seed=seed,
    )
    closure = closure_of(w, noisy, seed)
    while sampler.trajectory_time < BURN_IN:
        sampler.step(closure)
    begin = sampler.diagnostics
    average = sg.TimeAverage(sampler)
    samples: list[Array] = []
    sampler.register_sample_hook(
        lambda sampler, time: samples.append(w.detach().numpy().copy())
    )
    corners, bounces = [w.detach().numpy().copy()], []
    before = begin
    with tqdm(total=time, desc=f"figure 1, {case}", leave=False) as bar:
        while before.trajectory_time < begin.trajectory_time + time:
            sampler.step(closure)
            after = sampler.diagnostics
            bar.update(after.trajectory_time - before.trajectory_time)
            if after.bounces > before.bounces:
                bounces.append(after.trajectory_time)
            if len(bounces) < SHOWN:
                corners.append(w.detach().numpy().copy())
            before = after
    mean, square = average.mean(w).numpy(), average.mean_square(w).numpy()
    return {
        "samples": np.array(samples),
        "moments": np.stack([mean, square], axis=-1).ravel(),
        "bounces": np.array(bounces),
        "corners": np.array(corners),
        "violations": np.array(sampler.diagnostics.violation_rate),
    }


def run(size: Size, cache: Path) -> dict[str, Any]:
    """Runs both cases; returns numbers, and under "curves" what the picture shows."""
    document: dict[str, Any] = {"size": asdict(size), "cases": {}, "curves": {}}
    for case, settings in CASES.items():
        runs = [
            kept_arrays(
                cache,
                f"figure 1, {case}, seed {seed}",
                [size.time, settings, INTERVAL, REFRESH_RATE, BURN_IN],
                lambda case=case, seed=seed: simulate(case, size.time, seed),
            )
            for seed in range(size.seeds)
        ]
        waits = [np.diff(r["bounces"]) for r in runs]
        sizes = [effective_size(r["samples"][:, 0]) for r in runs]
        document["cases"][case] = {
            "moments": [r["moments"].tolist() for r in runs],
            "mean_wait": [float(w.mean()) for w in waits],
            "violation_rate": [float(r["violations"]) for r in runs],
            "effective_size_by_time": [100 * s / size.time for s in sizes],
            "effective_size_by_bounces": [
                100 * s / len(r["bounces"]) for s, r in zip(sizes, runs, strict=True)
            ],
        }
        lags = min(41, len(runs[0]["samples"]) // 2)
        acfs = [autocorrelation(r["samples"][:, 0], lags, 0.0) for r in runs]
        document["curves"][case] = {
            "corners": runs[0]["corners"],
            "waits": np.concatenate(waits),
            "samples": np.concatenate([r["samples"] for r in runs]),
            "autocorrelation": np.mean(acfs, axis=0),
        }
    return document


def table(document: dict[str, Any]) -> str:
    """A markdown table, mean ± standard error over seeds."""
    head = [
        "gradient",
        *MOMENTS,
        "time until a bounce",
        "bound violations",
        "ESS of x per 100 time units",
        "per 100 bounces",
    ]
    rows = [
        [
            case,
            *(standard_error(m, 3) for m in np.transpose(result["moments"])),
            standard_error(result["mean_wait"], 3),
            f"{np.mean(result['violation_rate']):.2%}",
            standard_error(result["effective_size_by_time"], 1),
            standard_error(result["effective_size_by_bounces"], 1),
        ]
        for case, result in document["cases"].items()
    ]
    rows.append(["truth", *(f"{m:.3f}" for m in MOMENTS.values()), "", "", "", ""])
    return markdown(head, rows)


def draw(document: dict[str, Any], path: Path) -> None:
    """The paper's panels: trajectories, waits, quantiles and autocorrelations."""
    figure, grid = plt.subplot_mosaic(
        [
            ["exact gradient"] * 3 + ["noisy gradient"] * 3,
            ["w", "w", "q", "q", "a", "a"],
        ],
        figsize=(10.6, 7.6),
    )
    x, y = np.meshgrid(*[np.linspace(-3.5, 3.5, 200)] * 2)
    levels = energy(torch.from_numpy(np.stack([x, y], axis=-1))).numpy()
    chances = np.linspace(0.002, 0.998, 250)
    for case, curve in document["curves"].items():
        color = COLORS[case]
        panel = grid[case]
        panel.contour(
            x, y, levels, levels=[0.5, 1, 2, 3, 4.5], colors="0.7", linewidths=0.8
        )
        panel.plot(*curve["corners"].T, color=color, linewidth=0.9)
        panel.set(title=f"{case}: {SHOWN} bounces", xlabel="x", ylabel="y")
        grid["w"].hist(
            curve["waits"],
            bins=np.linspace(0, 5, 41),
            density=True,
            histtype="step",
            color=color,
            label=case,
        )
        theory = stats.norm.ppf(chances)
        grid["q"].plot(
            theory,
            np.quantile(curve["samples"][:, 0], chances),
            color=color,
            label=case,
        )
        acf = curve["autocorrelation"]
        grid["a"].plot(INTERVAL * np.arange(len(acf)), acf, color=color, label=case)
    grid["w"].set(xlabel="trajectory time between bounces", ylabel="density")
    grid["w"].legend()
    grid["q"].plot([-3, 3], [-3, 3], color="k", linewidth=0.8, linestyle=":")
    grid["q"].set(xlabel="quantiles of x, exactly", ylabel="quantiles of the samples")
    grid["a"].axhline(0, color="k", linewidth=0.8)
    grid["a"].set(xlabel="lag (trajectory time)", ylabel="autocorrelation of x")
    save(figure, path, 72)
