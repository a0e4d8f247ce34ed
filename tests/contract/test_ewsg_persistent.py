"""EWSG's index chain that goes on from step to step: which minibatches, and when."""

import copy
import pickle

import pytest
import torch
from ewsg_chains import GOOD, Draws
from failed_steps import refused, step_fails
from reference import ewsg_log_weights
from short_chains import assert_same, two
from torch import nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C

pytestmark = pytest.mark.full

TARGET = {
    "lr": 0.1,
    "momentum": 0.7,
    "num_data": 20.0,
    "prior_precision": 0.5,
    "temperature": 0.9,
}
DATA = torch.randn(30, 4, generator=torch.Generator().manual_seed(7))


class Mean:
    """The mean of data, in K chains; its minibatches of two are asked for by number."""

    def __init__(self, chains=None, **settings):
        self.chains = chains
        self.p = nn.Parameter(torch.zeros(chains or 1, 4))
        self.batches = sg.IndependentBatchSampler(len(DATA), 2, seed=11)
        self.sampler = sg.EWSG(
            [self.p],
            **{**TARGET, "persistent_index_chain": True, "seed": 3, **settings},
            num_chains=chains,
        )
        self.asked = []

    @property
    def group(self):
        return self.sampler.param_groups[0]

    def gradients(self, numbers, theta):
        return theta - DATA[self.batches.at(numbers)].mean(dim=1)

    def closure(self):
        numbers = self.sampler.minibatches
        self.asked.append(numbers.tolist())
        loss = (self.p - DATA[self.batches.at(numbers)].mean(dim=1)).square().sum() / 2
        loss.backward()
        return loss

    def run(self, steps):
        for _ in range(steps):
            self.sampler.step(self.closure)
        return self


@pytest.mark.parametrize("momentum", [0.7, 0.0])
@pytest.mark.parametrize("chains", [None, 1, 6])
@pytest.mark.parametrize("persistent", [True, False])
def test_every_decision(persistent, chains, momentum):
    """A step goes on from its minibatches' gradients at the present θ, or afresh."""
    length, count = 2, chains or 1
    settings = {"momentum": momentum, "persistent_index_chain": persistent}
    mean = Mean(chains, index_chain_length=length, **settings)
    mean.run(1)
    accepted = stayed = 0
    for step in range(1, 40):
        theta = mean.p.detach().clone()
        state = mean.sampler.state.get(mean.p, {})
        v = state.get("momentum", torch.zeros_like(theta)).clone()
        former, drawn = mean.group["minibatches"], mean.group["num_drawn"]
        mean.asked.clear()
        mean.run(1)
        new = (length if persistent else length + 1) * count
        fresh = [*torch.arange(drawn, drawn + new).view(-1, count)]
        current, *proposals = [torch.tensor(former), *fresh] if persistent else fresh
        assert mean.asked == [each.tolist() for each in (current, *proposals)]
        assert mean.group["num_drawn"] == drawn + new
        first = current

        def weight(numbers, theta=theta, v=v):
            grads, target = (
                mean.gradients(numbers, theta),
                {**TARGET, "momentum": momentum},
            )
            return ewsg_log_weights([theta], [grads], [v], **target, num_chains=count)

        for m, proposed in enumerate(proposals):
            rise = weight(proposed) - weight(current)
            yes = torch.ops.torch_sgmcmc.metropolis_decide(
                rise, proposal=m, purpose=_C.Purpose.INDEX_CHAIN, seed=3, step=step
            )
            accepted += int(yes.sum())
            current = torch.where(yes, proposed, current)
        assert mean.group["minibatches"] == (current.tolist() if persistent else [])
        stayed += int((current == first).sum())
        torch.testing.assert_close(mean.p.grad, mean.gradients(current, theta))
    assert accepted <= mean.group["num_accepted"] <= accepted + length * count
    assert 0.1 < accepted / (39 * length * count) < 0.9
    assert stayed > 3


def test_switched_on_and_off():
    mean = Mean().run(5)
    (number,) = mean.group["minibatches"]
    mean.group["persistent_index_chain"] = False
    mean.run(1)
    assert number not in mean.asked[-2] and mean.group["minibatches"] == []
    mean.group["persistent_index_chain"] = True
    mean.run(2)
    # The first step has begun with a fresh one, and the second with what it left.
    assert mean.asked[-4][0] > mean.asked[-5][0]
    assert mean.asked[-2] in mean.asked[-4:-2]


def copied(sampler):
    return copy.deepcopy(sampler.state_dict())


def through_pickle(sampler):
    return pickle.loads(pickle.dumps(sampler)).state_dict()


@pytest.mark.parametrize("way", [copied, through_pickle])
@pytest.mark.parametrize("chains", [None, 6])
def test_resumes_bit_for_bit(chains, way):
    whole, begun, other = (Mean(chains) for _ in range(3))
    whole.run(20)
    begun.run(10)
    other.sampler.load_state_dict(way(begun.sampler))
    other.p.data.copy_(begun.p.data)
    other.run(10)
    assert_same([other.p], [whole.p])
    assert begun.asked + other.asked == whole.asked
    assert other.sampler.param_groups[0] | {"params": None} == whole.group | {
        "params": None
    }


NOT_ASKED = (
    "EWSG got gradients from a closure that did not read sampler.minibatches: with "
    "persistent_index_chain=True a step begins with the minibatch that the last one "
    "ended with, and the closure must evaluate the minibatches of the numbers "
    "minibatches"
)


@pytest.mark.parametrize("call", [0, 1])
def test_a_closure_that_does_not_ask(call):
    params = two()
    sampler = sg.EWSG(params, **GOOD, persistent_index_chain=True)
    draws, calls = Draws(params), iter(range(9))

    def closure():
        draws()
        if next(calls) != call:
            assert sampler.minibatches.shape == (1,)

    step_fails(sampler, closure, RuntimeError, NOT_ASKED)


def test_minibatches_are_for_the_closure():
    message = "EWSG.minibatches is for the closure that step() calls"
    mean = Mean()
    for fails in (False, True):
        with refused(RuntimeError, message):
            mean.sampler.minibatches  # noqa: B018
        if fails:
            with pytest.raises(KeyError):
                mean.sampler.step(lambda: {}["data"])
        mean.run(1)


@pytest.mark.parametrize("choice", ["raise", "skip"])
def test_gradients_that_are_not_finite(choice):
    """Minibatches of a step that was left out are not drawn again, nor kept."""
    mean = Mean(6, nonfinite=choice).run(5)
    before = mean.group["num_drawn"]

    def closure():
        mean.closure()
        if mean.asked[-1][0] >= before:  # the proposal's
            mean.p.grad.fill_(torch.nan)

    if choice == "raise":
        message = "EWSG got a gradient that is not finite"
        theta, state = mean.p.clone(), copied(mean.sampler)
        with pytest.raises(RuntimeError, match=message):
            mean.sampler.step(closure)
        assert_same([mean.p], [theta])
        groups = mean.sampler.state_dict()["param_groups"]
        assert groups == state["param_groups"]
        return
    mean.sampler.step(closure)
    assert mean.sampler.num_skipped == 1
    assert mean.group["minibatches"] == [] and mean.group["num_drawn"] == before + 6
    mean.asked.clear()
    mean.run(1)
    assert mean.asked == torch.arange(before + 6, before + 18).view(2, 6).tolist()


def test_a_chain_that_would_never_move():
    message = (
        "Invalid index_chain_length: 0 (must be >= 1 with persistent_index_chain=True: "
        "the first minibatch would stay for ever)"
    )
    settings = {**GOOD, "persistent_index_chain": True}
    with refused(ValueError, message):
        sg.EWSG(two(), **settings, index_chain_length=0)
    mean = Mean().run(1)
    mean.group["index_chain_length"] = 0
    step_fails(mean.sampler, mean.closure, ValueError, message)


@pytest.mark.parametrize(
    ("numbers", "kind", "message"),
    [
        ([0, 1], ValueError, "2 numbers (must be 6 in [0, num_drawn = 36), or none)"),
        ([36] * 6, ValueError, "6 numbers (must be 6 in [0, num_drawn = 36), or none)"),
        ([-1] * 6, ValueError, "6 numbers (must be 6 in [0, num_drawn = 36), or none)"),
        ([0.0] * 6, TypeError, "in a state dict (must be a list of ints)"),
        (None, TypeError, "in a state dict (must be a list of ints)"),
    ],
)
def test_bad_numbers(numbers, kind, message):
    mean = Mean(6).run(5)
    state = copied(mean.sampler)
    state["param_groups"][0]["minibatches"] = numbers
    with pytest.raises(kind) as error:
        mean.sampler.load_state_dict(state)
    prefix = "Invalid minibatches: " if kind is ValueError else "Invalid minibatches "
    assert str(error.value) == prefix + message
