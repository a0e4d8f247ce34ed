"""Numbers that overflow, and interrupts at each point of a step."""

import re
import signal
import sys
from functools import partial

import pytest
import torch
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.samplers._ecs.likelihood import jacobian

KINDS = {
    "SGLD": partial(sg.SGLD, lr=0.1),
    "SGHMC": partial(sg.SGHMC, lr=0.1, momentum=0.9),
    "EWSG": partial(sg.EWSG, lr=0.1),
    "HMC": partial(sg.HMC, step_size=0.1, num_steps=2),
    "SBPS": partial(sg.SBPS, refresh_rate=1.0),
    "HMCECS": partial(
        sg.HMCECS, step_size=0.5, subsample_size=4, num_blocks=2, taylor_order=1
    ),
}

# Longer steps, of which not every point is tried.
STRIDES = {"EWSG": 3, "HMC": 5, "SBPS": 5, "HMCECS": 23}


@pytest.mark.parametrize("cls", [sg.SGLD, sg.SGLRW, sg.SGHMC, sg.BAOA, sg.SGNHT])
def test_noise_that_overflows_is_refused(cls):
    p = nn.Parameter(torch.zeros(3))
    make = partial(cls, [p], num_data=1, seed=0)
    words = r"Invalid lr: 1e\+300 with temperature 1 .* float32 cannot hold"
    with pytest.raises(ValueError, match=words):
        make(lr=1e300)
    sampler = make(lr=0.1, temperature=1.0)
    for group in ({"lr": 1e200}, {"lr": 1e70, "temperature": 1e70}):
        sampler.param_groups[0].update(group)
        p.grad = torch.zeros(3)
        with pytest.raises(ValueError, match="Invalid lr: "):
            sampler.step()
        assert not p.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_a_precision_that_is_not_finite(value):
    """1e30 is finite, and its square is not."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    sampler = sg.SGLD([{"params": [p]} for p in params], 0.1, num_data=1, seed=0)
    precision = sg.GammaPrecision(sampler)
    with torch.no_grad():
        params[1][0] = value
    words = "Cannot draw prior_precision of group 1: the sum of squares of its"
    if value == 1e30:
        assert precision.step()[1] > 0  # the sum of squares is one of float64
        return
    with pytest.raises(RuntimeError, match=re.escape(words)):
        precision.step()
    assert [g["prior_precision"] for g in sampler.param_groups] == [0.0, 0.0]
    assert precision.num_updates == 0


class Interrupt:
    """Sends SIGINT where Python handles signals, the k-th time.

    That is at the start of a function of Python's and after a call of one of C's.
    """

    def __init__(self, number):
        self.number, self.raised = number, False

    def __call__(self, frame, event, argument):
        if event not in ("call", "c_return") or argument is sys.setprofile:
            return
        self.number -= 1
        if self.number == 0:
            self.raised = True
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


def context_of(kind):
    theta = nn.Parameter(torch.ones(3))
    sampler = KINDS[kind]([theta], num_data=10, seed=4)

    def closure():
        sampler.zero_grad()
        value = (theta**2).sum()
        value.backward()
        return value

    def losses():
        return (theta**2).sum() * torch.linspace(0.5, 1.5, 10)

    closures = {"SBPS": losses, "HMCECS": lambda indices: -losses()[indices]}
    return theta, sampler, closures.get(kind, closure)


def advance(sampler, closure, steps):
    """Makes steps until there are so many; the fourth has another lr."""
    while sampler.param_groups[0]["step"] < steps:
        if sampler.param_groups[0]["step"] == 3 and "lr" in sampler.param_groups[0]:
            sampler.param_groups[0]["lr"] = 0.05
        sampler.step(closure)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps_before", [0, 2, 3])
def test_an_interrupt_leaves_a_whole_number_of_steps(kind, steps_before):
    """And autograd on. Parameters, state and counter are before a step or after it."""
    expected, sampler, closure = context_of(kind)
    advance(sampler, closure, 6)
    count = 0
    for number in range(1, 5000, STRIDES.get(kind, 1)):
        theta, sampler, closure = context_of(kind)
        advance(sampler, closure, steps_before)
        interrupt = Interrupt(number)
        if steps_before == 3 and "lr" in sampler.param_groups[0]:
            sampler.param_groups[0]["lr"] = 0.05
        try:
            sys.setprofile(interrupt)
            sampler.step(closure)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
            is_on = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
        assert is_on, number
        advance(sampler, closure, 6)
        assert torch.equal(theta, expected), number
        if not interrupt.raised:
            break
        count += 1
    assert count > 20


def test_an_interrupt_waits_for_the_end_of_a_vmap(monkeypatch):
    """torch.vmap stays entered after one: later random numbers raise errors."""
    whole, ends = torch.autograd.grad, []

    def grad(*args, is_grads_batched=False, **options):
        if is_grads_batched:
            signal.raise_signal(signal.SIGINT)
        found = whole(*args, is_grads_batched=is_grads_batched, **options)
        ends.append(is_grads_batched)
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    x = torch.arange(3.0, requires_grad=True)
    with pytest.raises(KeyboardInterrupt):
        jacobian(x**2, [x], 3)
    assert ends == [True]
