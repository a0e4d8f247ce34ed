"""Many independent chains of one method as one tensor, with a gradient budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import torch_sgmcmc as sg

from .target import Gaussian


@dataclass(frozen=True)
class Method:
    """A sampler with its settings.

    Args:
        sampler: "ewsg", "sghmc", "sgld" or "psgld".
        step: h of the paper. lr = n h² for EWSG and SGHMC, n h for SGLD, h for pSGLD,
            whose preconditioner, made of gradients of V, has an n in it.
        friction: γ of EWSG and SGHMC; momentum = 1 - γ h.
        length: M, the length of EWSG's index chain.
        surrogate: EWSG's surrogate of the new momentum.
        persistent: whether EWSG's index chain goes on from step to step.
        anchored: whether gradients have SVRG's control variate.
        euler: whether θ moves with the old momentum, as by the paper's eq. 3.
    """

    sampler: str
    step: float
    friction: float = 10.0
    length: int = 1
    surrogate: str = "momentum"
    persistent: bool = False
    anchored: bool = False
    euler: bool = False

    @property
    def underdamped(self) -> bool:
        """True if the method has a momentum."""
        return self.sampler in ("ewsg", "sghmc")


#: The paper's figure 1a and its step sizes; pSGLD also with the other reading of its h,
#: by a preconditioner of mean gradients; and EWSG with SVRG's gradients.
METHODS = {
    "EWSG": Method("ewsg", 5e-2),
    "SGHMC": Method("sghmc", 5e-2),
    "SGLD": Method("sgld", 5e-3),
    "pSGLD": Method("psgld", 5e-3),
    "pSGLD, n h": Method("psgld", 20 * 5e-3),
    "SVRG-LD": Method("sgld", 5e-4, anchored=True),
    "EWSG, SVRG": Method("ewsg", 5e-2, anchored=True),
}


class Chains:
    """Independent chains from given starts.

    Minibatches are single data, drawn uniformly and independently for each chain and
    step. The gradients of all chains are written at once, as autograd would leave
    them: θ - cᵢ is that of the loss ‖θ - cᵢ‖² / 2.

    Args:
        target: whose data the chains see.
        method: sampler and settings.
        start: θ at first, [chains, d].
        seed: of the sampler and of the minibatches.
    """

    def __init__(
        self, target: Gaussian, method: Method, start: Tensor, seed: int
    ) -> None:
        self.target, self.method = target, method
        self.parameter = start.clone().requires_grad_()
        self.generator = torch.Generator().manual_seed(seed)
        self.gradients = 0  # of single data, per chain
        self.steps = 0
        self.anchor: Tensor | None = None
        self.index: Tensor | None = None  # of the minibatch drawn last
        self.drawn = torch.empty(0, dtype=torch.int16)  # by their numbers
        n, h = target.num_data, method.step
        # By the groups' shared arguments all samplers have e^-V as target.
        common = {"num_data": n, "seed": seed}
        params = [self.parameter]
        if method.underdamped:
            lr, momentum = n * h * h, 1 - method.friction * h
        self.sampler: sg.Sampler
        match method.sampler:
            case "ewsg":
                self.sampler = sg.EWSG(
                    params,
                    lr,
                    momentum,
                    index_chain_length=method.length,
                    persistent_index_chain=method.persistent,
                    surrogate=method.surrogate,
                    num_chains=len(start),
                    **common,
                )
            case "sghmc":
                self.sampler = sg.SGHMC(params, lr, momentum, **common)
            case "sgld":
                self.sampler = sg.SGLD(params, n * h, **common)
            case "psgld":
                # As the literature has it: V adapts throughout, without Γ.
                self.sampler = sg.PSGLD(params, h, gamma=False, **common)
            case other:
                raise ValueError(f"Invalid sampler: {other!r}")

    @property
    def theta(self) -> Tensor:
        """The chains' states, [chains, d].

        By eq. 3 the next state is θ + v, v = h r. The sampler adds its new momentum to
        its parameter, which thus is θ + v after the step, and follows eq. 3 if
        gradients are those at θ. (The first step's are at θ + v: v is drawn with it.)
        """
        parameter = self.parameter.detach()
        state = self.sampler.state.get(self.parameter, {})
        if self.method.euler and "momentum" in state:
            return parameter - state["momentum"]
        return parameter

    def _minibatches(self) -> Tensor:
        """Fresh ones, or for a persistent index chain those that it asks for."""
        size = (len(self.theta),)
        if not self.method.persistent:
            return torch.randint(self.target.num_data, size, generator=self.generator)
        numbers = self.sampler.minibatches
        while int(numbers.max()) >= len(self.drawn):
            more = torch.randint(
                self.target.num_data,
                (max(*size, len(self.drawn)),),
                generator=self.generator,
                dtype=self.drawn.dtype,
            )
            self.drawn = torch.cat([self.drawn, more])
        return self.drawn[numbers].long()

    def _differentiate(self) -> None:
        theta, data = self.theta, self.target.data
        self.index = self._minibatches()
        self.gradients += 1
        chosen = data[self.index]
        grad = theta - chosen
        if self.anchor is not None:
            # The gradients at the anchor are kept from the last full pass.
            grad += (self.anchor - self.target.mean) - (self.anchor - chosen)
        self.parameter.grad = grad

    def step(self) -> None:
        """Makes one step of all chains."""
        if self.method.anchored and self.steps % self.target.num_data == 0:
            self.anchor = self.theta.clone()
            self.gradients += self.target.num_data
        if self.method.sampler == "ewsg":
            self.sampler.step(self._differentiate)
        else:
            self._differentiate()
            self.sampler.step()
        self.steps += 1
