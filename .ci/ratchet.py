"""Compares the sizes of the checkout with those of the last landing, and with limits.

    python .ci/ratchet.py [SECONDS]

Prints a table of lines of product, tests and documents, and of the SECONDS that the
default level of the tests took. More than 3 % of growth in lines fails: make something
smaller, or write the new number and the reason into ``.ci/sizes``. So does a function
of the package of more than 60 lines without its docstring, a file of more than 550, or
a class of more than 25 methods of its own.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROWTH = 1.03
CODE = (".py", ".h", ".cpp", ".cu", ".cuh", ".inl")
KINDS = {
    "product": (("csrc/", "torch_sgmcmc/"), CODE),
    "tests": (("tests/",), CODE),
    "documents": (("",), (".md",)),
}
FUNCTION, FILE, METHODS = 60, 550, 25


def measure() -> dict[str, int]:
    """Returns the lines of each kind."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return {
        kind: sum(
            len((ROOT / name).read_bytes().splitlines())
            for name in listed
            if name.startswith(folders) and name.endswith(endings)
        )
        for kind, (folders, endings) in KINDS.items()
    }


def read_last() -> dict[str, tuple[int, str]]:
    """Returns the numbers of the last landing, with what is said of each."""
    rows = {}
    for line in (ROOT / ".ci/sizes").read_text().splitlines():
        if line and not line.startswith("#"):
            kind, number, *reason = line.split(maxsplit=2)
            rows[kind] = int(number), reason[0] if reason else ""
    return rows


def too_long() -> Iterator[str]:
    """Yields the package's functions and files that are longer than they may be."""
    for path in sorted((ROOT / "torch_sgmcmc").rglob("*.py")):
        text, name = path.read_text("utf-8"), path.relative_to(ROOT)
        if (lines := len(text.splitlines())) > FILE:
            yield f"{name} has {lines} lines, more than {FILE}"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    lines -= node.body[0].end_lineno - node.body[0].lineno + 1
                if lines > FUNCTION:
                    place = f"{name}:{node.lineno} {node.name}()"
                    yield f"{place} has {lines} lines, more than {FUNCTION}"
            elif isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if hasattr(each, "args")}
                if len(methods) > METHODS:
                    place = f"{name}:{node.lineno} {node.name}"
                    yield f"{place} has {len(methods)} methods, more than {METHODS}"


def main() -> int:
    """Prints the table; returns 1 if something is too large."""
    last, found = read_last(), dict(measure())
    if len(sys.argv) > 1:
        found["seconds"] = round(float(sys.argv[1]))
    grown = []
    print(f"{'':10} {'last':>7} {'now':>7}")
    for kind, now in found.items():
        before, reason = last[kind]
        print(f"{kind:10} {before:7} {now:7}  {now / before - 1:+.1%}  {reason}")
        if kind in KINDS and now > GROWTH * before:
            grown.append(kind)
    for kind in grown:
        print(
            f"{kind} has grown by more than 3 % ({last[kind][0]} to {found[kind]} "
            "lines): make something smaller, or write the new number and the reason "
            "into .ci/sizes"
        )
    long = [*too_long()]
    print(*long, sep="\n", end="\n" * bool(long))
    return 1 if grown or long else 0


if __name__ == "__main__":
    sys.exit(main())
