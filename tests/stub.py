"""Writes ``torch_sgmcmc/_C.pyi``, the types of the compiled module.

    python tests/stub.py

They are in the docstrings that pybind11 (3 or newer) makes.
"""

import enum
import re
from pathlib import Path

import torch_sgmcmc._C as _C

STUB = Path(_C.__file__).with_name("_C.pyi")
HEAD = """# Written by tests/stub.py.
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from torch import Tensor
"""
# Numbers and lists as callers have them, and what the docstrings leave open.
REPLACED = {
    r"typing\.Supports(Int|Float)( \| typing\.SupportsIndex)?": lambda m: m[1].lower(),
    r'typing\.Annotated\[([\w.\[\]]+), "FixedSize\(\d\)"\]': r"\1",
    r"collections\.abc\.|torch_sgmcmc\._C\.": "",
    r"^(settings.*) -> list$": r"\1 -> list[tuple[Any, ...]]",
    r"^(op_specs.*) -> list$": r"\1 -> list[dict[str, Any]]",
    r"^(gradients.*) -> object$": r"\1 -> list[Tensor] | None",
    r"(arg\d+: [^,)]+)\)": r"\1, /)",
    r"\blist\b(?!\[)": "list[Any]",
    r"\bdict\b(?!\[)": "dict[Any, Any]",
    r"(self): \w+": r"\1",
}


def signature(docstring):
    """Returns the first line of a docstring as a stub's definition."""
    text = docstring.strip().split("\n")[0]
    for pattern, new in REPLACED.items():
        text = re.sub(pattern, new, text)
    return f"def {text}: ..."


def members(cls):
    """Yields the lines of a class."""
    if issubclass(cls, enum.Enum):
        yield from (f"{each.name} = {each.value}" for each in cls)
        return
    for name, member in vars(cls).items():
        if isinstance(member, property):
            yield "@property"
            yield signature(name + member.fget.__doc__.replace("arg0", "self"))
            if member.fset:
                yield f"@{name}.setter"
                text = member.fset.__doc__.replace("arg0", "self")
                yield signature(name + text.replace("arg1", "value"))
        elif name == "__init__" or not name.startswith("_"):
            if isinstance(member, staticmethod):
                yield "@staticmethod"
            yield signature(getattr(cls, name).__doc__)


def stub():
    """Returns the text of the stub."""
    lines = [HEAD]
    for name, value in vars(_C).items():
        if isinstance(value, type):
            base = "(IntEnum)" if issubclass(value, enum.Enum) else ""
            lines += [f"class {name}{base}:", *(f"    {m}" for m in members(value))]
        elif callable(value) and not name.startswith("_"):
            lines.append(signature(value.__doc__))
        elif isinstance(value, int | float):
            lines.append(f"{name}: {type(value).__name__}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub())
