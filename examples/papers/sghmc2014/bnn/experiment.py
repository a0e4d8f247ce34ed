"""The runs of an example: every method with every seed, or with every setting."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from reproduce import checkpoint

from .loop import RunConfig
from .report import settings_in_words

Config = TypeVar("Config", bound=RunConfig)
Settings = Mapping[str, float]
Scores = tuple[float, float]  # the error and the NLL
Run = Callable[[Config, Path], dict[str, Any]]


def run_in_turn(
    args: argparse.Namespace,
    settings: Mapping[str, Settings],
    configure: Callable[..., Config],
    run: Run[Config],
) -> dict[str, list[dict[str, Any]]]:
    """Runs all seeds of each method, if --out has no checkpoint against it.

    Args:
        args: the command line: methods, seeds, folder.
        settings: by method.
        configure: makes a config of a method, a seed and settings.
        run: runs a config, with its checkpoint in a folder, and returns the state.
    """
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    configs = {
        method: [configure(method, seed, settings[method]) for seed in seeds]
        for method in args.method
    }
    for of_method in configs.values():
        for config in of_method:
            checkpoint.of_run(config.checkpoint(args.out), config.as_dict())
    return {
        method: [run(config, args.out) for config in configs[method]]
        for method in configs
    }


def tune(
    args: argparse.Namespace,
    search: Mapping[str, Iterable[Settings]],
    configure: Callable[..., Config],
    run: Run[Config],
    finalists: int = 0,
) -> None:
    """Prints the validation scores of all settings in the search.

    All run with seed 0; then the finalists, those of the lowest NLL, with all seeds.
    What has the lowest mean NLL is printed at the end. The NLL of a run that diverges,
    whose gradients are not finite, is infinite.

    Args:
        args: the command line: methods, folder, which gets one for each of them, seeds
            of the finalists.
        search: what to try, by method.
        configure: as above, with ``validate``.
        run: as above.
        finalists: how many settings of a method run with the other seeds.
    """

    def scores(config: Config, number: int) -> Scores:
        where = args.out / "tune" / f"{config.method}{number}"
        where.mkdir(parents=True, exist_ok=True)
        try:
            last = run(config, where)["history"][-1]
        except RuntimeError as error:
            if "not finite" not in str(error):
                raise
            return math.nan, math.inf
        return last["error"], last["nll"]

    chosen = {}
    print("| method | settings | seeds | validation error | NLL |")
    print("| --- | --- | --- | --- | --- |")
    for method in args.method:
        tried: list[tuple[float, int, list[Config], Scores]] = []
        for i, settings in enumerate(search[method]):
            configs = [
                configure(method, seed, settings, validate=True)
                for seed in range(args.seeds)
            ]
            first = scores(configs[0], i)
            print(_row(configs[0], [first]), flush=True)
            tried.append((first[1], i, configs, first))
        tried.sort(key=itemgetter(0))
        last = []
        for _, i, configs, first in tried[: finalists if args.seeds > 1 else 0]:
            several = [first, *(scores(config, i) for config in configs[1:])]
            print(_row(configs[0], several), flush=True)
            last.append((fmean(nll for _, nll in several), i, configs, first))
        _, _, (config, *_), _ = min(last or tried, key=itemgetter(0))
        chosen[method] = settings_in_words(dict(config.settings))
    print("\nThe lowest NLL:")
    for method, words in chosen.items():
        print(f"{method}: {words}")


def _row(config: RunConfig, scores: Sequence[Scores]) -> str:
    errors, nlls = zip(*scores, strict=True)
    if math.inf in nlls:
        result = f"diverges with {nlls.count(math.inf)} |"
    else:
        result = f"{fmean(errors):.2%} | {fmean(nlls):.4f}"
        if len(nlls) > 1:
            result += f" ({', '.join(f'{nll:.4f}' for nll in nlls)})"
    words = settings_in_words(dict(config.settings))
    return f"| {config.method} | {words} | {len(nlls)} | {result} |"
