"""Figures 1 to 5 of the SBPS paper.

Pakman, Gilboa, Carlson and Paninski (2017). Figure 1: noise in the gradients. Figure 2:
the intensity of proposals over the true rate. Figure 3: pSBPS against SBPS. Figure 4: a
logistic regression against SGLD, mSGNHT, Zig-Zag with subsampling and Lipschitz-BPS.
Figure 5: averages over the continuous trajectory and over points of it.

    python examples/papers sbps2017.figures              # some minutes
    python examples/papers sbps2017.figures --figure 4
    python examples/papers sbps2017.figures --paper      # what the results page shows

Results go to --out: results.json and figure1.png to figure5.png. Finished runs are kept
in --out too, so that a killed program goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from reproduce.program import Parser, versions, write_json

from sbps2017.toys import figure1, figure2, figure3, figure4, figure5

FIGURES = {1: figure1, 2: figure2, 3: figure3, 4: figure4, 5: figure5}

SIZES: dict[int, dict[str, Any]] = {
    1: {
        "tiny": figure1.Size(2, 6.0),
        "short": figure1.Size(3, 100.0),
        "paper": figure1.Size(60, 100.0),
    },
    2: {
        "tiny": figure2.Size(2, 20),
        "short": figure2.Size(3, 100),
        "paper": figure2.Size(5, 100),
    },
    3: {
        "tiny": figure3.Size(2, 3, 4, 50),
        "short": figure3.Size(2, 60, 60, 500),
        "paper": figure3.Size(5, 60, 100, 500),
    },
    4: {
        "tiny": figure4.Size(2, 3, 4, 50),
        "short": figure4.Size(3, 100, 200, 500),
        "paper": figure4.Size(5, 100, 2000, 4000),
    },
    5: {
        "tiny": figure5.Size(2, 3, 50),
        "short": figure5.Size(3, 200, 500),
        "paper": figure5.Size(5, 300, 500),
    },
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, "sbps_figures")
    parser.add_argument(
        "--figure",
        type=int,
        nargs="+",
        choices=sorted(FIGURES),
        default=sorted(FIGURES),
        help="one or several figures (default: all)",
    )
    parser.add_sizes()
    parser.add_argument("--seeds", type=int, help="of each figure (default: its own)")
    args = parser.parse_args(arguments)
    parser.check_at_least(args, seeds=1)
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for and reports."""
    args = parse_arguments(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "environment": versions(),
    }
    for number in sorted(set(args.figure)):
        figure = FIGURES[number]
        size = SIZES[number][args.size]
        if args.seeds is not None:
            size = replace(size, seeds=args.seeds)
        result = figure.run(size, args.out / "runs")
        figure.draw(result, args.out / f"figure{number}.png")
        print(f"\nFigure {number}\n\n{figure.table(result)}")
        # What only the picture shows.
        del result["curves"]
        document[f"figure_{number}"] = result
    write_json(document, args.out / "results.json")
    print(f"\nPictures and results.json are in {args.out}")


if __name__ == "__main__":
    main()
