"""R-hat and effective draws from batches: ArviZ's numbers, and what they show."""

import math

import pytest
import torch
from torch import Tensor

from torch_sgmcmc.judge.after.agreement import agreement_of
from torch_sgmcmc.judge.convergence import Convergence
from torch_sgmcmc.judge.convergence.batch_means import effective_draws, split_rhat

pytestmark = pytest.mark.full


def noise(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def of(draws: Tensor) -> Convergence:
    """Of draws [chains, draws, ...]."""
    return agreement_of(draws).convergence


def autoregressive(rho: float, chains: int, draws: int, quantities: int) -> Tensor:
    """Of variance 1, with autocorrelations rho**t."""
    kicks = math.sqrt(1 - rho * rho) * noise(chains, draws, quantities)
    kicks[:, 0] /= math.sqrt(1 - rho * rho)
    for t in range(1, draws):
        kicks[:, t] += rho * kicks[:, t - 1]
    return kicks


@pytest.mark.parametrize("draws", [4, 62, 1000])
def test_rhat_is_arviz_s(draws: int) -> None:
    arviz = pytest.importorskip("arviz")
    values = 3 + 0.1 * noise(3, draws, 4).cumsum(1) + torch.tensor([0, 1e3, 0, -1e2])
    report = of(values)
    assert (report.num_chains, report.num_draws) == (3, draws)
    for i in range(4):
        expected = arviz.rhat(values[..., i].numpy(), method="split")
        assert float(report.rhat[i]) == pytest.approx(float(expected), rel=1e-10)


def test_batches_are_as_good_as_their_draws() -> None:
    values = noise(2, 4096, 3).cumsum(1)
    batches = values.reshape(2, 64, 64, 3)
    means = batches.mean(2)
    squares = (batches - means[:, :, None]).square().sum(2)
    rhat, _ = split_rhat(means, squares, 64)
    torch.testing.assert_close(rhat, of(values).rhat)


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.9])
def test_effective_draws_of_autoregressive_chains(rho: float) -> None:
    """All 100 quantities' long-run variances together are known to a percent.

    Batch means give σ² (1 - k / 2E) on average and have a relative variance of
    2 / mk: m = 4 chains, k = 64 batches of 128, E effective draws a chain.
    """
    chains, draws, quantities, count = 4, 8192, 100, 64
    values = autoregressive(rho, chains, draws, quantities)
    batches = values.reshape(chains, count, -1, quantities)
    means = batches.mean(2)
    squares = (batches - means[:, :, None]).square().sum(2)
    ess, at_most = effective_draws(means, squares, draws // count)
    each = draws * (1 - rho) / (1 + rho)
    assert not at_most.any()
    ratio = chains * each / ess
    # Exactly 2 Σ t ρ_t / b (1 + 2 Σ ρ_t), which is k / 2E where ρ is near 1.
    short = 2 * rho / (1 - rho * rho) / (draws / count)
    error = math.sqrt(2 / (chains * count) / quantities)
    assert abs(float(ratio.mean()) - (1 - short)) < 4 * error  # 6e-5 to be wrong
    assert 0.7 < float(ratio.std()) / math.sqrt(2 / (chains * count)) < 1.4


def test_a_drift_that_all_chains_share() -> None:
    values = noise(4, 640, 1)
    assert float(of(values).rhat) < 1.02
    assert float(of(values + torch.linspace(0, 3, 640)[:, None]).rhat) > 1.1


def test_the_spread_of_many_chains_is_counted() -> None:
    """A chain each in one of two modes: all their draws are worth few."""
    values = noise(4, 1024, 1)
    values[2:] += 10
    report = of(values)
    assert float(report.rhat) > 5
    assert bool(report.at_most.all())
    assert float(report.ess) <= 4 * 8 * 1.1


def test_short_chains_say_at_most() -> None:
    slow = of(autoregressive(0.99, 2, 1024, 20))  # 5 a chain
    assert bool(slow.at_most.all())
    assert "at most as many as said: 20 of 20" in slow.summary()
    assert "effective draws a chain: 0 of 20" in slow.summary(ess_per_chain=1)


def test_constants_are_counted_and_enter_no_quantile() -> None:
    values = noise(2, 200, 3)
    values[:, :, 1] = 0.1  # its sums round
    report, rest = of(values), of(values[:, :, [0, 2]])
    assert report.constant.tolist() == [False, True, False]
    for found in (report.rhat, report.ess):
        assert found.isnan().tolist() == report.constant.tolist()
    for kind, found in report.quantiles(0, 0.5, 1).items():
        assert torch.equal(found, rest.quantiles(0, 0.5, 1)[kind])
    assert "constant in all draws: 1 of 3" in report.summary()
    assert "constant" not in rest.summary()
    nothing = of(torch.ones(2, 8, 3))
    assert "all 3 are constant" in nothing.summary()
    assert nothing.quantiles(0.5)["rhat"].isnan().all()


def test_chains_that_stand_still_apart() -> None:
    draws = torch.arange(4.0)[:, None, None].expand(4, 40, 1)
    report = of(torch.cat([draws, noise(4, 40, 1)], 2))
    assert report.rhat[0] == math.inf
    assert not report.constant.any()
    assert report.quantiles(1.0)["rhat"].item() == math.inf
    assert "R-hat infinite: 1 of 2" in report.summary()


def test_quantiles_go_from_best_to_worst() -> None:
    draws = noise(2, 100, 11)
    draws[0] += torch.arange(11.0)
    report = of(draws)
    found = report.quantiles(0, 0.5, 1)
    assert found["rhat"].tolist() == report.rhat.sort().values[[0, 5, 10]].tolist()
    few = report.ess.sort(descending=True).values
    assert found["ess"].tolist() == few[[0, 5, 10]].tolist()
    lines = report.summary(rhat=1.2, ess_per_chain=1).splitlines()
    assert lines[0] == "Outputs: 2 chains of 100 draws, 11 quantities"
    assert [line[:8].strip() for line in lines[1:4]] == ["", "R-hat", "ESS"]
    assert lines[4] == f"R-hat < 1.2: {int((report.rhat < 1.2).sum())} of 11"
    assert str(report) == repr(report) == report.summary()
    with pytest.raises(ValueError, match=r"Invalid level: 1\.5"):
        report.quantiles(1.5)
