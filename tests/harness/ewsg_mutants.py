"""EWSG in plain PyTorch, and its known bugs as mutations (see ``harness.mutants``)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Bugs in W, by which the wrong W differs from the right one: the nearest to it.
WEIGHT_MUTATIONS: dict[str, Callable[[dict[str, Any]], float]] = {
    "sign of W": lambda c: -1.0,
    "factor 1/2 missing": lambda c: 2.0,
    "T missing": lambda c: c["temperature"],
}

EWSG_MUTATIONS = (
    *WEIGHT_MUTATIONS,
    *("one decision for each tensor", "one decision for all chains"),
    *("uniform reused by the next proposal", "uniform reused by the next step"),
    *("first group's settings in every weight", "prior missing in W"),
    *("every proposal accepted", "proposals compared with the first minibatch"),
    "chain not restarted",
)

# Bugs of a persistent index chain.
PERSISTENT_MUTATIONS = (
    *("former minibatch not evaluated again", "chain restarted"),
    *("last proposal kept", "first minibatch kept"),
)


class ReferenceEWSG(Optimizer):
    """Many chains along the leading dimension of every parameter, in float64."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        *,
        num_data: float,
        prior_precision: float = 0.0,
        temperature: float = 1.0,
        index_chain_length: int = 1,
        persistent_index_chain: bool = False,
        surrogate: str = "momentum",
        seed: int = 0,
        mutation: str | None = None,
    ) -> None:
        target = {"prior_precision": prior_precision, "temperature": temperature}
        lists = {"lr": lr, "momentum": momentum, "num_data": num_data}
        super().__init__(params, lists | target)
        self.length, self.surrogate = index_chain_length, surrogate
        self.mutation = mutation
        self.generator = torch.Generator().manual_seed(seed + 2**32)
        self.persistent = persistent_index_chain
        self.kept: list[Tensor] | None = None
        self.numbers: Tensor | None = None  # of the minibatches used last
        self.num_drawn = 0
        self.uniforms: Tensor | None = None

    @property
    def members(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, group) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:
        for p, c in self.members:
            if "momentum" not in self.state[p]:
                heat = c["lr"] * c["temperature"] / c["num_data"]
                self.state[p]["momentum"] = heat**0.5 * self.normal(p)
        numbers = self.numbers
        if numbers is None or not self.persistent:
            numbers = self.fresh()
        current = self.draw(closure, numbers)
        stale = ("chain not restarted", "former minibatch not evaluated again")
        if self.mutation in stale and self.kept is not None:
            current = self.kept
        first = current
        for proposal in range(self.length):
            fresh = self.fresh()
            proposed = self.draw(closure, fresh)
            base = current
            if self.mutation == "proposals compared with the first minibatch":
                base = first
            rises = [
                self.weight(p, b, c) - self.weight(p, a, c)
                for (p, c), a, b in zip(self.members, base, proposed, strict=True)
            ]
            if self.mutation != "one decision for each tensor":
                rises = [sum(rises)] * len(rises)
            if self.mutation == "one decision for all chains":
                rises = [r.sum().expand_as(r) for r in rises]
            uniform = self.uniform(rises[0], proposal)
            current = [
                torch.where(self.accepts(uniform, r)[:, None], b, a)
                for r, a, b in zip(rises, current, proposed, strict=True)
            ]
            accepted = self.accepts(uniform, rises[0])
            if self.mutation == "last proposal kept":
                accepted = accepted | True
            if self.mutation != "first minibatch kept":
                numbers = torch.where(accepted, fresh, numbers)
        self.kept = current
        self.numbers = None if self.mutation == "chain restarted" else numbers
        for (p, c), grad in zip(self.members, current, strict=True):
            heat = c["lr"] * c["temperature"] / c["num_data"]
            noise = (2 * (1 - c["momentum"]) * heat) ** 0.5 * self.normal(p)
            full = grad + c["prior_precision"] / c["num_data"] * p
            v = c["momentum"] * self.state[p]["momentum"] - c["lr"] * full + noise
            self.state[p]["momentum"] = v
            p += v
            p.grad = grad

    def normal(self, p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=self.generator, dtype=p.dtype)

    def fresh(self) -> Tensor:
        chains = len(self.members[0][0])
        self.num_drawn += chains
        return torch.arange(self.num_drawn - chains, self.num_drawn)

    def draw(self, closure: Callable[[], Any], numbers: Tensor) -> list[Tensor]:
        self.minibatches = numbers
        with torch.enable_grad():
            closure()
        return [p.grad for p, _ in self.members]

    def uniform(self, like: Tensor, proposal: int) -> Tensor:
        reuse = self.uniforms is not None and (
            (self.mutation == "uniform reused by the next proposal" and proposal > 0)
            or self.mutation == "uniform reused by the next step"
        )
        if not reuse:
            g, dtype = self.generator, like.dtype
            self.uniforms = torch.rand(like.shape, generator=g, dtype=dtype)
        return self.uniforms

    def accepts(self, uniform: Tensor, rise: Tensor) -> Tensor:
        if self.mutation == "every proposal accepted":
            return uniform >= 0
        return uniform.log() < rise

    def weight(self, p: Tensor, grad: Tensor, c: dict[str, Any]) -> Tensor:
        """METHODS, section 5, of each chain."""
        if self.mutation == "first group's settings in every weight":
            c = self.param_groups[0]
        lr, alpha = c["lr"], 1 - c["momentum"]
        variance = 2 * alpha * lr * c["temperature"] / c["num_data"]
        v = self.state[p]["momentum"]
        u = {
            "momentum": alpha * v,
            "zero": 0 * v,
            "one": 0 * v + variance**0.5,
            "full_momentum": -(1 - alpha) * v,
        }[self.surrogate]
        full = grad
        if self.mutation != "prior missing in W":
            full = grad + c["prior_precision"] / c["num_data"] * p
        w = (u + lr * full).square().flatten(1).sum(dim=1) / (2 * variance)
        return WEIGHT_MUTATIONS.get(self.mutation or "", lambda c: 1.0)(c) * w
