"""Hyperparameter checks with one wording for all samplers."""

import math
import operator
import sys
import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "check_callable",
    "check_capturable",
    "check_choice",
    "check_function",
    "check_integer",
    "check_real",
    "check_seed",
    "draw_seed",
    "number_of_lr",
    "plain",
    "warn",
    "wrong_shape",
    "wrong_type",
]


def check_real(
    name: str,
    value: object,
    *,
    low: float = 0.0,
    high: float = math.inf,
    low_open: bool = False,
) -> float:
    """Returns value as a float if it is a number in [low, high), else raises.

    With ``low_open`` the interval is (low, high).
    """
    if type(value) is float and low < value < high:
        return value  # the common case first: samplers check at every step
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"Invalid {name}: {value!r} (must be a number, got {type(value).__name__})"
        )
    number = float(value)
    if (number > low if low_open else number >= low) and number < high:
        return number
    if high == math.inf:
        wanted = "must be finite"
        if low > -math.inf:
            wanted += f" and {'>' if low_open else '>='} {low:g}"
    else:
        wanted = f"must be in {'(' if low_open else '['}{low:g}, {high:g})"
    raise ValueError(f"Invalid {name}: {value} ({wanted})")


def number_of_lr(lr: Tensor, capturable: bool) -> float | Tensor:
    """The number of a Tensor of one, which is read at every step, or what it is.

    Raises:
        ValueError: it is to be read in a CUDA graph, which cannot.
    """
    if lr.numel() != 1 or not lr.is_floating_point():
        return lr
    if capturable:
        raise ValueError(
            "Invalid lr: a Tensor is read on the host at every step and excludes "
            "capturable=True"
        )
    return float(lr)


def check_integer(
    name: str, value: object, *, low: int = 0, high: float = math.inf
) -> int:
    """Returns value as an int if it is one in [low, high), else raises."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"Invalid {name}: {value!r} (must be an int, got {type(value).__name__})"
        )
    if not low <= value < high:
        wanted = f">= {low}" if high == math.inf else f"in [{low}, {high - 1:g}]"
        raise ValueError(f"Invalid {name}: {value} (must be {wanted})")
    return operator.index(value)


def check_callable(name: str, value: object) -> None:
    """Raises unless it can be called."""
    if not callable(value):
        raise TypeError(
            f"Invalid {name}: {value!r} (must be callable, got {type(value).__name__})"
        )


def check_function(name: str, value: object) -> None:
    """The same of what is a function or, by mistake, what it would return."""
    if not callable(value):
        raise TypeError(f"Invalid {name}: {type(value).__name__} (must be a function)")


def wrong_shape(name: str, tensor: Tensor, wanted: object) -> ValueError:
    """The error of a tensor that should be as is said in words, or of this shape."""
    return ValueError(f"Invalid {name}: shape {list(tensor.shape)} (must be {wanted})")


def wrong_type(name: str, value: object, wanted: str) -> TypeError:
    """The same of what is of another type."""
    return TypeError(
        f"Invalid {name}: of type {type(value).__name__} (must be {wanted})"
    )


def check_capturable(value: object) -> None:
    """Raises unless it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"Invalid capturable: {value!r} (must be a bool)")


def check_choice(value: object, choices: Sequence[str]) -> None:
    """Raises unless it is one of these values of ``nonfinite``."""
    if not isinstance(value, str) or value not in choices:
        *some, last = map(repr, choices)
        raise ValueError(
            f"Invalid nonfinite: {value!r} (must be {', '.join(some)} or {last})"
        )


def check_seed(seed: object) -> int:
    """Returns a seed as an int if it is one of 64 bits, else raises."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(
            f"Invalid seed: {seed!r} (must be an int or None, "
            f"got {type(seed).__name__})"
        )
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"Invalid seed: {seed} (must fit in 64 bits)")
    return operator.index(seed)


def draw_seed(seed: object) -> int:
    """Checks a seed; None draws one from torch's default generator."""
    if seed is None:
        return int(torch.randint(2**63 - 1, (), dtype=torch.int64).item())
    return check_seed(seed)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """The same with NumPy's numbers as Python's, which a state dict can hold."""
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return operator.index(value)
    return float(value) if isinstance(value, Real) else value


# torch's decorators and wrappers are between a program and a step.
_LIBRARIES = tuple(str(Path(f).parent) for f in (Path(__file__).parent, torch.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the line of the program that called the library."""
    level, frame = 1, sys._getframe(0)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, category, stacklevel=level)
