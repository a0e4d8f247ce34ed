"""Simulation-based calibration: every sampler passes, and wrong ones do not."""

import pytest
from levels import at_levels
from sbc_problem import TARGET, calibrate, hmc, sgld

import torch_sgmcmc as sg

pytestmark = pytest.mark.nightly

#: Samplers, and what each needs of the calibration.
ECS = {"subsample_size": 40, "num_blocks": 4, "step_size": 0.5, **TARGET}
BOUNCY = {"sample_interval": 2.0, "refresh_rate": 1.0, **TARGET}
PRECONDITIONED = {"decay": 0.99, "eps": 0.5, **TARGET}
SAMPLERS = {
    "SGLD": (sgld, {"thin": 25}),
    "SGHMC": (lambda p, s: sg.SGHMC(p, 0.05, 0.7, **TARGET, seed=s), {"thin": 15}),
    "PSGLD": (lambda p, s: sg.PSGLD(p, 0.05, **PRECONDITIONED, seed=s), {"thin": 40}),
    "SGNHT": (lambda p, s: sg.SGNHT(p, 0.05, 0.7, **TARGET, seed=s), {"thin": 15}),
    "EWSG": (lambda p, s: sg.EWSG(p, 0.02, 0.8, num_chains=len(p[0]), **TARGET, seed=s),
     {"thin": 40, "batch_size": 4}),
    "HMC": (hmc, {"thin": 2, "warmup": 20}),
    "HMCECS": (lambda p, s: sg.HMCECS(p, **ECS, seed=s),
     {"thin": 4, "warmup": 20, "at_once": 10, "simulations": 60}),
    "SBPS": (lambda p, s: sg.SBPS(p, **BOUNCY, seed=s),
     {"thin": 3, "warmup": 50, "at_once": 4, "simulations": 40}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("sampler", "model"),
    at_levels(
        [
            *((sampler, "Gaussian") for sampler in SAMPLERS if sampler != "HMCECS"),
            *((sampler, "logistic") for sampler in ("SGHMC", "HMCECS")),
        ],
        full=[("SGHMC", "Gaussian"), ("SGHMC", "logistic")],
    ),
)
def test_every_sampler(sampler, model):
    """A right one is refused once in a thousand seeds."""
    make, options = SAMPLERS[sampler]
    if model == "logistic":  # where some data leave a wide posterior
        options = {**options, "thin": 2 * options["thin"]}
    result = calibrate(make, model, **options)
    assert result.passed(1e-3), f"\n{result}"
    assert max(result.autocorrelation.values()) < 0.3
    assert list(result.ranks) == [
        "theta[0]",
        "theta[1]",
        "squared norm",
        "log likelihood",
    ]
    for ranks in result.ranks.values():
        assert ranks.shape == (options.get("simulations", 300),)
        assert 0 <= int(ranks.min()) < 2 and 13 < int(ranks.max()) <= 15


#: What is wrong with each; a wrong one is to be refused at a rate of 1e-6.
def sghmc(*settings, **options):
    return lambda p, s: sg.SGHMC(p, *settings, **options, **TARGET, seed=s)


MUTANTS = {
    "temperature": (lambda p, s: hmc(p, s, temperature=1.5), {}),
    "no noise": (sghmc(0.05, 0.7, temperature=0), {"thin": 5}),
    "minibatches": (
        lambda p, s: sg.SGLD(p, 0.5, **TARGET, seed=s),
        {"thin": 5, "batch_size": 1},
    ),
    "correlated": (sghmc(0.01, 0.0), {"thin": 1, "warmup": 500}),
}


@pytest.mark.parametrize("mutant", at_levels(MUTANTS, full=["temperature"]))
def test_wrong_samplers_are_flagged(mutant):
    make, options = MUTANTS[mutant]
    shared = {"simulations": 2000, "thin": 2, "warmup": 20}
    result = calibrate(make, **{**shared, **options})
    assert not result.passed(1e-6)
    assert "ranks are NOT uniform" in result.summary()
    if mutant == "correlated":
        assert "ranks crowd at both ends" in result.summary()
