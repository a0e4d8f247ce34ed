"""Figure 2: the intensity of proposals over the rate that it is to bound.

Two-dimensional logistic regression. SBPS's clock is read between its steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.report import markdown, plt, save, standard_error
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import torch_sgmcmc as sg

from .exact import LipschitzBPS, ZigZag
from .logistic import NUM_DATA, Array, Problem, simulate
from .paths import EPOCH, NUM_STD, minibatches

DATA_SEED = 0
PROPOSALS = range(6, 10)  # on the line that is shown


@dataclass(frozen=True)
class Size:
    """The size of the runs: seeds, and epochs of each."""

    seeds: int
    epochs: int


@dataclass(frozen=True)
class Look:
    """An event on a straight line.

    Args:
        time: since the line began.
        value: the observed G, and its standard error.
        error: of the value.
        rate: of proposals then; NaN where nothing was proposed.
        times: [m] from the last event to this one.
        rates: of proposals at those times, which may be negative.
        bounced: whether the line ends here.
    """

    time: float
    value: float
    error: float
    rate: float
    times: Array
    rates: Array
    bounced: bool


@dataclass(frozen=True)
class Line:
    """A straight line from one bounce to the next."""

    origin: Array
    velocity: Array
    looks: list[Look]

    def true_rate(self, problem: Problem, times: Array) -> Array:
        """G of all data: the slope of U along the line."""
        places = self.origin + times[:, None] * self.velocity
        return problem.gradient(places) @ self.velocity


def follow(problem: Problem, start: Array, steps: int, seed: int) -> list[Line]:
    """The lines of a trajectory, without the last, from its first bounce on."""
    w = nn.Parameter(torch.from_numpy(start.copy()))
    sampler = sg.SBPS([w], num_data=NUM_DATA, num_std=NUM_STD, seed=seed)
    (group,) = sampler.param_groups
    batches = minibatches(problem, 1, seed)

    def closure() -> Tensor:
        x, y = next(batches)
        return F.binary_cross_entropy_with_logits(x[0] @ w, y[0], reduction="none")

    sampler.step(closure)
    lines: list[Line] = []
    looks: list[Look] = []
    for _ in tqdm(range(steps), desc=f"figure 2, seed {seed}", leave=False):
        clock = group["clock"].copy()
        begin, time_before = group["line_time"], group["trajectory_time"]
        state = {key: sampler.state[w][key].numpy() for key in ("origin", "velocity")}
        proposals, bounces = group["num_proposals"], group["num_bounces"]
        sampler.step(closure)
        end = begin + group["trajectory_time"] - time_before
        times = np.linspace(begin, end, 50)
        rates = np.array(clock.rate(NUM_STD, times.tolist()))
        bounced = group["num_bounces"] > bounces
        # A bounced line's last observation is the next one's first, turned round.
        after = group["clock"].observations[-1]
        proposed = group["num_proposals"] > proposals
        looks.append(
            Look(
                time=end,
                value=-after[1] if bounced else after[1],
                error=after[2] ** 0.5,
                rate=float(rates[-1]) if proposed else np.nan,
                times=times,
                rates=rates,
                bounced=bounced,
            )
        )
        if bounced:
            lines.append(Line(state["origin"], state["velocity"], looks))
            looks = []
    return lines[1:]


def run(size: Size, cache: Path) -> dict[str, Any]:
    """Runs all seeds; returns numbers, and under "curves" what the picture shows.

    It takes seconds: nothing is kept in ``cache``.
    """
    problem = simulate(2, DATA_SEED)
    starts = problem.laplace_draws(size.seeds, seed=3)
    runs = [
        follow(problem, start, size.epochs * EPOCH, seed)
        for seed, start in enumerate(starts)
    ]
    document: dict[str, Any] = {"size": asdict(size), "seeds": []}
    for lines in runs:
        looks = [look for line in lines for look in line.looks]
        proposed = [look for look in looks if not np.isnan(look.rate)]
        true = np.concatenate(
            [
                line.true_rate(problem, look.times)
                for line in lines
                for look in line.looks
            ]
        )
        rates = np.concatenate([look.rates for look in looks])
        # Each look's piece has equally many points: weigh them by its length.
        lengths = np.repeat([np.ptp(look.times) / 50 for look in looks], 50)
        document["seeds"].append(
            {
                "mean_rate_of_proposals": float(
                    (np.maximum(rates, 0) * lengths).sum() / lengths.sum()
                ),
                "mean_true_rate": float(
                    (np.maximum(true, 0) * lengths).sum() / lengths.sum()
                ),
                "time_below_the_true_rate": float(
                    ((rates < true) * lengths).sum() / lengths.sum()
                ),
                "violations": float(
                    np.mean([look.value > look.rate for look in proposed])
                ),
                "proposals_per_bounce": len(proposed) / len(lines),
            }
        )
    document["constant_bounds"] = {
        f"{kind.__name__}, {'tight' if tight else 'the authors'}": kind(
            problem, starts, 0, tight=tight
        ).rate
        for kind in (LipschitzBPS, ZigZag)
        for tight in (True, False)
    }
    eligible = [
        number
        for number, line in enumerate(runs[0][:-1])
        if len(line.looks) in PROPOSALS and all(look.rate > 0 for look in line.looks)
    ]
    # The one that climbs highest.
    ends = [runs[0][k].true_rate(problem, runs[0][k].looks[-1].times) for k in eligible]
    shown = eligible[int(np.argmax([end[-1] for end in ends]))] if eligible else 0
    document["curves"] = {"shown": shown, "lines": runs[0]}
    return document


def table(document: dict[str, Any]) -> str:
    """A markdown table, mean ± standard error over seeds."""
    rows = [
        [
            label,
            standard_error(
                [100**percent * seed[key] for seed in document["seeds"]], digits
            ),
        ]
        for label, key, digits, percent in (
            ("mean rate of proposals", "mean_rate_of_proposals", 1, 0),
            ("mean true rate [G]₊, of all data", "mean_true_rate", 1, 0),
            ("proposals per bounce", "proposals_per_bounce", 1, 0),
            ("proposals at which G̃ exceeds it, %", "violations", 2, 1),
            ("time for which G exceeds it, %", "time_below_the_true_rate", 2, 1),
        )
    ]
    rows += [
        [f"constant bound: {name}", f"{bound:.0f}"]
        for name, bound in document["constant_bounds"].items()
    ]
    return markdown(["", "value"], rows)


def draw(document: dict[str, Any], path: Path) -> None:
    """The paper's panels: one line's intensity, and the trajectory around it."""
    problem = simulate(2, DATA_SEED)
    number, lines = document["curves"]["shown"], document["curves"]["lines"]
    line: Line = lines[number]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.4, 4.6))
    end = line.looks[-1].time
    grid = np.linspace(0, end, 200)
    left.plot(grid, line.true_rate(problem, grid), color="k", label="G(t), all data")
    labels = [
        "observed, rejected",
        *[None] * (len(line.looks) - 2),
        "observed, bounced",
    ]
    for look, label in zip(line.looks, labels[-len(line.looks) :], strict=True):
        left.plot(look.times, look.rates, color="C0")
        left.vlines(look.time, look.value, look.rates[-1], color="0.8", linewidth=0.8)
        left.errorbar(
            look.time,
            look.value,
            look.error,
            fmt="o",
            markersize=5,
            capsize=2,
            color="C3" if look.bounced else "C2",
            label=label,
        )
    left.plot([], [], color="C0", label="γ(t), intensity of proposals")
    left.axhline(0, color="k", linewidth=0.6)
    left.set(xlabel="trajectory time since the last bounce", ylabel="rate")
    left.legend()

    near = lines[max(0, number - 6) : number + 7]
    corners = np.array([other.origin for other in near])
    right.plot(*corners.T, color="0.6", linewidth=0.9)
    arrow = {"angles": "xy", "scale_units": "xy", "width": 0.008, "zorder": 3}
    length = 0.25 * np.ptp(corners, axis=0).max()
    stop = line.origin + end * line.velocity
    after = lines[number + 1].velocity
    right.plot(*np.array([line.origin, stop]).T, color="C0")
    for place, velocity, color, label in (
        (line.origin, line.velocity, "C0", "velocity on this line"),
        (stop, after, "C3", "velocity after the bounce"),
    ):
        right.quiver(
            *place, *(length * velocity), color=color, label=label, scale=1, **arrow
        )
    for look in line.looks:
        place = line.origin + look.time * line.velocity
        right.plot(*place, "o", markersize=4, color="C3" if look.bounced else "C2")
    angle = np.linspace(0, 2 * np.pi, 200)
    root = np.linalg.cholesky(problem.covariance)
    for radius in (0.5, 1, 2, 3):
        ellipse = problem.mode[:, None] + radius * root @ [np.cos(angle), np.sin(angle)]
        right.plot(*ellipse, color="0.8", linewidth=0.8, zorder=0)
    centre, reach = corners.mean(axis=0), 0.8 * np.ptp(corners, axis=0).max()
    right.set(
        xlim=(centre[0] - reach, centre[0] + reach),
        ylim=(centre[1] - reach, centre[1] + reach),
        aspect="equal",
        xlabel="w₁",
        ylabel="w₂",
    )
    right.legend()
    save(figure, path, 72)
