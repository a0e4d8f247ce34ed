"""SBPS's derivatives in forward mode: those of reverse mode, of the model as it is."""

import pytest
import torch
from failed_steps import step_fails
from sbps_chains import N, make, run
from torch import nn
from torch.nn import functional as F

from torch_sgmcmc._sbps.segment_stats import Evaluations


class Net(nn.Module):
    """A little of everything, with a parameter that is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten())
        self.head = nn.Linear(8, 3)
        self.tied = nn.Linear(3, 3)
        self.tied2 = nn.Linear(3, 3, bias=False)
        self.tied2.weight = self.tied.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, x):
        return self.tied2(self.tied(self.head(self.body(x))).tanh())


def net_closure(net):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(N, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (N,), generator=generator)

    def closure():
        index = torch.randperm(N, generator=generator)[:10]
        return F.cross_entropy(net(x[index]), y[index], reduction="none")

    return closure


def test_forward_and_reverse_mode_agree():
    places, counts = [], []
    for forward in (False, True):
        net = Net()
        sampler = make(net.parameters(), model=net if forward else None)
        places.append(run(sampler, net_closure(net), 100)[1])
        counts.append(sampler.evaluations)
        bounces = sampler.diagnostics.bounces
        assert bounces > 10
        assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        assert all(p.grad is None for p in net.parameters())
        # What the loss does not use moves all the same.
        assert (net.unused != 1).all()
    for a, b in zip(*places, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    # In forward mode gradients at bounces alone.
    assert counts[0] == Evaluations(1000, 1000)
    assert counts[1] == Evaluations(1000, 10 * bounces)


def test_what_learns_always_takes_gradients_always():
    """Both modes give the same chain for the same minibatches."""
    places, counts = [], []
    for forward in (False, True):
        net = Net()
        options = {"preconditioned": True, "adapt_every_step": True, "eps": 0.1}
        sampler = make(net.parameters(), model=net if forward else None, **options)
        places.append(run(sampler, net_closure(net), 100)[1])
        counts.append(sampler.evaluations)
        assert 10 < sampler.diagnostics.bounces < 60
    for a, b in zip(*places, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert counts[0] == counts[1] == Evaluations(1000, 1000)


def test_a_resumed_run_counts_the_same_evaluations():
    net, other = Net(), Net()
    sampler = make(net.parameters(), model=net)
    run(sampler, net_closure(net), 5)
    other.load_state_dict(net.state_dict())
    resumed = make(other.parameters(), model=other)
    resumed.load_state_dict(sampler.state_dict())
    for each, model in ((sampler, net), (resumed, other)):
        run(each, net_closure(model), 30)
    assert sampler.diagnostics.bounces > 1
    assert resumed.evaluations == sampler.evaluations


def test_forward_mode_restores_the_model():
    net = Net()
    sampler = make(net.parameters(), model=net)
    before = dict(net.named_parameters(remove_duplicate=False))

    def broken():
        assert net.head.weight is not before["head.weight"]
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        sampler.step(broken)
    after = dict(net.named_parameters(remove_duplicate=False))
    assert all(after[key] is before[key] for key in before)


def test_forward_mode_without_the_model():
    net, other = Net(), Net()
    message = (
        "SBPS got losses from the closure that do not depend on the parameters of its "
        "model (does the closure call another model?)"
    )
    step_fails(
        make(net.parameters(), model=net), net_closure(other), RuntimeError, message
    )


@pytest.mark.parametrize("change", ["parameter", "name", "module", "tie"])
def test_a_model_that_is_changed_between_steps(change):
    """Parameters are put in their places wherever those are now."""
    places = []
    for forward in (False, True):
        net = Net()
        sampler = make(net.parameters(), model=net if forward else None)
        closure = net_closure(net)
        run(sampler, closure, 20)
        if change == "parameter":  # another one in its place, and it in another's
            net.head.bias, net.tied.bias = net.tied.bias, net.head.bias
        elif change == "name":
            weight = net.tied2.weight
            del net.tied2.weight
            net.tied2.register_parameter("other", weight)
            net.tied2.forward = lambda x, m=net.tied2: F.linear(x, m.other)
        elif change == "module":
            old, net.head = net.head, nn.Linear(8, 3).double()
            net.head.weight, net.head.bias = old.weight, old.bias
        else:
            net.tied2.bias = net.tied.bias
        run(sampler, closure, 20)
        assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        assert change != "name" or list(net.tied2._parameters) == ["bias", "other"]
        places.append(run(sampler, closure, 20)[1])
    for a, b in zip(*places, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_a_model_that_keeps_copies_is_found_out():
    class Copying(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.b = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.kept = [self.b]

        def forward(self):
            return self.a + self.kept[0] * torch.arange(3.0, dtype=torch.float64)

    net = Copying()
    sampler = make(net.parameters(), model=net)
    with pytest.raises(RuntimeError, match=r"do not agree with the gradient.*RNNs do"):
        sampler.step(net)
    sampler.model = None
    sampler.step(net)
