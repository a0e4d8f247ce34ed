"""HMC-ECS: control variates and estimators."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from ecs_data import F64, Data, estimate, make

import torch_sgmcmc as sg
from torch_sgmcmc.core.ops import ecs_estimate
from torch_sgmcmc.samplers._ecs.subsample import SubsampleDraws
from torch_sgmcmc.samplers._ecs.target import Estimator
from torch_sgmcmc.samplers._ecs.taylor import whitening


def test_the_second_order_of_a_gaussian_model_has_no_variance():
    data = Data("gaussian")
    sampler = make(data, subsample_size=5)
    for _ in range(20):
        sampler.step(data)
        assert sampler.estimator_variance < 1e-20
    assert sampler.subsample_acceptance_rate == 1
    first = Data("gaussian")
    sampler = make(first, subsample_size=5, taylor_order=1)
    for _ in range(5):
        sampler.step(first)
    assert sampler.estimator_variance > 1e-4


def test_whitening():
    g = torch.Generator().manual_seed(0)
    root = torch.randn(4, 4, generator=g, dtype=F64)
    h = root @ root.t() + torch.eye(4, dtype=F64)
    w = whitening("dense", h)
    torch.testing.assert_close(w @ w.t(), torch.linalg.inv(h))
    diagonal = whitening("diagonal", h)
    torch.testing.assert_close(diagonal**2, 1 / h.diagonal())
    assert whitening("identity", h) is None
    # Saddles: by the absolute curvature; flat directions: not by 0.
    saddle = whitening("dense", torch.diag(torch.tensor([4.0, -9.0, 0.0], dtype=F64)))
    inverse = (saddle @ saddle.t()).diagonal()
    expected = torch.tensor([1 / 4, 1 / 9, 1e8 / 9], dtype=F64)
    torch.testing.assert_close(inverse, expected)
    flat = whitening("diagonal", torch.zeros(2, 2, dtype=F64))
    torch.testing.assert_close(flat, torch.ones(2, dtype=F64))


def draws_of(*layout):
    names = ("num_data", "num_cells", "num_blocks", "batch_size", "poisson", "seed")
    return SubsampleDraws(dict(zip(names, layout, strict=True)))


def z_of_share(count, draws, share):
    return abs(count - draws * share) / math.sqrt(draws * share * (1 - share))


def test_cells_are_parted_into_blocks():
    draws = draws_of(100, 13, 5, 1, False, 0)
    begins = [draws.begin(block) for block in range(6)]
    assert (begins[0], begins[5]) == (0, 13)
    assert {b - a for a, b in pairwise(begins)} == {2, 3}


def test_data_and_blocks_are_drawn_uniformly():
    """Thirteen z-tests of |z| < 5: one fails once in 10^5 seeds."""
    draws, steps = draws_of(4, 10, 5, 1, False, 1), 4000
    data, proposed, blocks = np.zeros(4), np.zeros(4), np.zeros(5)
    for step in range(steps):
        counts, indices = draws.draw(step)
        assert counts == [1] * 10 and len(indices) == 10
        data += np.bincount(indices, minlength=4)
        block, counts, indices = draws.propose(step)
        assert counts == [1, 1] and len(indices) == 2
        blocks[block] += 1
        proposed += np.bincount(indices, minlength=4)
    assert all(z_of_share(count, 10 * steps, 1 / 4) < 5 for count in data)
    assert all(z_of_share(count, 2 * steps, 1 / 4) < 5 for count in proposed)
    assert all(z_of_share(count, steps, 1 / 5) < 5 for count in blocks)


def test_numbers_of_minibatches_are_poisson():
    """Seven z-tests of |z| < 5: one fails once in 2 10^5 seeds."""
    draws, found = draws_of(50, 8, 2, 3, True, 9), []
    for step in range(6000):
        for *_, counts, indices in (draws.draw(step), draws.propose(step)):
            assert len(indices) == 3 * sum(counts)
            found += counts
    assert len(found) == 12 * 6000
    for k in range(7):
        share = math.exp(-1) / math.factorial(k)
        assert z_of_share(found.count(k), len(found), share) < 5, k


def test_draws_are_pure_functions_of_layout_and_step():
    a, b = (draws_of(1000, 50, 10, 2, True, seed) for seed in (7, 8))

    def drawn(draws, step):
        return draws.draw(step)[1].tolist()

    assert drawn(a, 3) == drawn(a, 3)
    assert drawn(a, 3) != drawn(a, 4) and drawn(a, 3) != drawn(b, 3)
    assert a.propose(3)[2].tolist() != b.propose(3)[2].tolist()
    one = draws_of(1_000_000, 20, 1, 1, False, 7)
    assert drawn(one, 3) != one.propose(3)[2].tolist()
    # As they have always been.
    small = draws_of(4, 10, 5, 1, False, -3)
    assert drawn(small, 2**40 + 3) == [3, 2, 0, 3, 3, 1, 0, 0, 1, 1]
    assert small.propose(2**40 + 3)[0] == 0
    counts, indices = draws_of(50, 8, 2, 3, True, 9).draw(3)
    assert counts == [0, 1, 0, 0, 2, 1, 1, 1] and indices[:3].tolist() == [49, 6, 21]
    assert draws_of(50, 8, 2, 3, True, 9).propose(3)[:2] == (1, [2, 2, 1, 1])


def test_sizes_of_draws_out_of_range():
    for name, sizes in (
        ("num_data", (0, 1, 1, 1)),
        ("num_cells", (1, 0, 1, 1)),
        ("num_blocks", (1, 1, 2, 1)),
        ("batch_size", (1, 1, 1, 0)),
        ("num_cells", (1, 2**27, 1, 1)),
        ("num_cells", (1, 2**25, 1, 3)),
    ):
        with pytest.raises(ValueError, match=f"Invalid {name}: "):
            draws_of(*sizes, False, 0)


def test_steps_of_draws_out_of_range():
    draws = draws_of(5, 1, 1, 1, False, 0)
    for draw in (draws.draw, draws.propose):
        with pytest.raises(ValueError, match="Invalid step: "):
            draw(2**48)


def block_poisson(d, n, m, products, low):
    return estimate(Estimator(n, m, products, low), d)


def test_the_operator_makes_the_same_estimates():
    """The operator equals tensor code, bitwise, for all sizes of the last eight."""
    g = torch.Generator().manual_seed(2)
    for size in (2, 5, 8, 11, 1023, 1032, 2049):
        d = torch.randn(3 * size, generator=g, dtype=F64)
        zero = torch.zeros(1, dtype=F64)
        for sizes in (
            {"num_data": 7e3, "batch_size": 1, "num_factors": 0, "lower_bound": 0.0},
            {"num_data": 9.0, "batch_size": size, "num_factors": 4, "lower_bound": -5},
        ):
            gradients = torch.zeros(1, len(d), 1, dtype=F64)
            plain = (d, zero, zero, torch.zeros_like(d), gradients, None, None)
            weights, _, numbers = ecs_estimate(*plain, temperature=1.0, **sizes)
            ours, derivatives = estimate(Estimator(**sizes), d)
            assert torch.equal(derivatives, weights)
            assert [*ours] == numbers.tolist()


def test_the_signed_estimator_is_unbiased():
    """Over all counts and minibatches, for λ = 2, m = 2, N = 3."""
    d, m, bound = torch.tensor([0.4, -0.9, 0.3], dtype=F64), 2, -1.1
    minibatches = [d[list(u)] for u in product(range(3), repeat=m)]
    # The sum over X of Poisson(1) weights times means over X minibatches each, for
    # both factors: the number of minibatches in all is Poisson(2).
    total, probability = 0.0, 0.0
    for count in range(4):
        mean, several = 0.0, list(product(minibatches, repeat=count))
        for chosen in several:
            data = torch.cat(chosen) if chosen else torch.empty(0, dtype=F64)
            found, _ = block_poisson(data, 3.0, m, 2, bound)
            mean += found.sign * math.exp(found.log) / len(several)
        total += math.exp(-2) * 2**count / math.factorial(count) * mean
        probability += math.exp(-2) * 2**count / math.factorial(count)
    # What four and more minibatches add is known: by
    # E f^X, f the mean of one factor's term.
    f = float((3.0 * d.mean() - bound) / 2)
    first = sum((2 * f) ** k / math.factorial(k) for k in range(4))
    rest = math.exp(bound + 2 - 2) * (math.exp(2 * f) - first)
    assert 0.8 < probability < 1
    assert math.isclose(total + rest, math.exp(float(d.sum())), rel_tol=1e-9)
    assert abs(rest) < 0.1 * total


pytestmark = pytest.mark.full

pytest.importorskip("arviz")


def run():
    p = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    sizes = {"num_data": 40, "subsample_size": 3, "num_factors": 4, "num_blocks": 4}
    settings = {"trajectory_length": 1.0, "step_size": 0.3, "prior_precision": 1.0}
    sampler = sg.HMCECS([p], estimator="signed", **sizes, **settings, seed=0)
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


def test_bad_arguments():
    sampler = run()
    with pytest.raises(ValueError, match=r"Invalid draws: shape \[5\] \(must be \[R"):
        sg.ECSEfficiency.of(sampler, torch.zeros(5))
    with pytest.raises(ValueError, match="Invalid signs: must be 5 numbers"):
        sg.ECSEfficiency.of(sampler, torch.zeros(5, 2), torch.zeros(5))
