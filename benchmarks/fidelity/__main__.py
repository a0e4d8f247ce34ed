"""Distances of samplers to a network's posterior: gold standards and a table.

    python benchmarks/fidelity gold --data-root DATA       # HMC with all data
    python benchmarks/fidelity table --data-root DATA
    python benchmarks/fidelity gold --csv FILE --hidden 20 # the last column is y
    python benchmarks/fidelity table --csv FILE --hidden 20

``gold`` runs eight chains from draws of the prior, and writes moments and quantiles of
their predictions, with evidence that they agree. ``table`` runs each method at three
budgets of gradients and compares its predictions with the gold standard. Every result
is appended to --out as a JSON line, and results that are there are not repeated. Errors
are over eight chains (four of SBPS). docs/fidelity.md has the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gold import LEVELS, Gold, agreement_of, make, values_of
from methods import DATA, METHODS, Cell, Result
from tasks import TASKS, Task, table_of
from tqdm import tqdm

from torch_sgmcmc import scoring

HERE = Path(__file__).parent
TRAJECTORIES = {"digits": 2000, "energy": 1000, "covertype": 1200}
LEVEL = 0.9  # of intervals
# Factors, formats and heads; the first ones are shown at every budget.
ALWAYS = {
    "TV": (100, ".1f", "TV, %"),
    "mean": (1, ".2f", "means, sd"),
    "sd": (100, "+.0f", "sds, %"),
}
AT_LAST = {
    "agreement": (100, ".1f", "agreement, %"),
    "NLL": (1000, "+.0f", "NLL − gold, 10⁻³"),
    "coverage": (100, ".0f", "coverage, %"),
    "T_conf": (1, ".3f", "T_conf"),
    "T_kin": (1, ".3f", "T_kin"),
    "ESS": (1, ".0f", "ESS"),
}


def scores(task: Task, gold: Gold, found: Result, budget: int) -> dict[str, Any]:
    """Returns scores of each chain against the gold standard."""
    draws = torch.stack(found.draws)  # [draws, chains, rows, outputs]
    rows: list[dict[str, float]] = []
    exact = nll(task, gold.mean, gold.sd.square() + gold.mean.square())
    for chain in draws.unbind(1):
        mean, square = chain.mean(0), chain.square().mean(0)
        sd = (square - mean.square()).clamp_min(0).sqrt()
        error = (mean - gold.mean).square().mean() / gold.sd.square().mean()
        row = {"mean": float(error.sqrt()), "NLL": nll(task, mean, square) - exact}
        if len(chain) > 1:
            row["sd"] = float(sd.mean() / gold.sd.mean()) - 1
            row["coverage"] = coverage(gold, values_of(task, chain))
        if task.classes:
            row["TV"] = scoring.total_variation(mean, gold.mean)
            row["agreement"] = scoring.agreement(mean, gold.mean)
        rows.append(row)
    result: dict[str, Any] = {k: [row[k] for row in rows] for k in rows[0]}
    if found.temperatures:
        result["T_conf"] = torch.stack(found.temperatures).mean(0).tolist()
        result["T_kin"] = [] if math.isnan(found.kinetic) else [found.kinetic]
        size = agreement_of(values_of(task, draws))
        result["R-hat"] = [size["r_hat_median"]]
        result["ESS"] = [size["ess_median"] / draws.shape[1] * 1000 / budget]
    return result | {"settings": found.settings, "draws": len(draws)}


def nll(task: Task, mean: torch.Tensor, square: torch.Tensor) -> float:
    """Returns the mean negative log density of the scored rows."""
    return -float(task.log_densities(mean, square).mean())


def coverage(gold: Gold, values: torch.Tensor) -> float:
    """Returns the posterior probability of the draws' intervals, a mean over rows."""
    ends = values.quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2]), dim=0)
    masses = [
        np.diff(np.interp(ends[:, row], gold.quantiles[:, row], LEVELS))
        for row in range(values.shape[1])
    ]
    return float(np.mean(masses))


# ---- Programs ------------------------------------------------------------------------


def run_gold(arguments: argparse.Namespace, task: Task) -> None:
    """Makes a task's gold standard, and prints its evidence."""
    draws = arguments.draws or TRAJECTORIES.get(task.name, 1000)
    gold = make(task, warmup=50, burn_in=100, draws=draws, seed=arguments.seed)
    gold.save(arguments.gold / f"{task.name}.npz")
    for name, value in gold.evidence.items():
        print(f"{name}: {value}")


def cells(arguments: argparse.Namespace, task: Task) -> Iterator[tuple[str, str, Cell]]:
    """Yields the rows of the table, the cheapest first."""
    for budget in sorted(arguments.budgets):
        for data in DATA:
            for name, method in METHODS.items():
                chosen = any(fnmatch(name, p) for p in arguments.methods)
                if chosen and data in method.data and budget >= method.least:
                    batch = task.batch if data == "minibatches" else 0
                    yield name, data, Cell(task, batch, budget, arguments.seed + 1)


def run_table(arguments: argparse.Namespace, task: Task) -> None:
    """Runs what is missing of the table, and prints it."""
    gold = Gold.load(arguments.gold / f"{task.name}.npz")
    rows = read(arguments.out)
    wanted = [*cells(arguments, task)]
    for name, data, cell in tqdm(wanted, task.name):
        key = {"task": task.name, "method": name, "data": data}
        key |= {"budget": cell.budget, "seed": cell.seed}
        if not any(key.items() <= row.items() for row in rows):
            began = time.process_time()
            row = {**key, **attempt(gold, name, cell)}
            rows.append(row | {"seconds": time.process_time() - began})
            with arguments.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    show(task, [row for row in rows if row["task"] == task.name])


def attempt(gold: Gold, name: str, cell: Cell) -> dict[str, Any]:
    """Returns the scores of a method, or why it failed."""
    try:
        found = METHODS[name].run(cell)
        if not found.draws:
            return {"error": "no draws"}
        return scores(cell.task, gold, found, cell.budget)
    except (RuntimeError, ValueError) as error:
        return {"error": str(error).splitlines()[0]}


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def show(task: Task, rows: list[dict[str, Any]]) -> None:
    """Prints means over chains with standard errors, the first columns by budget."""
    budgets = sorted({row["budget"] for row in rows})
    cells = {(row["method"], row["data"], row["budget"]): row for row in rows}
    has = {key for row in rows for key in row}
    has -= {"mean"} if "TV" in has else set()
    always, last = ({k: c for k, c in x.items() if k in has} for x in (ALWAYS, AT_LAST))
    title = ", ".join(f"{budget:,}" for budget in budgets)
    heads = [head for *_, head in (*always.values(), *last.values())]
    print(
        f"\n{task.name}: {title} gradients\n\n| method | data | {' | '.join(heads)} |"
    )
    print("|" + " --- |" * (2 + len(heads)))
    pairs = [(method, data) for data in DATA for method in METHODS]
    for method, data in pairs:
        line = [cells.get((method, data, budget), {}) for budget in budgets]
        if not any(line):
            continue
        texts = [
            ", ".join(text_of(row.get(key), *column[:2]) for row in line)
            for key, column in always.items()
        ]
        texts += [text_of(line[-1].get(k), *column[:2]) for k, column in last.items()]
        print(f"| {method} | {data} | {' | '.join(texts)} |")


def text_of(values: list[float] | None, unit: float, form: str) -> str:
    """Returns a mean with its standard error."""
    if not values or not all(map(math.isfinite, values)):
        return "–"
    text = f"{unit * statistics.fmean(values):{form}}"
    if len(values) > 1:
        error = unit * statistics.stdev(values) / math.sqrt(len(values))
        text += f" ± {error:{form.lstrip('+')}}"
    return text.replace("-", "−")


def main() -> None:
    """Runs a program for each task."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", choices=("gold", "table"))
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--csv", type=Path, help="a table of your own")
    parser.add_argument("--classes", action="store_true", help="y of --csv is a label")
    parser.add_argument("--hidden", type=int, nargs="+", default=[50])
    parser.add_argument("--noise", type=float, default=0.1, help="of a regression")
    parser.add_argument("--draws", type=int, help="trajectories of the gold standard")
    parser.add_argument("--budgets", type=int, nargs="+", default=[20, 200, 2000])
    parser.add_argument("--methods", nargs="+", default=["*"], help="patterns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gold", type=Path, default=HERE / "gold", help="a folder")
    parser.add_argument("--out", type=Path, default=Path("runs/fidelity.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    makers = [partial(TASKS[name], arguments.data_root) for name in arguments.tasks]
    if arguments.csv:
        given = tuple(arguments.hidden), arguments.classes, arguments.noise
        makers = [partial(table_of, arguments.csv, *given)]
    for maker in makers:
        run = run_gold if arguments.program == "gold" else run_table
        run(arguments, maker())


if __name__ == "__main__":
    main()
