"""The updates of compiled blocks in tensor arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_sgmcmc.core.hyperparams import least_root
from torch_sgmcmc.core.ops import OP_SPECS, chain_turn
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.state import PRECONDITIONER
from torch_sgmcmc.core.steps import numbers_of, operator_of
from torch_sgmcmc.data import one_gradient_a_step


class Numbers(dict[str, Any]):
    """An operator's numbers as floats, with the names of those that were read."""

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        super().__init__(numbers)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.read.add(name)
        return float(super().__getitem__(name))


class Rule(NamedTuple):
    """An update in tensor arithmetic; csrc/ops/ has the same as functors.

    Attributes:
        keys: the parameter's state that the update reads.
        coefficients: returns the update's numbers from the operator's :class:`Numbers`.
        update: returns θ and the new state, from the coefficients, θ, g (the gradient
            of U / N), the minibatch's gradient, the noise ξ, and the state.
        is_uniform: whether ξ is uniform on (-1, 1), and not normal.
        shared: of a sampler whose update of one parameter depends on all: takes the
            update's numbers, for each parameter g, the noise ξ and the state, the
            record with a row for each chain, and whether chains are the last dimension.
            Returns the numbers that the updates take instead, and the new record.
    """

    keys: tuple[str, ...]
    coefficients: Callable[[Numbers], tuple[float, ...]]
    update: Callable[..., tuple[Tensor, ...]]
    is_uniform: bool = False
    shared: Callable[..., tuple[list[Tensor], Tensor]] | None = None


def _variance(n: Numbers) -> float:
    """Returns lr T / N."""
    return n["lr"] * n["temperature"] / n["num_data"]


def _sgld_numbers(n: Numbers) -> tuple[float, ...]:
    return n["lr"], math.sqrt(2 * _variance(n))


def _sgld(c: Any, theta: Tensor, g: Tensor, _: Tensor, xi: Tensor) -> tuple[Tensor]:
    lr, noise = c
    return (theta - lr * g + noise * xi,)


def _sglrw(c: Any, theta: Tensor, g: Tensor, _: Tensor, xi: Tensor) -> tuple[Tensor]:
    lr, delta = c
    move = -lr * g
    step = torch.where(delta * xi < move, delta, -delta)
    return (theta + torch.where(move * 0 == 0, step, move),)  # not finite stays so


def _sghmc_numbers(n: Numbers) -> tuple[float, ...]:
    friction = max(0.0, 1 - n["momentum"] - n["noise_estimate"])
    return n["lr"], n["momentum"], math.sqrt(2 * friction * _variance(n))


def _sghmc(
    c: Any, theta: Tensor, g: Tensor, _: Tensor, xi: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    lr, momentum, noise = c
    v = momentum * v - lr * g + noise * xi
    return theta + v, v


def _baoa_numbers(n: Numbers) -> tuple[float, ...]:
    m = n["momentum"]
    friction = max(0.0, 2 * (1 - m) / (1 + m) - n["noise_estimate"])
    return n["lr"], m, (1 + m) * math.sqrt(friction * _variance(n) / 2)


def _baoa(
    c: Any, theta: Tensor, g: Tensor, _: Tensor, xi: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    lr, momentum, noise = c
    kicked = v - lr * g
    v = momentum * kicked + noise * xi
    return theta + 0.5 * (kicked + v), v


def _sgnht_numbers(n: Numbers) -> tuple[float, ...]:
    variance = _variance(n)
    rate = n["thermostat_rate"] * (variance > 0)
    noise = math.sqrt(2 * (1 - n["momentum"]) * variance)
    gain = rate / (4 * variance) if rate > 0 else 0.0
    return n["lr"], n["momentum"], noise, rate, gain


def _sgnht(
    c: Any,
    theta: Tensor,
    g: Tensor,
    _: Tensor,
    xi: Tensor,
    v: Tensor,
    thermostat: Tensor,
) -> tuple[Tensor, ...]:
    lr, momentum, noise, rate, gain = c
    new = (momentum - thermostat) * v - lr * g + noise * xi
    return theta + new, new, thermostat + gain * (v + new) ** 2 - rate


def _psgld_numbers(n: Numbers, decay: float | None = None) -> tuple[float, ...]:
    decay = n["decay"] if decay is None else decay
    return n["lr"], math.sqrt(2 * _variance(n)), decay, 1 - decay, least_root(n)


def _psgld(
    c: Any, theta: Tensor, g: Tensor, grad: Tensor, xi: Tensor, square: Tensor
) -> tuple[Tensor, ...]:
    lr, noise, decay, weight, eps = c
    square = decay * square + weight * grad * grad
    root = (square.sqrt() + eps).rsqrt()
    return theta + root * (noise * xi - lr * root * g), square


def _mclmc_numbers(n: Numbers) -> tuple[float, ...]:
    # 1 - momentum: in fp32 the momentum's difference to 1 would be rounded.
    return math.sqrt(_variance(n)), 1 - n["momentum"], n["num_data"] / n["temperature"]


def _mclmc_turn(
    c: Sequence[Tensor],
    each: Sequence[Sequence[Tensor]],
    record: Tensor,
    has_chains: bool,
) -> tuple[list[Tensor], Tensor]:
    scaled = [(G[0].sqrt() * g if G else g, z, u) for g, z, u, *G in each]
    # Noise is a view with other strides, which the operator does not take.
    g, z, u = (
        torch.cat([tensor.reshape(-1, len(record)) for tensor in own])
        for own in zip(*scaled, strict=True)
    )
    root, rest, scale = (number.double() for number in c)
    numbers = torch.stack([root * math.sqrt(len(g)), 1 - rest, scale])
    turn, record = chain_turn(g, z, u, record, numbers)
    factors = turn.to(g.dtype)
    return [*(factors.unbind(1) if has_chains else factors[0].unbind(0))], record


def _mclmc(
    c: Any, theta: Tensor, g: Tensor, _: Tensor, xi: Tensor, u: Tensor
) -> tuple[Tensor, ...]:
    of_u, of_g, of_xi, step_size = c
    u = step_size * (of_u * u + of_g * g + of_xi * xi)
    return theta + u, u


def _preconditioned_mclmc(
    c: Any, theta: Tensor, g: Tensor, grad: Tensor, xi: Tensor, u: Tensor, G: Tensor
) -> tuple[Tensor, ...]:
    root = G.sqrt()
    _, u = _mclmc(c, theta, root * g, grad, xi, u)
    return theta + root * u, u, G


def _preconditioned(update: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Returns an update with momenta in the coordinates θ / √G: lr G, and √G ξ."""

    def preconditioned(
        c: Any, theta: Tensor, g: Tensor, grad: Tensor, xi: Tensor, v: Tensor, G: Tensor
    ) -> tuple[Tensor, ...]:
        return *update(c, theta, G * g, grad, G.sqrt() * xi, v), G

    return preconditioned


_RULES = {
    "sgld_step_": Rule((), _sgld_numbers, _sgld),
    "sglrw_step_": Rule((), _sgld_numbers, _sglrw, is_uniform=True),
    "sghmc_step_": Rule(("momentum",), _sghmc_numbers, _sghmc),
    "baoa_step_": Rule(("momentum",), _baoa_numbers, _baoa),
    "sgnht_step_": Rule(("momentum", "thermostat"), _sgnht_numbers, _sgnht),
    "psgld_step_": Rule(("square_average",), _psgld_numbers, _psgld),
    "psgld_frozen_step_": Rule(
        ("square_average",), partial(_psgld_numbers, decay=1.0), _psgld
    ),
    "mclmc_step_": Rule(("direction",), _mclmc_numbers, _mclmc, shared=_mclmc_turn),
}
# Of groups with a preconditioner G.
_WITH_G = {
    "sghmc_preconditioned_step_": Rule(
        ("momentum", PRECONDITIONER), _sghmc_numbers, _preconditioned(_sghmc)
    ),
    "baoa_preconditioned_step_": Rule(
        ("momentum", PRECONDITIONER), _baoa_numbers, _preconditioned(_baoa)
    ),
    "mclmc_step_": Rule(
        ("direction", PRECONDITIONER),
        _mclmc_numbers,
        _preconditioned_mclmc,
        shared=_mclmc_turn,
    ),
}
_PRIOR = ("num_data", "prior_precision", "prior_mean")
# Numbers that change state between graphs, which the block does.
_OF_BLOCKS = ("momentum_scale", "thermostat_scale", "resample_momentum_every")


def _rule_of(
    operator: str | None, is_preconditioned: bool, numbers: Mapping[str, Any]
) -> Rule | None:
    """Returns an operator's rule for such numbers, None if it cannot be compiled.

    An operator with a number that its rule does not read cannot: it would be ignored.
    """
    rule = (_WITH_G if is_preconditioned else _RULES).get(operator or "")
    if rule is None:
        return None
    spec = OP_SPECS[operator or ""]
    names = {each["name"] for each in (*spec["numbers"], *spec["common"])}
    known = Numbers(numbers)
    rule.coefficients(known)
    return rule if names <= known.read | {*_PRIOR, *_OF_BLOCKS} else None


def coefficients_of(rule: Rule, numbers: Mapping[str, Any]) -> list[float]:
    """Returns a group's input of the graph: λ / N, μ, and the rule's numbers."""
    numbers = Numbers(numbers)
    num_data, precision, mean = map(numbers.__getitem__, _PRIOR)
    return [precision / num_data, mean, *rule.coefficients(numbers)]


def rules_of(sampler: Sampler) -> list[Rule]:
    """Returns each group's rule; raises if one cannot be compiled."""
    is_single = one_gradient_a_step(sampler)
    if is_single and unwrap(type(sampler).step) is not unwrap(Sampler.step):
        raise ValueError(
            f"Invalid sampler: {type(sampler).__name__} overrides step(), which "
            "a compiled block does not call (must be a class of torch_sgmcmc)"
        )
    found = (
        _rule_of(*operator_of(sampler, group), numbers_of(sampler, group))
        for group in (sampler.param_groups if is_single else ())
    )
    rules = [rule for rule in found if rule is not None]
    if len(rules) < len(sampler.param_groups):
        raise ValueError(
            f"Invalid sampler: {type(sampler).__name__} cannot be compiled with these "
            "settings (must be SGLD, SGHMC without noise_estimate='online', BAOA, "
            "SGLRW, SGNHT, MCLMC, or PSGLD with gamma=False)"
        )
    return rules
