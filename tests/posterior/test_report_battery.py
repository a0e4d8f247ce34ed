"""Verdicts on chains of which the truth is known: each fault, and right chains."""

import re

import pytest
import torch
from torch import nn

import torch_sgmcmc as sg

N = 100
INPUTS = torch.eye(5)


class Line(nn.Module):
    """f(x) = x θ: outputs for the unit matrix are the parameters."""

    def __init__(self, start=0.0, sizes=(5,)):
        super().__init__()
        self.theta = nn.Parameter(torch.full((5,), start))
        for i, size in enumerate(sizes[1:]):
            setattr(self, f"other{i}", nn.Parameter(torch.full((size,), start)))

    def forward(self, x):
        return x @ self.theta


class Drawn(dict):
    """A draw in memory, with its chain."""

    def __init__(self, tensors, chain):
        super().__init__(tensors)
        self.chain = chain


def quadratic(theta):
    """The gradient of a potential whose law is N(0, 1/N)."""
    return theta


def two_wells(theta):
    return theta - 3 * torch.tanh(300 * theta)


def run(
    *,
    chains=4,
    steps=1000,
    burn_in=50,
    every=4,
    lr=0.1,
    momentum=0.5,
    starts=(0.0,),
    force=quadratic,
    noise=0.0,
    seed=0,
    seeds=None,
    sampler=sg.SGHMC,
    sizes=(5,),
    each=None,
    **options,
):
    """Draws of chains of this law; ``each`` has what differs by chain."""
    draws, monitor, samplers = [], [], []
    for chain in range(chains):
        own = {"lr": lr, "momentum": momentum, **options, **(each or {}).get(chain, {})}
        own.setdefault("num_data", N)
        if sampler is sg.SGLD:
            del own["momentum"]
        key = sg.fold_in(seed, chain) if seeds is None else seeds(chain)
        generator = torch.Generator().manual_seed(sg.fold_in(seed, chain))
        line = Line(starts[chain % len(starts)], sizes)
        walker = sampler(line.named_parameters(), seed=key, nonfinite="skip", **own)
        gauge = sg.TemperatureMonitor(walker, every=2)
        for step in range(steps):
            if step == burn_in:
                gauge.reset()
            for p in line.parameters():
                shift = noise * torch.randn(p.shape, generator=generator)
                p.grad = force(p.detach()) + shift
            walker.step()
            if step >= burn_in and step % every == 0:
                now = {k: p.detach().clone() for k, p in line.named_parameters()}
                draws.append(Drawn(now, chain))
        monitor.append(gauge)
        samplers.append(walker)  # which monitor hold weakly
    return draws, monitor, samplers


def sampled(*, sizes=(5,), **options):
    """Reports such chains."""
    draws, monitor, _samplers = run(sizes=sizes, **options)
    model = Line(0.0, sizes)
    return sg.report(model, draws, INPUTS, monitor=monitor, link="identity")


def series(values):
    """Reports chains of such values, [chains, draws, 5], without monitor."""
    draws = [
        Drawn({"theta": value.float()}, chain)
        for chain, of_chain in enumerate(values)
        for value in of_chain
    ]
    return sg.report(Line(), draws, INPUTS, link="identity")


def slow(chains, draws, rho, seed=0):
    """A stationary law with autocorrelations rho**t, [chains, draws, 5]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(chains, 5, generator=generator)
    found = []
    for _ in range(draws):
        x = rho * x + (1 - rho**2) ** 0.5 * torch.randn(chains, 5, generator=generator)
        found.append(x)
    return torch.stack(found, 1)


def scaled():
    values = slow(4, 360, 0.0)
    values[2] *= 3
    return values


def drifting():
    return slow(4, 400, 0.3) + torch.linspace(0, 3, 400)[:, None]


def transient():
    """First draws far away, which widen standard deviations 13 times."""
    away = 130 * 0.5 ** torch.arange(400)
    return slow(4, 400, 0.3) + away[:, None]


def frozen():
    values = slow(4, 200, 0.0)
    values[2] = values[2, :1]
    return values


def doubled():
    values = slow(4, 200, 0.0)
    values[3] = values[1]
    return values


def diverged():
    values = slow(4, 200, 0.0)
    values[1, 150:] = torch.nan
    return values


def half_shared():
    """Two chains of which half the noise is one."""
    return (slow(4, 400, 0.5) + slow(1, 400, 0.5, 9)) / 2**0.5


RIGHT = {
    "four chains": lambda: sampled(),
    "two short chains": lambda: sampled(chains=2, steps=500),
    "one long chain": lambda: sampled(chains=1, steps=4000),
    "eight chains": lambda: sampled(chains=8, steps=600),
    "a little heat": lambda: sampled(noise=0.02),
    "SGLD": lambda: sampled(sampler=sg.SGLD, lr=0.05, steps=2000, every=8),
    "BAOA": lambda: sampled(sampler=sg.BAOA, steps=1000),
    "SGNHT": lambda: sampled(sampler=sg.SGNHT, steps=3000, burn_in=500, every=10),
    "tempered": lambda: sampled(temperature=0.25),
    "one-element tensors": lambda: sampled(sizes=(5, *(1,) * 12), steps=500, every=3),
    "different starts": lambda: sampled(starts=(2.0, -2.0, 1.0, -1.0), burn_in=100),
    "independent draws": lambda: series(slow(4, 60, 0.0)),
    "autocorrelated draws": lambda: series(slow(4, 2000, 0.9)),
    "alternating draws": lambda: series(slow(4, 200, -0.5)),
    "heavy tails": lambda: series(slow(4, 500, 0.3) / slow(4, 500, 0.3, 1).abs()),
}

# How a chain is run, the issue it must have, and what its words must name.
WRONG = {
    "too hot": (lambda: sampled(noise=0.3), "above T", r"1\.\d+ T"),
    "too hot by lr": (lambda: sampled(lr=1.5), "above T", "T in"),
    "one chain too hot": (lambda: sampled(each={2: {"lr": 1.5}}), "above T",
     r"\(chain 2\)"),
    "hot in few steps": (lambda: sampled(noise=0.5, steps=64, burn_in=50, every=1,
     sizes=(5, 800)), "above T", "other0"),
    "on the way": (lambda: sampled(lr=1e-6, starts=(9.0, 8.0, 7.0, 6.0), burn_in=0),
     "not converged", r"chain \d"),
    "drift": (lambda: series(drifting()), "not converged", r"chain \d"),
    "two modes": (lambda: sampled(force=two_wells, starts=(3.0, -3.0)), "chains differ",
     r"chain \d"),
    "scale": (lambda: series(scaled()), "chains differ", "spread.* chain 2"),
    "slow": (lambda: sampled(lr=4e-3, burn_in=1000, steps=3000), "few draws",
     "times as long"),
    "hundred times too short": (lambda: series(slow(4, 400, 0.999)), "few draws",
     r"at least (\d{2,}|1e\+02)"),
    "three draws": (lambda: series(slow(1, 3, 0.0)), "few draws", "3 draws"),
    "twelve draws": (lambda: series(slow(2, 6, 0.0)), "few draws", "12 draws"),
    "identical": (lambda: series(doubled()), "identical", "Chains 1, 3"),
    "one seed": (lambda: sampled(seeds=lambda i: 7), "identical", "Chains 0, 1, 2, 3"),
    "one seed, two modes": (lambda: sampled(seeds=lambda i: 5 + i // 2, force=two_wells,
     starts=(3.0, -3.0)), "shared noise", "Chains 0, 1, 2, 3"),
    "half the noise": (lambda: series(half_shared()), "shared noise",
     "Chains 0, 1, 2, 3"),
    "never moved": (lambda: series(frozen()), "not moving", "chain 2 are"),
    "all still": (lambda: sampled(lr=0.0), "not moving", "All draws"),
    "temperature": (lambda: sampled(each={1: {"temperature": 0.8}}), "settings differ",
     r"temperature \(1 in chains 0, 2, 3; 0\.8 in chain 1\)"),
    "prior_precision": (lambda: sampled(prior_precision=1.0,
     each={3: {"prior_precision": 2.0}}), "settings differ",
     "prior_precision .*2 in chain 3"),
    "num_data": (lambda: sampled(each={0: {"num_data": 110}}), "settings differ",
     "num_data .*110 in chain 0"),
    "lr": (lambda: sampled(each={2: {"lr": 0.05}}), "settings differ",
     "lr .*0.05 in chain 2"),
    "burn-in, by draws": (lambda: series(transient()), "burn-in too short",
     r"chain \d.*widen output \d [\d.e+]+ times"),
    "burn-in, of a run": (lambda: sampled(starts=(20.0,), burn_in=0),
     "burn-in too short", r"chain \d.*widen output \d [\d.e+]+ times"),
    "not finite": (lambda: series(diverged()), "not finite", "chain 1.* draw 150"),
}  # fmt: skip

_DEFAULT = {"four chains", "scale", "three draws", "one seed", "temperature"}


def _named(names):
    return [
        pytest.param(name, marks=() if name in _DEFAULT else pytest.mark.full)
        for name in names
    ]


@pytest.mark.parametrize("name", _named(RIGHT))
def test_right_chains_have_no_verdict(name):
    found = RIGHT[name]()
    assert not found.issues, str(found)
    assert not re.search("equilibrium", str(found))
    assert len(found.markdown().splitlines()) < 40
    assert len(found.json().splitlines()) < 20


@pytest.mark.parametrize("name", _named(WRONG))
def test_faults_are_named(name):
    build, kind, words = WRONG[name]
    found = build()
    told = {issue.kind: issue.message for issue in found.issues}
    assert kind in told, str(found)
    assert re.search(words, told[kind]), told[kind]
    assert told[kind] in found.markdown()
