"""Var(ḡ) that SGHMC is given: of each coordinate, or as one matrix."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sghmc_problem
import torch
from failed_steps import refused
from harness.chains import Experiment, Group, assert_caught, check_stationary
from harness.methods import Coordinates, Law, Method, sghmc_law
from harness.targets import Quadratic, correlated
from reference import same_bits
from sghmc_problem import (
    COMMON,
    advance,
    check_a_state_dict_continues,
    check_algorithm_2,
    parameters,
    some,
)
from short_chains import assert_same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import torch_sgmcmc as sg
from torch_sgmcmc.chain import given_covariance

GIVEN = {**COMMON, "noise_estimate": "given"}


def make(params: list[nn.Parameter], **settings: Any) -> sg.SGHMC:
    return sghmc_problem.make(params, **{"noise_estimate": "given", **settings})


def variances() -> list[Tensor]:
    return some(2, 0.0, 0.1)


def matrix_of(tensors: list[Tensor]) -> Tensor:
    return torch.cat([v.flatten() for v in tensors]).diag()


# ---- One step --------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.0)],
    ids=str,
)
def test_a_diagonal_matrix_is_the_variance_of_each_coordinate(
    dtype: torch.dtype, tolerance: float, every: int
) -> None:
    """The fused update and that of torch's operators, with the very same noise."""
    ends = []
    for is_whole in (False, True):
        params = parameters(dtype)
        settings = {"prior_mean": 0.25, "temperature": 0.7}
        sampler = make(params, resample_momentum_every=every, **settings)
        if is_whole:
            sampler.set_gradient_covariance(matrix_of(variances()))
        else:
            sampler.set_gradient_variance(variances())
        advance(sampler, params)
        ends.append(params)
    for one, other in zip(*ends, strict=True):
        assert (one - other).abs().sum() <= tolerance * max(1, one.numel())


@pytest.mark.parametrize("estimate", ["given", "matrix"])
def test_algorithm_2_written_out(estimate: str) -> None:
    check_algorithm_2(estimate)


def test_threads_change_nothing(set_threads: Callable[[int], None]) -> None:
    """LAPACK's factor of 300 coordinates has other bits with two threads."""
    rows = torch.randn(400, 300, generator=torch.Generator().manual_seed(4))
    covariance = sg.minibatch_covariance([rows.double()], None)
    ends = []
    for count in (1, 2, 3):
        set_threads(count)
        p = nn.Parameter(torch.ones(300, dtype=torch.float64))
        sampler = sg.SGHMC([p], 0.01, **GIVEN)
        sampler.set_gradient_covariance(covariance)
        advance(sampler, [p], 5)
        ends.append(p)
    assert same_bits(ends[0], ends[1]) and same_bits(ends[0], ends[2])


# ---- What examples say -----------------------------------------------------------


def test_variance_of_a_minibatch() -> None:
    """Unbiased: its mean over all minibatches of 3 of 6 is the variance of the mean."""
    data = torch.randn(6, 2, 2, dtype=torch.float64)
    index = torch.combinations(torch.arange(6), 3)
    means = torch.stack([data[i].mean(0) for i in index]).flatten(1)
    exact = torch.cov(means.T, correction=0)
    found = torch.stack(
        [sg.minibatch_covariance([data[i]], 6) for i in index],
    ).mean(0)
    torch.testing.assert_close(found, exact)
    each = torch.stack([sg.minibatch_variance([data[i]], 6)[0] for i in index]).mean(0)
    torch.testing.assert_close(each.flatten(), exact.diagonal())

    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    means = torch.stack([data[i].mean(0) for i in pairs])
    each = torch.stack([sg.minibatch_variance([data[i]], None)[0] for i in pairs])
    torch.testing.assert_close(each.mean(0), means.var(0, correction=0))


def test_gradients_as_torch_func_makes_them() -> None:
    net = nn.Linear(3, 2).double()
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()

    def loss_of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (torch.func.functional_call(net, weights, x) - y).square().sum()

    each = torch.func.vmap(torch.func.grad(loss_of_one), (None, 0, 0))
    gradients = each(dict(net.named_parameters()), x, y)
    found = sg.minibatch_variance(gradients, 70)
    by_hand = []
    for xi, yi in zip(x, y, strict=True):
        net.zero_grad()
        (net(xi) - yi).square().sum().backward()
        by_hand.append([p.grad.clone() for p in net.parameters()])
    for i, v in enumerate(found):
        rows = torch.stack([row[i] for row in by_hand])
        torch.testing.assert_close(v, rows.var(0) / 7 * (1 - 7 / 70))
    sampler = sg.SGHMC(net.parameters(), 1e-4, num_data=70, noise_estimate="given")
    sampler.set_gradient_variance(found)
    sampler.step()


@pytest.mark.parametrize(
    ("gradients", "num_data", "text"),
    [
        ([], 5, "Invalid gradients: none, or without a dimension of examples (must be "
         "[n, *shape] for each parameter)"),
        ([torch.ones(3), torch.ones(2)], 5, "Invalid gradients: number 1 is of "
         "torch.float32 and shape [2] (must be floating point, of 3 examples)"),
        ([torch.ones(3, dtype=torch.int64)], 5, "Invalid gradients: number 0 is of "
         "torch.int64 and shape [3] (must be floating point, of 3 examples)"),
        ([torch.ones(1, 3)], 5, "Invalid gradients: of 1 examples (must be at least "
         "2)"),
        ([torch.ones(6, 3)], 5, "Invalid num_data: 5 (must be at least the 6 "
         "examples)"),
    ],
)  # fmt: skip
def test_invalid_gradients(gradients: list[Tensor], num_data: int, text: str) -> None:
    for function in (sg.minibatch_variance, sg.minibatch_covariance):
        with refused(ValueError, text):
            function(gradients, num_data)


# ---- State -----------------------------------------------------------------------


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("before", [0, 7])
def test_a_state_dict_continues_the_chain(is_whole: bool, before: int) -> None:
    params = parameters(torch.float32)
    sampler = make(params)
    if is_whole:
        sampler.set_gradient_covariance(matrix_of(variances()))
    else:
        sampler.set_gradient_variance(variances())
    check_a_state_dict_continues(sampler, params, before)


def test_one_kind_replaces_the_other() -> None:
    params = parameters()
    sampler = make(params)
    sampler.set_gradient_variance(variances())
    sampler.set_gradient_covariance(matrix_of(variances()))
    assert set(sampler.state) == {"gradient_noise"}
    sampler.set_gradient_variance(variances())
    assert set(sampler.state) == set(params)
    sampler.set_gradient_variance(None)
    assert not sampler.state


# ---- Errors ----------------------------------------------------------------------


def test_a_step_without_variances() -> None:
    params = parameters()
    sampler = make(params)
    with refused(
        RuntimeError,
        "SGHMC has no gradient variance for a parameter of shape [3, 4]: call "
        "set_gradient_variance() before step(), with that of all parameters",
    ):
        advance(sampler, params)
    sampler.set_gradient_covariance(matrix_of(variances()))
    advance(sampler, params)
    sampler.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with refused(
        RuntimeError,
        "SGHMC has a gradient covariance over 18 coordinates, and its parameters have "
        "20: call set_gradient_covariance() anew",
    ):
        advance(sampler, params)


def test_more_noise_than_friction() -> None:
    params = parameters()
    sampler = make(params)
    begin = [p.detach().clone() for p in params]
    # β̂ = lr N V / (2T) = 0.25 V
    sampler.set_gradient_variance([0.0, 0.2, torch.full((5,), 1.0), 0.0])
    with refused(
        ValueError,
        "Invalid noise_estimate: 0.25 in the noisiest coordinate. No parameter has "
        "changed (must not exceed the friction 1 - momentum = 0.2: lower momentum or "
        "lr, or take larger minibatches)",
    ):
        advance(sampler, params)
    # Variances below the friction, of which one direction has too much.
    whole = torch.full((18, 18), 0.3, dtype=torch.float64)
    whole[:12] = whole[:, :12] = 0
    sampler.set_gradient_covariance(whole)
    with refused(
        ValueError,
        "Invalid noise_estimate: -0.25 is the least eigenvalue of α - B, α = 1 - "
        "momentum and B = lr N Var / (2 T) (must be >= 0: lower momentum or lr, or "
        "take larger minibatches)",
    ):
        advance(sampler, params)
    assert_same(params, begin)
    # All of the friction's noise, in one direction: an eigenvalue that is 0.
    sampler.set_gradient_covariance(whole * (0.2 / 0.45))
    advance(sampler, params)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 2), "is of torch.float32 and shape [2, 2] (must be floating "
         "point, and [18, 18]: all coordinates, in the order of the parameters)"),
        (torch.ones(18, 18, dtype=torch.int64), "is of torch.int64 and shape [18, 18] "
         "(must be floating point, and [18, 18]: all coordinates, in the order of the "
         "parameters)"),
        (torch.ones(18, 18).triu(), "has elements out of range (must be finite, and "
         "symmetric)"),
        (torch.full((18, 18), torch.nan), "has elements out of range (must be finite, "
         "and symmetric)"),
        (torch.eye(18).to_sparse(), "has the layout torch.sparse_coo on the device cpu "
         "(must be torch.strided, with numbers)"),
        (torch.eye(18, device="meta"), "has the layout torch.strided on the device "
         "meta (must be torch.strided, with numbers)"),
    ],
)  # fmt: skip
def test_invalid_matrices(value: Tensor, text: str) -> None:
    sampler = make(parameters())
    with refused(ValueError, f"Invalid gradient covariance: it {text}"):
        sampler.set_gradient_covariance(value)
    assert not sampler.state
    saved = sampler.state_dict()
    saved["state"]["gradient_noise"] = {"covariance": value}
    with refused(ValueError, f"Invalid state_dict: gradient_noise {text}"):
        sampler.load_state_dict(saved)
    saved["state"]["gradient_noise"] = [value]
    with refused(
        ValueError,
        "Invalid state_dict: gradient_noise (must be a dict of covariance, a Tensor)",
    ):
        sampler.load_state_dict(saved)


def test_what_excludes_a_matrix() -> None:
    params = [nn.Parameter(torch.ones(2, 3))]
    sampler = sg.SGHMC(params, 0.1, num_chains=2, **GIVEN)
    with refused(
        ValueError,
        "Invalid gradient covariance: a matrix excludes num_chains (give the variance "
        "of each coordinate)",
    ):
        sampler.set_gradient_covariance(torch.eye(6))
    params = parameters()
    sampler = make(params)
    sampler.set_gradient_covariance(matrix_of(variances()))
    sampler.param_groups[1]["noise_estimate"] = 0.01
    with refused(
        ValueError,
        "Invalid noise_estimate: 0.01 (must be 'given' in all groups beside a matrix "
        "over all coordinates; set_gradient_variance(None) removes it)",
    ):
        advance(sampler, params)


# ---- The law: false alarms as in harness.statistics ------------------------------

NOISE = np.array([[1.0, 0.9, 0.0], [0.9, 1.0, -0.3], [0.0, -0.3, 0.6]])
CURVATURE = correlated(3, seed=5, condition=3.0)


def account(what: str) -> np.ndarray:
    return {
        "whole": NOISE,
        "diagonal": np.diag(np.diag(NOISE)),
        "nothing": np.zeros((3, 3)),
    }[what]


def method(what: str, *, mutation: str = "") -> Method:
    """SGHMC that is given a part of the minibatches' covariance, and its law."""

    def build(groups: Any, **settings: Any) -> sg.SGHMC:
        sampler = sg.SGHMC(groups, noise_estimate="given", **settings)
        given = torch.from_numpy(account(what))
        if mutation == "sign":
            given = -given
        if mutation == "shuffled":
            given = given.flip(0, 1)
        rows = []
        widths = [p.shape[1] for g in sampler.param_groups for p in g["params"]]
        parts = given.split(widths)
        for part in parts:
            # Of chains beside each other, coordinates of which follow each other.
            chains = torch.eye(len(sampler.param_groups[0]["params"][0]))
            rows.append(
                torch.cat([torch.kron(chains, v) for v in part.split(widths, 1)], 1)
            )
        sampler.set_gradient_covariance(torch.cat(rows))
        return sampler

    def law(target: Any, c: Coordinates) -> Law:
        left = replace(target, gradient_noise=target.noise - account(what))
        return sghmc_law(left, c)

    return Method(f"SGHMC given {what}", build, law, lambda _: (0.0, 0.0))


def experiment(chosen: Method, **settings: Any) -> Experiment:
    target = Quadratic(CURVATURE, np.array([1.0, -1.0, 0.5]), NOISE)
    given = {"lr": 0.16, "momentum": 0.8, "num_data": 1, **settings}
    groups = (Group((1,)), Group((2,), {"momentum": 0.7}))
    return Experiment(
        chosen, target, given, groups, chains=400, seed=12, dtype=torch.float64
    )


@pytest.fixture
def by_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,200 coordinates in little time; test_algorithm_2_written_out has its own."""

    def cholesky(rest: Tensor) -> Tensor | None:
        factor, info = torch.linalg.cholesky_ex(rest)
        return None if int(info) else factor

    monkeypatch.setattr("torch_sgmcmc.chain.correlated_noise._cholesky", cholesky)


@pytest.mark.usefixtures("by_lapack")
@pytest.mark.parametrize(
    ("every", "what"), [(0, "whole"), (3, "whole"), (0, "diagonal")]
)
def test_law(what: str, every: int) -> None:
    check_stationary(experiment(method(what), resample_momentum_every=every))


def test_what_a_diagonal_leaves() -> None:
    """Along the axes of the least and the most noise, of the posterior's variance."""
    _, axes = np.linalg.eigh(NOISE)
    posterior = np.linalg.inv(CURVATURE)
    found = {}
    for what in ("whole", "diagonal", "nothing"):
        _, cov = experiment(method(what)).law.cycle.stationary()
        found[what] = [
            axis @ cov[:3, :3] @ axis / (axis @ posterior @ axis)
            for axis in (axes[:, 0], axes[:, -1])
        ]
    assert found["whole"] == pytest.approx([1.03, 1.02], abs=0.005)  # lr is not 0
    assert found["diagonal"] == pytest.approx([0.80, 1.30], abs=0.005)
    assert found["nothing"] == pytest.approx([1.07, 1.61], abs=0.005)


@pytest.mark.usefixtures("by_lapack")
@pytest.mark.parametrize("what", ["diagonal", "nothing"])
def test_less_than_the_whole_is_caught(what: str) -> None:
    less = replace(method(what), law=method("whole").law)
    assert_caught(check_stationary, experiment(less))


@pytest.mark.usefixtures("by_lapack")
@pytest.mark.parametrize("mutation", ["sign", "shuffled"])
def test_mutants_are_caught(mutation: str) -> None:
    assert_caught(check_stationary, experiment(method("whole", mutation=mutation)))


@pytest.mark.usefixtures("by_lapack")
@pytest.mark.parametrize("mutant", ["transposed", "scale squared"])
def test_mutants_of_the_factor_are_caught(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = given_covariance.noise_factor

    def wrong(friction: Tensor, scale: Tensor, covariance: Tensor) -> Tensor:
        if mutant == "scale squared":
            scale = scale**2
        factor = right(friction, scale, covariance)
        return factor.T if mutant == "transposed" else factor

    monkeypatch.setattr(given_covariance, "noise_factor", wrong)
    with pytest.raises(AssertionError):
        check_algorithm_2("matrix")
    if mutant == "scale squared":
        assert_caught(check_stationary, experiment(method("whole")))


def test_a_momentum_drawn_afresh_with_all_of_the_noise_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update after a draw takes a part of its gradient, and of the noise."""
    right = given_covariance.noise_factor

    def wrong(friction: Tensor, scale: Tensor, covariance: Tensor) -> Tensor:
        full = (0.01 * 50 / (2 * 0.7)) ** 0.5  # √(lr N / 2T)
        return right(friction, torch.full_like(scale, full), covariance)

    monkeypatch.setattr(given_covariance, "noise_factor", wrong)
    test_a_diagonal_matrix_is_the_variance_of_each_coordinate(torch.float64, 1e-14, 0)
    with pytest.raises(AssertionError):
        test_a_diagonal_matrix_is_the_variance_of_each_coordinate(
            torch.float64, 1e-14, 3
        )


# ---- torch.distributed.checkpoint ------------------------------------------------


def test_no_checkpoints_of_a_matrix() -> None:
    """Those of variances are in test_mass.py."""
    net = nn.Linear(3, 2)
    sampler = sg.SGHMC(net.parameters(), 0.01, **GIVEN)
    sampler.set_gradient_covariance(torch.eye(8))
    with refused(
        RuntimeError,
        "SGHMC has a gradient covariance over all parameters, which "
        "get_optimizer_state_dict cannot hold: save its state_dict() with torch.save",
    ):
        get_optimizer_state_dict(net, sampler)
