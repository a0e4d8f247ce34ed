"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_sgmcmc.core import shards
from torch_sgmcmc.core.many_chains import ManyChains
from torch_sgmcmc.core.master import start_masters
from torch_sgmcmc.core.momentum import blank, start_momenta, state_dtype
from torch_sgmcmc.core.operators import gradient_variance_, sghmc_step_
from torch_sgmcmc.core.prior import prior_of
from torch_sgmcmc.core.settings import settings
from torch_sgmcmc.sampler import Work

__all__ = ["SGHMC"]

# The running variance of noise_estimate="online": a plain mean over the first
# 1 / (1 - 0.999) gradients and exponentially forgetting from then on. It is used
# once it rests on enough gradients for its largest coordinate to mean something.
_FORGETTING = 1e-3
_MIN_GRADIENTS = 100


# What is kept for it.
_ONLINE = {"grad_variance": Tensor, "num_grads": int, "previous_grad": Tensor}


class SGHMC(ManyChains):
    r"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014).

    Swap it in for ``torch.optim.SGD(params, lr, momentum)``: both numbers keep their
    meaning, and the iterates become samples of the posterior. With
    :math:`\bar g` = ``p.grad``, the gradient of the *mean* loss of a minibatch,
    and :math:`\alpha = 1 - \mathrm{momentum}`,

    .. math::
        g &= \bar g + \tfrac{\lambda}{N} (\theta - \mu), \\
        v &\leftarrow (1 - \alpha) v - \mathrm{lr}\, g
            + \sqrt{2 (\alpha - \hat\beta)\, \mathrm{lr}\, T / N}\; \xi,
            \qquad \xi \sim N(0, I), \\
        \theta &\leftarrow \theta + v \quad \text{(the new } v).

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`,
    up to an error of the order of ``lr`` and what is left of the minibatch noise
    after ``noise_estimate``. Neither ``lr`` nor ``momentum`` changes the target.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`.
        lr: step size on SGD's scale, >= 0. In the paper's notation η = lr / N.
        momentum: 1 - α in [0, 1); α is the friction. Default: 0.9.
        num_data: N, the number of training examples, > 0. 1 means that the loss is
            U itself.
        prior_precision: λ >= 0, precision of the Gaussian prior N(μ, 1/λ) on each
            parameter; 0 is a flat prior. Default: 0.
        prior_mean: μ, a number, or tensors, one for each parameter and of its shape,
            which are copied, see :class:`Sampler`. Default: 0.
        temperature: T >= 0; 1 is the Bayesian posterior, 0 gives SGD with momentum.
            Default: 1.
        noise_estimate: β̂, the part of the friction's noise that the minibatches
            already bring: β̂ = lr N Var(ḡ) / (2T). A float in [0, α], equal for
            all coordinates, or ``"online"``: estimated for each coordinate from the
            gradients seen, as half the mean squared difference of consecutive
            gradients, and used after the first 100 of them. β̂ > α is an error that
            names both numbers. Default: 0.
        resample_momentum_every: k >= 0; before every k-th update the momentum is
            drawn afresh from its stationary law given θ. 0 never does. Default: 0.
        initial_momentum: ``"stationary"`` draws the first momentum from its
            stationary law N(0, lr T / N), ``"zeros"`` starts at rest. Default:
            "stationary".
        num_chains: K makes K independent chains at once: every parameter has a leading
            dimension K, as :func:`torch.func.stack_module_state` makes them, and the
            loss is the sum of the chains' mean losses. Chain k is the chain of a
            sampler with the seed ``fold_in(seed, k)``, bit for bit. Default: None, one
            chain.
        seed: key of the noise, a 64-bit int; None draws one, see :class:`Sampler`.
            Default: None.
        capturable: keep the step counter in device memory, so that ``step()`` can be
            captured in a CUDA graph after one ordinary step. Excludes
            ``noise_estimate="online"``, which needs the host. Default: False.
        nonfinite: what to do about gradients that are not finite: "raise", "skip" or
            "allow", see :class:`Sampler`, also on clipping. Default: "raise".
        process_group: the ranks that sample this chain together, see :class:`Sampler`.
            Default: all.

    State:
        * ``momentum`` (shape of the parameter; fp64 for fp64 parameters, else fp32):
          v.
        * ``previous_grad``, ``grad_variance`` (same shape and dtype) and
          ``num_grads`` (int), only with ``noise_estimate="online"``.
        * ``master`` (same shape, fp32), only of parameters in bf16 or fp16: θ, see
          :class:`SGLD`.

    Raises:
        ValueError: a hyperparameter out of range, here or at a later step.
        TypeError: a hyperparameter that is not a number.

    Example:
        >>> sampler = SGHMC(model.parameters(), lr=0.1, momentum=0.99,
        ...                 num_data=50_000, prior_precision=1.0, seed=0)
        >>> for x, y in loader:
        ...     sampler.zero_grad()
        ...     F.cross_entropy(model(x), y).backward()
        ...     sampler.step()

    Note:
        ``momentum = 0`` carries no momentum over: that is SGLD. If β̂ > α stops the
        chain early in training, where gradients are noisiest, start with 0 and set
        ``group["noise_estimate"] = "online"`` after burn-in. More:
        docs/samplers/sghmc.md.

    Reference:
        T. Chen, E. B. Fox and C. Guestrin, Stochastic Gradient Hamiltonian Monte
        Carlo, ICML 2014, eq. 15.
    """

    _SETTINGS = settings("SGHMC")
    _STATE: ClassVar[Mapping[str, type]] = {
        "momentum": Tensor,
        **_ONLINE,
        "master": Tensor,
        "prior_mean": Tensor,
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        *,
        num_data: float,
        prior_precision: float = 0.0,
        prior_mean: float | Tensor | Iterable[Tensor] = 0.0,
        temperature: float = 1.0,
        noise_estimate: float | str = 0.0,
        resample_momentum_every: int = 0,
        initial_momentum: str = "stationary",
        num_chains: int | None = None,
        seed: int | None = None,
        capturable: bool = False,
        nonfinite: str = "raise",
        process_group: ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "num_data": num_data,
            "prior_precision": prior_precision,
            "prior_mean": prior_mean,
            "temperature": temperature,
            "noise_estimate": noise_estimate,
            "resample_momentum_every": resample_momentum_every,
            "initial_momentum": initial_momentum,
            "num_chains": num_chains,
        }
        super().__init__(
            *(params, defaults, seed, nonfinite, capturable),
            process_group=process_group,
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        noise_estimate = group["noise_estimate"]
        if noise_estimate == "online":
            if group["capturable"]:
                raise ValueError(
                    "Invalid noise_estimate: 'online' is checked on the host at "
                    "every step and excludes capturable=True"
                )
        elif noise_estimate == 0:
            return
        else:
            _check_friction(noise_estimate, group["momentum"])
        if group["temperature"] == 0:
            raise ValueError(
                f"Invalid noise_estimate: {noise_estimate!r} (must be 0 at "
                "temperature 0, where no noise is injected)"
            )

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        if group["noise_estimate"] != "online":
            return blank(p, "momentum")
        return {
            **blank(p, "momentum", "grad_variance", "previous_grad"),
            "num_grads": 0,
        }

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        missing = [key for key in _ONLINE if key not in state]
        if 0 < len(missing) < len(_ONLINE):
            raise ValueError(
                f"Invalid state_dict: the state of parameter {index} lacks "
                f"{', '.join(missing)}"
            )

    def _prepare(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        offsets: list[int],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns momenta, the gradients' variances if they are used, and masters."""
        start_momenta(
            self,
            group,
            params,
            offsets,
            stationary=group["initial_momentum"] == "stationary",
        )
        variances: list[Tensor] = []
        if group["noise_estimate"] == "online":
            variances = self._observe_gradients(group, params, grads)
        momenta = [self.state[p]["momentum"] for p in params]
        return momenta, variances, start_masters(self, params)

    def _looks_later(self, work: list[Work]) -> bool:
        """Not with a noise estimate that is checked on the host at every step."""
        return super()._looks_later(work) and not any(
            lists[0]["noise_estimate"] == "online" for lists in work
        )

    def _observe_gradients(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        """Updates the gradients' variances and checks them against the friction.

        Returns:
            The variances once all rest on enough gradients, until then nothing.
        """
        by_count: dict[int, list[tuple[dict[str, Any], Tensor]]] = {}
        for p, grad in zip(params, grads, strict=True):
            state = self.state[p]
            count = state.get("num_grads", 0)
            if count == 0:
                like = {"dtype": state_dtype(p)}
                state["grad_variance"] = torch.zeros_like(p, **like)
                state["previous_grad"] = torch.zeros_like(p, **like).copy_(grad)
            else:
                by_count.setdefault(count, []).append((state, grad))
            state["num_grads"] = count + 1
        for count, members in by_count.items():
            gradient_variance_(
                shards.locals_of(grad for _, grad in members),
                shards.locals_of(state["grad_variance"] for state, _ in members),
                shards.locals_of(state["previous_grad"] for state, _ in members),
                weight=max(1.0 / count, _FORGETTING),
            )
        states = [self.state[p] for p in params]
        if min(state["num_grads"] for state in states) <= _MIN_GRADIENTS:
            return []
        variances = [state["grad_variance"] for state in states]
        here = [v for v in shards.locals_of(variances) if v.numel()]
        largest = max((float(v.max()) for v in here), default=0.0)
        largest = shards.max_over_ranks(params, largest)
        scale = group["lr"] * group["num_data"] / (2 * group["temperature"])
        _check_friction(
            scale * largest,
            group["momentum"],
            " in the noisiest coordinate. No parameter has changed; the gradients "
            "have entered the estimate",
        )
        return variances

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        offsets: list[int],
        prepared: tuple[list[Tensor], list[Tensor], list[Tensor]],
    ) -> None:
        noise_estimate = group["noise_estimate"]
        self._local(sghmc_step_)(
            params,
            grads,
            *prepared,
            lr=group["lr"],
            momentum=group["momentum"],
            num_data=group["num_data"],
            prior_precision=group["prior_precision"],
            **prior_of(self, group, params),
            temperature=group["temperature"],
            noise_estimate=0.0 if noise_estimate == "online" else noise_estimate,
            resample_momentum_every=group["resample_momentum_every"],
            offsets=offsets,
            **self._step_arguments(group),
        )


def _check_friction(noise_estimate: float, momentum: float, where: str = "") -> None:
    friction = 1.0 - momentum
    # momentum 0.9 and noise_estimate 0.1 are equal parts of 1, but for rounding.
    if noise_estimate > friction + 1e-12:
        raise ValueError(
            f"Invalid noise_estimate: {noise_estimate:.6g}{where} (must not exceed "
            f"the friction 1 - momentum = {friction:.6g}: lower momentum or lr, or "
            "take larger minibatches)"
        )
