"""Figures 1 to 5 of the SBPS paper.

Pakman, Gilboa, Carlson and Paninski (2017). Figure 1: noise in the gradients. Figure 2:
the intensity of proposals over the true rate. Figure 3: pSBPS against SBPS. Figure 4: a
logistic regression against SGLD, mSGNHT, Zig-Zag with subsampling and Lipschitz-BPS.
Figure 5: averages over the continuous trajectory and over points of it.

    python examples/papers sbps2017.figures                  # some minutes
    python examples/papers sbps2017.figures --only figure4
    python examples/papers sbps2017.figures --paper      # what the results page shows

Results go to --out: results.json and figure1.png to figure5.png. Finished runs are kept
in --out too, so that a killed program goes on where it was.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from reproduce.program import Parser, run_alone, run_parts

from .toys import figure1, figure2, figure3, figure4, figure5

FIGURES = {
    f"figure{i}": module
    for i, module in enumerate((figure1, figure2, figure3, figure4, figure5), 1)
}

SIZES: dict[str, dict[str, Any]] = {
    "figure1": {
        "tiny": figure1.Size(2, 6.0),
        "short": figure1.Size(3, 100.0),
        "paper": figure1.Size(60, 100.0),
    },
    "figure2": {
        "tiny": figure2.Size(2, 20),
        "short": figure2.Size(3, 100),
        "paper": figure2.Size(5, 100),
    },
    "figure3": {
        "tiny": figure3.Size(2, 3, 4, 50),
        "short": figure3.Size(2, 100, 100, 500),
        "paper": figure3.Size(5, 200, 1000, 1000),
    },
    "figure4": {
        "tiny": figure4.Size(2, 3, 4, 50),
        "short": figure4.Size(3, 100, 200, 500),
        "paper": figure4.Size(5, 100, 2000, 4000),
    },
    "figure5": {
        "tiny": figure5.Size(2, 3, 50),
        "short": figure5.Size(3, 200, 500),
        "paper": figure5.Size(5, 300, 500),
    },
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __name__)
    parser.add_choice("--only", FIGURES)
    parser.add_sizes()
    parser.add_argument("--seeds", type=int, help="of each figure (default: its own)")
    args = parser.parse_args()
    parser.check_at_least(args, seeds=1)
    return args


def run_figure(name: str, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """A figure's table and its numbers."""
    figure, size = FIGURES[name], SIZES[name][args.size]
    if args.seeds is not None:
        size = replace(size, seeds=args.seeds)
    result = figure.run(size, args.out / "runs")
    figure.draw(result, args.out / f"{name}.png")
    text = figure.table(result)
    del result["curves"]  # what only the picture shows
    return text, result


def main() -> None:
    """Runs what the command line asks for and reports."""
    parts = {name: partial(run_figure, name) for name in FIGURES}
    run_alone(lambda args: run_parts(args, parts), parse_arguments())
