"""A closure may fail at any of its calls: the step is as if it had not been begun.

Every call of every step fails in turn, once before the closure has done anything and
once when it has done everything. After each failure the sampler must be as before the
step, and the chain that goes on must be the one that was never interrupted. Every
second failure is an interrupt, which is no Exception.
"""

from dataclasses import dataclass

import pytest
import torch
from ecs_data import Data
from ecs_data import make as make_ecs
from every_sampler import bits
from levels import at_levels
from torch import Tensor, nn

import torch_sgmcmc as sg

STEPS = 3


class Broken(Exception):
    """An Exception that closures raise."""


class Interrupt(BaseException):
    """A BaseException that closures raise."""


class Closure:
    """Calls another with the number of the draw, and fails where it is told to."""

    def __init__(self, work):
        self.work = work
        self.begin()
        self.first = 0

    def begin(self, fails_at=None, late=False):
        self.calls, self.fails_at, self.late = 0, fails_at, late

    def __call__(self, *arguments):
        self.calls += 1
        fails = self.calls == self.fails_at
        if fails and not self.late:
            raise Interrupt
        result = self.work(self.first + self.calls, *arguments)
        if fails:
            raise Broken
        return result


@dataclass
class Chain:
    sampler: sg.Sampler
    params: list[Tensor]
    closure: Closure


def some():
    g = torch.Generator().manual_seed(9)
    return [
        nn.Parameter(torch.randn(4, generator=g)),
        nn.Parameter(torch.randn(4, 2, generator=g, dtype=torch.float64)),
        nn.Parameter(torch.randn(4, generator=g).bfloat16()),  # which has a master
    ]


def losses(params, draw, chains):
    """Losses of 6 examples, or the mean loss of each of 4 chains."""
    x = torch.sin(10.0 * draw + torch.arange(6.0, dtype=torch.float64))
    if chains:
        rows = [p.double().reshape(4, -1).sum(1) for p in params]
        return sum((0.1 * r[:, None] - x).square().mean(1) for r in rows)
    return sum((p.double().flatten() - x[:, None]).square().sum(1) for p in params)


def make(name):
    cls, settings = SAMPLERS[name]
    if cls is sg.HMCECS:
        data = Data()
        ecs = make_ecs(data, trajectory_length=1.2, **settings)
        return Chain(ecs, data.params, Closure(lambda draw, i: data(i)))
    params = some()
    sampler = cls(params, num_data=50, seed=5, **settings)
    chains = "num_chains" in settings

    def work(draw):
        sampler.zero_grad()
        # HMC's is the loss of all data.
        loss = losses(params, 0 if cls is sg.HMC else draw, chains)
        if cls is sg.SBPS:
            return loss
        loss = loss if chains else loss.mean()
        loss.sum().backward(create_graph=cls is sg.PSGLD)
        return loss

    return Chain(sampler, params, Closure(work))


KEPT = {"step_size": 0.05, "num_steps": 2, "resample_momentum_every": 2}
SAMPLERS = {
    "SGLD": (sg.SGLD, {"lr": 0.1}),
    "SGHMC": (sg.SGHMC, {"lr": 0.1, "noise_estimate": "online"}),
    "PSGLD": (sg.PSGLD, {"lr": 0.1}),
    "SGNHT": (sg.SGNHT, {"lr": 0.1}),
    "EWSG": (sg.EWSG, {"lr": 0.1, "index_chain_length": 3}),
    "EWSG, overdamped": (sg.EWSG, {"lr": 0.1, "momentum": 0.0}),
    "EWSG, many chains": (sg.EWSG, {"lr": 0.1, "num_chains": 4}),
    "HMC": (sg.HMC, {"step_size": 0.05, "num_steps": 3}),
    "HMC, momenta kept": (sg.HMC, KEPT),
    "HMC, many chains": (sg.HMC, {"step_size": 0.1, "num_steps": 3, "num_chains": 4}),
    "HMC-ECS": (sg.HMCECS, {}),
    "HMC-ECS, order 1": (sg.HMCECS, {"taylor_order": 1}),
    "HMC-ECS, signed": (sg.HMCECS, {"estimator": "signed", "num_factors": 9}),
    "SBPS": (sg.SBPS, {"prior_precision": 20.0}),
    "pSBPS": (sg.SBPS, {"prior_precision": 20.0, "preconditioned": True}),
}


def snapshot(chain):
    """All but the number of evaluations, which counts those in vain too."""
    state = chain.sampler.state_dict()
    groups = [
        {k: v for k, v in g.items() if k != "num_evaluations"}
        for g in state["param_groups"]
    ]
    return bits([[*chain.params], groups, dict(state["state"])])


def fails(call, late):
    with pytest.raises(Broken if late else Interrupt):
        call()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_step_that_fails_was_not_begun(name, one_thread):
    cls, whole, broken = SAMPLERS[name][0], make(name), make(name)
    for _ in range(STEPS):
        whole.closure.begin()
        whole.sampler.step(whole.closure)
        calls = whole.closure.calls
        before = snapshot(broken)
        for at in range(1, calls + 1):
            for late in (False, True):
                broken.closure.begin(at, late)
                fails(lambda: broken.sampler.step(broken.closure), late)
                assert snapshot(broken) == before, (at, late)
        broken.closure.begin()
        broken.sampler.step(broken.closure)
        assert broken.closure.calls == calls
        assert snapshot(broken) == snapshot(whole)
        for chain in (whole, broken):
            chain.closure.first += calls
    # More than one call where there is more than one: the middle has been tested.
    assert calls > 1 or cls not in (sg.EWSG, sg.HMC, sg.HMCECS)


OF_ECS = (4, {"anchor_every": 2, "target_variance": 0.5})
WARMUPS = dict.fromkeys(("HMC", "HMC, momenta kept", "HMC, many chains"), (5, {}))
WARMUPS |= {kind: OF_ECS for kind in SAMPLERS if kind.startswith("HMC-ECS")}


@pytest.mark.filterwarnings("ignore:num_blocks")  # it chooses few factors
@pytest.mark.parametrize(
    "name", at_levels(WARMUPS, default=["HMC", "HMC-ECS"], otherwise="full")
)
def test_a_warmup_that_fails_keeps_its_whole_steps(name, one_thread):
    steps, settings = WARMUPS[name]
    whole = make(name)
    whole.sampler.warmup(whole.closure, steps, progress=False, **settings)
    calls = whole.closure.calls
    whole.sampler.step(whole.closure)
    assert calls > steps
    places = {}
    for at in range(1, calls + 1):
        for late in (False, True):
            broken = make(name)

            def warmup(steps, broken=broken):
                broken.sampler.warmup(broken.closure, steps, progress=False, **settings)

            broken.closure.begin(at, late)
            fails(lambda: warmup(steps), late)
            done = int(broken.sampler.param_groups[0]["step"])
            ecs = isinstance(broken.sampler, sg.HMCECS)
            place = bits(broken.params) if ecs else snapshot(broken)[:3]
            assert place == places.setdefault(done, place), (at, late)
            broken.closure.begin()
            if ecs:  # starts again where it is
                warmup(steps)
                assert broken.sampler.param_groups[0]["step"] == done + steps
                continue
            warmup(steps - done)
            broken.sampler.step(broken.closure)
            assert snapshot(broken) == snapshot(whole), (at, late)
    # Steps without data in the subsample call no closure.
    assert len(places) > steps // 2
