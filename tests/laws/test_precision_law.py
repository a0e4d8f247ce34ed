"""Gibbs updates of prior precisions follow their conditional and the prior."""

import pytest
from harness.gibbs import check_conditional, check_joint

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
