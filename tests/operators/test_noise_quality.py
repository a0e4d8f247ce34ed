"""The noise: known answers, the documented counter layout, Gaussian quality."""

import numpy as np
import pytest
import torch
from harness.noise import Battery
from harness.philox import normals, philox
from harness.statistics import StatisticalError

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.ops import gaussian_

pytestmark = pytest.mark.full

# Random123's kat_vectors: counter, key, output of philox4x32 10.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        *([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2),
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert _C.philox4x32(counter, key) == answer
    assert philox(np.array([counter], dtype=np.uint64), tuple(key)).tolist() == [answer]


def test_philox_equals_its_numpy_version_on_random_counters():
    random = np.random.default_rng(0)
    counters = random.integers(2**32, size=(500, 4), dtype=np.uint64)
    for key in random.integers(2**32, size=(4, 2)).tolist():
        ours = [_C.philox4x32(c, key) for c in counters.tolist()]
        assert philox(counters, tuple(key)).tolist() == ours


def draw(count, *, seed=0, step=0, purpose=0, offset=0):
    out = torch.empty(count)
    gaussian_([out], std=1.0, offsets=[offset], seed=seed, step=step, purpose=purpose)
    return out


@pytest.mark.parametrize(
    ("seed", "purpose"),
    [
        *((seed, 1) for seed in (0, 1, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF0)),
        *((0x123456789ABCDEF0, purpose) for purpose in (0, 2, 2**15, 2**16 - 1)),
    ],
)
def test_counter_layout(seed, purpose):
    for step in (0, 1, 2**32 - 1, 2**32, 5 * 2**32 + 7, 2**48 - 1):
        stream = {"seed": seed, "step": step, "purpose": purpose}
        # Offsets on and off the quads and blocks, around 2³² quads, and beyond.
        for offset in (0, 1, 2, 3, 126, 128, 129, 2**34 - 301, 2**34, 2**45 + 77):
            actual = draw(601, offset=offset, **stream).double().numpy()
            expected = normals(offset, 601, **stream)
            # Polynomials of relative error 1.7e-7 and less, and float32 rounding.
            np.testing.assert_allclose(actual, expected, rtol=5e-7, atol=0)


def test_counter_layout_over_many_draws():
    """A million draws, so that the corners of both transforms are met."""
    stream = {"seed": 7, "step": 3, "purpose": 1}
    actual = draw(10**6, **stream).double().numpy()
    expected = normals(0, 10**6, **stream)
    np.testing.assert_allclose(actual, expected, rtol=5e-7, atol=0)


# Each stream differs from the one before in what is named, and in nothing else.
CHANGES = [
    ("consecutive steps", {"step": 1}),
    ("steps 2³² apart", {"step": 1 + 2**32}),
    ("adjacent purposes", {"purpose": 1}),
    ("purposes 2¹⁵ apart", {"purpose": 1 + 2**15}),
    ("adjacent seeds", {"seed": 1}),
    ("seeds 2³² apart", {"seed": 1 + 2**32}),
    ("seeds of either sign", {"seed": 1 + 2**32 - 2**63}),
    ("elements 2²⁷ apart", {"offset": 2**27}),
    ("elements 2³⁴ apart", {"offset": 2**27 + 2**34}),
]


def run_battery(source, count):
    """Feeds a battery with ten streams of noise, ``count`` draws in all."""
    battery, stream = Battery(), {}
    chunk = count // (len(CHANGES) + 1)
    battery.add(source(chunk))
    for differs_in, change in CHANGES:
        stream |= change
        battery.add(source(chunk, **stream), differs_in=differs_in)
    return battery


def test_gaussian_quality_of_40_million_draws():
    """Noise passes; below, noise with too few bits for the tails does not."""
    battery = run_battery(draw, 4 * 10**7)
    assert battery.count == 4 * 10**7
    battery.check("gaussian_")


def _sixteen_bit_radius(count, **stream):
    """Box-Muller with one 16-bit uniform for the radius: 4.85 at most."""
    z = draw(count, **stream).double().view(-1, 2)
    u = torch.exp(-0.5 * (z * z).sum(dim=1, keepdim=True))
    coarse = ((u * 2**16).floor() + 0.5) / 2**16
    return (z * torch.sqrt(torch.log(coarse) / torch.log(u))).float().view(-1)


def altered(name, change):
    """The stream of another seed, step, purpose or offset."""
    return lambda n, **s: draw(n, **{**s, name: change(s.get(name, 0))})


BAD_NOISE = {
    "rounded to bfloat16": lambda n, **s: draw(n, **s).bfloat16().float(),
    "cut off at 4": lambda n, **s: draw(n, **s).clamp(-3.99, 3.99),
    "0.3 % too wide": lambda n, **s: 1.003 * draw(n, **s),
    "shifted by 0.003": lambda n, **s: 0.003 + draw(n, **s),
    "period of 1024 elements": lambda n, **s: draw(n, **s)[torch.arange(n) % 1024],
    "low word of the step ignored": altered("step", lambda k: k >> 32),
    "high word of the step ignored": altered("step", lambda k: k % 2**32),
    "purpose ignored": altered("purpose", lambda k: 0),
    "high bit of the purpose ignored": altered("purpose", lambda k: k % 2**15),
    "seed ignored": altered("seed", lambda k: 0),
    "high word of the seed ignored": altered("seed", lambda k: k % 2**32),
    "sign of the seed ignored": altered("seed", lambda k: k % 2**63),
    "offset ignored": altered("offset", lambda k: 0),
    "high word of the quad ignored": altered("offset", lambda k: k % 2**34),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", BAD_NOISE)
def test_bad_noise_is_caught(name):
    with pytest.raises(StatisticalError):
        run_battery(BAD_NOISE[name], 4 * 10**6).check(name)


@pytest.mark.nightly
def test_missing_tails_are_caught():
    """Noise without values beyond 4.85 (23 too few in 4 10⁷) is caught."""
    with pytest.raises(StatisticalError, match="tail beyond ±5"):
        run_battery(_sixteen_bit_radius, 4 * 10**7).check("16-bit radius")


def test_the_battery_passes_good_noise_of_another_kind():
    """The battery's expectations are not those of one generator."""
    generator = torch.Generator().manual_seed(0)
    run_battery(
        lambda n, **stream: torch.randn(n, generator=generator), 4 * 10**6
    ).check("torch.randn")
