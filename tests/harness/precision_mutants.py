"""A reference for ``GammaPrecision`` in NumPy, and its bugs as mutations."""

import numpy as np

from torch_sgmcmc import Sampler

PRECISION_MUTATIONS = (
    "d instead of d/2",
    "mean instead of a draw",
    "T on the rate only",
    "first parameter of the group only",
    "one draw for all groups",
    "draw of the update before",
)


class ReferencePrecision:
    """λ | θ ~ Gamma((a + d/2 - 1)/T + 1, rate (b + ‖θ‖²/2)/T), of every group."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        shape: float,
        rate: float,
        mutation: str | None = None,
    ) -> None:
        self.sampler, self.mutation = sampler, mutation
        self.shape, self.rate = shape, rate
        self.random = np.random.default_rng(0)
        self.count = 0

    def step(self) -> None:
        state = self.random.bit_generator.state
        if self.mutation == "draw of the update before":
            self.random = np.random.default_rng(self.count // 2)
        self.count += 1
        for group in self.sampler.param_groups:
            if self.mutation == "one draw for all groups":
                self.random.bit_generator.state = state
            group["prior_precision"] = self.draw(group)

    def draw(self, group: dict) -> float:
        params = group["params"]
        if self.mutation == "first parameter of the group only":
            params = params[:1]
        d = sum(p.numel() for p in params)
        square = sum(float((p.double() ** 2).sum()) for p in params)
        if self.mutation == "d instead of d/2":
            d *= 2
        t = on_shape = group["temperature"]
        if self.mutation == "T on the rate only":
            on_shape = 1.0
        shape = (self.shape + d / 2 - 1) / on_shape + 1
        rate = (self.rate + square / 2) / t
        if self.mutation == "mean instead of a draw":
            return shape / rate
        return self.random.gamma(shape) / rate
