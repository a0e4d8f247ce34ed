"""HMC's target, the law of its leapfrog, and a bug that must be caught.

False alarms: see the note in ``harness.statistics``.
"""

import pytest
import torch
from harness import trajectories
from harness.statistics import StatisticalError
from levels import at_levels

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

CHECKS = [
    trajectories.check_invariance,
    trajectories.check_mixing,
    trajectories.check_dynamics,
]
CHECKS += [trajectories.check_kept_momenta, trajectories.check_double_well]


@pytest.mark.parametrize(
    "check", at_levels(CHECKS, default=[CHECKS[0], CHECKS[2]], otherwise="full")
)
def test_law(check):
    check(sg.HMC)


def too_hot(groups, **settings):
    return sg.HMC(groups, **{**settings, "temperature": 1.1 * settings["temperature"]})


@pytest.mark.default
@pytest.mark.parametrize("check", [CHECKS[0], CHECKS[2]])
def test_a_wrong_temperature_is_caught(check):
    with pytest.raises(StatisticalError):
        check(too_hot)


def test_the_checks_reject_and_accept():
    """Acceptance is far from 0 and 1 where the Metropolis test is under test."""
    problem = trajectories.GaussianProblem()
    run = trajectories.Run(
        problem, sg.HMC, problem.draw(seed=1), **trajectories.COARSE
    ).advance(3)
    assert 0.3 < run.sampler.acceptance_rate < 0.8
    assert run.sampler.num_divergences == 0


def anharmonic(p):
    return (0.25 * p**4 + 0.3 * p[:, :1] * p[:, 1:]).sum(dim=1)


def energy_errors(step_size, num_steps):
    """-ΔH of trajectories of length 1, from 500 points with the same momenta."""
    g = torch.Generator().manual_seed(0)
    p = torch.randn(500, 2, generator=g, dtype=torch.float64).requires_grad_()
    sampler = sg.HMC(
        [p], step_size, num_steps=num_steps, num_data=1, num_chains=500, seed=3
    )

    def closure():
        loss = anharmonic(p)
        loss.sum().backward()
        return loss

    _, log_ratios = sampler._trajectory(closure)
    return log_ratios


def test_the_energy_error_is_of_second_order():
    coarse, middle, fine = (energy_errors(1 / n, n) for n in (25, 50, 100))
    assert float(fine.abs().max()) > 1e-7  # far above rounding
    ratios = [float(a.norm() / b.norm()) for a, b in ((coarse, middle), (middle, fine))]
    # ΔH = c ε² + O(ε⁴): the ratios approach 4 with a quarter of the error each.
    assert abs(ratios[1] - 4) < 0.01
    assert abs(ratios[1] - 4) < 0.35 * abs(ratios[0] - 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_trajectory_runs_back(dtype):
    g = torch.Generator().manual_seed(0)
    p = torch.randn(200, 2, generator=g, dtype=dtype).requires_grad_()
    options = {"metropolis": False, "resample_momentum_every": 0, "seed": 3}
    sampler = sg.HMC(
        [p], 0.02, num_steps=40, num_data=1, prior_precision=0.5, **options
    )
    sampler.set_mass([torch.tensor([0.5, 2.0])])

    def closure():
        anharmonic(p).sum().backward()

    start = p.detach().clone()
    sampler.step(closure)
    assert float((p.detach() - start).norm()) > 1
    sampler.state[p]["momentum"].neg_()
    sampler.step(closure)
    error = float((p.detach() - start).abs().max())
    assert error < 1000 * torch.finfo(dtype).eps
