"""HMC in plain PyTorch, and its known bugs as mutations (see ``harness.mutants``)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Tensors = list[Tensor]

# Bugs of the dynamics, which a test of the uncorrected leapfrog sees. A gradient of
# another function than U is among them alone: the Metropolis test puts it right.
DYNAMICS_MUTATIONS = (
    *("explicit Euler", "momentum not resampled"),
    *("mass multiplied and not divided by", "prior missing in the gradient"),
)
# Bugs of the corrected chain. (The last half step is of the momentum alone: without
# a test it does not matter, if momenta are drawn afresh. With one, explicit Euler is
# nearly always rejected.)
HMC_MUTATIONS = (
    *("first half step whole", "last half step missing"),
    *("momentum with T and not its root", "momentum of unit mass"),
    *("every trajectory accepted", "kinetic energy without masses"),
    *("Metropolis test without T", "prior missing in the energy"),
    *("one decision for all chains", "one decision for each tensor"),
    *("first group's prior in all", "uniform reused by the next step"),
)


class ReferenceHMC(Optimizer):
    """Many chains along the leading dimension of every parameter, in float64."""

    def __init__(
        self,
        params: Iterable[Any],
        step_size: float,
        *,
        num_steps: int,
        num_data: float,
        prior_precision: float = 0.0,
        temperature: float = 1.0,
        metropolis: bool = True,
        resample_momentum_every: int = 1,
        num_chains: int | None = None,
        seed: int = 0,
        mutation: str | None = None,
    ) -> None:
        super().__init__(params, {"prior_precision": prior_precision})
        self.step_size, self.num_steps = step_size, num_steps
        self.num_data, self.temperature = num_data, temperature
        self.metropolis, self.every = metropolis, resample_momentum_every
        self.mutation = mutation
        self.generator = torch.Generator().manual_seed(seed + 2**32)
        self.masses: list[Tensor] = [torch.ones_like(p) for p, _ in self.members]
        self.momenta: list[Tensor] = []
        self.uniform: Tensor | None = None
        self.count = 0

    def set_mass(self, masses: Iterable[Tensor]) -> None:
        each = zip(masses, self.members, strict=True)
        self.masses = [m.expand_as(p) for m, (p, _) in each]

    @property
    def members(self) -> list[tuple[Tensor, float]]:
        """Parameters, and the prior precision that each is given."""
        first = self.param_groups[0]["prior_precision"]
        bug = getattr(self, "mutation", None) == "first group's prior in all"
        return [
            (p, first if bug else group["prior_precision"])
            for group in self.param_groups
            for p in group["params"]
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:
        bug, eps = self.mutation, self.step_size
        params = [p for p, _ in self.members]
        saved = [p.clone() for p in params]
        self.draw()
        loss = self.call(closure)
        start = self.energies(loss)
        before = [r.clone() for r in self.momenta]
        self.kick(eps if bug == "first half step whole" else eps / 2)
        for i in range(self.num_steps):
            speeds = [
                r * m if bug == "mass multiplied and not divided by" else r / m
                for r, m in zip(self.momenta, self.masses, strict=True)
            ]
            if bug == "explicit Euler":
                self.kick(eps)  # by the gradient of the old place
            for p, speed in zip(params, speeds, strict=True):
                p += eps * speed
            loss = self.call(closure)
            last = i == self.num_steps - 1
            if bug == "explicit Euler":
                continue
            if not last:
                self.kick(eps)
            elif bug != "last half step missing":
                self.kick(eps / 2)
        if self.metropolis:
            self.decide(start, self.energies(loss), saved, before)
        self.count += 1

    def draw(self) -> None:
        if self.momenta and (
            self.every == 0
            or self.count % self.every
            or self.mutation == "momentum not resampled"
        ):
            return
        t = self.temperature
        scale = t if self.mutation == "momentum with T and not its root" else t**0.5
        self.momenta = []
        for (p, _), m in zip(self.members, self.masses, strict=True):
            mass = torch.ones_like(m) if self.mutation == "momentum of unit mass" else m
            xi = torch.randn(p.shape, generator=self.generator, dtype=p.dtype)
            self.momenta.append(scale * mass.sqrt() * xi)

    def call(self, closure: Callable[[], Any]) -> Tensor:
        self.zero_grad()
        with torch.enable_grad():
            return closure().detach()

    def kick(self, size: float) -> None:
        for (p, prior), r in zip(self.members, self.momenta, strict=True):
            assert p.grad is not None
            decay = 0.0 if self.mutation == "prior missing in the gradient" else prior
            r -= size * (self.num_data * p.grad + decay * p)

    def energies(self, loss: Tensor) -> list[Tensor]:
        """Returns the energy of each tensor; the first includes the loss."""
        bug, result = self.mutation, []
        each = zip(self.members, self.momenta, self.masses, strict=True)
        for (p, prior), r, m in each:
            mass = torch.ones_like(m) if bug == "kinetic energy without masses" else m
            kinetic = 0.5 * (r * r / mass).sum(dim=1)
            decay = 0.0 if bug == "prior missing in the energy" else prior
            result.append(kinetic + 0.5 * decay * (p * p).sum(dim=1))
        result[0] = result[0] + self.num_data * loss
        return result

    def decide(
        self, start: Tensors, end: Tensors, saved: Tensors, before: Tensors
    ) -> None:
        bug = self.mutation
        falls = [a - b for a, b in zip(start, end, strict=True)]
        if bug != "one decision for each tensor":
            falls = [sum(falls)] * len(falls)
        if bug == "one decision for all chains":
            falls = [f.mean().expand_as(f) for f in falls]
        heat = 1.0 if bug == "Metropolis test without T" else self.temperature
        if bug != "uniform reused by the next step" or self.uniform is None:
            uniform = torch.rand(
                falls[0].shape, generator=self.generator, dtype=falls[0].dtype
            )
            self.uniform = uniform
        for (p, _), r, old, begin, fall in zip(
            self.members, self.momenta, saved, before, falls, strict=True
        ):
            yes = (fall / heat).exp() > self.uniform
            if bug == "every trajectory accepted":
                yes = torch.ones_like(yes)
            turned = begin if bug == "momentum not turned round" else -begin
            p.copy_(torch.where(yes[:, None], p, old))
            r.copy_(torch.where(yes[:, None], r, turned))
