"""Gauges of SBPS: windows of its flight, in which T_kin = T_conf = T.

Fixed seeds. Whether both languages have the same numbers, and go on with them, is in
test_cpp_chains.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C
from torch_sgmcmc.bouncy.flight import Flight, Piece, _steered

N, EXAMPLES = 100.0, 4
SIZES = (24, 8)
PRIORS = (0.0, 60.0)
CURVATURES = torch.cat([torch.linspace(0.5, 2.0, 24), torch.linspace(2.0, 4.0, 8)])

Settings = dict[str, Any]

#: Settings, and the spread of the examples' gradients, by curvature.
RIGHT: dict[str, tuple[Settings, float]] = {
    "noisy": ({"refresh_rate": 1.0}, 0.15),
    "exact": ({"refresh_rate": 5.0, "temperature": 0.5}, 0.0),
    # About the standard deviations, unevenly.
    "given": (
        {"preconditioned": True, "given": (0.15, 0.04), "refresh_rate": 1.0},
        0.05,
    ),
}


class Chain:
    """SBPS on a Gaussian, observed once it is there; A is frozen."""

    def __init__(
        self,
        settings: Settings,
        spread: float,
        *,
        dtype: torch.dtype = torch.float32,
        sizes: tuple[int, ...] = SIZES,
        seed: int = 3,
        every: int = 20,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        is_usual = sizes == SIZES
        self.curvatures = CURVATURES if is_usual else torch.ones(sum(sizes))
        self.params = [
            nn.Parameter(torch.randn(size, generator=generator).to(dtype) / N**0.5)
            for size in sizes
        ]
        self.spread = spread
        self.noise = torch.Generator().manual_seed(5)
        priors = PRIORS if is_usual else [0.0] * len(sizes)
        groups = [
            {"params": [p], "prior_precision": prior}
            for p, prior in zip(self.params, priors, strict=True)
        ]
        own = {key: value for key, value in settings.items() if key != "given"}
        self.sampler = sg.SBPS(groups, num_data=N, replacement=True, seed=seed, **own)
        if "given" in settings:
            self.sampler.set_preconditioner(settings["given"])
        self.run(200)
        for group in self.sampler.param_groups:
            group["adapt"] = False
        self.run(100)
        self.gauges = sg.Gauges(self.sampler, every=every)

    def losses(self) -> Tensor:
        """Of examples whose gradients have noise of their own."""
        p, k = torch.cat([p.float() for p in self.params]), self.curvatures
        noise = torch.randn(EXAMPLES, len(p), generator=self.noise)
        return (k * p**2).sum() / 2 + self.spread * k * noise @ p

    def run(self, steps: int, scale: float = 1.0) -> None:
        for _ in range(steps):
            self.sampler.step(lambda: scale * self.losses())

    @property
    def faults(self) -> set[str]:
        return {found.fault for found in self.gauges.findings()}


def looks(chain: Chain) -> tuple[bool, bool]:
    """Whether temperatures are known well enough, and T to 3.5 standard errors."""
    temperature = chain.sampler.param_groups[0]["temperature"]
    readings = [chain.gauges.tensor(i) for i in range(len(chain.params))]
    known = right = True
    for reading in (*readings, chain.gauges.all()):
        for mean, half_width in (reading.kinetic, reading.configurational):
            known &= half_width < 0.3 * temperature
            right &= abs(mean - temperature) < 1.75 * half_width + 1e-6
        mean, half_width = reading.excess
        right &= abs(mean) < 1.75 * half_width
    return known, right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("noisy", torch.bfloat16),
        ("exact", torch.float32),
        ("given", torch.float32),
    ],
)
def test_both_temperatures_are_that_of_the_target(name: str, dtype: Any) -> None:
    chain = Chain(*RIGHT[name], dtype=dtype)
    for _ in range(2):  # as often as a wrong one is looked at
        chain.run(2000)
        known, right = looks(chain)
        assert right or not known
    assert known
    assert chain.faults == set()
    assert 100 < chain.gauges.num_observed < 400


@pytest.mark.slow
def test_intervals_cover() -> None:
    """At least 92 %: of 32 tensors 24 or more but for one time in 1,000."""
    chain = Chain({"refresh_rate": 1.0}, 0.15, sizes=(8,) * 32)
    chain.run(1500)
    for which in ("kinetic", "configurational"):
        readings = [getattr(chain.gauges.tensor(i), which) for i in range(32)]
        covered = sum(abs(r.mean - 1) < r.half_width for r in readings)
        assert covered >= 24


# ---- What is wrong -----------------------------------------------------------------


@pytest.mark.slow
def test_lost_bounces() -> None:
    """A band that many observations are above: the particle flies out too far."""
    chain = Chain({"confidence": 0.0, "refresh_rate": 1.0}, 0.3)
    chain.run(2500)
    assert chain.faults == {"not in equilibrium"}
    mean, half_width = chain.gauges.all().configurational
    assert mean - half_width > 1.2
    assert "unless bounces are lost" in chain.gauges.summary()


def test_a_velocity_that_is_not_shared_out() -> None:
    """What a particle that came from far away keeps without refreshments."""
    chain = Chain({}, 0.15)
    with torch.no_grad():
        chain.params[0].add_(3.0)
    chain.gauges.reset()
    chain.run(1200)
    assert chain.faults == {"hot", "cold"}
    summary = chain.gauges.summary()
    assert "the velocity lies in other tensors (a refresh_rate" in summary
    assert "that is the velocity's part in this tensor" in summary


@pytest.mark.slow
def test_observe_sees_another_loss() -> None:
    """Its own temperatures are of whatever target is sampled, observe()'s are not."""
    chain = Chain({"refresh_rate": 1.0, "sample_interval": 0.3}, 0.15)
    chain.run(300, scale=0.6)
    chain.gauges.reset()
    chain.run(2500, scale=0.6)
    assert looks(chain) == (True, True)
    chain.gauges.detach()
    gauges = sg.Gauges(chain.sampler, every=10**9)
    chain.sampler.register_sample_hook(
        lambda *_: gauges.observe(lambda: chain.losses().mean().backward())
    )
    chain.run(1500, scale=0.6)
    mean, half_width = gauges.tensor(0).configurational
    assert abs(mean - 1 / 0.6) < 1.75 * half_width < 0.5


def without_rates(flight: Flight, piece: Piece) -> tuple[Flight, Piece]:
    return flight, piece._replace(rate=1.0 if piece.rate > 0 else 0.0)


def of_signs(flight: Flight, piece: Piece) -> tuple[Flight, Piece]:
    """Whether G is above 0, not by how much."""
    return flight, piece._replace(value=piece.rate if piece.value > 0 else 0.0)


def not_whitened(flight: Flight, piece: Piece) -> tuple[Flight, Piece]:
    return Flight([replace(part, preconditioner=[]) for part in flight.parts]), piece


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [without_rates, of_signs, not_whitened])
def test_wrong_sums_are_seen(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    right = sg.Gauges._fly
    monkeypatch.setattr(sg.Gauges, "_fly", lambda g, *a: right(g, *wrong(*a)))
    chain = Chain(*RIGHT["given"], seed=4)
    for _ in range(2):
        chain.run(2000)
        if looks(chain) == (True, False):
            return
    assert not all(looks(chain))


def accepts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _C.BounceClock, "accepts", staticmethod(lambda rate, value, **_: value > 0)
    )


def stale_reflections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the gradient of the bounce before."""
    right, kept = Flight.reflected, []

    def reflected(flight: Flight, time: float, grads: Any, common: Any) -> Flight:
        kept.append([grad.clone() for grad in grads])
        return right(flight, time, kept[max(len(kept) - 2, 0)], common)

    monkeypatch.setattr(Flight, "reflected", reflected)


def off_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off g, and not off Ag."""
    right = Flight.reflected

    def reflected(flight: Flight, time: float, grads: Any, common: Any) -> Flight:
        scales = [part.preconditioner for part in flight.parts]
        plain = [
            replace(part, preconditioner=[torch.ones_like(a) for a in scale])
            for part, scale in zip(flight.parts, scales, strict=True)
        ]
        turned = right(Flight(plain), time, grads, common).parts
        for part, scale in zip(turned, scales, strict=True):
            part.preconditioner = scale
        return _steered(turned, common)

    monkeypatch.setattr(Flight, "reflected", reflected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("noisy", accepts_all),
        ("noisy", stale_reflections),
        ("given", off_the_gradient),
    ],
)
def test_wrong_bounces_are_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, break_it: Any
) -> None:
    chain = Chain(*RIGHT[name])
    break_it(monkeypatch)
    for _ in range(5):
        chain.run(500)
        # Five looks, at one's rate of false alarms.
        findings = chain.gauges.findings(rate=0.002)
        if "not in equilibrium" in {found.fault for found in findings}:
            return
    raise AssertionError(chain.gauges.summary())


# ---- Windows -----------------------------------------------------------------------


def test_windows_of_one_length() -> None:
    """By hand: T_kin, and T_conf with what is taken off, in windows of 2."""
    host = _C.Gauges([2, 3, 0, 4], [0, 0, 1, 1])
    settings = [((0.0, N, 2.0, 0.0, 0.0), (int(_C.Motion.FLIGHT), 0, 0))] * 4
    nan = float("nan")

    def fly(wait: float, rate: float, value: float, *numbers: float) -> None:
        """The last two are y · v at the end, of lines that began 3 earlier."""
        squares, ends = [*numbers[:2], nan, nan], [*numbers[2:], nan, nan]
        products = [end - 3 * v for end, v in zip(ends, squares, strict=True)]
        piece = 3.0, wait, rate, value
        host.add_flight(piece, squares, products, settings, steps=2)

    def means() -> list[tuple[float, float, int]]:
        each = (host.series(i) for i in (0, 1, 2, 3, 4, 5, 6))
        return [(kin.mean, conf.mean, kin.count) for kin, conf, *_ in each]

    fly(0.0, 4.0, 2.0, 0.3, 0.7, 1.0, 1.0)  # 1/2 bounce
    fly(2.0, 0.0, 5.0, 0.3, 0.7, 1.0, 1.0)  # none: 1/4 a time
    assert host.series(6)[0].count == 0
    fly(1.5, 8.0, 2.0, 0.4, 0.6, 2.0, -1.0)  # 1/4 bounce; then 0.75 in 3.5
    fly(0.5, 2.0, -1.0, 0.2, 0.8, 0.0, 3.0)  # ends the window
    # D = 5 move. Integrals of y · v: 1.5 (2 − 0.75 · 0.4), 0.5 (0 − 0.25 · 0.2), ...
    first = 5 / 2 * 2 * (1.5 * 0.4 + 0.5 * 0.2) / 2
    rates = 0.5 / 2, 0.75 / 3.5
    force = 2.0 / 4 - rates[0] * 1.5 * (2 - 0.3) - rates[1] * 0.5 * (0 - 0.05)
    other = -1.0 / 4 - rates[0] * 1.5 * (-1 - 0.45) - rates[1] * 0.5 * (3 - 0.2)
    confs = [5 / 2 * 2 * 2 * force / 2, 5 / 2 * 2 * 2 * other / 3]
    seen = means()
    assert seen[0] == pytest.approx((first, confs[0], 1))
    assert seen[1][1] == pytest.approx(confs[1])
    assert [count for *_, count in seen] == [1, 1, 0, 0, 1, 0, 1]
    assert seen[6][0] == pytest.approx(2)
    # Half of a window, then three and a half, and what begins the next is kept.
    fly(8.0, 1.0, 1.0, 0.4, 0.6, 0.0, 0.0)
    assert host.series(6)[0].count == 5
    assert host.series(0)[0].means[-1] == pytest.approx(2 * 5 * 0.4 / 2)
    state = host.state
    again = _C.Gauges([2, 3, 0, 4], [0, 0, 1, 1])
    again.state = state
    assert repr(again.state) == repr(state)  # with NaN
    for wrong in ([*state[:-1], state[-1][:-1]], state[:-2]):
        with pytest.raises(ValueError, match="Invalid state"):
            again.state = wrong
    # A wait of 1,000 windows shows that they are too short: of 16 times the length.
    fly(2000.0, 0.0, 0.0, 0.4, 0.6, 0.0, 0.0)
    assert host.series(6)[0].count == 5 + 2000 // 32


def test_an_observation_goes_on() -> None:
    whole, parts = (Chain(*RIGHT["noisy"]) for _ in range(2))
    whole.run(300)
    parts.run(150)
    state = parts.gauges.state_dict()
    parts.gauges.detach()
    parts.gauges = sg.Gauges(parts.sampler, every=20)
    parts.gauges.load_state_dict(state)
    parts.run(150)
    assert parts.gauges.state_dict() == whole.gauges.state_dict()
    assert whole.gauges.num_observed > 5


def test_a_tensor_that_does_not_move() -> None:
    chain = Chain({}, 0.15)
    chain.params[1].requires_grad_(False)
    chain.run(500)
    assert math.isnan(chain.gauges.tensor(1).kinetic.mean)
    kinetic = chain.gauges.tensor(0).kinetic
    assert kinetic.mean == pytest.approx(1, rel=1e-6)


def test_a_failed_step_is_not_observed() -> None:
    chain = Chain(*RIGHT["noisy"])
    chain.run(100)
    before = chain.gauges.state_dict()
    chain.spread = float("nan")
    with pytest.raises(RuntimeError, match="not finite"):
        chain.run(1)
    assert chain.gauges.state_dict() == before
