"""The runs of an example: every method with every seed, or with every setting."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import checkpoint

from .loop import RunConfig
from .report import settings_in_words

__all__ = ["run_in_turn", "tune"]

Config = TypeVar("Config", bound=RunConfig)
Settings = Mapping[str, float]
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
) -> None:
    """Prints the validation scores of all settings in the search.

    Args:
        args: the command line: methods, folder, which gets one for each of them.
        search: what to try, by method.
        configure: as above, with ``validate``.
        run: as above.
    """
    print("| method | settings | validation error | NLL |\n| --- | --- | --- | --- |")
    for method in args.method:
        for i, settings in enumerate(search[method]):
            where = args.out / "tune" / f"{method}{i}"
            where.mkdir(parents=True, exist_ok=True)
            config = configure(method, 0, settings, validate=True)
            last = run(config, where)["history"][-1]
            words = settings_in_words(dict(config.settings))
            print(f"| {method} | {words} | {last['error']:.2%} | {last['nll']:.4f} |")
