"""Hyperparameter checks with one wording for all samplers."""

import math
from numbers import Real

import torch

__all__ = ["check_integer", "check_real", "draw_seed"]


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
        wanted = f"must be finite and {'>' if low_open else '>='} {low:g}"
    else:
        wanted = f"must be in {'(' if low_open else '['}{low:g}, {high:g})"
    raise ValueError(f"Invalid {name}: {value} ({wanted})")


def check_integer(name: str, value: object, *, low: int = 0) -> int:
    """Returns value if it is an int that is at least low, else raises."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"Invalid {name}: {value!r} (must be an int, got {type(value).__name__})"
        )
    if value < low:
        raise ValueError(f"Invalid {name}: {value} (must be >= {low})")
    return value


def draw_seed(seed: object) -> int:
    """Checks a seed; None draws one from torch's default generator."""
    if seed is None:
        return int(torch.randint(2**63 - 1, (), dtype=torch.int64).item())
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            f"Invalid seed: {seed!r} (must be an int or None, "
            f"got {type(seed).__name__})"
        )
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"Invalid seed: {seed} (must fit in 64 bits)")
    return seed
