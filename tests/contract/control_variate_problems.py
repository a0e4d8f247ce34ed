"""A small network with minibatches, that tests of control variates share."""

import torch
from reference import same_bits
from torch import nn

import torch_sgmcmc as sg


class Problem:
    """A small network on random data, with a sampler, and batches of its data."""

    def __init__(self, kind=sg.SGLD, dtype=torch.float64, count=7, **options):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 3, generator=g).to(dtype)
        self.y = torch.randn(count, 2, generator=g).to(dtype)
        self.params = [
            nn.Parameter(torch.randn(s, generator=g).to(dtype))
            for s in ((3, 4), (4,), (4, 2))
        ]
        settings = {"lr": 0.05, "num_data": count, "seed": 3, **options}
        self.sampler = kind(self.params, **settings)
        self.calls = 0

    def loss_fn(self, batch):
        self.calls += 1
        w, b, v = self.params
        x, y = batch
        return ((torch.tanh(x @ w + b) @ v - y) ** 2).sum(1).mean()

    def batch(self, indices):
        index = torch.as_tensor(indices)
        return self.x[index], self.y[index]

    def loader(self, size=3):
        """All data once, in batches of unequal sizes."""
        return [
            self.batch(range(i, min(i + size, len(self.x))))
            for i in range(0, len(self.x), size)
        ]

    def gradient(self, indices, at=None):
        """The plain gradient of a minibatch, at other values if given."""
        own = self.params
        if at is not None:
            self.params = [nn.Parameter(t.detach().clone()) for t in at]
        grads = torch.autograd.grad(self.loss_fn(self.batch(indices)), self.params)
        self.params = own
        return list(grads)

    def move(self, size=0.3):
        g = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.params:
                p += size * torch.randn(p.shape, generator=g).to(p.dtype)

    def estimator(self, **options):
        estimator = sg.ControlVariates(self.sampler, self.loss_fn, **options)
        estimator.set_anchor(self.loader())
        return estimator

    def svrg(self, **options):
        return sg.SVRG(
            self.sampler, self.loss_fn, self.loader(), **{"refresh_every": 3, **options}
        )

    def estimates(self, estimator):
        """Returns the gradient of each datum."""
        found = []
        for i in range(len(self.x)):
            self.sampler.zero_grad()
            estimator.backward(self.batch([i]))
            found.append(self.grads())
        return found

    def grads(self):
        return [p.grad.clone() for p in self.params if p.grad is not None]

    def values(self):
        return [p.detach().clone() for p in self.params]


def assert_close(got, want):
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def assert_same(got, want):
    assert len(got) == len(want)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
