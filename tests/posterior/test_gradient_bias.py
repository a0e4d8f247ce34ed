"""TemperatureMonitor.observe: are the gradients that a step uses those of the loss?

Fixed seeds, and data of which every minibatch is drawn: what is wrong here is wrong in
training loops.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import torch_sgmcmc as sg

# Sampled laws, except what is marked as default.
pytestmark = pytest.mark.full

N, STEPS = 200, 2500
PRIOR = 20.0


class Loop:
    """A training loop of SGHMC, and what each of the errors changes in it."""

    def __init__(self, model, center="current"):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(N, 6, generator=generator)
        noise = torch.randn(N, 1, generator=generator)
        self.y = self.x[:, :1] - 0.5 * self.x[:, 1:2].tanh() + noise
        self.model = model
        named = model.named_parameters()
        self.sampler = sg.SGHMC(named, 2e-3, num_data=N, prior_precision=PRIOR, seed=1)
        self.generator = torch.Generator().manual_seed(1)
        self.size = 100
        # What a step does otherwise.
        self.penalty = lambda: 0.0
        self.after_backward = lambda: None
        self.choose = self.draw
        # From the start on errors would be small beside what chance does.
        for _ in range(500):
            self.step()
        self.monitor = sg.TemperatureMonitor(self.sampler, center=center)

    def draw(self):
        return torch.randint(N, (self.size,), generator=self.generator)

    def loss(self, index):
        return mse_loss(self.model(self.x[index]), self.y[index]) / 2

    def right(self):
        training = self.model.training
        self.model.eval()
        self.loss(slice(None)).backward()
        self.model.train(training)

    def step(self):
        self.sampler.zero_grad()
        (self.loss(self.choose()) + self.penalty()).backward()
        self.after_backward()
        self.sampler.step()

    def run(self, sought=None):
        """Collects issues of ten checks, or until the expected one is found."""
        found = set()
        for step in range(STEPS):
            if step % 5 == 0:
                self.monitor.observe(self.right)
            self.step()
            if step % (STEPS // 10) == STEPS // 10 - 1:
                found |= {finding.fault for finding in self.monitor.issues()}
            if sought in found:
                break
        return found


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 1)


def clipped(loop):
    parameters = list(loop.model.parameters())
    loop.after_backward = lambda: nn.utils.clip_grad_norm_(parameters, 0.1)


def stale(loop):
    """Gradients of twenty steps before, as of a slow worker."""
    kept = []

    def swap():
        kept.append([p.grad for p in loop.model.parameters()])
        for p, grad in zip(loop.model.parameters(), kept[-20:][0], strict=True):
            p.grad = grad

    loop.after_backward = swap


def mined(loop):
    """The half of a minibatch with the larger losses."""

    def hardest():
        index = loop.draw()
        with torch.no_grad():
            errors = (loop.model(loop.x[index]) - loop.y[index]).square().squeeze(1)
        return index[errors.topk(len(index) // 2).indices]

    loop.choose = hardest


def prior_in_the_loss(loop):
    half = PRIOR / (2 * N)
    loop.penalty = lambda: half * sum(p.square().sum() for p in loop.model.parameters())


def scaled(loop):
    """Scaled gradients: a GradScaler without step(), ranks that sum."""

    def double():
        for p in loop.model.parameters():
            p.grad *= 2

    loop.after_backward = double


def batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


WRONG = {
    "gradients clipped": (clipped, "biased gradient"),
    "gradients scaled": (scaled, "biased gradient"),
    "minibatches that depend on the parameters": (mined, "biased gradient"),
    "the prior in the loss too": (prior_in_the_loss, "biased gradient"),
    "stale gradients": (stale, "above T"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_found(name):
    make_wrong, fault = WRONG[name]
    loop = Loop(linear())
    make_wrong(loop)
    assert fault in loop.run(fault)


def test_a_right_loop_is_not_blamed():
    loop = Loop(linear())
    assert loop.run() == set()
    assert loop.monitor.all().gradient_bias.half_width < 0.5


def test_batch_norm_in_training_mode():
    """Evaluation mode predicts, and its posterior is another."""
    loop = Loop(batch_norm(), None)  # the bias is nearly the same everywhere
    loop.size = 20
    assert "biased gradient" in loop.run("biased gradient")
    assert "batch norm in training mode" in loop.monitor.summary()
    right = Loop(batch_norm().eval(), None)
    right.size = 20
    assert "biased gradient" not in right.run()


@pytest.mark.default
def test_it_is_the_next_step_that_is_compared():
    """N/d (θ − c)·(g − h), whenever observe() is called; state and reset."""
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    q = nn.Parameter(torch.tensor([3.0]))
    sampler = sg.SGLD([p, q], 1e-9, num_data=10, prior_precision=7.0, seed=0)
    monitor = sg.TemperatureMonitor(sampler, center=[torch.tensor([0.0, 1.0]), 0.0])

    def right():
        (2 * p.sum() + 5 * q.sum()).backward()

    def step(q_grad):
        p.grad = torch.tensor([3.0, 4.0])
        q.grad = None if q_grad is None else torch.tensor([q_grad])
        sampler.step()

    monitor.observe(right)
    assert p.grad is None and q.grad is None
    step(6.0)
    of_p = 10 / 2 * (1 * (3 - 2) + (-3) * (4 - 2))
    of_q = 10 / 1 * 3 * (6 - 5)
    assert monitor.tensor(0).gradient_bias.mean == pytest.approx(of_p, rel=1e-5)
    assert monitor.tensor(1).gradient_bias.mean == pytest.approx(of_q, rel=1e-5)
    both = monitor.all().gradient_bias.mean
    assert both == pytest.approx((2 * of_p + of_q) / 3, rel=1e-5)
    step(6.0)  # without observe(), nothing is compared
    assert monitor.all().gradient_bias.mean == both
    monitor.observe(right)
    step(None)  # nor what has no gradient
    assert monitor.tensor(1).gradient_bias.mean == pytest.approx(of_q, rel=1e-5)
    mean = pytest.approx((both + of_p) / 2, rel=1e-5)
    assert monitor.all().gradient_bias.mean == mean
    state = copy.deepcopy(monitor.state_dict())
    monitor.observe(right)
    monitor.reset()
    step(6.0)
    assert math.isnan(monitor.all().gradient_bias.mean)
    monitor.load_state_dict(state)
    assert monitor.all().gradient_bias.mean == mean


@pytest.mark.default
@pytest.mark.parametrize("is_one_object", [False, True])
def test_gradients_in_memory_that_every_backward_pass_writes_to(is_one_object):
    """Gradients as views, as DistributedDataParallel's gradient_as_bucket_view=True."""
    p = nn.Parameter(torch.ones(4))
    sampler = sg.SGLD([p], 1e-9, num_data=10, seed=0)
    monitor = sg.TemperatureMonitor(sampler)
    bucket = torch.zeros(4)
    view = bucket.view(4)

    def backward(value):
        bucket.fill_(value)
        p.grad = view if is_one_object else bucket.view(4)

    backward(2.0)
    monitor.observe(lambda: backward(5.0))
    assert p.grad is not None and bool((p.grad == 2.0).all())
    sampler.step()
    assert monitor.all().gradient_bias.mean == pytest.approx(10 * (2 - 5), rel=1e-5)


@pytest.mark.default
def test_parameters_that_were_moved_are_not_compared():
    p = nn.Parameter(torch.ones(4))
    sampler = sg.SGLD([p], 1e-9, num_data=10, seed=0)
    monitor = sg.TemperatureMonitor(sampler)
    monitor.observe(lambda: p.sum().backward())
    with torch.no_grad():
        p.fill_(100.0)
    p.grad = torch.ones(4)
    sampler.step()
    assert math.isnan(monitor.all().gradient_bias.mean)


@pytest.mark.default
def test_a_summary_of_comparisons_alone():
    p = nn.Parameter(torch.ones(4))
    sampler = sg.SGLD([p], 1e-9, num_data=10, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=1000)
    for i in range(40):
        if i == 1:
            monitor.reset()
        monitor.observe(lambda: p.sum().backward())
        p.grad = 2 * torch.ones(4)
        sampler.step()
    assert [found.fault for found in monitor.issues()] == ["biased gradient"]
    assert "has gradients that differ from the closure" in monitor.summary()


@pytest.mark.default
def test_ewsg_chooses_its_gradients_on_purpose():
    p = nn.Parameter(torch.ones(4))
    sampler = sg.EWSG([p], 1e-3, num_data=10, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=1000)
    monitor.observe(lambda: p.square().sum().backward())
    assert monitor.num_observed == 1
    assert math.isnan(monitor.all().gradient_bias.mean)
