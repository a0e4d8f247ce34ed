"""Reference samplers in plain PyTorch, and every known bug as a mutation of them.

The references take the arguments of the real samplers, but share no code with them:
updates are written out and noise comes from torch's own generator. With
``mutation=None`` they are right and must pass every check; each mutation is a bug
that was seen in some implementation, or that a check must be able to see, and must
fail. The mutations are the switches below, nothing else knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["SGHMC_MUTATIONS", "SGLD_MUTATIONS", "ReferenceSGHMC", "ReferenceSGLD"]

Group = dict[str, Any]

# How each bug changes the standard deviation of the injected noise.
_SCALES: dict[str, Callable[[Group], float]] = {
    "noise scale lr instead of sqrt(lr)": lambda c: c["lr"] ** 0.5,
    "N forgotten in the noise": lambda c: c["num_data"] ** 0.5,
    "N applied twice": lambda c: c["num_data"] ** -0.5,
    "T forgotten": lambda c: c["temperature"] ** -0.5,
    "T applied twice": lambda c: c["temperature"] ** 0.5,
    "T instead of sqrt(T)": lambda c: c["temperature"] ** 0.5,
    "factor 2 missing": lambda c: 0.5**0.5,
    "noise halved": lambda c: 0.5,
    "noise 1 % too large": lambda c: 1.01,
    "noise 2 % too large": lambda c: 1.02,
}

SGLD_MUTATIONS = (
    *_SCALES,
    "prior dropped",
    "N forgotten in the prior",
    "prior counted twice",
    "gradient 2 % too large",
    "gradient summed over the data",
    "uniform noise",
    "noise shared between parameters",
    "noise shared between neighbouring elements",
    "seed reused between steps",
    "seed reused every second step",
)

SGHMC_MUTATIONS = (
    *SGLD_MUTATIONS,
    "explicit Euler",
    "momentum means friction",
    "friction forgotten in the noise",
    "noise account ignored",
    "noise account applied twice",
    "noise account added",
    "momentum never resampled",
    "momentum resampled at every step",
    "momentum resampled one step late",
    "momentum resampled from N(0, lr T / N)",
    "momentum starts at rest",
    "momentum starts with the step's noise",
)


class _Reference(Optimizer):
    """What both references share: gradients with prior, and noise."""

    def __init__(
        self, params: Iterable[Any], seed: int, mutation: str | None, **defaults: Any
    ) -> None:
        super().__init__(params, defaults)
        self.seed, self.mutation = seed, mutation
        self.step_count = 0
        self.generator = torch.Generator().manual_seed(seed + 2**32)

    def gradient(self, p: Tensor, c: Group) -> Tensor:
        """ḡ + (λ / N) θ."""
        assert p.grad is not None
        decay, grad = c["prior_precision"] / c["num_data"], p.grad
        if self.mutation == "prior dropped":
            decay = 0.0
        if self.mutation == "N forgotten in the prior":
            decay = c["prior_precision"]
        if self.mutation == "prior counted twice":
            decay *= 2
        if self.mutation == "gradient 2 % too large":
            grad = 1.02 * grad
        if self.mutation == "gradient summed over the data":
            grad = c["num_data"] * grad
        return grad + decay * p

    def noise(self, p: Tensor, variance: float, c: Group) -> Tensor:
        """Fresh N(0, variance) for every element."""
        generator, step = self.generator, self.step_count
        if self.mutation == "seed reused between steps" and p is self.first:
            generator.manual_seed(self.seed)
        if self.mutation == "seed reused every second step" and p is self.first:
            generator.manual_seed(2**20 * self.seed + step // 2)
        if self.mutation == "noise shared between parameters":
            generator.manual_seed(2**20 * self.seed + step)
        xi = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if self.mutation == "noise shared between neighbouring elements":
            flat = xi.flatten()
            flat[1::2] = flat[: len(flat) - 1 : 2]
        if self.mutation == "uniform noise":
            xi = 12**0.5 * (torch.special.ndtr(xi) - 0.5)
        return variance**0.5 * _SCALES.get(self.mutation or "", lambda c: 1.0)(c) * xi

    @property
    def first(self) -> Tensor:
        return self.param_groups[0]["params"][0]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group)
        self.step_count += 1

    def update(self, p: Tensor, c: Group) -> None:
        raise NotImplementedError


class ReferenceSGLD(_Reference):
    """θ <- θ - lr g + N(0, 2 lr T / N)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: float,
        prior_precision: float = 0.0,
        temperature: float = 1.0,
        seed: int = 0,
        mutation: str | None = None,
    ) -> None:
        super().__init__(
            params,
            seed,
            mutation,
            lr=lr,
            num_data=num_data,
            prior_precision=prior_precision,
            temperature=temperature,
        )

    def update(self, p: Tensor, c: Group) -> None:
        variance = 2 * c["lr"] * c["temperature"] / c["num_data"]
        p += -c["lr"] * self.gradient(p, c) + self.noise(p, variance, c)


class ReferenceSGHMC(_Reference):
    """v <- m v - lr g + N(0, 2 (1 - m - β̂) lr T / N), then θ <- θ + v."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        *,
        num_data: float,
        prior_precision: float = 0.0,
        temperature: float = 1.0,
        noise_estimate: float = 0.0,
        resample_momentum_every: int = 0,
        seed: int = 0,
        mutation: str | None = None,
    ) -> None:
        super().__init__(
            params,
            seed,
            mutation,
            lr=lr,
            momentum=momentum,
            num_data=num_data,
            prior_precision=prior_precision,
            temperature=temperature,
            noise_estimate=noise_estimate,
            resample_momentum_every=resample_momentum_every,
        )

    def update(self, p: Tensor, c: Group) -> None:
        scale = c["lr"] * c["temperature"] / c["num_data"]
        state, momentum = self.state[p], c["momentum"]
        lr, account = c["lr"], self.account(c)
        if self.is_drawn(c):
            variance = scale
            if c["resample_momentum_every"] > 0 and self.mutation != (
                "momentum resampled from N(0, lr T / N)"
            ):
                # With the mean lr g / (1 + m), which leaves a part of the step's -lr g.
                part = 1 / (1 + momentum)
                variance, lr, account = 2 * part * scale, part * lr, part**2 * account
            v = variance**0.5 * torch.randn(
                p.shape, generator=self.generator, dtype=p.dtype
            )
            if self.step_count == 0 and self.mutation == "momentum starts at rest":
                v.zero_()
            state["momentum"] = v
        v = state["momentum"]
        if self.mutation == "momentum means friction":
            momentum = 1 - momentum
        friction = 1 - momentum - account
        if self.mutation == "friction forgotten in the noise":
            friction = 1.0
        xi = self.noise(p, 2 * friction * scale, c)
        if self.step_count == 0 and self.mutation == (
            "momentum starts with the step's noise"
        ):
            v = xi / (2 * friction) ** 0.5
        move = momentum * v - lr * self.gradient(p, c) + xi
        p += v if self.mutation == "explicit Euler" else move
        state["momentum"] = move

    def is_drawn(self, c: Group) -> bool:
        """Whether this step starts with a fresh momentum."""
        every, step = c["resample_momentum_every"], self.step_count
        if self.mutation == "momentum never resampled":
            every = 0
        if self.mutation == "momentum resampled at every step":
            every = 1
        if self.mutation == "momentum resampled one step late" and step > 0:
            step -= 1
        return self.step_count == 0 or (every > 0 and step % every == 0)

    def account(self, c: Group) -> float:
        """The part of the friction's noise that the gradients bring."""
        factors = {
            "noise account ignored": 0.0,
            "noise account applied twice": 2.0,
            "noise account added": -1.0,
        }
        return factors.get(self.mutation or "", 1.0) * c["noise_estimate"]
