"""SGHMC's mass and friction of each coordinate: algorithm 2's M and C."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from failed_steps import refused
from harness.chains import (
    Experiment,
    Group,
    assert_caught,
    check_stationary,
)
from harness.exactness import assert_same
from harness.methods import Coordinates, Law, Method, sghmc_law
from harness.targets import Quadratic, correlated
from reference import same_bits
from sghmc_problem import (
    COMMON,
    advance,
    check_a_state_dict_continues,
    check_algorithm_2,
    make,
    parameters,
    some,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import torch_sgmcmc as sg
from torch_sgmcmc import sghmc
from torch_sgmcmc.chain import given_covariance
from torch_sgmcmc.chain.by_coordinate import update_
from torch_sgmcmc.chain.momentum import start_momenta

# ---- One step --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimate", "every"), [(0.0, 0), (0.05, 3), ("online", 3), ("given", 3)]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 0.0)],
    ids=str,
)
def test_masses_of_one_are_the_fused_update(
    dtype: torch.dtype, tolerance: float, estimate: Any, every: int
) -> None:
    ends = []
    for friction in (None, [1.0] * 4, "plain"):
        params = parameters(dtype)
        sampler = make(
            params,
            **{"prior_mean": 0.25, "temperature": 0.7, "noise_estimate": estimate},
            resample_momentum_every=every,
        )
        if estimate == "given":
            sampler.set_gradient_variance([v / 20 for v in some(2, 0.0, 1.0)])
        if friction != "plain":
            sampler.set_mass([1.0] * 4, friction)
        advance(sampler, params, 160 if estimate == "online" else 20)
        ends.append(params)
    for one, other, plain in zip(*ends, strict=True):
        assert same_bits(one, other)
        torch.testing.assert_close(one, plain, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("has_friction", [False, True])
@pytest.mark.parametrize("estimate", [0.03, "given", "matrix"])
def test_algorithm_2_written_out(estimate: Any, has_friction: bool) -> None:
    frictions = some(5, 0.6, 2.0)[:3] if has_friction else None
    check_algorithm_2(estimate, some(4, 0.6, 2.0)[:3], frictions)


# ---- State -----------------------------------------------------------------------


@pytest.mark.parametrize("has_friction", [False, True])
@pytest.mark.parametrize("before", [0, 7])
def test_a_state_dict_continues_the_chain(has_friction: bool, before: int) -> None:
    params = parameters(torch.float32)
    sampler = make(params, resample_momentum_every=5)
    sampler.set_mass(some(4, 0.5, 2.0), some(5, 0.5, 2.0) if has_friction else None)
    check_a_state_dict_continues(sampler, params, before)


@pytest.mark.parametrize("has_mass", [False, True])
def test_what_fails_to_load_changes_no_mass(has_mass: bool) -> None:
    params = parameters(torch.float32)
    sampler, other = make(params), make(parameters(torch.float32))
    (sampler if has_mass else other).set_mass([2.0] * 4, [1.5] * 4)
    advance(sampler, params, 2)
    theirs, twin = copy.deepcopy((params, sampler))

    def fail(_: Any) -> None:
        raise KeyError("a hook")

    handle = sampler.register_load_state_dict_post_hook(fail)
    with pytest.raises(KeyError, match="a hook"):
        sampler.load_state_dict(other.state_dict())
    handle.remove()
    advance(sampler, params)
    advance(twin, theirs)
    assert_same(params, theirs)


def test_another_mass_scales_momenta() -> None:
    """v = ε r / M with the energy r² / 2M kept: √(old mass / new mass)."""
    params = parameters()
    sampler = make(params)
    advance(sampler, params, 2)
    before = [sampler.state[p]["momentum"].clone() for p in params]
    held = sampler.state_dict()["state"][0]["momentum"]
    sampler.set_mass([4.0] * 4)
    assert torch.equal(held, before[0])
    for p, v in zip(params, before, strict=True):
        torch.testing.assert_close(sampler.state[p]["momentum"], v / 2)
    sampler.set_mass([1.0] * 4, [9.0] * 4)
    assert set(sampler.state[params[0]]) == {
        *("momentum", "given_mass", "given_friction")
    }
    sampler.set_mass([16.0] * 4)
    assert set(sampler.state[params[0]]) == {"momentum", "given_mass"}
    sampler.set_mass(None)
    for p, v in zip(params, before, strict=True):
        assert set(sampler.state[p]) == {"momentum"}
        torch.testing.assert_close(sampler.state[p]["momentum"], v)
    unused = make(parameters())
    unused.set_mass([1.0] * 4)
    unused.set_mass(None)
    assert not unused.state


def test_parameters_that_come_later_have_a_mass_of_one() -> None:
    ends = []
    for mass in (None, 1.0):
        params = parameters()
        sampler = make(params)
        sampler.set_mass([2.0] * 4)
        new = nn.Parameter(torch.ones(3, dtype=torch.float64))
        sampler.add_param_group({"params": [new]})
        if mass is not None:
            sampler.set_mass([2.0] * 4 + [mass])
        advance(sampler, [*params, new])
        ends.append(new)
    torch.testing.assert_close(*ends, rtol=0.0, atol=1e-14)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(3, 2)
        self.layer.bias.requires_grad_(False)

    def advance(self, sampler: Any, steps: int) -> None:
        def closure() -> Tensor:
            sampler.zero_grad()
            loss = self.layer(torch.ones(4, 3)).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            sampler.step(closure)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    ("build", "key"),
    [
        (partial(sg.SGHMC, lr=0.01, **COMMON), "given_mass"),
        (partial(sg.HMC, step_size=0.01, num_steps=3, **COMMON), "mass"),
        (
            partial(sg.SGHMC, lr=0.01, noise_estimate="given", **COMMON),
            "given_variance",
        ),
    ],
    ids=["SGHMC", "HMC", "variances"],
)
def test_checkpoints_of_torch_distributed(
    build: Callable[..., Any], key: str, before: int
) -> None:
    """What is given is state before the first step, and torch's lay-out keeps it."""

    def made(net: Net, first: float) -> Any:
        sampler = build(net.parameters())
        is_mass = key != "given_variance"
        give = sampler.set_mass if is_mass else sampler.set_gradient_variance
        give([first, 0.2])
        return sampler

    net, other = Net(), Net()
    sampler = made(net, 0.3)
    net.advance(sampler, before)
    saved = copy.deepcopy(get_optimizer_state_dict(net, sampler))
    loaded = made(other, 0.9)
    set_optimizer_state_dict(other, loaded, saved)
    other.load_state_dict(net.state_dict())
    net.advance(sampler, 5)
    other.advance(loaded, 5)
    assert same_bits(net.layer.weight, other.layer.weight)
    assert torch.all(loaded.state[other.layer.weight][key] == 0.3)


# ---- Errors ----------------------------------------------------------------------


# What is refused of any tensors that are given is in test_given_tensors.py.
def test_a_friction_needs_a_mass() -> None:
    sampler = make(parameters())
    with refused(ValueError, "Invalid friction: it needs a mass"):
        sampler.set_mass(None, [1.0] * 4)
    sampler.set_mass([1.0] * 4, [2.0] * 4)
    saved = copy.deepcopy(sampler.state_dict())
    del saved["state"][1]["given_mass"]
    with refused(
        ValueError, "Invalid state_dict: the state of parameter 1 lacks given_mass"
    ):
        sampler.load_state_dict(saved)


def test_more_than_a_friction_can_be() -> None:
    params = parameters()
    begin = [p.detach().clone() for p in params]
    sampler = make(params)
    sampler.set_mass([1.0, 2.0, 1.0, 1.0], [1.0, 12.0, 1.0, 1.0])
    with refused(
        ValueError,
        "Invalid momentum: 0.8, with which the largest friction (1 - momentum) C / M "
        "is 1.2. No parameter has changed (must not exceed 1: raise momentum, or give "
        "more mass or less friction)",
    ):
        advance(sampler, params)
    for estimate in ("online", "given"):  # before it is in use, and beside a matrix
        sampler = make(params, noise_estimate=estimate)
        sampler.set_gradient_covariance(torch.zeros(18, 18, dtype=torch.float64))
        if estimate == "online":
            sampler.set_gradient_variance(None)
        sampler.set_mass([1.0] * 4, [1.0, 1.0, 6.0, 1.0])
        with pytest.raises(ValueError, match=r"C / M is 1\.2\. No param"):
            advance(sampler, params)
        assert not any("num_grads" in sampler.state[p] for p in params)
    assert_same(params, begin)
    sampler = make(params)
    sampler.set_mass([1.0, 2.0, 1.0, 1.0], [1.0, 10.0, 1.0, 1.0])
    advance(sampler, params, 1)  # of 1, no momentum is left
    for p, q in zip(params, begin, strict=True):
        p.detach().copy_(q)

    # β̂ = 0.15, and its friction 0.2 * 0.7
    friction = torch.tensor([1.0, 0.75, 0.7, 1.0, 1.0])
    masses = [1.0, 1.0, torch.tensor([1.0, 0.5, 0.5, 1.0, 1.0]), 1.0]
    for estimate in (0.15, "given", 0.0):
        sampler = make(params)
        sampler.param_groups[1]["noise_estimate"] = estimate
        if estimate == "given":  # β̂ = lr N V / (2T) = 0.25 V
            sampler.set_gradient_variance([0.0, 0.0, 0.6, 0.0])
        sampler.set_mass(masses, [1.0, 1.0, friction, 1.0])
        if estimate:
            with refused(
                ValueError,
                "Invalid noise_estimate: 0.15 in the noisiest coordinate. No parameter "
                "has changed (must not exceed its friction (1 - momentum) C = 0.14: "
                "lower momentum or lr, or take larger minibatches)",
            ):
                advance(sampler, params)
        assert_same(params, begin)
    advance(sampler, params)


def test_a_matrix_takes_masses_into_account() -> None:
    params = parameters()
    sampler = make(params, noise_estimate="given")
    # Of α M - B̂, with B̂ / M = 0.25 V / M.
    sampler.set_gradient_covariance(0.6 * torch.eye(18, dtype=torch.float64))
    with refused(
        ValueError,
        "Invalid noise_estimate: -0.05 is the least eigenvalue of α - B, α = 1 - "
        "momentum and B = lr N Var / (2 T) (must be >= 0: lower momentum or lr, or "
        "take larger minibatches)",
    ):
        advance(sampler, params)
    sampler.set_mass([2.0] * 4)
    advance(sampler, params)


def test_what_cannot_be_tuned() -> None:
    p = nn.Parameter(torch.ones(3))
    sampler = sg.SGHMC([p], 0.01, **COMMON)
    sampler.set_mass([2.0])
    with refused(
        ValueError,
        "Invalid sampler: it has masses, by which heat differs between coordinates "
        "(tune lr without, then set_mass())",
    ):
        sg.tune(sampler, lambda: p.square().sum().backward())


# ---- The law: false alarms as in harness.statistics ------------------------------

NOISE = np.diag([1.0, 0.3, 0.6])
MASS, FRICTION = np.array([0.8, 4.0, 1.2]), np.array([1.6, 1.5, 2.5])


def method(*, friction: bool, given: bool, mutation: str = "") -> Method:
    """SGHMC with masses, and its law."""

    def build(groups: Any, **settings: Any) -> sg.SGHMC:
        if given:
            settings["noise_estimate"] = "given"
        sampler = sg.SGHMC(groups, **settings)
        widths = [p.shape[1] for g in sampler.param_groups for p in g["params"]]
        mass, rubbed, noise = (
            torch.tensor(a).split(widths)
            for a in (
                MASS if mutation != "inverse" else 1 / MASS,
                FRICTION if mutation != "friction of mass" else FRICTION * MASS,
                np.diag(NOISE),
            )
        )
        sampler.set_mass(mass, rubbed if friction else None)
        if given:
            sampler.set_gradient_variance(noise)
        return sampler

    def law(target: Any, c: Coordinates) -> Law:
        rubbed = FRICTION if friction else MASS
        own = {
            **c,
            "lr": c["lr"] / MASS,
            "momentum": 1 - (1 - c["momentum"]) * rubbed / MASS,
            "noise_estimate": c["noise_estimate"] / MASS,
        }
        left = replace(target, gradient_noise=0 * NOISE) if given else target
        return sghmc_law(left, own)

    return Method("SGHMC with masses", build, law, lambda _: (0.0, 0.0))


def experiment(chosen: Method, **settings: Any) -> Experiment:
    target = Quadratic(
        correlated(3, seed=5, condition=3.0), np.array([1.0, -1.0, 0.5]), NOISE
    )
    common = {"lr": 0.16, "momentum": 0.8, "num_data": 1, "temperature": 1.3}
    groups = (Group((1,)), Group((2,), {"momentum": 0.7}))
    return Experiment(
        chosen,
        target,
        {**common, **settings},
        groups,
        chains=500,
        seed=12,
        dtype=torch.float64,
    )


@pytest.mark.parametrize("friction", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("every", [0, 3])
def test_law(every: int, given: bool, friction: bool) -> None:
    settings = {"resample_momentum_every": every}
    if not given:
        settings["noise_estimate"] = 0.05
    chosen = experiment(method(friction=friction, given=given), **settings)
    check_stationary(chosen)


@pytest.mark.parametrize("mutation", ["inverse", "friction of mass"])
def test_wrong_units_are_caught(mutation: str) -> None:
    friction = mutation != "inverse"
    wrong = method(friction=friction, given=False, mutation=mutation)
    assert_caught(check_stationary, experiment(wrong))


@pytest.mark.parametrize("mutant", ["no friction", "no mass", "no estimate"])
def test_what_is_not_handed_on_is_caught(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method_of_mass = sg.SGHMC._BY_COORDINATE
    right = method_of_mass.operator

    def wrong(*lists: list[Tensor], **numbers: Any) -> None:
        *before, masses, frictions, masters = lists
        if mutant == "no friction":
            frictions = []
        elif mutant == "no mass":
            masses = [torch.ones_like(m) for m in masses]
            frictions = []
        else:
            numbers["noise_estimate"] = 0.0
        right(*before, masses, frictions, masters, **numbers)

    monkeypatch.setattr(method_of_mass, "operator", wrong)
    chosen = experiment(method(friction=True, given=False), noise_estimate=0.19)
    assert_caught(check_stationary, chosen)


@pytest.mark.parametrize("mutant", ["momentum", "step"])
def test_wrong_updates_beside_a_matrix_are_caught(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(group: Any, rates: Any, *rest: Any) -> None:
        friction, lr = rates
        if mutant == "momentum":
            friction = torch.full_like(friction, 1 - group["momentum"])
        else:
            lr = torch.full_like(lr, group["lr"])
        update_(group, (friction, lr), *rest)

    monkeypatch.setattr(given_covariance, "update_", wrong)
    with pytest.raises(AssertionError):
        test_algorithm_2_written_out("matrix", True)


def test_a_start_of_another_mass_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_forget(*args: Any, **kwargs: Any) -> list[Tensor]:
        start_momenta(*args, **kwargs)
        return []

    monkeypatch.setattr(sghmc, "start_momenta", start_and_forget)
    with pytest.raises(AssertionError):
        test_algorithm_2_written_out(0.03, False)
