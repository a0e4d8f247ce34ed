"""The search for settings on the validation set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .loop import RunConfig
from .report import settings_in_words

__all__ = ["tune"]

Config = TypeVar("Config", bound=RunConfig)


def tune(
    search: Mapping[str, Sequence[Config]],
    run: Callable[[Config, Path], dict[str, Any]],
    folder: Path,
) -> None:
    """Prints the validation scores of every config in the search.

    Args:
        search: what to try, by method.
        run: runs a config, with its checkpoint in a folder, and returns the state.
        folder: gets a folder for each config.
    """
    print("| method | settings | validation error | NLL |\n| --- | --- | --- | --- |")
    for method, configs in search.items():
        for i, config in enumerate(configs):
            where = folder / f"{method}{i}"
            where.mkdir(parents=True, exist_ok=True)
            last = run(config, where)["history"][-1]
            words = settings_in_words(dict(config.settings))
            print(f"| {method} | {words} | {last['error']:.2%} | {last['nll']:.4f} |")
