"""R-hat and effective sample sizes of many quantities: ArviZ's numbers."""

import math

import pytest
import torch

from torch_sgmcmc.diagnostics.convergence import convergence_of, shared_noise

pytestmark = pytest.mark.full


def noise(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def of(draws):
    return convergence_of(draws, "Outputs")


def autoregressive(rho, chains, draws, quantities):
    """Chains of variance 1, with autocorrelations rho**t."""
    kicks = math.sqrt(1 - rho * rho) * noise(chains, draws, quantities)
    kicks[:, 0] /= math.sqrt(1 - rho * rho)
    for t in range(1, draws):
        kicks[:, t] += rho * kicks[:, t - 1]
    return kicks


@pytest.mark.default
@pytest.mark.parametrize(("chains", "draws"), [(5, 4), (4, 10), (2, 24)])
def test_effective_draws_of_few_are_not_known(chains, draws):
    """ArviZ's number is its own limit there, n log10 n of all draws."""
    pytest.importorskip("arviz_stats")
    found = of(noise(chains, draws, 50))
    assert found.rhat.isfinite().all()
    assert all(found.quantiles(0.5)[name].isnan() for name in ("ess", "ess_tail"))
    assert "bulk-ESS  not known below 25 draws a chain" in str(found)
    assert of(noise(chains, 25, 50)).quantiles(0.5)["ess"].isfinite()


@pytest.mark.default
def test_no_more_effective_draws_than_draws_are_printed():
    found = of(autoregressive(-0.7, 2, 100, 20))
    assert float(found.ess.median()) > 300
    assert max(map(float, str(found).splitlines()[3].split()[1:])) <= 200


@pytest.mark.parametrize("draws", [4, 62, 1000])
def test_numbers_are_arviz_s(draws):
    arviz = pytest.importorskip("arviz")
    values = 3 + 0.1 * noise(3, draws, 4).cumsum(1) + torch.tensor([0, 1e3, 0, -1e2])
    report = of(values)
    assert (report.num_chains, report.num_draws) == (3, draws)
    for i in range(4):
        one = values[..., i].numpy()
        for found, expected in (
            (report.rhat, arviz.rhat(one, method="rank")),
            (report.ess, arviz.ess(one, method="bulk")),
            (report.ess_tail, arviz.ess(one, method="tail", prob=(0.05, 0.95))),
        ):
            assert float(found[i]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.9])
def test_effective_draws_of_autoregressive_chains(rho):
    ess = of(autoregressive(rho, 4, 4000, 20)).ess.mean()
    assert float(ess) == pytest.approx(16_000 * (1 - rho) / (1 + rho), rel=0.1)


def test_what_ranks_see():
    """A drift that all share, another scale, and heavy tails apart."""
    values = noise(4, 640, 1)
    assert float(of(values).rhat) < 1.02
    assert float(of(values + torch.linspace(0, 3, 640)[:, None]).rhat) > 1.1
    scaled = values.clone()
    scaled[1] *= 4
    assert float(of(scaled).rhat) > 1.1
    tails = values / noise(4, 640, 1, seed=1).abs()
    tails[2] += 2
    assert float(of(tails).rhat) > 1.05


def test_constants_are_counted_and_enter_no_quantile():
    values = noise(2, 200, 3)
    values[:, :, 1] = 0.1  # its sums round
    report, rest = of(values), of(values[:, :, [0, 2]])
    assert report.constant.tolist() == [False, True, False]
    for found in (report.rhat, report.ess, report.ess_tail):
        assert found.isnan().tolist() == report.constant.tolist()
    for kind, found in report.quantiles(0, 0.5, 1).items():
        assert torch.equal(found, rest.quantiles(0, 0.5, 1)[kind])
    assert "constant in all draws: 1 of 3" in str(report)
    assert "constant" not in str(rest)
    assert of(torch.ones(2, 8, 3)).quantiles(0.5)["rhat"].isnan().all()


def test_chains_that_stand_still_apart():
    draws = torch.arange(4.0)[:, None, None].expand(4, 40, 1)
    report = of(torch.cat([draws, noise(4, 40, 1)], 2))
    assert report.rhat[0] == math.inf
    assert not report.constant.any()
    assert report.quantiles(1.0)["rhat"].item() == math.inf


def test_quantiles_go_from_best_to_worst():
    draws = noise(2, 100, 11)
    draws[0] += torch.arange(11.0)
    report = of(draws)
    found = report.quantiles(0, 0.5, 1)
    assert found["rhat"].tolist() == report.rhat.sort().values[[0, 5, 10]].tolist()
    few = report.ess.sort(descending=True).values
    assert found["ess"].tolist() == few[[0, 5, 10]].tolist()
    lines = str(report).splitlines()
    assert lines[0] == "Outputs: 2 chains of 100 draws, 11 quantities"
    names = ["", "R-hat", "bulk-ESS", "tail-ESS"]
    assert [line[:8].strip() for line in lines[1:5]] == names
    assert str(report) == repr(report)
    with pytest.raises(ValueError, match=r"Invalid level: 1\.5"):
        report.quantiles(1.5)


def test_one_chain_is_cut_into_two():
    values = noise(1, 401, 2)
    halves = values[0, 1:].reshape(2, 200, 2)
    torch.testing.assert_close(of(values).rhat, of(halves).rhat)


def test_shared_noise_is_found_and_drift_is_not():
    own, common = noise(3, 300, 8), noise(1, 300, 8, seed=1)
    drift = torch.linspace(0, 50, 300)[:, None].square()
    assert shared_noise(dict(enumerate(own))) == []
    assert shared_noise(dict(enumerate((own + drift).cumsum(1)))) == []
    together = [own[0] + common[0], own[1], own[2] + common[0]]
    assert shared_noise(dict(enumerate(together))) == [(0, 2)]
