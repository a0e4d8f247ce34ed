"""Samplers in several threads, inside backward passes, and in forked processes.

A sampler belongs to one thread at a time. Those of other parameters may step at once,
and each draws the chain that it draws alone.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from every_sampler import EVERY, THREE, Chain, bits
from short_chains import KINDS, make, needs_closure
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torch_sgmcmc as sg

FORKED_STEPS = Path(__file__).with_name("forked_steps.py")


@pytest.fixture
def three_threads(set_threads):
    """Operators share their work among three."""
    set_threads(3)


@pytest.fixture
def hasty():
    """Python changes threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(calls):
    """Returns the results of calls, each in its thread."""
    results = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def work(i):
        start.wait()
        results[i] = calls[i]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def end(kind, seed, **settings):
    """A chain that goes through a state dict in its middle, and where it ends."""
    chain = Chain(kind, seed=seed, **settings)
    chain.run(range(3))
    chain.sampler.load_state_dict(chain.sampler.state_dict())
    return bits([chain.run(range(3, 6)), chain.sampler.state_dict()])


def test_every_kind_of_sampler_twice_at_once(one_thread, hasty):
    chains = [(kind, seed) for kind in EVERY for seed in (5, 6)]
    ends = at_once([lambda chain=chain: end(*chain) for chain in chains])
    for chain, found in zip(chains, ends, strict=True):
        assert found == end(*chain), chain


@pytest.mark.parametrize("kind", [k for k in EVERY if not k.startswith("HMCECS")])
def test_two_samplers_share_the_threads_of_operators(kind, three_threads):
    sizes = (3, 50_000, 4)  # for three threads in an update
    calls = [lambda seed=seed: end(kind, seed, sizes=sizes) for seed in (5, 6)]
    assert at_once(calls) == [call() for call in calls]


class Network(nn.Module):
    """Its matrix in the middle is used twice."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        for name, shape in (("a", (3, 4)), ("b", (4, 4)), ("c", (4,)), ("d", (4, 1))):
            p = nn.Parameter(0.5 * torch.randn(shape, generator=g))
            self.register_parameter(name, p)

    def loss(self, step):
        g = torch.Generator().manual_seed(step)
        x = torch.tanh(torch.randn(6, 3, generator=g) @ self.a + self.c)
        for _ in range(2):
            x = torch.tanh(x @ self.b + self.c)
        return (x @ self.d).square().mean()


def end_of_network(kind, in_backward):
    net = Network()
    samplers = {p: make(kind, [p], seed=i) for i, p in enumerate(net.parameters())}

    def step(p):
        samplers[p].step()
        p.grad = None

    if in_backward:
        for p in samplers:
            p.register_post_accumulate_grad_hook(step)
    for i in range(5):
        net.loss(i).backward()
        assert in_backward == all(p.grad is None for p in samplers)
        if not in_backward:
            for p in samplers:
                step(p)
    return bits([[*samplers], [s.state_dict() for s in samplers.values()]])


def is_stepped_alone(kind):
    sampler = make(kind, [nn.Parameter(torch.zeros(1))])
    gamma = isinstance(sampler, sg.PSGLD) and sampler.param_groups[0]["gamma"]
    adapts = gamma and sampler.param_groups[0]["adapt"]
    return not (needs_closure(sampler) or adapts)


@pytest.mark.parametrize("kind", [*filter(is_stepped_alone, KINDS)])
def test_steps_inside_a_backward_pass(kind, one_thread):
    assert end_of_network(kind, True) == end_of_network(kind, False)


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "BAOA", "SGLRW"])
@pytest.mark.usefixtures("no_warnings", "one_thread")
def test_samplers_of_one_parameter_make_the_chain_of_all(kind):
    whole, parts = Network(), Network()
    sampler = make(kind, whole.parameters(), seed=3)
    (saved,) = sampler.state_dict()["param_groups"]
    samplers = {}
    for i, p in enumerate(parts.parameters()):
        own = {key: saved[key][i : i + 1] for key in ("offsets", "sizes")}
        samplers[p] = make(kind, [p], seed=3)
        state = {"state": {}, "param_groups": [saved | own | {"params": [0]}]}
        samplers[p].load_state_dict(state)
        p.register_post_accumulate_grad_hook(lambda p: samplers[p].step())
    for net in (whole, parts):
        for i in range(5):
            net.zero_grad()
            net.loss(i).backward()
            if net is whole:
                sampler.step()
    assert bits([*whole.parameters()]) == bits([*parts.parameters()])


@pytest.mark.parametrize("kind", ["EWSG", "HMC", "SBPS", "HMCECS"])
def test_a_required_closure_inside_a_backward_pass(kind):
    net = Network()
    sampler = Chain(kind).sampler_of([net.b, nn.Parameter(torch.zeros(1))])
    hook = net.b.register_post_accumulate_grad_hook(lambda _: sampler.step())
    with pytest.raises(TypeError, match=rf"^{kind}\.step\(\) needs a closure, "):
        net.loss(0).backward()
    hook.remove()
    net.loss(0).backward()
    assert all(map(torch.equal, net.parameters(), Network().parameters()))


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gamma_of_parameters_that_have_changed(in_backward):
    # Each sampler's second derivatives depend on what others have moved.
    net = Network()
    samplers = {p: make("PSGLD", [p], seed=i) for i, p in enumerate(net.parameters())}
    if in_backward:
        for p in samplers:
            p.register_post_accumulate_grad_hook(lambda p: samplers[p].step())
    before = None
    with pytest.raises(RuntimeError) as error:
        net.loss(0).backward(create_graph=True)
        for p in samplers:
            before = p.detach().clone()
            samplers[p].step()
    assert str(error.value) == (
        "PSGLD got gradients of parameters that have changed since, and Γ needs second "
        "derivatives: step once for each backward pass, after it, and sample all "
        "parameters of a loss with one sampler"
    )
    assert in_backward or torch.equal(before, p)
    net.zero_grad()


@pytest.mark.full
def test_a_forked_process_resumes():
    kinds = ["SGD", *THREE, "PSGLD", "SBPS", "HMCECS"]
    # A child that hangs goes too.
    command = [sys.executable, FORKED_STEPS, "1", *kinds]
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **options)
    try:
        text, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert text.splitlines() == [f"{kind}: equal" for kind in kinds]


class Waves(Dataset):
    """Data of an operation that would take several threads."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.sin(i + torch.arange(200_000.0))[:4]


def end_with_workers(num_workers):
    chain = Chain("SGHMC", sizes=(4, 50_000))
    batches = sg.IndependentBatchSampler(12, 3, seed=1)
    workers = {"num_workers": num_workers}
    if num_workers:
        workers |= {"multiprocessing_context": "fork", "timeout": 120}
    loader = DataLoader(Waves(), batch_sampler=batches, **workers)
    chain.run(range(2))
    for _ in range(2):  # workers are forked for each
        for x in loader:
            chain.sampler.zero_grad()
            sum((p[:4] - x).square().mean() for p in chain.params).backward()
            chain.sampler.step()
    return bits([chain.params, chain.sampler.state_dict(), batches.state_dict()])


def test_workers_that_are_forked_between_steps(three_threads):
    assert end_with_workers(2) == end_with_workers(0)
