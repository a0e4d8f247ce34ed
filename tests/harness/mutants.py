"""Reference samplers in plain PyTorch, and every known bug as a mutation of them.

The references take the arguments of the real samplers, but share no code with them:
updates are written out and noise comes from torch's own generator. With
``mutation=None`` they are right and must pass every check; each mutation is a bug
that was seen in some implementation, or that a check must be able to see, and must
fail: one of each class (others of the class differ in size, and are larger). The
mutations are the switches below, nothing else knows of them. Bugs in the samplers'
own code: ``tests/mutants``.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]

# How each bug changes the standard deviation of the injected noise.
_SCALES: dict[str, Callable[[Group], float]] = {
    "N forgotten in the noise": lambda c: c["num_data"] ** 0.5,
    "T instead of sqrt(T)": lambda c: c["temperature"] ** 0.5,
    "factor 2 missing": lambda c: 0.5**0.5,
    "noise 2 % too large": lambda c: 1.02,
}

# Of what all references share.
SGLD_MUTATIONS = (
    *(*_SCALES, "prior dropped", "gradient 2 % too large", "uniform noise"),
    *("noise shared between parameters", "noise shared between neighbouring elements"),
    "seed reused every second step",
)

SGHMC_MUTATIONS = (
    *("explicit Euler", "momentum means friction", "friction forgotten in the noise"),
    *("noise account ignored", "momentum never resampled"),
    *("momentum resampled one step late", "momentum starts at rest"),
)

# Frozen.
PSGLD_MUTATIONS = (
    "preconditioner without its root in the noise",
    *("preconditioner not in the noise", "preconditioner without its root"),
    "frozen too late",
)

# Without a memory.
GAMMA_MUTATIONS = ("gamma left out", "gamma of the wrong sign", "gamma without T")

SGNHT_MUTATIONS = ("explicit Euler", "friction forgotten in the noise")

# At work.
THERMOSTAT_MUTATIONS = (
    *("thermostat ignored", "thermostat watches a norm", "thermostat twice as fast"),
    *("thermostat watches the new momentum", "N forgotten in the thermostat"),
)


class _Reference(Optimizer):
    """The base of the references: gradients with prior, and noise."""

    #: Hyperparameters that not all of them have; a type is of one that must be given.
    OWN: ClassVar[Group] = {}

    def __init__(self, params: Iterable[Any], lr: float, **settings: Any) -> None:
        own = {
            "prior_precision": 0.0,
            "temperature": 1.0,
            "num_data": float,
            **self.OWN,
        }
        own |= {"seed": 0, "mutation": None}
        assert settings.keys() <= own.keys()
        own |= settings
        assert not any(isinstance(value, type) for value in own.values())
        self.seed, self.mutation = own.pop("seed"), own.pop("mutation")
        super().__init__(params, {"lr": lr} | own)
        self.step_count = 0
        self.generator = torch.Generator().manual_seed(self.seed + 2**32)

    def gradient(self, p: Tensor, c: Group) -> Tensor:
        """ḡ + (λ / N) θ."""
        assert p.grad is not None
        decay, grad = c["prior_precision"] / c["num_data"], p.grad
        if self.mutation == "prior dropped":
            decay = 0.0
        if self.mutation == "gradient 2 % too large":
            grad = 1.02 * grad
        return grad + decay * p

    def noise(self, p: Tensor, variance: float, c: Group) -> Tensor:
        """Fresh N(0, variance) for every element."""
        generator, step = self.generator, self.step_count
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
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group)
        self.step_count += 1

    def update(self, p: Tensor, c: Group) -> None:
        raise NotImplementedError


class ReferenceSGLD(_Reference):
    """θ <- θ - lr g + N(0, 2 lr T / N)."""

    def update(self, p: Tensor, c: Group) -> None:
        variance = 2 * c["lr"] * c["temperature"] / c["num_data"]
        p += -c["lr"] * self.gradient(p, c) + self.noise(p, variance, c)


class ReferenceSGHMC(_Reference):
    """v <- m v - lr g + N(0, 2 (1 - m - β̂) lr T / N), then θ <- θ + v."""

    OWN: ClassVar[Group] = {
        "momentum": 0.9,
        "noise_estimate": 0.0,
        "resample_momentum_every": 0,
    }

    def update(self, p: Tensor, c: Group) -> None:
        scale = c["lr"] * c["temperature"] / c["num_data"]
        state, momentum = self.state[p], c["momentum"]
        lr, account = c["lr"], self.account(c)
        if self.is_drawn(c):
            variance = scale
            if c["resample_momentum_every"] > 0:
                # With the mean lr g / (1 + m), which leaves a part of the step's -lr g.
                part = 1 / (1 + momentum)
                variance, lr, account = 2 * part * scale, part * lr, part**2 * account
            xi = torch.randn(p.shape, generator=self.generator, dtype=p.dtype)
            v = variance**0.5 * xi
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
        move = momentum * v - lr * self.gradient(p, c) + xi
        p += v if self.mutation == "explicit Euler" else move
        state["momentum"] = move

    def is_drawn(self, c: Group) -> bool:
        """Returns whether this step starts with a fresh momentum."""
        every, step = c["resample_momentum_every"], self.step_count
        if self.mutation == "momentum never resampled":
            every = 0
        if self.mutation == "momentum resampled one step late" and step > 0:
            step -= 1
        return self.step_count == 0 or (every > 0 and step % every == 0)

    def account(self, c: Group) -> float:
        """The part of the friction's noise that the gradients bring."""
        ignored = self.mutation == "noise account ignored"
        return 0.0 if ignored else c["noise_estimate"]


class ReferencePSGLD(_Reference):
    """θ <- θ - lr G g + (lr T / N) Γ + N(0, 2 lr T G / N), G = 1 / (√V + ε)."""

    OWN: ClassVar[Group] = {"decay": 0.99, "eps": 1e-5, "adapt": True, "gamma": True}

    def update(self, p: Tensor, c: Group) -> None:
        state, bug, grad = self.state[p], self.mutation, p.grad
        assert grad is not None
        weight = 1 - c["decay"]
        v = state.get("square_average")
        if v is None:
            v = grad.detach() ** 2
            if c["adapt"] and c["gamma"]:
                v = self.begin_gamma(p, grad, v, c)
        if c["adapt"] or bug == "frozen too late":
            v = (1 - weight) * v + weight * grad.detach() ** 2
        state["square_average"] = v
        g = 1 / (v.sqrt() + c["eps"])
        if bug == "preconditioner without its root":
            g = 1 / (v + c["eps"])
        heat = c["lr"] * c["temperature"] / c["num_data"]
        noise = self.noise(p, 2 * heat, c)
        if bug == "preconditioner without its root in the noise":
            noise *= g
        elif bug != "preconditioner not in the noise":
            noise *= g.sqrt()
        gradient = self.gradient(p, c).detach()
        moved = p - c["lr"] * g * gradient
        if c["adapt"] and c["gamma"] and bug != "gamma left out":
            moved += self.correction(p, grad, v, g, c)
        p.copy_(moved + noise)

    def begin_gamma(self, p: Tensor, grad: Tensor, v: Tensor, c: Group) -> Tensor:
        """V before the first step, and J W."""
        (h,) = torch.autograd.grad(grad, p, torch.ones_like(p), retain_graph=True)
        slope = 2 * grad.detach() * h
        self.state[p]["w"] = slope
        if self.mutation == "gamma starts with the first square and its slope":
            return v
        return v + c["temperature"] / c["num_data"] * h.abs()

    def correction(
        self, p: Tensor, grad: Tensor, v: Tensor, g: Tensor, c: Group
    ) -> Tensor:
        """(lr T / N) Γ, with the exact curvature: chains are independent."""
        state, bug, weight = self.state[p], self.mutation, 1 - c["decay"]
        assert p.shape[1] == 1
        (h,) = torch.autograd.grad(grad, p, torch.ones_like(p), retain_graph=True)
        last = 2 * weight * grad.detach() * h
        w = (1 - weight) * state.get("w", torch.zeros_like(p)) + last
        decay = c["prior_precision"] / c["num_data"]
        jacobian = 1 - c["lr"] * g * (h + decay)
        largest = 1 / c["decay"] if c["decay"] > 0 else 1.0
        if bug != "gamma without the Jacobians":
            state["w"] = w * jacobian.clamp(0, largest)
        else:
            state["w"] = w
        if bug == "gamma of the last gradient alone":
            w = last
        factors = {
            "gamma of the wrong sign": -1.0,
            "gamma without T": 1 / c["temperature"],
        }
        heat = c["lr"] * c["temperature"] / c["num_data"] * factors.get(bug or "", 1.0)
        # V = 0 at a stationary point, where W = 0 as well.
        return -heat * g**2 / (2 * v.sqrt()).clamp(min=1e-30) * w


class ReferenceSGNHT(_Reference):
    """SGHMC with the friction α <- α + κ (u² N / (lr T) - 1), u the mean of v, v'."""

    OWN: ClassVar[Group] = {"momentum": 0.9, "thermostat_rate": float}

    def update(self, p: Tensor, c: Group) -> None:
        state, bug = self.state[p], self.mutation
        heat = c["lr"] * c["temperature"] / c["num_data"]
        injected = 1 - c["momentum"]  # A
        if not state:
            v = torch.randn(p.shape, generator=self.generator, dtype=p.dtype)
            state["momentum"] = heat**0.5 * v
            state["thermostat"] = torch.zeros_like(p)
        v, alpha = state["momentum"], injected + state["thermostat"]
        if bug == "thermostat ignored":
            alpha = injected
        share = 1.0 if bug == "friction forgotten in the noise" else injected
        xi = self.noise(p, 2 * share * heat, c)
        new = (1 - alpha) * v - c["lr"] * self.gradient(p, c) + xi
        p += v if bug == "explicit Euler" else new
        state["momentum"] = new
        state["thermostat"] = state["thermostat"] + self.change(v, new, heat, c)

    def change(self, old: Tensor, new: Tensor, heat: float, c: Group) -> Tensor:
        """Returns the thermostats' scale."""
        bug, rate = self.mutation, c["thermostat_rate"]
        if bug == "N forgotten in the thermostat":
            heat = heat * c["num_data"]
        u = new if bug == "thermostat watches the new momentum" else (old + new) / 2
        seen = u**2 / heat
        if bug == "thermostat watches a norm":
            seen = seen.mean(dim=1, keepdim=True)
        if bug == "thermostat twice as fast":
            rate = 2 * rate
        return rate * (seen - 1)
