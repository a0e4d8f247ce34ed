"""The law while a user changes lr, temperature, num_data or momentum (METHODS 12).

Chains sample N(0, T / (N h)), each element of a tensor one of them. Their variance in
the last part of a schedule is compared with the exact recursion of the rule: momenta
are multiplied by the change of √(lr T / N). The recursion is written here in numpy and
uses nothing of the library.
"""

import math
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from levels import at_levels
from torch.optim import lr_scheduler

import torch_sgmcmc as sg

CHAINS = 40_000  # a variance is known to 0.7 %
CURVATURE = 1.0
LR, NUM_DATA = 0.1, 100.0
#: Least deviation that fails: five standard errors and the burn-in that is left.
TOLERANCE = 0.04


class Step(NamedTuple):
    """The hyperparameters of a step, and whether it is made."""

    lr: float
    temperature: float
    num_data: float
    momentum: float
    has_gradient: bool = True
    is_skipped: bool = False
    curvature: float = CURVATURE  # of the mean loss and the prior together
    noise: float = 0.0  # standard deviation of the gradient's noise


def recursion(kind, steps, estimate=0.0):
    """Returns the exact variance of θ after each step; a start in equilibrium."""
    first = steps[0]
    cov = np.zeros((2, 2))
    cov[0, 0] = first.temperature / (first.num_data * first.curvature)
    known = None
    variances = []
    for step in steps:
        if step.lr == 0 or step.is_skipped:
            variances.append(cov[0, 0])
            continue
        heat = step.lr * step.temperature / step.num_data
        factor = 1.0
        if known is None:
            cov[1, 1] = heat
        elif known.temperature == 0 and step.temperature > 0:
            cov[1], cov[:, 1] = 0, 0
            cov[1, 1] = heat
        elif known.temperature == 0:
            factor = step.lr / known.lr
        elif step.temperature == 0:
            factor = math.sqrt(step.lr / known.lr)
        else:
            before = known.lr * known.temperature / known.num_data
            factor = math.sqrt(heat / before)
        scale = np.diag([1, factor])
        cov, known = scale @ cov @ scale, step
        if not step.has_gradient:
            variances.append(cov[0, 0])
            continue
        if kind in ("SGLD", "SGLRW"):
            kept = 1 - step.lr * step.curvature
            if kind == "SGLD":
                cov[0, 0] = kept**2 * cov[0, 0] + (step.lr * step.noise) ** 2
            else:  # moves have one size, whatever the gradient
                cov[0, 0] *= 2 * kept - 1
            cov[0, 0] += 2 * heat
            variances.append(cov[0, 0])
            continue
        m, kick = step.momentum, -step.lr * step.curvature
        beta = estimate * (step.lr / LR) * (step.num_data / NUM_DATA)
        beta /= step.temperature if step.temperature else 1
        if kind == "BAOA":
            friction = 2 * (1 - m) / (1 + m)
            noise = (1 + m) ** 2 * (friction - beta) * heat / 2
            move = np.array([[1 + (1 + m) / 2 * kick, (1 + m) / 2], [m * kick, m]])
            entry, kicked = np.array([0.5, 1.0]), np.array([(1 + m) / 2, m])
        else:
            noise = 2 * (1 - m - beta) * heat
            move = np.array([[1 + kick, m], [kick, m]])
            entry = kicked = np.array([1.0, 1.0])
        cov = move @ cov @ move.T + noise * np.outer(entry, entry)
        cov += (step.lr * step.noise) ** 2 * np.outer(kicked, kicked)
        variances.append(cov[0, 0])
    return variances


def _of_torch(make):
    def set_up(sampler):
        scheduler = make(sampler)
        return lambda k: scheduler.step() if k > 0 else None

    return set_up


def _of_setting(name, value):
    def change(sampler, k):
        for group in sampler.param_groups:
            group[name] = value(k)

    return lambda sampler: partial(change, sampler)


def _decay_of_tensor(sampler):
    for group in sampler.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
    return lr_scheduler.ExponentialLR(sampler, 0.99)


def _of_lambda(factor):
    return _of_torch(lambda sampler: lr_scheduler.LambdaLR(sampler, factor))


_CYCLE_MOMENTA = {"base_momentum": 0.85, "max_momentum": 0.95}
_SCHEDULES = {
    "cosine": (1000,
     _of_torch(lambda s: lr_scheduler.CosineAnnealingWarmRestarts(s, 500))),
    "one_cycle": (600,
     _of_torch(lambda s: lr_scheduler.OneCycleLR(s, LR, 600, **_CYCLE_MOMENTA))),
    "drop": (500, _of_torch(lambda s: lr_scheduler.MultiStepLR(s, [250], 0.02))),
    # Falls to 0, rests there, and comes back.
    "through_zero": (600, _of_lambda(lambda k: max(0.0, abs(k - 300) / 300 - 0.05))),
    "warm_up": (600, _of_lambda(lambda k: min(k / 300, 1.0))),
    "tensor": (500, _of_torch(_decay_of_tensor)),
    "more_data": (400,
     _of_setting("num_data", lambda k: NUM_DATA * (1, 1, 4, 16)[k // 100])),
    "cooling": (400, _of_setting("temperature", lambda k: 1.0 if k < 200 else 0.1)),
    # Cycles that explore at T = 0.
    "phases": (600, _of_torch(lambda s: sg.CyclicalSchedule(s, 300, exploration=0.3))),
}  # fmt: skip

_SHARED = {"num_data": NUM_DATA, "seed": 3, "nonfinite": "skip"}


def _make(kind, *momentum, **settings):
    options = {**_SHARED, **settings}
    return lambda params: getattr(sg, kind)(params, LR, *momentum, **options)


KINDS = {
    "SGHMC 0.9": ("SGHMC", _make("SGHMC", 0.9)),
    "SGHMC 0.99": ("SGHMC", _make("SGHMC", 0.99)),
    "BAOA": ("BAOA", _make("BAOA", 0.99)),
    "EWSG": ("SGHMC", _make("EWSG", 0.99, index_chain_length=0)),
}
#: A wrong momentum shows for a hundred steps.
LONG_MEMORY = ["SGHMC 0.99", "BAOA", "EWSG"]


def never(k):
    return False


def run(
    kind, name, *, absent=never, skipped=never, resumed=never, make=None, estimate=0
):
    """Returns the largest deviation of the variance in the last fifth, relative."""
    family, made = KINDS[kind]
    made = make or made
    length, set_up = _SCHEDULES[name]
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(CHAINS, dtype=torch.float64, generator=generator)
    p = (start / math.sqrt(NUM_DATA * CURVATURE)).requires_grad_()
    # Has a gradient where p has none, so that steps are made.
    other = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    sampler = made([p, other])
    change = set_up(sampler)
    steps, variances = [], []
    for k in range(length):
        change(k)
        if resumed(k):
            loaded = made([p, other])
            loaded.load_state_dict(sampler.state_dict())
            # Schedulers go on with the sampler that they know.
            sampler.load_state_dict(loaded.state_dict())
        group = sampler.param_groups[0]
        names = ("lr", "temperature", "num_data", "momentum")
        values = (float(group[name]) for name in names)
        steps.append(Step(*values, not absent(k), skipped(k)))

        def closure(k=k):
            p.grad = None if absent(k) else CURVATURE * p.detach()
            other.grad = torch.full_like(other, math.nan if skipped(k) else 0.0)
            return 0.0

        sampler.step(closure)
        variances.append(float(p.detach().var()))
    exact = recursion(family, steps, estimate)
    late = [k for k in range(length) if k >= 0.8 * length and exact[k] > 0]
    return max(abs(variances[k] / exact[k] - 1) for k in late)


@pytest.mark.parametrize(
    ("kind", "name"),
    # EWSG has no T = 0.
    at_levels(
        [(k, n) for k in KINDS for n in _SCHEDULES if (k, n) != ("EWSG", "phases")],
        default=[("SGHMC 0.99", "drop"), ("BAOA", "drop")],
        otherwise="full",
    ),
)
def test_variance_follows_the_recursion(kind, name):
    assert run(kind, name) < TOLERANCE


# What happens at the change: momenta of a missing gradient are rescaled all the same, a
# skipped step leaves momenta and record to the next one, and the record is loaded.
EVENTS = [
    ({"absent": lambda k: 245 <= k <= 255}, ("cosine", "drop")),
    ({"skipped": lambda k: k in (200, 250, 251, 300)}, ("drop", "more_data")),
    ({"resumed": lambda k: k in (100, 250, 300)}, ("drop", "through_zero")),
]


@pytest.mark.full
@pytest.mark.parametrize("kind", LONG_MEMORY)
@pytest.mark.parametrize(
    ("event", "name"), [(event, name) for event, names in EVENTS for name in names]
)
def test_an_event_at_the_change(kind, name, event):
    assert run(kind, name, **event) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("family", ["SGHMC", "BAOA"])
@pytest.mark.parametrize("name", ["drop", "more_data", "cooling"])
def test_a_noise_estimate_belongs_to_its_settings(family, name):
    """β̂ = lr N Var(ḡ) / (2 T): it follows lr, N and T."""
    estimate = 0.002
    kind = {"SGHMC": "SGHMC 0.9", "BAOA": "BAOA"}[family]
    make = _make(family, 0.9, noise_estimate=estimate)
    assert run(kind, name, make=make, estimate=estimate) < TOLERANCE


def test_a_large_noise_estimate():
    """Half of the friction; not scaled the variance would be 0.51 (METHODS 12)."""
    make = _make("SGHMC", 0.9, noise_estimate=0.05)
    assert run("SGHMC 0.9", "drop", make=make, estimate=0.05) < TOLERANCE


_MAKERS = {
    "SGLD": ("SGLD", _make("SGLD")),
    "SGLRW": ("SGLRW", _make("SGLRW")),
    "PSGLD": ("SGLD", _make("PSGLD", adapt=False, eps=1e-9)),
    "SGHMC": ("SGHMC", _make("SGHMC", 0.9)),
    "BAOA": ("BAOA", _make("BAOA", 0.9)),
    "EWSG": ("SGHMC", _make("EWSG", 0.9, index_chain_length=0)),
    # Without adaptation it is SGHMC; the law of thermostats has tests of its own.
    "SGNHT": ("SGHMC", _make("SGNHT", 0.9, thermostat_rate=0)),
}
_CHANGE, _END = 100, 400
_SETTINGS = {
    "lr": {"lr": 0.03},
    "temperature": {"temperature": 0.25},
    "num_data": {"num_data": 4 * NUM_DATA},
    "prior_precision": {"prior_precision": 2 * NUM_DATA},
    "momentum": {"momentum": 0.5},
    "minibatches": {},
    "groups": {},
    "frozen": {"lr": 0.03},
    "sizes": {},
}


def _grown(sampler, p):
    """Makes a parameter and its state twice as long, by rows of its own chains."""
    with torch.no_grad():
        half = p.detach().clone()
        p.data = torch.cat([half, half])
        p.grad = None
        for key, value in sampler.state.get(p, {}).items():
            if torch.is_tensor(value) and value.shape == half.shape:
                sampler.state[p][key] = torch.cat([value, value])
    sampler.reassign_noise_offsets()


@pytest.mark.full
@pytest.mark.parametrize("what", _SETTINGS)
@pytest.mark.parametrize("kind", _MAKERS)
def test_the_law_after_a_change(kind, what):
    family, make = _MAKERS[kind]
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(CHAINS // 2, dtype=torch.float64, generator=generator)
    p = (start / math.sqrt(NUM_DATA * CURVATURE)).requires_grad_()
    # Has a gradient while p is frozen.
    other = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    sampler = make([p, other])
    params, steps, variances = [p], [], []
    for k in range(_END):
        if k == _CHANGE:
            for group in sampler.param_groups:
                changes = _SETTINGS[what].items()
                group.update({key: v for key, v in changes if key in group})
            if what == "groups":
                params.append(p.detach().flip(0).requires_grad_())
                sampler.add_param_group({"params": params[1:]})
            if what == "sizes":
                _grown(sampler, p)
        is_frozen = what == "frozen" and _CHANGE - 10 <= k < _CHANGE + 10
        p.requires_grad_(not is_frozen)
        noise = 0.05 if what == "minibatches" and k >= _CHANGE else 0.0
        group = sampler.param_groups[0]
        numbers = [group[key] for key in ("lr", "temperature", "num_data")]
        curvature = CURVATURE + group["prior_precision"] / group["num_data"]
        momentum = group.get("momentum", 0.0)
        if (
            kind == "PSGLD"
        ):  # its steps are bounded by the prior (docs/samplers/psgld.md)
            numbers[0] /= 1 + 10 * numbers[0] * group["prior_precision"] / numbers[2]
        steps.append(Step(*numbers, momentum, not is_frozen, False, curvature, noise))

        def closure(k=k, noise=noise, still=is_frozen):
            other.grad = torch.zeros_like(other)
            for each in params:
                errors = torch.randn(each.shape, dtype=p.dtype, generator=generator)
                each.grad = CURVATURE * each.detach() + noise * errors
                if kind == "PSGLD" and k == 0:  # V of the first gradient is kept
                    each.grad = torch.ones_like(each)
            if still:
                p.grad = None
            return 0.0

        if kind == "PSGLD" and k == 0:
            group["lr"], lr = 1e-12, group["lr"]
            sampler.step(closure)
            group["lr"] = lr
            steps.pop()
            continue
        if kind == "PSGLD" and what == "groups" and k == _CHANGE:
            for each in params[1:]:  # its V is made like the others'
                sampler.state[each]["square_average"] = torch.ones_like(each)
        sampler.step(closure)
        variances.append(float(torch.cat([q.detach() for q in params]).var()))
    exact = recursion(family, steps)
    late = range(int(0.8 * len(exact)), len(exact))
    assert max(abs(variances[k] / exact[k] - 1) for k in late) < 0.05


_CYCLE = 400


def _lr_of_cosine(k):
    return LR / 2 * (math.cos(math.pi * k / _CYCLE) + 1)


def _lr_of_drop(k):
    return LR if k < _CYCLE // 2 else 0.02 * LR


@pytest.mark.parametrize(
    ("lr_of", "noise", "rate"),
    at_levels(
        product((_lr_of_cosine, _lr_of_drop), (0.0, 0.1, 0.3), (None, 1e-3, 1e-2)),
        full=[
            (_lr_of_drop, 0.3, None),
            (_lr_of_drop, 0.0, 1e-3),
            (_lr_of_cosine, 0.3, 1e-3),
            (_lr_of_cosine, 0.1, None),
            (_lr_of_cosine, 0.3, 1e-2),
            (_lr_of_drop, 0.3, 1e-2),
        ],
    ),
)
def test_thermostats_follow(lr_of, noise, rate):
    """The variance over the exact one in the last 40 % of a cycle.

    Without the rule it was 0.57 and 0.71 for the largest noise, and diverged with a
    rate of 0.01.
    """
    num_data = 50
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(CHAINS // 2, dtype=torch.float64, generator=generator)
    p = (start / math.sqrt(num_data * CURVATURE)).requires_grad_()
    settings = {**_SHARED, "num_data": num_data, "thermostat_rate": rate}
    sampler = sg.SGNHT([p], LR, 0.9, **settings)
    ratios = []
    for k in range(4 * _CYCLE):
        sampler.param_groups[0]["lr"] = lr_of(k % _CYCLE)
        errors = torch.randn(p.shape, dtype=p.dtype, generator=generator)
        p.grad = CURVATURE * p.detach() + noise * errors
        sampler.step()
        if k >= 3.6 * _CYCLE:
            ratios.append(num_data * CURVATURE * float(p.detach().var()))
    # The spread of thermostats at a rate of 0.01 is as large as the friction.
    assert abs(np.mean(ratios) - 1) < (0.05 if rate == 1e-2 else 0.03)
