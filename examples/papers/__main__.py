"""Reproductions of the papers' experiments.

python examples/papers                             # which experiments there are
python examples/papers sghmc2014.figures --help    # options of one of them
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path


def experiments() -> dict[str, str]:
    """The experiments' titles by name, such as ``sghmc2014.figures``."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        text = path.read_text()
        if " import Parser" in text:
            title = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            found[f"{path.parent.name}.{path.stem}"] = title
    return found


def main() -> None:
    """Runs the experiment that is named, with the options behind."""
    known = experiments()
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        names = "\n".join(f"  {name:22}{title}" for name, title in known.items())
        raise SystemExit(f"usage: python examples/papers NAME [options]\n\n{names}")
    name = sys.argv.pop(1)
    sys.argv[0] = name
    importlib.import_module(name).main()


if __name__ == "__main__":
    main()
