"""Every sampler's bias beside its temperatures: a guide to the choice of a sampler.

Logistic regression on 20,000 rows of Covertype, and a network 10-10-1 on 1,000: every
sampler at three step sizes and two sizes of minibatches, with equal numbers of
gradients of single data, against NUTS. That takes an environment with numpyro:

    python examples/papers bias.table --data-root DATA --write-data
    python examples/papers/bias/truth.py runs/bias.table/logistic-data.npz  # numpyro
    python examples/papers/bias/truth.py runs/bias.table/network-data.npz
    python examples/papers bias.table --data-root DATA

Each line of the table is kept in ``--out`` and is not made again; results.json and
pictures are written there, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.kept import kept
from reproduce.program import Parser, finish, run_alone

from .methods import METHODS
from .problems import PROBLEMS, load
from .report import draw, table
from .run import Truth, line, modes, step_unit

#: Sizes of minibatches, and gradients in passes through the rows, for each chain.
BATCHES = {"logistic": (100, 1000), "network": (50, 250)}
PASSES = {"logistic": 100.0, "network": 400.0}
#: Times the step at which minibatches heat by a fifth of T.
FACTORS = (0.25, 1.0, 4.0)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __name__)
    parser.add_data("covertype/", required=True)
    parser.add_choice("--only", PROBLEMS)
    parser.add_choice("--method", METHODS, metavar="METHOD")
    parser.add_argument("--rows", type=int, help="of the data")
    parser.add_argument("--passes", type=float, help="through the rows, for each chain")
    parser.add_argument("--truth", type=Path, help="default: NAME-truth.npz in --out")
    parser.add_argument("--write-data", action="store_true", help="for truth.py")
    args = parser.parse_args()
    if args.truth is not None and len(args.only) > 1:
        parser.error("--truth is of one problem: name it with --only")
    parser.check_at_least(args)
    if args.passes is not None and not args.passes > 0:
        parser.error(f"--passes {args.passes:g} must be > 0")
    return args


def cells(name: str, keys: list[str], unit: float) -> list[dict[str, Any]]:
    """The table's lines: what each of them runs."""
    found = []
    for key in keys:
        method = METHODS[key]
        if name not in method.on:
            continue
        sizes = BATCHES[name] if method.batches else (None,)
        for size in sizes:
            if method.steps == "lr":
                # As much heat with minibatches of any size.
                scale = unit * (size or 0) / BATCHES[name][0]
                steps = tuple(factor * scale for factor in FACTORS)
            else:
                steps = (None,) if method.steps == "none" else method.steps
            found += [{"method": key, "step": s, "batch_size": size} for s in steps]
    return found


def run_problem(args: argparse.Namespace, name: str) -> tuple[str, list[Any]]:
    """Makes the lines that are missing, the table and the picture."""
    problem = load(name, args.data_root, args.rows or PROBLEMS[name])
    truth = Truth(args.truth or args.out / f"{name}-truth.npz", problem)
    start = modes(problem)
    unit = float(f"{step_unit(problem, start, BATCHES[name][0]):.2g}")
    passes = args.passes or PASSES[name]
    settings = {"rows": len(problem.y), "passes": passes, "unit": unit}
    lines = []
    for cell in cells(name, args.method, unit):

        def make(cell: dict[str, Any] = cell) -> dict[str, Any]:
            torch.manual_seed(0)
            size = cell["batch_size"] or len(problem.y)
            run = (cell["method"], cell["step"] or 0.0, size, passes)
            return {**cell, **line(problem, truth, start, *run)}

        found = kept(args.out, f"{name}-{cell['method']}", settings | cell, make)
        lines.append(found)
        print(table([found]).splitlines()[-1], flush=True)
    draw(lines, args.out / f"{name}.png")
    return f"{name}, NLL of NUTS {truth.nll:.4f}\n\n{table(lines)}", lines


def run_all(args: argparse.Namespace) -> None:
    """The problems' data, or their tables."""
    if args.write_data:
        for name in args.only:
            problem = load(name, args.data_root, args.rows or PROBLEMS[name])
            np.savez(args.out / f"{name}-data.npz", **problem.to_numpy())
        return
    found = {name: run_problem(args, name) for name in args.only}
    document = {name: lines for name, (_, lines) in found.items()}
    finish(args, document, "\n\n".join(text for text, _ in found.values()))


def main() -> None:
    """The program."""
    run_alone(run_all, parse_arguments())
