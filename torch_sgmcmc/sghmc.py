"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.by_coordinate import (
    Limits,
    check_rates,
    limits_of,
    masses_and_frictions,
)
from torch_sgmcmc.chain.diagonal import check_saved_diagonal, diagonals
from torch_sgmcmc.chain.dtypes import blank, state_dtype
from torch_sgmcmc.chain.fit import check_fits
from torch_sgmcmc.chain.friction import check_friction, check_noise_estimate
from torch_sgmcmc.chain.given import GIVEN_FRICTION, GIVEN_MASS, GIVEN_VARIANCE
from torch_sgmcmc.chain.given_covariance import (
    COVARIANCE,
    Factors,
    check_saved_matrix,
    kept_matrix,
    move_matrix,
    noise_of_matrix,
    refuse_checkpoint,
    update_with_noise,
)
from torch_sgmcmc.chain.many_chains import ManyChains
from torch_sgmcmc.chain.master import start_masters
from torch_sgmcmc.chain.method import Method
from torch_sgmcmc.chain.momentum import start_momenta
from torch_sgmcmc.chain.operators import gradient_variance_
from torch_sgmcmc.chain.record import Chain, Work
from torch_sgmcmc.chain.roots import root
from torch_sgmcmc.chain.settings import settings

__all__ = ["SGHMC"]

# Estimates that are compared with the friction at every step.
_CHECKED = ("online", "given")
_UNCHANGED = ". No parameter has changed"
_FRICTION = "1 - momentum"

# What is kept for "online".
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
        {num_data} {prior_precision} {prior_mean}
        temperature: T >= 0; 1 is the Bayesian posterior, 0 gives SGD with momentum.
            Default: 1.
        noise_estimate: β̂, the part of the friction's noise that the minibatches
            already bring: β̂ = lr N Var(ḡ) / (2T). A float in [0, α], equal for
            all coordinates, ``"online"``: estimated for each coordinate from the
            gradients seen, as half the mean squared difference of consecutive
            gradients, and used after the first 100 of them, or ``"given"``: of the
            Var(ḡ) that :meth:`set_gradient_variance` got for each coordinate, or
            :meth:`set_gradient_covariance` as a matrix over all. β̂ > α is an error
            that names both numbers. Default: 0.
        resample_momentum_every: k >= 0; before every k-th update the momentum is
            drawn afresh from its stationary law given θ. 0 never does. Default: 0.
        initial_momentum: ``"stationary"`` draws the first momentum from its
            stationary law N(0, lr T / N), ``"zeros"`` starts at rest. Default:
            "stationary".
        {num_chains} {seed}
        capturable: keep the step counter in device memory, so that ``step()`` can be
            captured in a CUDA graph after one ordinary step. Excludes the noise
            estimates that need the host, "online" and "given". Default: False.
        {nonfinite} {process_group}

    State:
        * ``momentum`` (shape of the parameter; fp64 for fp64 parameters, else fp32):
          v.
        * ``previous_grad``, ``grad_variance`` (same shape and dtype) and
          ``num_grads`` (int), only with ``noise_estimate="online"``.
        * ``given_variance`` (same shape and dtype), or for all parameters
          ``state["gradient_noise"]["covariance"]`` (fp64), as they were given.
        * ``given_mass`` and ``given_friction`` (same shape and dtype), after
          :meth:`set_mass`.
        * ``master`` (same shape, fp32), only of parameters in bf16 or fp16: θ, see
          :class:`SGLD`.

    Raises:
        ValueError: a hyperparameter out of range, here or at a later step.
        TypeError: a hyperparameter that is not a number.
        RuntimeError: at a step, with "given": no Var(ḡ), or one of other parameters.

    Example:
        >>> sampler = SGHMC(model.parameters(), lr=0.03, momentum=0.9,
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
    _METHOD = Method("sghmc_step_")
    _BY_COORDINATE = Method("sghmc_by_coordinate_step_")
    _STATE: ClassVar[Mapping[str, type]] = {
        **_METHOD.state,
        **_ONLINE,
        **dict.fromkeys((GIVEN_VARIANCE, GIVEN_MASS, GIVEN_FRICTION), Tensor),
    }
    _COMMON_STATE: ClassVar[tuple[str, ...]] = (COVARIANCE,)

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
        self._construct(locals())

    def _begin(self) -> None:
        super()._begin()
        # The factors of the injected noise, by which groups draw momenta afresh, and
        # what they were made of. And of the masses that were given. Known before a
        # step, which may not read tensors where it is captured or traced; unless they
        # are cut, which takes all ranks.
        self._chain.known.update(factors=Factors(), has_masses=False, limits={})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._note_masses(measure=self._chain.placement.is_whole)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["noise_estimate"] in _CHECKED and group["capturable"]:
            raise ValueError(
                f"Invalid noise_estimate: {group['noise_estimate']!r} is checked on "
                "the host at every step and excludes capturable=True"
            )
        check_noise_estimate(group, 1.0 - group["momentum"], _FRICTION)

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        state = super()._blank_state(group, p)
        if group["noise_estimate"] == "online":
            state |= {**blank(p, "grad_variance", "previous_grad"), "num_grads": 0}
        return state

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        missing = [key for key in _ONLINE if key not in state]
        if 0 < len(missing) < len(_ONLINE):
            raise ValueError(
                f"Invalid state_dict: the state of parameter {index} lacks "
                f"{', '.join(missing)}"
            )
        if GIVEN_VARIANCE in state:
            check_saved_diagonal(
                GIVEN_VARIANCE, index, state[GIVEN_VARIANCE], p, or_zero=True
            )
        for key in (GIVEN_MASS, GIVEN_FRICTION):
            if key in state:
                check_saved_diagonal(key, index, state[key], p)
        if GIVEN_FRICTION in state and GIVEN_MASS not in state:
            raise ValueError(
                f"Invalid state_dict: the state of parameter {index} lacks {GIVEN_MASS}"
            )

    # ---- Mass and friction ----------------------------------------------------

    @torch.no_grad()
    def set_mass(
        self,
        mass: Iterable[Tensor | float] | None,
        friction: Iterable[Tensor | float] | None = None,
    ) -> None:
        """Sets algorithm 2's M and C for each coordinate: a diagonal preconditioner.

        lr / M takes the place of ``lr``, (1 - ``momentum``) C / M that of
        1 - ``momentum``, and ``noise_estimate`` / M that of a ``noise_estimate`` that
        is a number. Neither changes the target. A mass of about 1 / the posterior
        variance (up to a factor, which ``lr`` can have) makes all coordinates equally
        fast. Momenta that are there are multiplied by √(old mass / new mass), so that
        their law is the new one. ``load_state_dict`` brings M and C back;
        ``torch.distributed.checkpoint`` brings back of the two what had been set
        before. They are new tensors: a CUDA graph has to be captured anew.

        Args:
            mass: M, tensors (or numbers), one for each parameter in the order of the
                param groups, finite and > 0, that broadcast to its shape, or of a
                DTensor are whole or cut as it is. They are copied and are part of the
                state dict. None forgets M and C.
            friction: C, the same. None: C = M, ``momentum`` is that of all coordinates.

        Raises:
            ValueError: there are not as many as parameters, or one of them has a wrong
                shape or elements out of range, or there is a friction and no mass.
                Nothing has changed. Whether a friction exceeds 1 is seen by the next
                step.
        """
        params = self._chain_now().params
        new: dict[str, Sequence[Tensor | None]] = {}
        if mass is not None:
            new[GIVEN_MASS] = diagonals("mass", mass, params)
        if friction is not None:
            if mass is None:
                raise ValueError("Invalid friction: it needs a mass")
            new[GIVEN_FRICTION] = diagonals("friction", friction, params)
        old = [self.state.get(p, {}).get(GIVEN_MASS) for p in params]
        self._replace_given((GIVEN_MASS, GIVEN_FRICTION), new)
        self._note_masses()
        chain = self._chain_now()
        for p, was in zip(params, old, strict=True):
            state = self.state.get(p, {})
            if "momentum" not in state:
                continue
            # Not in place: the one that is left may be in a state dict.
            if was is not None:
                state["momentum"] = state["momentum"] * root(chain, was)
            if GIVEN_MASS in state:
                state["momentum"] = state["momentum"] / root(chain, state[GIVEN_MASS])

    def _note_masses(self, *, measure: bool = True) -> None:
        """Keeps what a step needs to know of all masses."""
        having = [
            p for p in self._chain_now().params if GIVEN_MASS in self.state.get(p, {})
        ]
        known = self._chain.known
        known["has_masses"], known["limits"] = bool(having), {}
        if measure:
            known["limits"] = {p: limits_of(p, self.state[p]) for p in having}

    def _replace_given(
        self, keys: Iterable[str], new: Mapping[str, Sequence[Tensor | None]]
    ) -> None:
        """Puts what is given in the place of what was given, for all parameters."""
        chain = self._chain_now()
        chain.clear_blank_state()
        self._chain.known["factors"] = Factors()
        for i, p in enumerate(chain.params):
            # Another dict: the one that is left may be in a state dict.
            state = {**self.state.pop(p, {})}
            for key in keys:
                state.pop(key, None)
            state.update({key: tensors[i] for key, tensors in new.items()})
            if state:
                self.state[p] = state

    # ---- Var(ḡ) that users give -----------------------------------------------

    @torch.no_grad()
    def set_gradient_variance(self, variance: Iterable[Tensor | float] | None) -> None:
        """Sets Var(ḡ), of which ``noise_estimate="given"`` takes β̂ from now on.

        :func:`minibatch_variance` makes it of the gradients of a minibatch's examples.
        It may be another one before every step.

        Args:
            variance: tensors (or numbers) >= 0, one for each parameter in the order of
                the param groups, that broadcast to its shape. They are copied and are
                part of the state dict. None forgets what was given, matrix or not.

        Raises:
            ValueError: there are not as many as parameters, or one of them has a wrong
                shape or elements out of range. Nothing has changed.
        """
        new = None
        if variance is not None:
            params = self._chain_now().params
            new = diagonals("gradient variance", variance, params, or_zero=True)
        self._set_given(new, None)

    @torch.no_grad()
    def set_gradient_covariance(self, covariance: Tensor) -> None:
        r"""Sets Var(ḡ) as one matrix V, for ``noise_estimate="given"``.

        With all d coordinates in a row and B̂ = lr N V / (2T), the noise of an update is
        drawn from N(0, 2 lr T / N (α - B̂)). Its Cholesky factor is computed where V or
        a hyperparameter has changed; a step takes d² work. Coordinates without a
        gradient are left out. All groups must have ``noise_estimate="given"``, which
        the next step sees. :func:`minibatch_covariance` makes V.

        Args:
            covariance: symmetric, ``[d, d]``, coordinates in the order of the
                parameters. It is copied and is part of the state dict.

        Raises:
            ValueError: it is not of this shape, finite and symmetric, or the sampler
                has ``num_chains``, DTensors or parameters on several devices. Nothing
                has changed. Whether α - B̂ has a negative eigenvalue is seen by the next
                step, which then raises one that names it.
        """
        self._set_given(None, kept_matrix(self._chain_now(), covariance))

    def _set_given(
        self, new: list[Tensor] | None, matrix: dict[str, Tensor] | None
    ) -> None:
        self._replace_given(
            (GIVEN_VARIANCE,), {} if new is None else {GIVEN_VARIANCE: new}
        )
        self.state.pop(COVARIANCE, None)
        if matrix is not None:
            self.state[COVARIANCE] = matrix

    def _parameters_changed(self) -> None:
        self._chain.known["factors"] = Factors()
        self._note_masses()

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        super()._check_state_dict(state_dict)
        check_saved_matrix(self._chain_now(), state_dict["state"])

    def _finish_loading(self, state_dict: dict[str, Any]) -> None:
        super()._finish_loading(state_dict)
        self._chain.known["factors"] = Factors()
        self._note_masses()
        move_matrix(self._chain_now())

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Sampler.state_dict`.

        Raises:
            RuntimeError: it is for ``torch.distributed.checkpoint``'s
                ``get_optimizer_state_dict``, which knows state of parameters alone, and
                there is a matrix.
        """
        refuse_checkpoint(self._chain_now())
        return super().state_dict()

    # ---- A step ---------------------------------------------------------------

    def _prepare_all(self, chain: Chain, work: list[Work]) -> list[Any]:
        if self._chain.known["has_masses"]:
            for group, params, _, _ in work:
                self._check_rates(group, params, [], _UNCHANGED)
        prepared = super()._prepare_all(chain, work)
        if COVARIANCE in self.state and work:
            noises = noise_of_matrix(chain, work, chain.known["factors"])
            return [(*a, noise) for a, noise in zip(prepared, noises, strict=True)]
        return prepared

    def _prepare(
        self, chain: Chain, work: Work
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns momenta, the gradients' variances if they are used, and masters."""
        group, params, _, offsets = work
        stationary = group["initial_momentum"] == "stationary"
        new = start_momenta(chain, group, params, offsets, stationary=stationary)
        for p in new:
            if GIVEN_MASS in self.state[p]:
                self.state[p]["momentum"] /= root(chain, self.state[p][GIVEN_MASS])
        variances: list[Tensor] = []
        if group["noise_estimate"] == "online":
            variances = self._observe_gradients(chain, work)
        elif group["noise_estimate"] == "given" and COVARIANCE not in self.state:
            variances = self._given_variances(group, params)
        momenta = [self.state[p]["momentum"] for p in params]
        return momenta, variances, start_masters(chain, params)

    def _repeats(self, group: dict[str, Any]) -> bool:
        """Not with a noise estimate that follows gradients, nor with masses."""
        cls = type(self)
        return (
            cls._prepare is SGHMC._prepare
            and cls._prepare_all is SGHMC._prepare_all
            and cls._update is SGHMC._update
            and cls._advance is SGHMC._advance
            and group["noise_estimate"] not in _CHECKED
            and not self._chain.known["has_masses"]
        )

    def _looks_later(self, work: list[Work]) -> bool:
        """Not with a noise estimate that is checked on the host at every step."""
        return super()._looks_later(work) and not any(
            lists.group["noise_estimate"] in _CHECKED for lists in work
        )

    def _check_rates(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        variances: list[Tensor],
        state_of_things: str,
    ) -> None:
        states = [self.state[p] for p in params]
        if not self._chain.known["limits"]:
            self._note_masses()
        known = self._chain.known["limits"]
        limits = [known.get(p, Limits()) for p in params]
        check_rates(group, params, states, limits, variances, state_of_things)

    def _given_variances(
        self, group: dict[str, Any], params: list[Tensor]
    ) -> list[Tensor]:
        for p in params:
            if GIVEN_VARIANCE not in self.state[p]:
                raise RuntimeError(
                    "SGHMC has no gradient variance for a parameter of shape "
                    f"{list(p.shape)}: call set_gradient_variance() before step(), "
                    "with that of all parameters"
                )
        variances = [self.state[p][GIVEN_VARIANCE] for p in params]
        self._check_variances(group, params, variances, _UNCHANGED)
        return variances

    def _observe_gradients(self, chain: Chain, work: Work) -> list[Tensor]:
        """Updates the gradients' variances and checks them against the friction.

        Returns:
            The variances once all rest on enough gradients, until then nothing.
        """
        group, params, grads, _ = work
        # An operator that refuses the momenta would do so when this has been changed.
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            momentum = state["momentum"]
            if momentum.dtype is not state_dtype(p) or momentum.shape != p.shape:
                check_fits(chain, [work])
        by_count: dict[int, list[tuple[dict[str, Any], Tensor]]] = {}
        for p, state, grad in zip(params, states, grads, strict=True):
            count = state.get("num_grads", 0)
            if count == 0:
                like = {"dtype": state_dtype(p)}
                chain.create(p, "grad_variance", torch.zeros_like(p, **like))
                previous = torch.zeros_like(p, **like).copy_(grad)
                chain.create(p, "previous_grad", previous)
                chain.create(p, "num_grads", 0)
            else:
                by_count.setdefault(count, []).append((state, grad))
            state["num_grads"] = count + 1
        for count, members in by_count.items():
            self._chain.placement.without_noise(gradient_variance_)(
                [grad for _, grad in members],
                [state["grad_variance"] for state, _ in members],
                [state["previous_grad"] for state, _ in members],
                weight=max(1.0 / count, _C.FORGETTING),
            )
        if min(state["num_grads"] for state in states) <= _C.MIN_GRADIENTS:
            return []
        variances = [state["grad_variance"] for state in states]
        self._check_variances(
            *(group, params, variances),
            f"{_UNCHANGED}; the gradients have entered the estimate",
        )
        return variances

    def _check_variances(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        variances: list[Tensor],
        state_of_things: str,
    ) -> None:
        if self._chain.known["has_masses"]:
            self._check_rates(group, params, variances, state_of_things)
            return
        here = [v for v in self._chain.placement.here(variances) if v.numel()]
        largest = max((float(v.max()) for v in here), default=0.0)
        largest = self._chain.placement.largest(params, largest)
        scale = group["lr"] * group["num_data"] / (2 * group["temperature"])
        check_friction(
            scale * largest,
            1.0 - group["momentum"],
            _FRICTION,
            f" in the noisiest coordinate{state_of_things}",
        )

    def _instead(self, group: dict[str, Any]) -> dict[str, Any]:
        numbers = super()._instead(group)
        if group["noise_estimate"] in _CHECKED:
            numbers["noise_estimate"] = 0.0
        return numbers

    def _update(
        self, chain: Chain, work: Work, prepared: tuple[list[Tensor], ...]
    ) -> None:
        momenta, variances, masters, *noises = prepared
        if noises:
            update_with_noise(chain, work, [momenta, variances, masters], *noises)
            return
        lists, method = [momenta, variances], self._METHOD
        if self._chain.known["has_masses"]:
            states = [self.state[p] for p in work.params]
            lists += masses_and_frictions(work.params, states)
            method = self._BY_COORDINATE
        lists.append(masters)
        method.update(chain, work, lists, **self._instead(work.group))
