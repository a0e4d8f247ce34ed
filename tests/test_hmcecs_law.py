"""What HMC-ECS samples, and every known bug, which must be seen.

False alarms: see the note in ``harness.statistics``. Means over time of one chain are
compared by the means of 100 stretches of it, each far longer than the chain remembers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness.ecs import (
    MUTATIONS,
    ONLY_IN_THE_GRADIENT,
    SIGNED_MUTATIONS,
    Logistic,
    ReferenceECS,
)
from harness.statistics import Array, StatisticalError, check_mean, check_z
from torch import Tensor

import torch_sgmcmc as sg

HARD = Logistic(anchor=1.2)  # expansions so poor that every term matters
# A strong prior, without which |L̂| is large far away, where L is not.
MILD = Logistic(anchor=1.0, prior=8.0)

SIGNED = {"num_products": 3, "num_blocks": 3}
BOUND = -3.0


def expectations(law: Array, model: Logistic) -> Array:
    grid = model.grid()
    return np.array([law @ grid, law @ grid**2])


def moments(theta: Array, law: Array, model: Logistic) -> Array:
    """f - E f for f = θ and θ², along a new last axis."""
    return np.stack([theta, theta**2], axis=-1) - expectations(law, model)


def signed_moments(theta: Array, sign: Array, model: Logistic) -> Array:
    """What has mean 0 if chain and signs are right."""
    law, mean_sign = model.signed_law(SIGNED["num_products"], BOUND)
    return np.concatenate(
        [
            sign[..., None] * moments(theta, model.law(), model),
            moments(theta, law, model),
            sign[..., None] - mean_sign,
        ],
        axis=-1,
    )


def reference(mutation: str | None) -> None:
    """Chains that start in their law and must keep it."""
    law = HARD.perturbed_law()
    start = np.random.default_rng(1).choice(HARD.grid(), size=3000, p=law)
    sampler = ReferenceECS(
        HARD,
        start,
        step_size=0.6,
        num_steps=3,
        num_blocks=2,
        seed=3,
        mutation=mutation,
    )
    for _ in range(20):
        sampler.step()
    kept = [moments(sampler.step()[0], law, HARD) for _ in range(40)]
    check_mean(np.mean(kept, axis=0), 0.0, label=mutation or "reference")


def signed_reference(mutation: str | None) -> None:
    law, _ = MILD.signed_law(SIGNED["num_products"], BOUND)
    sampler = ReferenceECS(
        MILD,
        np.random.default_rng(1).choice(MILD.grid(), size=1000, p=law),
        step_size=0.6,
        num_steps=3,
        seed=3,
        lower_bound=BOUND,
        mutation=mutation,
        **SIGNED,
    )
    sampler.counts[:] = 0  # where only counts that are drawn anew get away from
    for _ in range(30):
        sampler.step()
    kept = [signed_moments(*sampler.step(), MILD) for _ in range(25)]
    check_mean(np.mean(kept, axis=0), 0.0, label=mutation or "reference")


@pytest.mark.parametrize("check", [reference, signed_reference])
def test_the_reference_is_right(check: Callable[[None], None]) -> None:
    check(None)


@pytest.mark.parametrize("mutation", sorted(set(MUTATIONS) - {ONLY_IN_THE_GRADIENT}))
def test_a_bug_is_caught(mutation: str) -> None:
    with pytest.raises(StatisticalError):
        reference(mutation)


@pytest.mark.parametrize("mutation", SIGNED_MUTATIONS)
def test_a_bug_of_the_signed_sampler_is_caught(mutation: str) -> None:
    with pytest.raises(StatisticalError):
        signed_reference(mutation)


# ---- The sampler on the same models -----------------------------------------------


def one_chain(model: Logistic, steps: int, **settings: Any) -> tuple[Array, Array]:
    p = torch.tensor([model.anchor], dtype=torch.float64, requires_grad=True)
    sampler = sg.HMCECS(
        [p],
        num_data=model.n,
        subsample_size=model.m,
        control_variate=1,
        mass_matrix="identity",
        prior_precision=model.prior,
        step_size=0.6,
        trajectory_length=1.8,
        seed=11,
        **settings,
    )
    closure = model.closure(p)
    sampler.set_anchor(closure, progress=False)
    draws, signs = np.empty(steps), np.empty(steps)
    for i in range(steps):
        sampler.step(closure)
        draws[i], signs[i] = p.item(), sampler.sign
    return draws, signs


def stretches(values: Array) -> Array:
    return values.reshape(100, -1, values.shape[-1]).mean(axis=1)


def test_the_perturbed_target() -> None:
    draws, signs = one_chain(HARD, 2500, variant="perturbed", num_blocks=2)
    assert np.all(signs == 1)
    ours = moments(draws, HARD.perturbed_law(), HARD)
    check_mean(stretches(ours), 0.0, label="perturbed")
    # The posterior itself is another one, by far more than the check's error.
    with pytest.raises(StatisticalError):
        off = moments(draws, HARD.law(), HARD)
        check_mean(stretches(off), 0.0, label="posterior")


def test_the_signed_target() -> None:
    draws, signs = one_chain(MILD, 2500, variant="signed", **SIGNED)
    ours = signed_moments(draws, signs, MILD)
    check_mean(stretches(ours), 0.0, label="signed")


def test_the_perturbation_falls_with_the_subsample() -> None:
    law = HARD.law()
    far = [0.5 * np.abs(HARD.perturbed_law(m) - law).sum() for m in (2, 4)]
    # O(1 / m²), see eq. 4.6 of the paper.
    assert far[0] > 0.1
    assert far[1] < 0.3 * far[0]


# ---- Energy along a trajectory ----------------------------------------------------


def energy_error(mutation: str | None, num_steps: int) -> float:
    """Root mean square of ΔH along trajectories of length 1."""
    rng = np.random.default_rng(1)
    start = rng.choice(HARD.grid(), size=2000, p=HARD.perturbed_law())
    sampler = ReferenceECS(
        HARD,
        start,
        step_size=1 / num_steps,
        num_steps=num_steps,
        num_blocks=2,
        mutation=mutation,
    )
    sampler.update_theta()
    return float(np.sqrt(np.mean(sampler.log_ratios**2)))


def test_energy_is_conserved_by_the_reference_alone() -> None:
    assert 3.7 < energy_error(None, 20) / energy_error(None, 40) < 4.3
    for mutation in (
        ONLY_IN_THE_GRADIENT,
        "fresh u inside the trajectory",
        "Metropolis test with the energy of all data",
    ):
        assert energy_error(mutation, 20) / energy_error(mutation, 40) < 2


@pytest.mark.parametrize("variant", ["perturbed", "signed"])
def test_energy_is_conserved_by_the_sampler(variant: str) -> None:
    """ΔH of trajectories of one length from one place: c ε² + O(ε⁴)."""
    errors = []
    for steps in (20, 40, 80):
        p = torch.tensor([1.9, -0.4], dtype=torch.float64, requires_grad=True)
        sampler = sg.HMCECS(
            [p],
            num_data=HARD.n,
            subsample_size=HARD.m,
            variant=variant,
            num_products=5,
            mass_matrix="diagonal",
            prior_precision=0.7,
            temperature=1.7,
            step_size=1.2 / steps,
            seed=5,
        )
        x, y = torch.tensor(HARD.x), torch.tensor(HARD.y)

        def closure(i: Tensor, p: Tensor = p, x: Tensor = x, y: Tensor = y) -> Tensor:
            eta = x[i] * p[0] + (x[i] ** 2).sin() * p[1] ** 3
            return y[i] * eta - torch.nn.functional.softplus(eta)

        sampler.set_anchor(closure, progress=False)
        with torch.no_grad():
            p.copy_(torch.tensor([0.4, -0.9]))
        errors.append(abs(sampler._sweep(closure)))
    assert errors[-1] > 1e-7  # far above rounding
    assert 3.8 < errors[1] / errors[2] < 4.2


# ---- Larger models against HMC ----------------------------------------------------


def poisson(eta: Tensor, y: Tensor) -> Tensor:
    return y * eta - eta.exp()


def logistic(eta: Tensor, y: Tensor) -> Tensor:
    return y * eta - torch.nn.functional.softplus(eta)


def gaussian(eta: Tensor, y: Tensor) -> Tensor:
    return -0.5 * (y - eta) ** 2


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (logistic, {"subsample_size": 100}),
        (logistic, {"subsample_size": 10, "variant": "signed", "num_products": 40}),
        (poisson, {"subsample_size": 100}),
        # m so large that the first order's perturbation is far below the error.
        (gaussian, {"subsample_size": 300, "control_variate": 1}),
    ],
)
def test_regressions_against_hmc(
    kind: Callable[[Tensor, Tensor], Tensor], settings: dict[str, Any]
) -> None:
    n, d, g = 400, 3, torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    x[:, 0] = 1
    eta = x @ torch.tensor([0.3, -0.5, 0.4], dtype=torch.float64)
    if kind is logistic:
        y = torch.bernoulli(torch.sigmoid(eta), generator=g)
    elif kind is poisson:
        y = torch.poisson(eta.exp(), generator=g)
    else:
        y = eta + torch.randn(n, generator=g, dtype=torch.float64)

    def loss(theta: Tensor) -> Tensor:  # U / n, for theta of shape [..., d]
        return -kind(theta @ x.t(), y).mean(dim=-1)

    mode = torch.zeros(d, dtype=torch.float64)
    eye = torch.eye(d, dtype=torch.float64)
    for _ in range(20):
        slope = n * torch.func.grad(loss)(mode) + mode
        hessian = n * torch.func.hessian(loss)(mode) + eye
        mode = mode - torch.linalg.solve(hessian, slope)
    chains = mode.repeat(400, 1).requires_grad_()
    hmc = sg.HMC(
        [chains], 0.3, num_steps=5, num_data=n, prior_precision=1.0,
        num_chains=400, seed=1,
    )  # fmt: skip
    hmc.set_mass([hessian.diagonal()])

    def losses() -> Tensor:
        values = loss(chains)
        values.sum().backward()
        return values

    kept = []
    for i in range(40):
        hmc.step(losses)
        if i >= 10:
            kept.append(chains.detach().clone().numpy())
    exact = np.stack(kept).reshape(-1, 400, d)
    mean, sd = exact.mean(axis=(0, 1)), exact.std(axis=(0, 1))

    p = torch.tensor(mean, dtype=torch.float64).requires_grad_()
    sampler = sg.HMCECS([p], num_data=n, prior_precision=1.0, seed=2,
                        trajectory_length=1.6, num_blocks=10, **settings)  # fmt: skip

    def closure(indices: Tensor) -> Tensor:
        return kind(x[indices] @ p, y[indices])

    sampler.warmup(closure, 100, progress=False)
    draws, signs = np.empty((1000, d)), np.empty((1000, 1))
    for i in range(1000):
        sampler.step(closure)
        draws[i], signs[i] = p.detach().numpy(), sampler.sign
    scaled = (draws - mean) / sd
    # As stretches of ten steps; the error of HMC's own moments is added to theirs.
    z, theirs = (
        np.concatenate([values, values**2 - 1], axis=-1)
        for values in (scaled, (exact - mean) / sd)
    )
    ours = (signs * z).reshape(100, -1, 2 * d).mean(axis=1)
    other = theirs.mean(axis=0)
    error = np.sqrt(ours.var(axis=0, ddof=1) / 100 + other.var(axis=0) / 400)
    check_z({"moments": ours.mean(axis=0) / error}, label="regression")
    assert np.mean(signs) > 0.9
    assert sampler.acceptance_rate > 0.6
