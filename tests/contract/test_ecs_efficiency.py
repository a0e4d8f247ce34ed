"""The report on a run of HMC-ECS."""

import math

import pytest
import torch

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

pytest.importorskip("arviz")


def run():
    p = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    sampler = sg.HMCECS(
        [p],
        num_data=40,
        subsample_size=3,
        estimator="signed",
        num_factors=4,
        num_blocks=4,
        trajectory_length=1.0,
        step_size=0.3,
        prior_precision=1.0,
        seed=0,
    )
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)

    def closure(indices):
        return -0.5 * (p[0] + p[1] * x[indices] - 0.3) ** 2

    for _ in range(4):
        sampler.step(closure)
    return sampler


def test_the_numbers():
    sampler = run()
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(4000, 2, generator=g, dtype=torch.float64)
    draws = noise.clone()
    for i in range(1, 4000):  # autocorrelation 0.6 and 0: IF 4 and 1
        draws[i, 0] = 0.6 * draws[i - 1, 0] + 0.8 * noise[i, 0]
    signs = torch.ones(4000)
    signs[::10] = -1  # τ = 0.9, (2τ - 1)² = 0.64
    report = sg.ECSEfficiency.of(sampler, draws, signs)
    assert report.positive == pytest.approx(0.9)
    least, median, largest = report.effective_draws
    assert 4000 * 0.64 / 4 * 0.8 < least < 4000 * 0.64 / 4 * 1.25
    assert 4000 * 0.64 * 0.9 < largest < 4000 * 0.64 * 1.1
    assert median == pytest.approx((least + largest) / 2)
    assert 2.2 < report.inefficiency < 2.8
    assert report.data_used == pytest.approx(100 * 12 / 40)
    assert report.num_steps == 3
    assert report.evaluations == sampler.num_evaluations > 40
    low, _, high = report.computational_time
    assert low == pytest.approx(4000 / largest * report.evaluations)
    assert high == pytest.approx(4000 / least * report.evaluations)
    assert report.acceptance == sampler.acceptance_rate
    assert report.subsample_acceptance == sampler.subsample_acceptance_rate
    unsigned = sg.ECSEfficiency.of(sampler, draws)
    assert unsigned.effective_draws[0] == pytest.approx(least / 0.64)


def test_the_table():
    sampler = run()
    g = torch.Generator().manual_seed(0)
    draws = torch.randn(100, 2, generator=g)
    table = str(sg.ECSEfficiency.of(sampler, draws)).splitlines()
    assert table[1] == "| --- | --- |"
    assert all(line.count("|") == 3 for line in table)
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table}
    assert rows["L"] == "3"
    assert rows["data used, %"] == "30"
    assert rows["τ"] == "1.0000"
    assert len(rows["CT (min, median, max)"].split(",")) == 3


def test_useless_signs():
    signs = torch.tensor([1.0, -1.0] * 20)
    report = sg.ECSEfficiency.of(run(), torch.randn(40, 2), signs)
    assert report.computational_time[1] == math.inf


def test_bad_arguments():
    sampler = run()
    with pytest.raises(ValueError, match=r"Invalid draws: shape \[5\] \(must be \[R"):
        sg.ECSEfficiency.of(sampler, torch.zeros(5))
    with pytest.raises(ValueError, match="Invalid signs: must be 5 numbers"):
        sg.ECSEfficiency.of(sampler, torch.zeros(5, 2), torch.zeros(5))
