"""The command line of all experiments, and their output."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import torch_sgmcmc as sg

from . import checkpoint

SIZES = {"paper": "what the results page shows", "tiny": "seconds, to try it out"}


class Parser(argparse.ArgumentParser):
    """A command line with ``--threads`` and ``--out``.

    Args:
        doc: the experiment's.
        name: its module's, such as sghmc2014.figures; of its folder under runs/, too.
    """

    def __init__(self, doc: str | None, name: str) -> None:
        super().__init__(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
        self.add_argument("--out", type=Path, default=Path("runs") / name)

    def add_choice(self, option: str, choices: Iterable[Any], **more: Any) -> None:
        """An option that is one or several of these; all if it is not given."""
        choices = list(choices)
        settings = {"choices": choices, "default": choices, "nargs": "+", **more}
        self.add_argument(option, type=type(choices[0]), **settings)

    def add_data(self, what: str, required: bool = False) -> None:
        """Adds ``--data-root``."""
        words = f"folder that holds {what}"
        self.add_argument("--data-root", type=Path, required=required, help=words)

    def add_sizes(self, *sizes: str) -> None:
        """Adds ``--paper`` and ``--tiny``: the ``size``, which is "short" without."""
        group = self.add_mutually_exclusive_group()
        for size in sizes or SIZES:
            settings: dict[str, Any] = {"dest": "size", "const": size}
            group.add_argument(
                f"--{size}", action="store_const", help=SIZES[size], **settings
            )
        self.set_defaults(size="short")

    def fill_in(
        self, args: argparse.Namespace, sizes: Mapping[str, tuple[Any, Any]]
    ) -> None:
        """Sets what was not given: by name, its default and that with ``--paper``."""
        for name, (short, full) in sizes.items():
            if getattr(args, name) is None:
                setattr(args, name, full if args.size == "paper" else short)

    def check_at_least(self, args: argparse.Namespace, **lows: int) -> None:
        """Refuses what is given and too small."""
        for name, low in {"threads": 1, **lows}.items():
            value = getattr(args, name)
            if value is not None and value < low:
                self.error(f"--{name.replace('_', '-')} must be at least {low}")


def run_alone(
    run: Callable[[argparse.Namespace], None], args: argparse.Namespace
) -> None:
    """Runs with so many threads, and keeps other runs out of the folder meanwhile."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with checkpoint.owned(args.out):
        run(args)


def run_parts(
    args: argparse.Namespace,
    parts: Mapping[str, Callable[[argparse.Namespace], tuple[str, dict[str, Any]]]],
) -> None:
    """Runs those of ``--only``: each prints its table and adds to results.json."""
    document: dict[str, Any] = {"environment": versions()}
    for name in dict.fromkeys(args.only):
        text, document[name] = parts[name](args)
        print(f"\n{name}\n\n{text}", flush=True)
        write_json(document, args.out / "results.json")
    print(f"\nPictures and results.json are in {args.out}")


def finish(
    args: argparse.Namespace, document: Mapping[str, Any], text: str, **environment: Any
) -> None:
    """Prints tables, and writes all figures behind them to results.json."""
    whole = {"environment": versions() | environment, **document}
    write_json(whole, args.out / "results.json")
    print(f"\n{text}\n\nPictures and results.json are in {args.out}")


def versions() -> dict[str, Any]:
    """Versions of what numbers depend on, and the number of threads."""
    return {
        "torch": torch.__version__,
        "torch_sgmcmc": sg.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def write_json(document: Any, path: Path) -> None:
    """Writes figures, all of them or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
