"""Simulation-based calibration: its laws, what it measures, says and refuses."""

import itertools
import math
import sys

import pytest
import torch
from sbc_problem import TARGET, N, calibrate, gaussian, gaussian_loss, hmc, prior, sgld

import torch_sgmcmc as sg
from torch_sgmcmc.calibration import Calibration, sbc
from torch_sgmcmc.diagnostics.ranks import RankLaw

pytestmark = pytest.mark.full


def test_the_law_is_exact():
    """All 4^5 outcomes of five simulations with three draws, one by one."""
    law = RankLaw(5, 3)
    outcomes = [torch.tensor(r) for r in itertools.product(range(4), repeat=5)]
    counts = torch.stack([law.counts(ranks) for ranks in outcomes])
    tails = law.tails.gather(1, counts.T).amin(0)
    for ranks, tail in list(zip(outcomes, tails.tolist(), strict=True))[::7]:
        as_bad = float((tails <= tail * (1 + 1e-12)).double().mean())
        assert law.p_value(ranks) == pytest.approx(as_bad, abs=1e-12)
    for coverage in (0.5, 0.8, 0.95):
        low, high = law.band(coverage)
        inside = ((counts >= low) & (counts <= high)).all(1).double().mean()
        assert coverage <= float(inside)


@pytest.mark.parametrize("simulations, draws", [(60, 9), (200, 500)])
def test_the_band_covers(simulations, draws):
    g = torch.Generator().manual_seed(0)
    law = RankLaw(simulations, draws)
    low, high = law.band(0.9)
    ranks = torch.randint(draws + 1, (4000, 1, simulations), generator=g)
    counts = ((ranks[i] <= law.ranks[:, None]).sum(1) for i in range(len(ranks)))
    inside = torch.stack([((k >= low) & (k <= high)).all() for k in counts])
    # Three standard errors, and what a band of whole numbers covers too much.
    error = 3 * math.sqrt(0.9 * 0.1 / 4000)
    assert 0.9 - error < float(inside.double().mean()) < 0.9 + error + 0.02


def test_points_and_differences():
    ranks = torch.tensor([0, 0, 1, 3, 3, 3, 2, 0, 3, 1])
    result = Calibration({"f": ranks}, 3, 10, 1, {"f": 0.0})
    z, off = result.ecdf_difference("f")
    assert z.tolist() == [0.25, 0.5, 0.75]
    expected = torch.tensor([0.3 - 0.25, 0.5 - 0.5, 0.6 - 0.75], dtype=torch.float64)
    torch.testing.assert_close(off, expected, rtol=0, atol=1e-15)
    low, high = result.band(0.9)
    assert bool((low < 0).all()) and bool((high > 0).all())
    with pytest.raises(ValueError, match=r"Invalid name: 'g' \(must be one of f\)"):
        result.ecdf_difference("g")
    for wrong in (0, 1):
        with pytest.raises(ValueError, match="Invalid rate"):
            result.passed(wrong)
        with pytest.raises(ValueError, match="Invalid coverage"):
            result.band(wrong)


def test_several_quantities_are_several_chances():
    """The worst of 40 uniform ones alone would often be rejected."""
    g = torch.Generator().manual_seed(1)
    refused, alone = 0, 0
    for _ in range(50):
        ranks = {str(j): torch.randint(8, (20,), generator=g) for j in range(40)}
        result = Calibration(ranks, 7, 20, 1, dict.fromkeys(ranks, 0.0))
        refused += not result.passed(0.05)
        alone += min(result.p_values.values()) <= 0.05
    assert refused <= 7  # at 0.05: 1.5 % to be more
    assert alone > 25


def test_thin_is_measured():
    """SGLD on a Gaussian is autoregressive, with ρ = 1 - lr (precision / N)."""
    rho = 1 - 0.1 * (1 + N) / N
    result = calibrate(sgld, simulations=100, draws=5)
    assert 0.7 < result.thin / ((1 + rho) / (1 - rho)) < 1.6
    result = calibrate(hmc, simulations=100, draws=5)
    assert result.thin <= 2


def test_autocorrelation_equals_the_draws():
    rho = 1 - 0.1 * (1 + N) / N
    result = calibrate(sgld, draws=50, thin=4)
    for name in ("theta[0]", "theta[1]"):
        # Few draws' mean takes some off: a part of about τ / L.
        assert abs(result.autocorrelation[name] - rho**4) < 0.06


def test_dicts_and_quantities():
    """Two parameters by their names, and quantities of one's own."""

    def two(n, generator):
        theta = prior(n, generator)
        return {"constant": theta[:, 0], "contrast": theta[:, 1:]}

    def joined(theta):
        return torch.cat([theta["constant"][:, None], theta["contrast"]], 1)

    options = {"simulations": 50, "draws": 7, "thin": 1, "warmup": 5}
    simulate = lambda theta, g: gaussian(joined(theta), g)  # noqa: E731
    loss = lambda theta, data: gaussian_loss(joined(theta), data)  # noqa: E731
    results = [
        sbc(
            two, simulate, loss, hmc, quantities=each, seed=3, progress=False, **options
        )
        for each in (None, {"sum": lambda theta, data: joined(theta).sum(1)})
    ]
    names = ["constant", "contrast[0]", "squared norm", "log likelihood"]
    assert list(results[0].ranks) == names
    assert list(results[1].ranks) == ["sum"]
    assert len(set(results[1].ranks["sum"].tolist())) > 4


def test_equal_values_have_random_ranks():
    constant = {"constant": lambda theta, data: torch.zeros(len(theta))}
    result = calibrate(hmc, quantities=constant, simulations=1000, thin=1)
    assert result.passed(1e-3)
    assert len(set(result.ranks["constant"].tolist())) == 16


@pytest.mark.nightly
def test_draws_that_alternate():
    """HMC of nearly half a period comes out on the other side: thinned too."""

    def half(params, seed):
        return hmc(params, seed, num_steps=5)

    first = {"theta[0]": lambda theta, data: theta[:, 0]}
    options = {"draws": 15, "warmup": 20, "simulations": 4000}
    options["quantities"] = first  # alternates, and has no slow part
    alternating = calibrate(half, **options, thin=1)
    assert alternating.autocorrelation["theta[0]"] < -0.6
    assert not alternating.passed(1e-6)
    assert "ranks crowd in the middle" in alternating.summary()
    thinned = calibrate(half, **options)
    assert thinned.thin > 5
    assert thinned.passed(1e-3)


def test_preparations():
    seen = []

    def warm(sampler, closure):
        sampler.warmup(closure, 30, progress=False)
        seen.append(sampler.param_groups[0]["step_size"])

    def fixed_length(params, seed):
        return hmc(params, seed, num_steps=None, trajectory_length=0.6)

    result = calibrate(fixed_length, prepare=warm, at_once=150, thin=2, warmup=5)
    assert len(seen) == 2 and all(size != 0.2 for size in seen)
    assert result.passed(1e-3)


def test_summary():
    ranks = {"a": torch.arange(160) % 16, "b": torch.zeros(160, dtype=torch.int64)}
    result = Calibration(ranks, 15, 160, 9, {"a": 0.0, "b": 0.25})
    lines = str(result).splitlines()
    assert lines[0] == "160 simulations, 15 draws of each posterior, one in 9 steps"
    assert lines[2].split() == ["a", "1", "+0.000", "0.00"]
    assert lines[3].split()[0] == "b" and lines[3].split()[2:] == ["+0.938", "0.25"]
    assert lines[4] == "ranks are NOT uniform (at a rate of 0.01 for the 2 together)"
    constant = {"b": math.nan, "a": 0.5}  # "b" is constant within chains
    fine = Calibration({"a": ranks["a"]}, 15, 160, 9, constant).summary(0.05)
    assert "all ranks are uniform (at a rate of 0.05 for the quantity)" in fine
    assert "draws are correlated (0.50 from one to the next)" in fine


def test_the_picture(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    result = Calibration({"a": torch.arange(160) % 16}, 15, 160, 9, {"a": 0.0})
    with matplotlib.rc_context({"figure.constrained_layout.use": True}):
        figure = result.plot(0.9)
    (axes,) = figure.axes
    assert axes.lines[0].get_ydata() == pytest.approx([0.0] * 15)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["90 % of uniform ranks", "a"]
    matplotlib.pyplot.close(figure)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"Calibration\.plot\(\) needs matplotlib"):
        result.plot()


@pytest.mark.parametrize(
    "change, error",
    [
        ({"simulations": 9}, r"Invalid simulations: 9 \(must be >= 10\)"),
        ({"draws": 2}, "Invalid draws: 2"),
        ({"thin": 0}, "Invalid thin: 0"),
        ({"warmup": -1}, "Invalid warmup: -1"),
        ({"at_once": 0}, "Invalid at_once: 0"),
        ({"batch_size": 0}, "Invalid batch_size: 0"),
        ({"batch_size": 7}, r"Invalid batch_size: 7 \(must be in \[1, 6\]\)"),
        ({"quantities": {}}, "Invalid quantities: there are none"),
        ({"quantities": {"f": lambda theta, data: theta}},
         r"Invalid quantity: 'f' is a Tensor of shape \[20, 2\]"),
        ({"quantities": {"f": lambda theta, data: theta[:, 0] / 0}},
         "Invalid quantity: 'f' is not finite"),
        ({"prior": lambda n, g: torch.zeros(n + 1, 2)},
         r"prior\(\) returned a Tensor of shape \[21, 2\].* \(must be a Tensor"),
        ({"prior": lambda n, g: torch.zeros(n, 65), "simulate": lambda theta,
         g: torch.zeros(20, 6)}, "there are 65 coordinates"),
        ({"simulate": lambda theta, g: torch.zeros(20)},
         r"simulate\(\) returned a Tensor of shape \[20\]"),
        ({"simulate": lambda theta, g: (torch.zeros(20, 6), torch.zeros(20, 5))},
         r"simulate\(\) returned a Tensor of shape \[20, 5\]"),
        ({"loss": lambda theta, data: gaussian_loss(theta, data).mean(1)},
         r"loss\(\) returned a Tensor of shape \[20\].* of shape \[20, 6\]"),
        ({"sampler": lambda p, s: sg.SGLD(p, 0.1, num_data=7)},
         r"Invalid num_data: 7.* \(simulate\(\) makes 6 data\)"),
        ({"sampler": lambda p, s: sg.SGLD([torch.zeros(2)], 0.1, num_data=6)},
         "it lacks some of the parameters that it was given"),
        ({"sampler": lambda p, s: sg.SBPS(p, num_data=6)},
         "Invalid sample_interval: None"),
    ],
)  # fmt: skip
def test_bad_arguments(change, error):
    options = {
        "prior": prior,
        "simulate": gaussian,
        "loss": gaussian_loss,
        "sampler": hmc,
        "simulations": 20,
        "draws": 3,
        "warmup": 2,
        "thin": 1,
        "progress": False,
        "seed": 0,
        **change,
    }
    with pytest.raises(ValueError, match=error):
        sbc(**options)


def test_no_sampler():
    with pytest.raises(TypeError, match=r"sampler\(\) returned a SGD \(must be a Samp"):
        calibrate(lambda p, s: torch.optim.SGD(p, 0.1), thin=1)


def test_chains_too_slow_to_measure(monkeypatch):
    from torch_sgmcmc import calibration

    monkeypatch.setattr(calibration, "_LONGEST_PILOT", 512)
    with pytest.raises(RuntimeError, match="still correlate over 512 steps"):
        calibrate(lambda p, s: sg.SGLD(p, 1e-5, **TARGET, seed=s), simulations=20)


def test_any_default_device(set_default_device) -> None:
    def normal(*shape, generator):
        return torch.randn(*shape, generator=generator, device="cpu")

    def calibrated() -> Calibration:
        return sbc(
            lambda n, g: normal(n, 2, generator=g),
            lambda theta, g: theta[:, None] + normal(len(theta), 4, 2, generator=g),
            lambda theta, data: (data - theta[:, None]).square().sum(2) / 2,
            lambda p, s: sg.SGLD(p, 0.1, num_data=4, prior_precision=1.0, seed=s),
            simulations=20,
            draws=7,
            warmup=5,
            batch_size=2,
            thin=2,
            seed=0,
            progress=False,
        )

    expected = calibrated()
    set_default_device("meta")
    assert calibrated().summary() == expected.summary()
