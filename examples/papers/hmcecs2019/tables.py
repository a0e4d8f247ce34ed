"""Tables 1 to 4 and figures 1 to 9 of the HMC-ECS paper.

Dang, Quiroz, Kohn, Tran and Villani, Hamiltonian Monte Carlo with Energy Conserving
Subsampling (JMLR 2019). Logistic regressions: HMC-ECS, perturbed and signed, full HMC,
and SGLD and SGHMC with and without control variates, on simulated data of HIGGS's
shape, on Covertype in place of the paper's bankruptcy data, by its columns and by
additive splines of the same d = 81, and on HIGGS itself if its file is given. Figure 7:
the step size against the dimension. Figures 8 and 9: the variance of the estimate, and
what the chains find, by the order of the expansions.

    python examples/papers hmcecs2019.tables              # some minutes
    python examples/papers hmcecs2019.tables --paper --data-root DIR
    python examples/papers hmcecs2019.tables --higgs HIGGS.csv.gz --paper
    python examples/papers hmcecs2019.tables --only simulated --num-data 10000000 \
        --method perturbed signed       # streamed; the Laplace approximation as truth

Results go to --out: results.json and pictures. Finished runs are kept in --out too,
those of full HMC in pieces, so that a killed program goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ewsg2021.blr import data as covertype_data
from reproduce.program import Parser, run_alone, run_parts

from . import realised, report, scaling, variances
from .comparison import METHODS, compare
from .higgs import higgs
from .problem import Problem
from .samplers import Size
from .scaling import Scaling
from .simulated import simulate
from .splines import spline_problem
from .variances import Variances

PARTS = (
    "simulated",
    "covertype",
    "splines",
    "higgs",
    "figure7",
    "figure8",
    "figure9",
)
# 1 % are too few for 81 parameters; of the paper's data they are 47,000.
_SPLINES_SHARE = 0.1
_ORDERS = ("HMC", "perturbed", "perturbed, order 1", "perturbed, order 0")


@dataclass(frozen=True)
class Sizes:
    """The lengths of all runs.

    Args:
        num_data: of the simulated data, without the test's.
        runs: of the methods.
        signed: the m of a minibatch of signed HMC-ECS, and λ.
        scaling: figure 7.
        variances: figure 8.
    """

    num_data: int
    runs: Size
    signed: dict[str, int]
    scaling: Scaling
    variances: Variances


_SIGNED = {"subsample_size": 30, "num_factors": 100}
SIZES = {
    "tiny": Sizes(
        3000,
        Size(2, 24, 40, 20, 100),
        {"subsample_size": 10, "num_factors": 20},
        Scaling(1, 3, 200, 20, 10),
        Variances(20, 10, 10, 100),
    ),
    "short": Sizes(
        100_000,
        Size(3, 500, 1000, 500, 1300),
        _SIGNED,
        Scaling(3, 8, warmup=300, draws=100),
        Variances(600, 200, 200),
    ),
    "paper": Sizes(
        1_000_000,
        Size(3, 2000, 1000, 1000, 1300),
        _SIGNED,
        Scaling(3, 8),
        Variances(),
    ),
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __name__)
    words = "what to run (default: all there are data for)"
    parser.add_choice("--only", PARTS, default=None, help=words)
    seldom = ("perturbed, order 0", "perturbed, G = 100", "signed, G = 100")
    seldom += ("SGHMC, CV, ε = 0.02", "SGHMC, CV, ε = 0.02, L = 7")
    usual = [name for name in METHODS if name not in seldom]
    parser.add_choice("--method", METHODS, default=usual, metavar="METHOD")
    parser.add_data("covertype/, for splines too")
    parser.add_argument(
        "--higgs", type=Path, help="HIGGS.csv or HIGGS.csv.gz, for that part"
    )
    parser.add_argument(
        "--rare",
        type=float,
        default=0.01,
        help="Covertype: the least share of rows that an indicator must be of "
        "(default: 0.01; 0 is all columns)",
    )
    parser.add_argument("--num-data", type=int, help="simulated data for training")
    parser.add_argument("--seeds", type=int, help="of each method and of figure 7")
    parser.add_argument(
        "--reference-draws",
        type=int,
        help="of HMC-ECS of order 2, that are the truth in the place of full HMC's; "
        "figure 9 is then a table of --method",
    )
    parser.add_sizes()
    args = parser.parse_args()
    given = dict.fromkeys(("covertype", "splines"), args.data_root)
    given["higgs"] = args.higgs
    if args.only is None:
        args.only = [p for p in PARTS if given.get(p, p) is not None]
    options = dict.fromkeys(("covertype", "splines"), "--data-root")
    for part, option in {**options, "higgs": "--higgs"}.items():
        if part in args.only and given[part] is None:
            parser.error(f"--only {part} needs {option}")
    if not 0 <= args.rare < 1:
        parser.error(f"--rare {args.rare:g} must be in [0, 1)")
    parser.check_at_least(args, num_data=1000, seeds=1, reference_draws=2)
    return args


def sizes(args: argparse.Namespace) -> Sizes:
    """The lengths from the command line."""
    chosen = SIZES[args.size]
    if args.num_data is not None:
        chosen = replace(chosen, num_data=args.num_data)
    if args.seeds is not None:
        chosen = replace(
            chosen,
            runs=replace(chosen.runs, seeds=args.seeds),
            scaling=replace(chosen.scaling, seeds=args.seeds),
        )
    return chosen


def covertype(data_root: Path, rare: float) -> Problem:
    """Class 2 against the rest, the prior N(0, 10 I), without rare indicators."""
    split = covertype_data.load(data_root)
    y, test_y = ((s > 0).float() for s in (split.train_s, split.test_s))
    present = (split.train_x != 0).float().mean(0) >= rare
    x, test_x = (t[:, present].contiguous() for t in (split.train_x, split.test_x))
    return Problem("Covertype", x, y, test_x, test_y, prior_precision=0.1)


def shown(result: dict[str, Any], text: str) -> tuple[str, dict[str, Any]]:
    """A part's tables and numbers, without what only pictures show."""
    return text, {k: v for k, v in result.items() if k not in ("curves", "groups")}


def run_comparison(
    part: str, load: Callable[[], Problem], size: Sizes, args: argparse.Namespace
) -> tuple[str, dict[str, Any]]:
    """All methods on one data set."""
    draws_orders = part == "figure9" and args.reference_draws is None
    result = compare(
        load(),
        size.runs,
        args.out / "runs",
        methods=_ORDERS if draws_orders else args.method,
        signed=size.signed,
        guideline=part in ("covertype", "splines"),
        share=_SPLINES_SHARE if part == "splines" else 0.01,
        reference=args.reference_draws,
    )
    text = report.tables(result)
    if draws_orders:
        report.orders(result, args.out / "figure9.png")
    elif part != "figure9":
        for draw in (report.moments, report.densities, report.costs):
            draw(result, args.out / f"{part}_{draw.__name__}.png")
    if "realised" in result:
        text += f"\n\n{realised.table(result['realised'])}"
        realised.draw(result, args.out / "figure6.png")
    return shown(result, text)


def run_all(args: argparse.Namespace) -> None:
    """Runs what the command line asks for and reports."""
    size, cache, folder = sizes(args), args.out / "runs", args.out / "data"

    def simulated() -> Problem:
        return simulate(size.num_data, min(500_000, size.num_data // 10), folder)

    def figure7(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
        result = scaling.run(size.scaling, cache)
        scaling.draw(result, args.out / "figure7.png")
        return shown(result, scaling.table(result))

    def figure8(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
        result = variances.run(simulated(), size.variances, cache)
        variances.draw(result, args.out / "figure8.png")
        return shown(result, variances.table(result))

    problems: dict[str, Callable[[], Problem]] = {
        "simulated": simulated,
        "figure9": simulated,
        "covertype": lambda: covertype(args.data_root, args.rare),
        "splines": lambda: spline_problem(args.data_root),
        "higgs": lambda: higgs(args.higgs, folder),
    }
    parts = {p: partial(run_comparison, p, problems[p], size) for p in problems}
    run_parts(args, {**parts, "figure7": figure7, "figure8": figure8})


def main() -> None:
    """The program."""
    run_alone(run_all, parse_arguments())
