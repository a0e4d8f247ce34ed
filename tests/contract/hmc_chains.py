"""Parameters and a closure that the tests of HMC share."""

import torch

GOOD = {"step_size": 0.1, "num_steps": 3, "num_data": 10, "seed": 0}
NO_CLOSURE = """\
HMC.step() needs a closure, since it computes several gradients a step:

    def closure():
        loss = F.cross_entropy(model(x), y)  # of all data
        loss.backward()
        return loss

    sampler.step(closure)"""


class Quartic:
    """A closure with an anharmonic loss, that counts its calls."""

    def __init__(self, params, chains=False):
        self.params, self.chains = params, chains
        self.losses = []

    def __call__(self):
        assert torch.is_grad_enabled()
        assert all(p.grad is None for p in self.params)
        terms = [0.1 * p.double() ** 4 + 0.3 * p.double() ** 2 for p in self.params]
        if self.chains:
            loss = torch.stack([t.flatten(1).sum(1) for t in terms]).sum(0)
        else:
            loss = torch.stack([t.sum() for t in terms]).sum()
        loss.sum().backward()
        self.losses.append(loss)
        return loss
