"""Hyperparameters: checks, the table of ranges, and keys of param groups.

Functions of a group without side effects; Note [Rescaled momenta] in state.py explains
the rescaling. A line of names in braces in a sampler's docstring stands for the texts
below.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_sgmcmc._C as _C


def check_real(
    name: str,
    value: object,
    *,
    low: float = 0.0,
    high: float = math.inf,
    low_open: bool = False,
) -> float:
    """Returns value as a float; raises unless it is a number in [low, high).

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


def check_integer(
    name: str, value: object, *, low: int = 0, high: float = math.inf
) -> int:
    """Returns value as an int; raises unless it is an int in [low, high)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"Invalid {name}: {value!r} (must be an int, got {type(value).__name__})"
        )
    number = operator.index(value)
    if not low <= number < high:
        wanted = f">= {low}" if high == math.inf else f"in [{low}, {high - 1:g}]"
        raise ValueError(f"Invalid {name}: {value} (must be {wanted})")
    return number


def check_function(name: str, value: object) -> None:
    """Raises a TypeError, naming the type, unless value is callable."""
    if not callable(value):
        raise TypeError(f"Invalid {name}: {type(value).__name__} (must be a function)")


def wrong_shape(name: str, tensor: Tensor, wanted: object) -> ValueError:
    """Returns the error for a tensor of a wrong shape."""
    return ValueError(f"Invalid {name}: shape {list(tensor.shape)} (must be {wanted})")


def wrong_type(name: str, value: object, wanted: str) -> TypeError:
    """Returns the error for a value of a wrong type."""
    return TypeError(
        f"Invalid {name}: of type {type(value).__name__} (must be {wanted})"
    )


def wrong_result(name: str, value: object, wanted: str) -> TypeError:
    """Returns the error for a wrong result of a user's function."""
    kind = type(value).__name__
    return TypeError(
        f"Invalid {name}: the function returned {kind} (must return {wanted})"
    )


def check_flag(name: str, value: object) -> None:
    """Raises a TypeError unless value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"Invalid {name}: {value!r} (must be a bool)")


def check_capturable(value: object) -> None:
    """Raises a TypeError unless value is a bool."""
    check_flag("capturable", value)


def check_choice(value: object, choices: Sequence[str]) -> None:
    """Raises a ValueError unless value is one of these values of ``nonfinite``."""
    if not isinstance(value, str) or value not in choices:
        raise _no_choice("nonfinite", value, map(repr, choices))


def _no_choice(name: str, value: object, choices: Iterable[str]) -> ValueError:
    *some, last = choices
    wanted = f"{', '.join(some)} or {last}"
    return ValueError(f"Invalid {name}: {value!r} (must be {wanted})")


def check_seed(seed: object) -> int:
    """Returns a seed as an int; raises unless it is a 64-bit int."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(
            f"Invalid seed: {seed!r} (must be an int or None, "
            f"got {type(seed).__name__})"
        )
    number = operator.index(seed)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"Invalid seed: {seed} (must fit in 64 bits)")
    return number


def draw_seed(seed: object) -> int:
    """Checks a seed; None draws one from torch's default generator."""
    if seed is None:
        drawn = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
        return int(drawn)
    return check_seed(seed)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Converts NumPy's numbers to Python's, which a state dict can hold."""
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return operator.index(value)
    return float(value) if isinstance(value, Real) else value


# torch's decorators and wrappers lie between a program and a step.
_LIBRARIES = tuple(str(Path(f).parent) for f in (Path(__file__).parent, torch.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the line of the program that called the library."""
    level = 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class Setting(NamedTuple):
    """A hyperparameter: its kind ("real", "whole", "flag" or "word") and range.

    ``default`` is NaN if there is none; the default of a word is the first of its
    words.
    """

    name: str
    kind: str
    default: float
    low: float
    high: float
    low_open: bool
    optional: bool
    words: tuple[str, ...]


# Types whose values need only a comparison with the range.
_PLAIN = {"real": (float,), "whole": (int,), "word": (str,), "flag": ()}

_DOUBLE = torch.finfo(torch.float64)
_TINY, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def settings(sampler: str) -> tuple[Setting, ...]:
    """Returns the settings of the sampler of this name."""
    return tuple(Setting(*row) for row in _C.settings(sampler))


def check_settings(rows: Sequence[Setting], group: Mapping[str, Any]) -> None:
    """Raises if a hyperparameter of a group has a wrong type or is out of range."""
    for row in rows:
        name, kind, _, low, high, low_open, optional, words = row
        value = group[name]
        if type(value) in _PLAIN[kind]:  # the common case first: at every step
            if kind == "word":
                if value in words:
                    continue
            elif low < value < high or (value == low and not low_open):
                continue
        if value is None and optional:
            continue
        _check(row, value)


def _check(row: Setting, value: Any) -> None:
    if row.kind == "flag":
        check_flag(row.name, value)
    elif row.kind == "word" or (isinstance(value, str) and row.words):
        if value not in row.words:
            numbers = ["a number"] if row.kind == "real" else []
            raise _no_choice(row.name, value, (*numbers, *map(repr, row.words)))
    elif row.kind == "whole":
        check_integer(row.name, value, low=int(row.low), high=row.high)
    else:
        check_real(row.name, value, low=row.low, high=row.high, low_open=row.low_open)


def check_noise_scale(group: Mapping[str, Any]) -> None:
    """Raises a ValueError if the noise of a step is not finite in float32."""
    if "lr" not in group:
        return
    lr, temperature, num_data = settings_of(group)
    # Products of valid numbers may overflow.
    scale = math.sqrt(2 * lr) * math.sqrt(temperature / num_data)
    if not scale <= _MOST:
        raise ValueError(
            f"Invalid lr: {lr:g} with temperature {temperature:g} and num_data "
            f"{num_data:g}: the noise has standard deviation sqrt(2 lr T / N) = "
            f"{scale:g}, which float32 cannot hold. Give smaller numbers"
        )


#: Keys that torch and its tools write into the groups of any optimizer.
FOREIGN_KEYS = frozenset(
    [
        "params",
        "param_names",
        "differentiable",
        "foreach",
        "fused",
        "maximize",
        # torch's schedulers and SWA
        "initial_lr",
        "max_lr",
        "min_lr",
        "base_momentum",
        "max_momentum",
        "swa_lr",
        # Hugging Face's Trainer (always 0 with samplers) and Lightning's monitor
        "weight_decay",
        "name",
        "lr_scale",  # timm's schedulers multiply lr by it
    ]
)

#: Foreign keys that would change the target if samplers used them.
MEANINGFUL_KEYS = ("weight_decay", "maximize", "differentiable")


def check_keys(
    sampler: str, settable: Collection[str], group: Mapping[str, Any], num_data: float
) -> None:
    """Raises if a new group has a key that is not settable and would be ignored."""
    check_meaningful(sampler, settable, group, num_data)
    for key in group:
        if key not in settable and key not in FOREIGN_KEYS:
            raise ValueError(_unknown(sampler, key, _nearest(key, settable)))


def with_known_arguments(constructor: Callable[..., None]) -> Callable[..., None]:
    """Wraps a constructor with errors that explain other optimizers' arguments."""
    known = dict(inspect.signature(constructor).parameters)
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return constructor
    known.pop("self", None)

    @wraps(constructor)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for key in kwargs:
            if key not in known:
                reason = _nearest(key, known)
                if key == "weight_decay":
                    reason = "prior_precision = weight_decay * num_data is that prior"
                raise TypeError(
                    f"{type(self).__name__} has no argument {key!r} ({reason})"
                )
        constructor(self, *args, **kwargs)

    return checked


def check_later_keys(
    sampler: str, known: Collection[str], group: Mapping[str, Any]
) -> None:
    """Raises if a key that was set later resembles a hyperparameter.

    Other programs may keep values in a group under other names.
    """
    if "lookahead_alpha" in group:
        raise ValueError(
            f"Invalid optimizer: {sampler} is inside of a Lookahead, which pulls the "
            "parameters back every few steps: that does not sample a posterior (step "
            "the sampler itself)"
        )
    for key in group:
        if key not in known and key not in FOREIGN_KEYS:
            near = get_close_matches(key, known, n=1, cutoff=0.85)
            if near:
                raise ValueError(_unknown(sampler, key, f"did you mean {near[0]!r}?"))


def check_meaningful(
    sampler: str, settable: Collection[str], group: Mapping[str, Any], num_data: float
) -> None:
    """Raises if a foreign key has a value that would change the target."""
    for key in MEANINGFUL_KEYS:
        value = group.get(key)
        if not value:
            continue
        reason = f"it has {_row(settable)}"
        if key == "weight_decay":
            # g = ḡ + weight_decay θ of torch is g = ḡ + (λ/N) θ.
            reason = (
                f"weight_decay = {value:g} is prior_precision = weight_decay * "
                f"num_data = {value * num_data:g}"
            )
        raise ValueError(_unknown(sampler, key, reason))


def _unknown(sampler: str, key: str, reason: str) -> str:
    return f"Invalid param group: {sampler} has no hyperparameter {key!r} ({reason})"


def _nearest(key: str, known: Collection[str]) -> str:
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it has {_row(known)}"


def _row(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def check_friction(
    noise_estimate: float, friction: float, what: str, where: str = ""
) -> None:
    """Raises a ValueError if a noise estimate exceeds the friction ``what``."""
    # momentum 0.9 and noise_estimate 0.1 add up to 1 only after rounding.
    if noise_estimate > friction + 1e-12:
        raise ValueError(
            f"Invalid noise_estimate: {noise_estimate:.6g}{where} (must not exceed "
            f"the friction {what} = {friction:.6g}: lower momentum or lr, or "
            "take larger minibatches)"
        )


def check_noise_estimate(group: Mapping[str, Any], friction: float, what: str) -> None:
    """Raises if a group's noise estimate exceeds the friction, or T is 0."""
    given = group["noise_estimate"]
    if given == 0:
        return
    if not isinstance(given, str):
        scaled = noise_estimate(group)
        if scaled > friction:  # a message costs more than the comparison
            check_friction(scaled, friction, what, _origin(group, scaled))
    if group["temperature"] == 0:
        raise ValueError(
            f"Invalid noise_estimate: {given!r} (must be 0 at "
            "temperature 0, where no noise is injected)"
        )


def _origin(group: Mapping[str, Any], scaled: float) -> str:
    """Describes the origin of an estimate that was given at other settings."""
    given = group["noise_estimate"]
    if scaled == given:
        return ""
    then, now = group[ESTIMATE_SETTINGS][1:], settings_of(group)
    words = [
        f" at lr {n[0]:g}, temperature {n[1]:g} and num_data {n[2]:g}"
        for n in (now, then)
    ]
    return f"{words[0]}, from {given:g}{words[1]}"


#: Keys of a group: the (lr, T, N) of its momenta, and ``noise_estimate`` with the (lr,
#: T, N) at which it was given. Empty before the first.
MOMENTUM_SETTINGS = "momentum_settings"
ESTIMATE_SETTINGS = "noise_estimate_settings"


def records_of(state: Iterable[str], settings: Iterable[str]) -> tuple[str, ...]:
    """Returns the records of a sampler with this state and these settings."""
    names = {*settings}
    has_momenta = "momentum" in state and "lr" in names
    records = (MOMENTUM_SETTINGS,) if has_momenta else ()
    return (*records, *((ESTIMATE_SETTINGS,) if "noise_estimate" in names else ()))


def rests(group: Mapping[str, Any]) -> bool:
    """Returns whether a group has lr = 0."""
    return "lr" in group and float(group["lr"]) == 0


def settings_of(group: Mapping[str, Any]) -> list[float]:
    """Returns lr, T and N of a group."""
    return [float(group["lr"]), float(group["temperature"]), float(group["num_data"])]


def momentum_scale(group: Mapping[str, Any], now: Sequence[float]) -> float | None:
    """Returns the factor for momenta whose (lr, T, N) change; None if they are drawn.

    The arithmetic is csrc/host/rescaling.h's, and traceable.
    """
    former = group[MOMENTUM_SETTINGS]
    lr = now[0] / former[0]
    if former[1] == 0:
        scale = math.inf if now[1] > 0 else lr  # as in SGD, whose buffer is -v / lr
    elif now[1] == 0:
        scale = math.sqrt(lr)
    else:
        before = former[0] * former[1] / former[2]
        after = now[0] * now[1] / now[2]
        # An underflowing product does not determine the factor.
        scale = math.sqrt(after / before) if before > 0 else math.inf
    if _TINY <= scale <= _MOST:
        return scale
    in_double = all(p.dtype is torch.float64 for p in group["params"])
    return scale if in_double and _DOUBLE.tiny <= scale <= _DOUBLE.max else None


def noise_estimate_scale(former: Sequence[float], now: Sequence[float]) -> float:
    """Returns the factor of β̂, which at T = 0 depends on lr and N alone."""
    scale = now[0] / former[0] * (now[2] / former[2])
    return scale * (former[1] / now[1]) if former[1] > 0 and now[1] > 0 else scale


def scales(
    group: Mapping[str, Any], now: Sequence[float] | None = None
) -> dict[str, float]:
    """Returns the operator's scale factors for a step of a group, except factors of 1.

    Redrawn momenta are drawn before the step.
    """
    former = group.get(MOMENTUM_SETTINGS)
    if not former:
        return {}
    now = now or settings_of(group)
    if former == now or now[0] == 0:
        return {}
    scale = momentum_scale(group, now)
    found = {} if scale in (None, 1.0) else {"momentum_scale": scale}
    if "thermostat_rate" in group:
        # A thermostat's mean is β̂, but its fluctuations do not follow the ratio: a
        # factor above 1 would raise them beyond the friction, and the chain would
        # diverge.
        if (thermostat := noise_estimate_scale(former, now)) < 1.0:
            found["thermostat_scale"] = thermostat
    return found


def is_drawn(group: Mapping[str, Any]) -> bool:
    """Returns whether a group's step starts with new momenta, as after T = 0."""
    former = group.get(MOMENTUM_SETTINGS)
    if not former or rests(group):
        return False
    now = settings_of(group)
    return former != now and momentum_scale(group, now) is None


def least_root(group: Mapping[str, Any]) -> float:
    """Returns the number that pSGLD adds to √V, as in csrc/ops/psgld.h."""
    weight_decay = group["prior_precision"] / group["num_data"]
    return max(group["eps"], 10 * float(group["lr"]) * weight_decay)


def noise_estimate(group: Mapping[str, Any]) -> float:
    """Returns β̂ of a group's step, rescaled to the present lr, T and N.

    β̂ = lr N Var(ḡ) / (2 T), with constant Var(ḡ).
    """
    given = group["noise_estimate"]
    known = group.get(ESTIMATE_SETTINGS)
    if given == 0 or not known or known[0] != given or rests(group):
        return float(given)
    now = settings_of(group)
    if now == known[1:] or now[1] == 0:
        return float(given)
    return float(given) * noise_estimate_scale(known[1:], now)


_ARGUMENTS = {
    "num_data": "N, the number of training examples, > 0. 1 means that the loss is U "
    "itself.",
    "prior_precision": "λ >= 0, precision of the Gaussian prior N(μ, 1/λ) on each "
    "parameter; 0 is a flat prior. Default: 0.",
    "prior_mean": "μ, a number, or tensors, one for each parameter and of its shape, "
    "which are copied, see :class:`Sampler`. Default: 0.",
    "temperature": "T > 0; 1 is the Bayesian posterior. Default: 1.",
    "num_chains": "K makes K independent chains at once: every parameter has a leading "
    "dimension K, as made by :func:`torch.func.stack_module_state`, and the loss is "
    "the sum of the chains' mean losses. Chain k is bitwise identical to the chain of "
    "a sampler with the seed ``fold_in(seed, k)``. Default: None, one chain.",
    "seed": "key of the noise, a 64-bit int; None draws one, see :class:`Sampler`. "
    "Default: None.",
    "capturable": "keep the step counter in device memory, so that ``step()`` can be "
    "captured in a CUDA graph after one ordinary step, see :class:`SGLD`. Default: "
    "False.",
    "nonfinite": 'policy for gradients that are not finite: "raise", "skip" or '
    '"ignore", see :class:`Sampler`, also on clipping. Default: "raise".',
    "process_group": "the ranks that sample this chain together, see "
    ":class:`Sampler`. Default: all.",
}
_NAMES = re.compile(r"^( +)(\{\w+\}(?: \{\w+\})*)$", re.MULTILINE)


def documented(docstring: str | None) -> str | None:
    """Replaces argument names in braces by their texts."""
    if docstring is None:
        return None
    return _NAMES.sub(_texts, docstring)


def _texts(names: re.Match[str]) -> str:
    indent, known = names[1], re.findall(r"\w+", names[2])
    if not all(name in _ARGUMENTS for name in known):
        return names[0]  # not a list of these names
    return "\n".join(
        textwrap.fill(
            f"{name}: {_ARGUMENTS[name]}",
            width=88,
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name in known
    )
