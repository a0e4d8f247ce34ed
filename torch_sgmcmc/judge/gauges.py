"""Is it the posterior? Temperatures of a chain while it runs."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.checks import check_integer
from torch_sgmcmc.chain.closures import fresh_gradients
from torch_sgmcmc.chain.dtypes import has_master, state_dtype
from torch_sgmcmc.chain.group_settings import noise_estimate, scales
from torch_sgmcmc.chain.operators import gauge_sums
from torch_sgmcmc.chain.prior import prior_of
from torch_sgmcmc.chain.record import Chain, Work, chain_of, work_of
from torch_sgmcmc.chain.state_checks import check_count, check_tensor
from torch_sgmcmc.judge.centers import centers_of
from torch_sgmcmc.judge.readings import Readings
from torch_sgmcmc.sampler import Sampler

__all__ = ["Gauges", "has_temperatures"]

# Kinds of sums (csrc/methods/gauge.h).
_LANGEVIN, _PRECONDITIONED, _MOMENTUM, _THERMOSTAT = range(4)
_NOISE, _PRECONDITIONED_NOISE, _LATTICE = range(4, 7)
# A kind's sums among those of the host, and those of noise.
_PLACES = {
    _LANGEVIN: (0, 1),
    _PRECONDITIONED: (0, 1),
    _MOMENTUM: (0, 2, 3),
    _THERMOSTAT: (0, 2, 3),
    _LATTICE: (0, 5, 6),
}
_COUNT = 7  # of sums


# Of tensors by place: which sums, and the step's settings.
_Row = tuple[list[int], list[tuple[tuple[int, ...], Tensor]], Any]


class Gauges(Readings):
    r"""Temperatures of a chain, by tensor: is it the posterior that is sampled?

    .. code-block:: python

        gauges = torch_sgmcmc.Gauges(sampler)
        ...  # the training loop as it was
        print(gauges.summary())

    With d the elements of a tensor, N ``num_data``, m the momentum and g the gradient
    that a step uses (prior included), the gauges are means over steps of

    .. math::
        T_\text{conf} = \frac{N}{d}\, (\theta - c) \cdot g, \qquad
        T_\text{kin} = \frac{N (1 + m)}{2\, \mathrm{lr}\, d} \|v\|^2
        \quad\text{or (SGLD)}\quad T + \frac{\mathrm{lr}\, N}{2 d} \|g\|^2,

    c any constant. **In equilibrium both are equal**, for any potential, step size,
    noise of minibatches and estimate: E‖θ − c‖² and E[θ·v] do not change. So

    * T_kin ≠ T_conf: not in equilibrium (or not the dynamics that it seems to be);
    * T_kin / T − 1 is the **heating** by minibatches and by the step's length, on a
      quadratic the relative error of the variance; the minibatches' part of it is
      lr N Var(ḡ) / (2 T α), α = 1 − m (SGLD: 1), less what ``noise_estimate`` takes.

    Equations of samplers that move otherwise are in docs/gauges.md, and derived in
    ``csrc/host/gauges.h``. Intervals are by batch means (16 to 31 batches that grow
    with the chain), which takes account of autocorrelation, not of what a chain has
    never seen. Equality holds for whatever g is used. That it is the loss's, which
    clipped, stale or summed gradients are not, is seen by :meth:`observe`.

    Args:
        sampler: the sampler that is to be observed, from its next step on, until
            :meth:`detach`. One ``Gauges`` a sampler, not ``capturable``. HMC, HMCECS
            and SBPS have none: their acceptance and violation rates tell.
        every: steps between observations (one more or so with
            ``resample_momentum_every``). An observation costs about as much as an
            update. Default: 20.
        center: c, a tensor or number for each parameter in the order of the groups, or
            "current" for where they are now, or "prior_mean"; None is 0. A good one (a
            mode, the prior's mean) makes intervals shorter. Default: None.
        names: of the parameters, for tables; None takes those of named parameters.

    Raises:
        TypeError, ValueError: an argument is not as it should be.

    Note:
        Steps without a parameter's gradient or left out are not observed.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        every: int = 20,
        center: Iterable[Tensor | float] | str | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise TypeError(
                f"Invalid sampler: a {type(sampler).__name__} (must be a sampler of "
                "torch_sgmcmc)"
            )
        check_integer("every", every, low=1)
        chain_of(sampler).placement.refuse(
            "Invalid sampler: it has DTensors, and gauges take sums over whole "
            "parameters (observe replicas under DistributedDataParallel)"
        )
        if sampler.defaults["capturable"]:
            raise ValueError(
                "Invalid sampler: it is capturable, and gauges are read on the host"
            )
        if not has_temperatures(sampler):
            raise ValueError(
                f"Invalid sampler: {_kind(sampler)} has no gauges (acceptance and "
                "violation rates tell of it: diagnostics())"
            )
        chain = chain_of(sampler)
        if chain.gauges is not None:
            raise ValueError("Invalid sampler: it has Gauges already (detach() them)")
        self._sampler = weakref.ref(sampler)
        # Which outlives a wrapper of the sampler.
        self._chain: weakref.ref[Chain] = weakref.ref(chain)
        kind = _kind(sampler)
        self._motion = _C.Motion(_C.motion_of(kind))
        self._compares = _C.has_unbiased_gradients(kind)
        groups = sampler.param_groups
        self._params = [p for group in groups for p in group["params"]]
        self._group_of = [i for i, g in enumerate(groups) for _ in g["params"]]
        self._place = {p: i for i, p in enumerate(self._params)}
        self._names = _names(groups) if names is None else [str(n) for n in names]
        if len(self._names) != len(self._params):
            raise ValueError(
                f"Invalid names: {len(self._names)} (must be one for each of the "
                f"{len(self._params)} parameters)"
            )
        self._centers = centers_of(center, sampler, self._params)
        self._every = every
        redraws = groups[0].get("resample_momentum_every", 0)
        self._interval = _C.observation_interval(every, redraws)
        self._previous: tuple[int, dict[Tensor, Tensor]] | None = None
        self._rows: list[tuple[list[_Row], bool]] = []
        # Forces of observe() where the chain still is, and beside those of the step.
        self._others: list[_Row] = []
        self._others_at: list[int] = []
        self._forces: list[tuple[list[_Row], list[_Row]]] = []
        self.reset()
        chain.gauges = self

    def reset(self) -> None:
        """Forgets what was observed, as after a burn-in."""
        self._rows.clear()
        self._others = []
        self._forces.clear()
        self._host = _C.Gauges([p.numel() for p in self._params], self._group_of)

    def detach(self) -> None:
        """Ends the observation; what was read stays."""
        sampler = self._sampler()
        if sampler is not None and chain_of(sampler).gauges is self:
            chain_of(sampler).gauges = None

    # ---- Checkpoints ----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was observed, as lists of numbers.

        And, where the next observation will compare gradients with those of the step
        before it, these: ``previous_gradients``.
        """
        self._read()
        kept = {"every": self._every, "series": self._host.state}
        if self._previous is not None:
            step, grads = self._previous
            by_place = {self._place[p]: grad for p, grad in grads.items()}
            kept["previous_gradients"] = {"step": step, "gradients": by_place}
        return kept

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned, for the same parameters.

        Raises:
            ValueError: it is of other parameters. Nothing has been loaded.
        """
        check_integer("every", state_dict["every"], low=1)
        previous = self._read_previous(state_dict.get("previous_gradients"))
        self._host.state = state_dict["series"]
        self._rows.clear()
        self._others = []
        self._forces.clear()
        self._every, self._previous = state_dict["every"], previous
        redraws = self._attached().param_groups[0].get("resample_momentum_every", 0)
        self._interval = _C.observation_interval(self._every, redraws)

    def _read_previous(
        self, saved: Mapping[str, Any] | None
    ) -> tuple[int, dict[Tensor, Tensor]] | None:
        if saved is None:
            return None
        step = check_count("step", saved["step"])
        grads = {}
        for place, grad in saved["gradients"].items():
            if place not in range(len(self._params)):
                raise ValueError(
                    "Invalid state_dict: previous_gradients (must be of the "
                    f"{len(self._params)} parameters, by their numbers)"
                )
            p = self._params[place]
            what = f"previous gradient of parameter {place}"
            check_tensor(what, grad, p.shape)
            if not bool(grad.isfinite().all()):
                raise ValueError(
                    f"Invalid state_dict: {what} has elements that are not finite"
                )
            grads[p] = grad.detach().to(p.device, p.dtype, copy=True)
        return step, grads

    # ---- Observations ---------------------------------------------------------

    @torch.no_grad()
    def observe(self, closure: Callable[[], Any]) -> None:
        r"""Observes where the chain is, by a gradient that is right.

        For :class:`EWSG`, at every sample or at some of them: T_conf beside T, among
        its own observations (a large ``every`` leaves those out).

        For the others, before a step: are the gradients that it uses those of the loss?
        With h the closure's gradient and g that of the next step, at one θ,

        .. math::
            \text{gradient\_bias} = \frac{N}{d}\, \overline{(\theta - c) \cdot (g - h)},

        which is 0 but for chance if g is unbiased. It is not if gradients are clipped,
        stale, summed in place of averaged, of minibatches that depend on θ, or of batch
        norm in training mode while evaluation mode predicts. (A difference that is the
        same everywhere shows where c is not the mean: with c = 0.) Parameters' ``grad``
        are as before when it ends.

        Args:
            closure: computes the mean loss, without the prior, of a fresh minibatch
                that is drawn uniformly, or of all data, and calls ``backward()``.
        """
        sampler = self._attached()
        before = [p.grad for p in self._params]
        values = [None if grad is None else grad.clone() for grad in before]
        try:
            fresh_gradients(sampler, closure)
            work = work_of(sampler)
            if self._compares:
                self._others, self._others_at = self._forces_of(work), self._versions()
            else:
                self._add(work, plain=True, has_noise=False)
        finally:
            for p, grad, value in zip(self._params, before, values, strict=True):
                # Gradients may be views of memory that each backward pass writes to,
                # such as DistributedDataParallel's. Others are not touched: autograd
                # may have saved them.
                if _share_memory(p.grad, grad):
                    grad.copy_(value)
                p.grad = grad

    def _seen(self) -> Chain:
        """What is observed, by whatever name the sampler was given here."""
        chain = self._chain()
        if chain is None:
            raise RuntimeError("these Gauges are detached from their sampler")
        return chain

    def _attached(self) -> Sampler:
        sampler = self._sampler()
        if sampler is None or chain_of(sampler).gauges is not self:
            raise RuntimeError("these Gauges are detached from their sampler")
        return sampler

    def _observe(self, work: list[Work]) -> None:
        """What a sampler calls before each update."""
        if not work:
            return
        self._compare(work)
        # Cycles explore at T = 0, where there is no temperature to compare with.
        work = [lists for lists in work if lists.group["temperature"] > 0]
        if not work:
            return
        step, interval = self._seen().rng.steps, self._interval
        if step % interval == 0:
            at, previous = self._previous or (-1, {})
            has_noise = at == step - 1 and all(
                p in previous for _, params, _, _ in work for p in params
            )
            self._add(work, plain=False, has_noise=has_noise)
            self._previous = None
            every = work[0].group.get("resample_momentum_every", 0)
            self._interval = interval = _C.observation_interval(self._every, every)
        if (step + 1) % (_C.NOISE_EVERY * interval) == 0:
            # A clone: a later backward pass may add to the same memory.
            self._previous = (
                step,
                {
                    p: grad.detach().clone()
                    for _, params, grads, _ in work
                    for p, grad in zip(params, grads, strict=True)
                },
            )

    def _compare(self, work: list[Work]) -> None:
        """Sets the step's gradients beside those of observe()."""
        if not self._others:
            return
        # Somebody else, a checkpoint, may have moved the parameters.
        if self._versions() == self._others_at:
            self._forces.append((self._others, self._forces_of(work)))
        self._others = []
        if len(self._forces) >= _C.MOST_ROWS:
            self._read()

    def _add(self, work: list[Work], *, plain: bool, has_noise: bool) -> None:
        state = self._seen().state
        rows = []
        for group, params, grads, _ in work:
            motion = _C.Motion.NONE if plain else self._motion
            states = [state.get(p, {}) for p in params]
            kind, movers, statistics = _LANGEVIN, [], []
            factors = {} if plain else scales(group)
            if not plain and "momentum" in states[0]:
                kind, movers = _MOMENTUM, [s["momentum"] for s in states]
                if "momentum_scale" in factors:
                    movers = torch._foreach_mul(movers, factors["momentum_scale"])
            elif motion is _C.Motion.MOMENTUM:
                motion = _C.Motion.LANGEVIN  # overdamped EWSG
            if motion is _C.Motion.THERMOSTAT:
                kind, statistics = _THERMOSTAT, [s["thermostat"] for s in states]
                if "thermostat_scale" in factors:
                    factor = factors["thermostat_scale"]
                    statistics = torch._foreach_mul(statistics, factor)
            elif motion is _C.Motion.LATTICE:
                kind = _LATTICE
            if motion is _C.Motion.LANGEVIN and "square_average" in states[0]:
                kind = _PRECONDITIONED
                statistics = [s["square_average"] for s in states]
            numbers = self._numbers(group, params)
            positions, centers = self._positions(params)
            of_step = gauge_sums(
                *(grads, positions, centers, movers, statistics), kind=kind, **numbers
            )
            sums = [(_PLACES[kind], of_step)]
            if has_noise and self._previous is not None:
                noise = _PRECONDITIONED_NOISE if kind == _PRECONDITIONED else _NOISE
                before = [self._previous[1][p] for p in params]
                weights = statistics if kind == _PRECONDITIONED else []
                of_noise = gauge_sums(
                    *(grads, positions, [], before, weights), kind=noise, **numbers
                )
                sums.append(((4,), of_noise))
            places = [self._place[p] for p in params]
            rows.append((places, sums, _settings(group, motion)))
        self._rows.append((rows, has_noise))
        if len(self._rows) >= _C.MOST_ROWS:
            self._read()

    def _versions(self) -> list[int]:
        return [0 if p.is_inference() else p._version for p in self._params]

    def _forces_of(self, work: list[Work]) -> list[_Row]:
        """Of each tensor, x · g."""
        rows: list[_Row] = []
        for group, params, grads, _ in work:
            sums = gauge_sums(
                *(grads, *self._positions(params), [], []),
                kind=_LANGEVIN,
                **self._numbers(group, params),
            )
            places = [self._place[p] for p in params]
            settings = _settings(group, self._motion)
            rows.append((places, [(_PLACES[_LANGEVIN], sums)], settings))
        return rows

    def _numbers(self, group: dict[str, Any], params: list[Tensor]) -> dict[str, Any]:
        return {
            "weight_decay": group["prior_precision"] / group["num_data"],
            "decay": group["decay"] if group.get("adapt", False) else 1.0,
            "eps": self._constant(group),
            **prior_of(self._seen().state, group, params),
        }

    def _constant(self, group: dict[str, Any]) -> float:
        """ε of a preconditioner, beyond what a lattice clips, or the lr of a kick."""
        if self._motion is _C.Motion.HALF_DRIFTS:
            return float(group["lr"])
        if self._motion is _C.Motion.LATTICE:
            heat, lr = 2 * group["temperature"] / group["num_data"], group["lr"]
            bound = math.sqrt(heat / lr) if lr else math.inf  # without a move
            return min(bound, sys.float_info.max)
        return group.get("eps", 0.0)

    def _positions(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Where they are, and the centers, in the type of arithmetic."""
        state = self._seen().state
        positions = [
            state.get(p, {}).get("master", p).to(state_dtype(p))
            if has_master(p)
            else p.detach()
            for p in params
        ]
        return positions, self._centers_of(params)

    def _centers_of(self, params: list[Tensor]) -> list[Tensor]:
        if self._centers is None:
            return []
        return [self._centers[self._place[p]] for p in params]

    def _read(self) -> None:
        """Takes in what devices have summed since the last time."""
        for rows, has_noise in self._rows:
            self._host.add(*self._tables(rows), has_noise)
        self._rows.clear()
        for others, used in self._forces:
            by_step, settings = self._tables(used)
            by_closure, _ = self._tables(others)
            forces = ([row[0] for row in sums] for sums in (by_step, by_closure))
            self._host.add_forces(*forces, settings)
        self._forces.clear()

    def _tables(self, rows: list[_Row]) -> tuple[list[list[float]], list[Any]]:
        """Sums and settings of all tensors."""
        # A tensor that was not observed has sums that are not finite.
        sums = [[float("nan")] * _COUNT for _ in self._params]
        settings: list[Any] = [((0.0,) * 5, (0, 0, 0))] * len(self._params)
        for tensors, parts, made_with in rows:
            for tensor in tensors:
                sums[tensor] = [0.0] * _COUNT
                settings[tensor] = made_with
            for places, part in parts:
                for tensor, row in zip(tensors, part.tolist(), strict=True):
                    for place, value in zip(places, row, strict=True):
                        sums[tensor][place] = value
        return sums, settings


def has_temperatures(sampler: Sampler) -> bool:
    """Whether gauges can observe it: not HMC, HMCECS and SBPS."""
    return _C.motion_of(_kind(sampler)) != _C.Motion.NONE


def _kind(sampler: Sampler) -> str:
    """The class's name; of a subclass that of what it is derived from."""
    return next(
        base.__name__
        for base in type(sampler).__mro__
        if base.__module__.startswith("torch_sgmcmc.")
    )


def _share_memory(a: Tensor | None, b: Tensor | None) -> bool:
    return (
        a is not None
        and b is not None
        and a is not b
        and a.numel() > 0
        and a.data_ptr() == b.data_ptr()
    )


def _settings(group: Mapping[str, Any], motion: Any) -> Any:
    """What a step is made with, for the host."""
    estimate = 0.0
    if "noise_estimate" in group:
        is_online = isinstance(group["noise_estimate"], str)
        estimate = math.nan if is_online else noise_estimate(group)
    return (
        (
            group.get("lr", 0.0),
            group["num_data"],
            group["temperature"],
            group.get("momentum", 0.0),
            estimate,
        ),
        (int(motion), group.get("resample_momentum_every", 0), int(group["step"])),
    )


def _names(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Those of named parameters, else by group, place and shape."""
    names = []
    for i, group in enumerate(groups):
        known = group.get("param_names")
        for j, p in enumerate(group["params"]):
            names.append(known[j] if known else f"{i}.{j} {list(p.shape)}")
    return names
