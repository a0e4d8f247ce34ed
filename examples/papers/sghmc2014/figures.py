"""Figures 1, 2 and 3 of the SGHMC paper: simulated scenarios.

Chen, Fox and Guestrin (2014), section 4.1. Figure 1: HMC with and without a
Metropolis-Hastings test, naive SGHMC with and without, and SGHMC on U = -2θ² + θ⁴
with gradient noise N(0, 4). Figure 2: four dynamics in phase space. Figure 3: SGLD
and SGHMC on a correlated Gaussian over five step sizes each.

    python examples/papers sghmc2014.figures                  # two minutes
    python examples/papers sghmc2014.figures --only figure3
    python examples/papers sghmc2014.figures --paper     # ten million samples, 3 seeds

Results go to --out: results.json and figure1.png, figure2.png, figure3.png.
"""

from __future__ import annotations

import argparse
from typing import Any

from reproduce.program import Parser, run_alone, run_parts

from .toys import correlated, double_well, phase_space, report


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __name__)
    parser.add_choice("--only", PARTS)
    parser.add_argument("--seeds", type=int, help="default: 1, with --paper 3")
    parser.add_sizes()
    args = parser.parse_args()
    parser.fill_in(args, {"seeds": (1, 3)})
    parser.check_at_least(args, seeds=1)
    return args


def sized(args: argparse.Namespace, tiny: Any, short: Any, full: Any) -> Any:
    """The options of the command line."""
    return {"tiny": tiny, "short": short, "paper": full}[args.size]


def run_1(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Figure 1: its table and its numbers."""
    size = double_well.Size(*sized(args, (400, 4, 12), (2000, 20, 50), (4000, 20, 250)))
    scores: dict[str, list[dict[str, Any]]] = {}
    shown = {}
    for method in double_well.METHODS:
        scores[method] = []
        for seed in range(args.seeds):
            result = double_well.run(method, size, seed)
            score = double_well.score(result["samples"])
            scores[method].append({**score, "acceptance": result["acceptance"]})
            shown.setdefault(method, result["samples"])
    report.figure_1(shown, args.out / "figure1.png")
    return report.table_1(scores), {"size": vars(size), "scores": scores}


def run_2(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Figure 2, likewise."""
    steps = sized(args, 1000, 15_000, 15_000)
    chains = sized(args, 200, 64, 400)
    numbers: dict[str, list[dict[str, Any]]] = {}
    shown = {}
    for dynamics in phase_space.DYNAMICS:
        theta, momentum = phase_space.run(dynamics, steps, chains, seed=0)
        numbers[dynamics] = [phase_space.summary(theta, momentum)]
        shown[dynamics] = theta[:, 0], momentum[:, 0]
    report.figure_2(shown, args.out / "figure2.png")
    text = f"{chains} chains\n\n{report.table_2(numbers)}"
    return text, {"steps": steps, "chains": chains, "dynamics": numbers}


def run_3(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Figure 3, likewise."""
    chains = sized(args, 50, 200, 2000)
    steps, burn_in = sized(args, (300, 50), (5000, 2000), (5000, 2000))
    points = {
        label: [
            [
                correlated.simulate(label, i, chains, steps, burn_in, seed)
                for seed in range(args.seeds)
            ]
            for i in range(len(settings))
        ]
        for label, settings in correlated.SETTINGS.items()
    }
    report.figure_3(points, args.out / "figure3.png")
    exact = {
        label: [correlated.law(*setting) for setting in settings]
        for label, settings in correlated.SETTINGS.items()
    }
    found = {"chains": chains, "burn_in": burn_in, "points": points, "exact": exact}
    return f"{chains} chains\n\n{report.table_3(points)}", found


PARTS = {"figure1": run_1, "figure2": run_2, "figure3": run_3}


def main() -> None:
    """Runs what the command line asks for and reports."""
    run_alone(lambda args: run_parts(args, PARTS), parse_arguments())
