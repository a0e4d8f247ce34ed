"""Which sampler should I take? Every sampler's bias, beside what the gauges say.

Logistic regression on 20,000 rows of Covertype, and a network 10-10-1 on 1,000: every
sampler at three step sizes and two sizes of minibatches, with equal numbers of
gradients of single data, against NUTS. That takes an environment with numpyro:

    python examples/papers bias.table --data-root DATA --write-data
    python examples/papers/bias/truth.py runs/bias/logistic-data.npz   # has numpyro
    python examples/papers/bias/truth.py runs/bias/network-data.npz
    python examples/papers bias.table --data-root DATA

Each line of the table is kept in ``--out`` and is not made again; tables and pictures
are written there, too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.program import Parser, versions, write_json

from bias.methods import METHODS
from bias.problems import PROBLEMS, load
from bias.report import draw, table
from bias.run import Truth, line, modes, step_unit

#: Sizes of minibatches, and gradients in passes through the rows, for each chain.
BATCHES = {"logistic": (100, 1000), "network": (50, 250)}
PASSES = {"logistic": 100.0, "network": 400.0}
#: Times the step at which minibatches heat by a fifth of T.
FACTORS = (0.25, 1.0, 4.0)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, "bias")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument(
        "--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS)
    )
    parser.add_argument(
        "--method", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD"
    )
    parser.add_argument("--rows", type=int, help="of the data")
    parser.add_argument("--passes", type=float, help="through the rows, for each chain")
    parser.add_argument(
        "--truth", type=Path, help="default: PROBLEM-truth.npz in --out"
    )
    parser.add_argument("--write-data", action="store_true", help="for bias_truth.py")
    args = parser.parse_args()
    if args.truth is not None and len(args.problem) > 1:
        parser.error("--truth is of one --problem")
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


def main() -> None:
    """Makes the lines that are missing, the tables and the pictures."""
    args = parse_arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.problem:
        problem = load(name, args.data_root, args.rows or PROBLEMS[name])
        if args.write_data:
            np.savez(args.out / f"{name}-data.npz", **problem.to_numpy())
            continue
        truth = Truth(args.truth or args.out / f"{name}-truth.npz", problem)
        start = modes(problem)
        unit = step_unit(problem, start, BATCHES[name][0])
        unit = float(f"{unit:.2g}")
        passes = args.passes or PASSES[name]
        path = args.out / f"{name}.json"
        settings = {"rows": len(problem.y), "passes": passes, "unit": unit}
        known: dict[str, Any] = {}
        if path.exists():
            document = json.loads(path.read_text())
            if document["settings"] == settings:
                known = {json.dumps(at["cell"]): at for at in document["lines"]}
        lines = []
        for cell in cells(name, args.method, unit):
            found = known.get(json.dumps(cell))
            if found is None:
                torch.manual_seed(0)
                result = line(
                    problem,
                    truth,
                    start,
                    cell["method"],
                    cell["step"] or 0.0,
                    cell["batch_size"] or len(problem.y),
                    passes,
                )
                found = {"cell": cell, **cell, **result}
                known[json.dumps(cell)] = found
                document = {
                    "settings": settings,
                    "environment": versions(),
                    "lines": list(known.values()),
                }
                write_json(document, path)
            lines.append(found)
            print(table([found]).splitlines()[-1], flush=True)
        draw(lines, args.out / f"{name}.png")
        text = f"{name}, NLL of NUTS {truth.nll:.4f}\n\n{table(lines)}\n"
        (args.out / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
