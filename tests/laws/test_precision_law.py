"""Gibbs updates of prior precisions follow their conditional and the prior."""

from functools import partial

import pytest
import torch
from harness.gibbs import check_conditional, check_joint

import torch_sgmcmc as sg
from torch_sgmcmc import GammaPrecision

pytestmark = pytest.mark.full

SETTINGS = [(3.0, 2.0, 0.5), (5.0, 1.0, 2.5)]
# The conditional of a single weight then has a shape below 1. (The joint test would
# need far more updates to forget its start.)
SMALL_SHAPE = (0.2, 0.5, 1.0)


@pytest.mark.parametrize(("shape", "rate", "temperature"), [*SETTINGS, SMALL_SHAPE])
def test_conditional(shape, rate, temperature):
    check_conditional(
        GammaPrecision, shape=shape, rate=rate, temperature=temperature, seed=1
    )


def test_joint():
    check_joint(GammaPrecision, shape=3.0, rate=2.0, temperature=0.5, seed=2)


class Prior(torch.nn.Module):
    """Two numbers without data."""

    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def losses(self, batch):
        return 0 * self.p.sum() * batch


def test_joint_of_a_path(tmp_path):
    """λ is drawn where the particle is refreshed: with all events its mean is 0.83."""
    sampler = partial(
        sg.SBPS, num_data=4, prior_precision=1.0, num_std=8, sample_interval=0.25
    )

    def run(refresh_rate):
        return sg.sample(
            Prior(),
            partial(sampler, refresh_rate=refresh_rate),
            [torch.zeros(4, dtype=torch.float64)],
            Prior.losses,
            tmp_path / "store",
            steps=5000,
            schedule=partial(GammaPrecision, shape=3.0, rate=3.0),
            seed=1,
            check=False,
            report=False,
            progress=False,
        )

    with pytest.raises(ValueError, match="refresh_rate is 0"):
        run(0.0)
    store = run(0.5)
    drawn = torch.tensor([draw.prior_precision[0] for draw in store])
    means = drawn[: len(drawn) // 20 * 20].view(20, -1).mean(1)
    assert len(drawn) > 5000
    assert abs(float(means.mean()) - 1) < 4 * float(means.std()) / 20**0.5 < 0.12
