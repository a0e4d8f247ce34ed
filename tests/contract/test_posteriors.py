"""Settings that mean the same in posteriors, as docs/coming_from.md has them.

Needs ``pip install posteriors`` (0.1.3), which no extra has.
"""

import math

import pytest
import torch

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

posteriors = pytest.importorskip("posteriors")

N, PRECISION, CURVATURE, TEMPERATURE = 500, 3.0, 0.7, 2.0
LR, ALPHA, SIGMA, BETA = 0.2, 1.5, 0.8, 2000.0  # ε, α, σ and β
THETA, MOMENTUM = 0.5, 0.03

OURS = {
    "sgld": lambda p, **target: sg.SGLD(p, LR, **target),
    "sglrw": lambda p, **target: sg.SGLRW(p, LR, **target),
    "sghmc": lambda p, **target:
     sg.SGHMC(p, (LR / SIGMA) ** 2, momentum=1 - LR * ALPHA / SIGMA**2,
     noise_estimate=(LR / SIGMA) ** 2 * TEMPERATURE / N * BETA / 2, **target),
    "sgnht": lambda p, **target:
     sg.SGNHT(p, (LR / SIGMA) ** 2, momentum=1 - LR * ALPHA / SIGMA**2, **target),
    "baoa": lambda p, **target:
     sg.BAOA(p, (LR / SIGMA) ** 2, momentum=math.exp(-LR * ALPHA / SIGMA**2), **target),
}  # fmt: skip


def loss(theta):
    return CURVATURE * theta.square().sum() / 2


def theirs(kind, start):
    """θ and v after a step."""

    def log_posterior(theta, batch):
        # As its documents have it: a mean, and of the prior an N-th.
        return -loss(theta) - PRECISION * theta.square().sum() / 2 / N, torch.zeros(())

    has_momenta = kind not in ("sgld", "sglrw")
    options = {"alpha": ALPHA, "sigma": SIGMA, "momenta": MOMENTUM}
    if kind == "sghmc":
        options["beta"] = BETA
    transform = getattr(posteriors.sgmcmc, kind).build(
        log_posterior, LR, temperature=TEMPERATURE / N, **options if has_momenta else {}
    )
    state, _ = transform.update(transform.init(start.clone()), None)
    return state.params, LR / SIGMA**2 * state.momenta if has_momenta else None


def ours(kind, start):
    p = start.clone().requires_grad_()
    sampler = OURS[kind](
        [p], num_data=N, prior_precision=PRECISION, temperature=TEMPERATURE, seed=0
    )
    loss(p).backward()
    if kind not in ("sgld", "sglrw"):
        sampler.state[p]["momentum"] = torch.full_like(start, LR / SIGMA**2 * MOMENTUM)
    sampler.step()
    return p.detach(), sampler.state[p].get("momentum")


@pytest.mark.parametrize("kind", OURS)
def test_a_step_has_the_same_law(kind):
    """Its moments, of 400,000 elements; 5 standard errors: 1e-5 false alarms in all.

    Its SGHMC and SGNHT move by the momentum that was, ours by the new one.
    """
    torch.manual_seed(0)
    start = torch.full((400_000,), THETA, dtype=torch.float64)
    pairs = list(zip(theirs(kind, start), ours(kind, start), strict=True))
    if kind in ("sghmc", "sgnht"):
        (moved, _), *pairs = pairs
        torch.testing.assert_close(moved, start + LR / SIGMA**2 * MOMENTUM)
    for expected, found in pairs:
        if expected is None:
            continue
        error = 5 * math.sqrt(2 / len(start))
        spread = float(expected.std())
        assert abs(float(found.mean() - expected.mean())) < error * spread
        assert abs(float(found.var() / expected.var()) - 1) < error * math.sqrt(2)
