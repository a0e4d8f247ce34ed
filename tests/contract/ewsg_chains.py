"""A closure with noisy gradients that the tests of EWSG share."""

import torch

GOOD = {"lr": 0.1, "num_data": 10, "seed": 0}


class Draws:
    """A closure that makes noisy gradients and keeps what it did."""

    def __init__(self, params, noise=0.5):
        self.params, self.noise = params, noise
        self.generator = torch.Generator().manual_seed(0)
        self.grads = []
        self.found = []
        self.losses = []

    def __call__(self):
        self.found.append([p.grad for p in self.params])
        assert torch.is_grad_enabled()
        terms = [
            (0.5 * p.square() + self.noise * self.normal(p) * p).sum()
            for p in self.params
        ]
        loss = torch.stack([t.double() for t in terms]).sum()
        loss.backward()
        self.grads.append([p.grad for p in self.params])
        self.losses.append(loss)
        return loss

    def normal(self, p):
        return torch.randn(p.shape, generator=self.generator, dtype=p.dtype)
