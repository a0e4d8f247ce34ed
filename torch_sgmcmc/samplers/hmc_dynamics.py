"""One trajectory of Hamiltonian dynamics: leapfrog steps and their Metropolis test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import dtensor, ops
from torch_sgmcmc.core.context import StepContext, TensorLists, has_master, state_dtype
from torch_sgmcmc.core.finite_check import check_finite
from torch_sgmcmc.core.hyperparams import check_real
from torch_sgmcmc.core.parameters import same_parameters
from torch_sgmcmc.core.state import MASS, prior_of

# Early in a warm-up the step size may be far too small, and a trajectory very long.
MOST_WARMUP_STEPS = 1024

# HMC warns after so many consecutive trajectories that began with another loss at the
# same parameters; a single change is allowed.
MOST_CHANGES = 3


@dataclass
class MovingLists:
    """Parameters with their momenta, masses and masters."""

    lists: TensorLists
    momenta: list[Tensor]
    masses: list[Tensor]  # empty: all are 1
    masters: list[Tensor]  # for parameters in bf16 and fp16
    # At the start of the trajectory, in case of a rejection.
    params_before: list[Tensor] = field(init=False)
    masters_before: list[Tensor] = field(init=False)
    momenta_turned: list[Tensor] = field(init=False)

    @classmethod
    def begin(cls, context: StepContext, lists: TensorLists) -> MovingLists:
        """Returns momenta and masters (copies or new ones), and masses."""
        group, params, _, offsets = lists
        states = [context.state.get(p, {}) for p in params]
        masses: list[Tensor] = []
        if any(MASS in state for state in states):
            masses = [
                state[MASS]
                if MASS in state
                else torch.ones_like(p, dtype=state_dtype(p))
                for p, state in zip(params, states, strict=True)
            ]
        every = group["resample_momentum_every"]
        draws_all = every > 0 and context.rng.steps % every == 0
        momenta = [
            torch.zeros_like(p, dtype=state_dtype(p))
            if draws_all or "momentum" not in state
            else state["momentum"].clone()
            for p, state in zip(params, states, strict=True)
        ]
        new = [i for i, s in enumerate(states) if draws_all or "momentum" not in s]
        if new:
            context.placement.updating(ops.hmc_momenta_)(
                [momenta[i] for i in new],
                [masses[i] for i in new] if masses else [],
                temperature=group["temperature"],
                offsets=[offsets[i] for i in new],
                **context.noise(),
            )
        masters = [
            state.get("master", p.detach()).to(state_dtype(p), copy=True)
            for p, state in zip(params, states, strict=True)
            if has_master(p)
        ]
        return cls(lists, momenta, masses, masters)

    def save(self) -> None:
        """Copies what a rejection or an error restores."""
        group = self.lists.group
        self.params_before = [p.detach().clone() for p in self.lists.params]
        self.masters_before = [m.clone() for m in self.masters]
        turns = group["metropolis"] and group["resample_momentum_every"] != 1
        self.momenta_turned = [-r for r in self.momenta] if turns else []

    def keep(self, state: dict[Any, Any]) -> None:
        """Stores masters and momenta after a trajectory."""
        group, params = self.lists.group, self.lists.params
        low = [p for p in params if has_master(p)]
        for p, master in zip(low, self.masters, strict=True):
            state[p]["master"] = master
        for p, momentum in zip(params, self.momenta, strict=True):
            if group["resample_momentum_every"] != 1:
                state[p]["momentum"] = momentum
            else:  # left by a schedule
                drop_state(state, p, "momentum")


def drop_state(state: dict[Any, Any], p: Tensor, name: str) -> None:
    """Removes an entry of a parameter's state, if there is one."""
    kept = state.get(p, {})
    kept.pop(name, None)
    if not kept:
        state.pop(p, None)


class Trajectory:
    """The parameters of a sampler on one trajectory: leapfrog, energy, decision.

    ``work`` has their gradients at the start.
    """

    def __init__(self, context: StepContext, work: list[TensorLists]) -> None:
        self.context, self.group = context, context.groups[0]
        self.is_tested = self.group["metropolis"]
        self.motion = [MovingLists.begin(context, lists) for lists in work]
        for motion in self.motion:
            motion.save()

    def integrate(
        self, gradients: Callable[[], tuple[Any, list[TensorLists]]], steps: int
    ) -> tuple[Tensor, Tensor] | None:
        """Makes leapfrog steps; returns :meth:`energies` at their end for the test.

        ``gradients`` returns the loss and the gradients where the parameters are.
        """
        step_size, loss = self.group["step_size"], None
        for i in range(steps):
            kick = step_size if i > 0 else step_size / 2
            self._leapfrog(kick, drift=step_size)
            loss, following = gradients()
            self._take(following)
        self._leapfrog(step_size / 2, drift=0.0)
        return self.energies(loss) if self.is_tested else None

    def restore(self) -> None:
        """Moves the parameters back to where the trajectory began."""
        for motion in self.motion:
            pairs = zip(motion.lists.params, motion.params_before, strict=True)
            for p, before in pairs:
                p.detach().copy_(before)  # an interrupt may leave autograd on

    def _take(self, following: list[TensorLists]) -> None:
        if not same_parameters([motion.lists for motion in self.motion], following):
            raise RuntimeError(
                "HMC got gradients of other parameters from the closure than at its "
                "first call in this step"
            )
        if not self.is_tested:  # the test would reject it
            check_finite(self.context, following)
        for motion, lists in zip(self.motion, following, strict=True):
            motion.lists = lists

    def _leapfrog(self, kick: float, drift: float) -> None:
        placement = self.context.placement
        leapfrog_ = placement.without_noise(ops.hmc_leapfrog_)
        for motion in self.motion:
            group, params, grads, _ = motion.lists
            leapfrog_(
                params,
                grads,
                motion.momenta,
                motion.masses,
                motion.masters,
                kick=kick,
                drift=drift,
                num_data=group["num_data"],
                prior_precision=group["prior_precision"],
                **prior_of(self.context.state, group, params),
            )
            placement.mark_changed(params)

    def energies(self, loss: Any) -> tuple[Tensor, Tensor]:
        """Returns each chain's loss and H, in float64."""
        chains = self.group["num_chains"]
        device = self.motion[0].lists.params[0].device
        losses = _losses(loss, chains, device)
        energy = self.group["num_data"] * losses
        for motion in self.motion:
            group, params, _, _ = motion.lists
            for part in self.context.placement.sums(
                ops.hmc_energy,
                params,
                motion.momenta,
                motion.masses,
                prior_precision=group["prior_precision"],
                **prior_of(self.context.state, group, params),
                num_chains=chains or 1,
            ):
                energy = energy + part.to(device)
        return losses, energy

    def decide(self, log_ratios: Tensor) -> Tensor:
        """Makes the Metropolis test, restores rejected chains; returns acceptance."""
        accepted = log_ratios.isfinite() & ops.metropolis_decide(
            log_ratios,
            proposal=0,
            purpose=_C.Purpose.METROPOLIS,
            **self.context.noise(),
        )
        if not bool(accepted.all()):
            select = self.context.placement.without_noise(ops.select_chains_)
            for motion in self.motion:
                params = motion.lists.params
                rejected = (~accepted).to(params[0].device)
                select(params, motion.params_before, chosen=rejected)
                self.context.placement.mark_changed(params)
                if motion.masters:
                    select(motion.masters, motion.masters_before, chosen=rejected)
                if motion.momenta_turned:
                    select(motion.momenta, motion.momenta_turned, chosen=rejected)
        return accepted

    def keep(self) -> None:
        """Stores what the next trajectory starts from."""
        for motion in self.motion:
            motion.keep(self.context.state)
            self.context.placement.mark_changed(motion.lists.params)


def _losses(loss: Any, chains: int | None, device: torch.device) -> Tensor:
    if loss is None:
        raise TypeError(
            "HMC got no loss from the closure, which must return it for the "
            "Metropolis test (metropolis=False makes none)"
        )
    if not isinstance(loss, Tensor):  # Python's floats have 64 bits
        loss = torch.as_tensor(loss, dtype=torch.float64, device="cpu")
    loss = loss.detach()
    if dtensor.is_dtensor(loss):
        loss = loss.full_tensor()
    expected = [] if chains is None else [chains]
    if list(loss.shape) != expected:
        wanted = (
            "must be a scalar"
            if chains is None
            else f"must be {expected}, the mean loss of each chain; call backward() "
            "on its sum"
        )
        raise ValueError(f"Invalid loss: shape {list(loss.shape)} ({wanted})")
    return loss.to(device, torch.float64).reshape(-1)


def leapfrog_steps(
    num_steps: int | None, length: float | None, size: float, most: int | None = None
) -> int:
    """Returns the number of steps: as given, or the nearest to length / size.

    At least 1, and at most ``most``, or 2^53: the quotient may be beyond all integers.
    """
    most = 2**53 if most is None else most
    if num_steps is not None:
        return min(num_steps, most)
    assert length is not None
    return int(min(max(math.floor(min(length / size, most) + 0.5), 1), most))


def mean_acceptance(log_ratios: list[float]) -> float:
    """Returns the mean of min(1, exp(log ratio)), 0 for ratios that are not finite."""
    total = 0.0
    for ratio in log_ratios:  # sum() rounds differently in later versions of Python
        if math.isfinite(ratio):
            total += math.exp(min(ratio, 0.0))
    return total / max(len(log_ratios), 1)


def changes_running(
    before: int, known: list[float], now: list[float], temperature: float, size: float
) -> int:
    """Returns the number of consecutive trajectories that began with another loss.

    Continues the count ``before``, by the chains' losses at the last end and now, at
    the same parameters; a change counts if it is beyond rounding and matters in the
    test.
    """
    least = 0.1 * temperature / size
    changed = len(known) == len(now) and any(
        abs(new - old) > max(1e-3 * abs(new), least)
        for old, new in zip(known, now, strict=True)
    )
    return before + 1 if changed else 0


def changed_target() -> str:
    """Returns HMC's message after ``MOST_CHANGES`` changes of the loss."""
    return (
        f"HMC got another loss at the start of {MOST_CHANGES} consecutive trajectories "
        "than at the end of the previous one, at the same parameters: the closure must "
        "always compute the same loss, of all data (no minibatches, no dropout), "
        "unless other quantities that it depends on are sampled in between"
    )


class DualAveraging:
    """Adapts a step size to a target acceptance probability, 0 < target < 1.

    Nesterov's dual averaging, section 3.2 of M. D. Hoffman and A. Gelman, JMLR 2014.
    After trajectory t, accepted with probability a_t,
      h_t       = (1 - 1 / (t + t0)) h_{t-1} + (target - a_t) / (t + t0),
      log e_t   = mu - sqrt(t) / gamma h_t,
      log avg_t = t^-kappa log e_t + (1 - t^-kappa) log avg_{t-1},
    with mu = log(10 e_0), gamma = 0.05, t0 = 10 and kappa = 0.75. The next trajectory
    has the size e_t; the final size is avg_t.
    """

    def __init__(self, step_size: float, target: float) -> None:
        log = math.log(step_size)
        # target, mu, t, h, log e, log avg.
        self.state = [float(target), math.log(10.0) + log, 0.0, 0.0, log, log]

    @classmethod
    def load(cls, state: Any) -> DualAveraging:
        """Continues from a saved state; raises ValueError if it is invalid."""
        if not (
            isinstance(state, (list, tuple))
            and len(state) == 6
            and all(isinstance(x, Real) and math.isfinite(x) for x in state)
            and state[2] >= 0
            and state[2] == math.floor(state[2])
        ):
            raise ValueError(
                "Invalid state of dual averaging (must be finite, with a whole count)"
            )
        check_real("target", state[0], high=1.0, low_open=True)
        loaded = cls(1.0, state[0])
        loaded.state = [float(x) for x in state]
        return loaded

    def update(self, acceptance: float) -> None:
        """Adds the acceptance probability of a trajectory, in [0, 1]."""
        target, mu, t, error, _, average = self.state
        t += 1
        weight, share = 1 / (t + 10), t**-0.75
        error = (1 - weight) * error + weight * (target - acceptance)
        log = mu - math.sqrt(t) / 0.05 * error
        self.state = [target, mu, t, error, log, share * log + (1 - share) * average]

    @property
    def target(self) -> float:
        """The acceptance rate that the step size is adapted to."""
        return self.state[0]

    @property
    def step_size(self) -> float:
        """The size to try next, never 0 nor infinite."""
        return _exp(self.state[4])

    @property
    def averaged(self) -> float:
        """The size to keep, never 0 nor infinite."""
        return _exp(self.state[5])


def _exp(log: float) -> float:
    # If no size reaches the target, the logarithm diverges.
    return math.exp(min(max(log, -300.0), 300.0))
