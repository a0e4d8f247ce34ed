"""Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import finite_check, parameters
from torch_sgmcmc.core.context import TensorLists, blank, context_of, nonfinite_policy
from torch_sgmcmc.core.distributed import refuse_other_meshes
from torch_sgmcmc.core.groups import fill_state
from torch_sgmcmc.core.hyperparams import check_integer, check_real, warn
from torch_sgmcmc.core.sampler import SharedSettings
from torch_sgmcmc.core.spec import SamplerSpec, Takes, Traits
from torch_sgmcmc.core.state import MASS, check_saved_diagonal, diagonals, note_given
from torch_sgmcmc.core.state_dict import check_part
from torch_sgmcmc.core.steps import check_groups, gather_work
from torch_sgmcmc.core.utils import Interrupts, progress_bar
from torch_sgmcmc.samplers.hmc_dynamics import (
    MOST_CHANGES,
    MOST_WARMUP_STEPS,
    DualAveraging,
    Trajectory,
    changed_target,
    changes_running,
    drop_state,
    leapfrog_steps,
    mean_acceptance,
)

_COUNTERS = ("num_trajectories", "num_accepted", "num_divergences")

_NO_CLOSURE = """\
HMC.step() needs a closure, since it computes several gradients a step:

    def closure():
        loss = F.cross_entropy(model(x), y)  # of all data
        loss.backward()
        return loss

    sampler.step(closure)"""


class HMC(SharedSettings):
    r"""Hamiltonian Monte Carlo, with the leapfrog and a Metropolis test.

    One step is one trajectory. With :math:`U(\theta) = N \cdot \text{loss} +
    \lambda \|\theta - \mu\|^2 / 2`, a momentum :math:`r \sim N(0, T M)` and a step size
    :math:`\epsilon` = ``step_size``, it makes ``num_steps`` leapfrog steps

    .. math::
        r &\leftarrow r - \tfrac{\epsilon}{2} \nabla U(\theta), \\
        \theta &\leftarrow \theta + \epsilon M^{-1} r, \\
        r &\leftarrow r - \tfrac{\epsilon}{2} \nabla U(\theta),

    and accepts the end with probability :math:`\min(1, e^{-(H_\text{end} -
    H_\text{start}) / T})`, :math:`H = U(\theta) + \tfrac12 r^\top M^{-1} r`. A
    rejection restores θ bitwise.

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)`, exactly if the
    closure always computes the same loss of all data; each param group has its own λ.
    Neither step size nor trajectory length nor mass changes the target. With
    ``metropolis=False`` the error is of the order of ε².

    With minibatches, this is the *naive* stochastic gradient HMC of Chen et al. 2014,
    which samples another distribution; use :class:`SGHMC` for minibatches.

    Args:
        params: parameters or param groups; a group can set ``prior_precision`` and
            ``prior_mean`` alone.
        step_size: ε > 0, the leapfrog's step on U: ε² = ``lr`` / N in terms of the
            other samplers' ``lr`` (with M = I). :meth:`warmup` adapts it.
        num_steps: m >= 1, the number of leapfrog steps of a trajectory. Either it or
            ``trajectory_length`` must be given.
        trajectory_length: τ > 0: the number of steps is the nearest to τ / ε, and at
            least 1, at every ε. (During :meth:`warmup` it is at most 1024.)
        {num_data} {prior_precision} {prior_mean} {temperature}
        metropolis: whether to make the Metropolis test. Without it the closure need not
            return the loss. Default: True.
        resample_momentum_every: k >= 0; the momentum is drawn afresh before every k-th
            trajectory, and with 0 only once, at the start. A kept momentum changes sign
            when a trajectory is rejected, so the target stays exact. Default: 1.
        num_chains: K makes K independent chains at once: every parameter has a leading
            dimension K, the closure returns the K chains' mean losses and calls
            ``backward()`` on their sum, and decisions are made for each chain. None is
            one chain. Default: None.
        {seed}
        nonfinite: policy for a gradient (or a loss) that is not finite at the start of
            a trajectory, and without the Metropolis test anywhere: "raise", "skip" or
            "ignore", see :class:`Sampler`, also on clipping. With "ignore" a loss that
            is not finite is still an error. Default: "raise".
        process_group: the ranks that sample this chain together, see :class:`Sampler`.
            On each rank the closure returns the mean loss of all ranks' data and leaves
            averaged gradients. With DTensors the group has all ranks of their mesh.
            Default: all.

    State:
        * ``momentum`` (shape of the parameter; fp64 for fp64 parameters, else fp32):
          r, unless it is drawn afresh for every trajectory.
        * ``mass`` (same shape and dtype): the diagonal of M, after :meth:`set_mass`.
        * ``master`` (same shape, fp32), only of parameters in bf16 or fp16: θ, see
          :class:`SGLD`.

    Raises:
        ValueError: a hyperparameter out of range, here or at a later step; or a loss
            of a wrong shape.
        TypeError: a hyperparameter of the wrong type, ``step()`` without a closure,
            or a closure that returns no loss where one is needed.
        RuntimeError: the closure leaves no gradients, or other parameters' than at its
            first call, or the loss is not finite at the start of a trajectory.

    Warns:
        UserWarning: three consecutive trajectories began with another loss than the
            previous end's, at the same parameters. In Lightning's automatic
            optimization this is an error, since minibatches are the reason.

    Example:
        >>> sampler = HMC(model.parameters(), step_size=1e-3, trajectory_length=0.05,
        ...               num_data=len(x), prior_precision=1.0, seed=0)
        >>> def closure():
        ...     loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> sampler.warmup(closure, 200)
        >>> for _ in range(1000):
        ...     loss = sampler.step(closure)
        >>> sampler.acceptance_rate, sampler.num_divergences

    Note:
        A step costs m + 1 gradients and clears them before each call of the closure.
        After a step ``p.grad`` is the gradient at the end of the trajectory, accepted
        or not. N times the rounding of a float32 loss enters the energy: return the
        loss in float64 where that matters. Switch off dropout and running statistics of
        batch norm. Not for ``torch.amp.GradScaler``: use bfloat16 autocast. More:
        docs/samplers/hmc.md.

    Reference:
        S. Duane, A. D. Kennedy, B. J. Pendleton and D. Roweth, Hybrid Monte Carlo,
        Physics Letters B 1987; algorithm 1 of T. Chen, E. B. Fox and C. Guestrin,
        Stochastic Gradient Hamiltonian Monte Carlo, ICML 2014. For momenta that are
        kept: A. M. Horowitz, A generalized guided Monte Carlo algorithm, Physics
        Letters B 1991.
    """

    _SPEC = SamplerSpec(
        "HMC",
        state=dict.fromkeys(("momentum", MASS, "master", "prior_mean"), Tensor),
        needs_closure=True,
        why_equal="there is one trajectory for all",
        # The state of the step size's adaptation is empty when there is none.
        progress={**dict.fromkeys(_COUNTERS, 0), "dual_averaging": []},
        traits=Traits(
            takes=Takes.POTENTIAL, instead="see acceptance_rate", accepts=True
        ),
    )
    # The chains' losses at the end of the last step with the parameters' versions and
    # addresses, and the number of consecutive steps that began with another loss.
    _known: tuple[Tensor, list[tuple[int, int]]] | None = None
    _num_changes = 0

    def __init__(
        self,
        params: Iterable[Any],
        step_size: float,
        *,
        num_steps: int | None = None,
        trajectory_length: float | None = None,
        num_data: float,
        prior_precision: float = 0.0,
        prior_mean: float | Tensor | Iterable[Tensor] = 0.0,
        temperature: float = 1.0,
        metropolis: bool = True,
        resample_momentum_every: int = 1,
        num_chains: int | None = None,
        seed: int | None = None,
        nonfinite: str = "raise",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**self._SPEC.arguments(locals()))

    @property
    def acceptance_rate(self) -> float:
        """The fraction of trajectories accepted since the warm-up.

        NaN before any, and with ``metropolis=False``.
        """
        group = self.param_groups[0]
        return _C.ratio(group["num_accepted"], group["num_trajectories"])

    @property
    def num_divergences(self) -> int:
        """The number of trajectories since the warm-up whose energy was not finite."""
        return self.param_groups[0]["num_divergences"]

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        return blank(p, "momentum") if group["resample_momentum_every"] != 1 else {}

    def _check_ranks(self) -> None:
        super()._check_ranks()
        if self._context.placement.is_sharded:
            refuse_other_meshes(context_of(self))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        steps, length = group["num_steps"], group["trajectory_length"]
        if (steps is None) == (length is None):
            raise ValueError(
                f"Invalid num_steps and trajectory_length: {steps} and {length} (give "
                "exactly one of them)"
            )

    def _check_progress(self, group: dict[str, Any]) -> None:
        for name in ("num_accepted", "num_divergences"):
            check_part(group, name, "num_trajectories")
        if group["dual_averaging"]:
            DualAveraging.load(group["dual_averaging"])

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        if MASS in state:
            check_saved_diagonal(MASS, index, state[MASS], p)

    def set_mass(self, masses: Iterable[Tensor | float] | None) -> None:
        """Sets the mass M, a number for each element of each parameter.

        The best mass of a coordinate is about 1 / its posterior variance. Kept momenta
        are drawn afresh.

        Args:
            masses: a tensor (or number) for each parameter, in the order of the param
                groups, finite and > 0, broadcastable to the parameter's shape (for a
                DTensor, placed as the parameter). None sets all masses to 1.

        Raises:
            ValueError: the number of masses is wrong, or a mass has a wrong shape or
                elements out of range. Nothing has changed.
        """
        context = context_of(self)
        params = context.params
        new: Sequence[Tensor | None] = [None] * len(params)
        if masses is not None:
            new = diagonals("masses", masses, params)
        context.clear_blank_state()
        for p, mass in zip(params, new, strict=True):
            drop_state(self.state, p, "momentum")
            if mass is None:
                drop_state(self.state, p, MASS)
            else:
                self.state[p][MASS] = mass
        note_given(self._context)
        fill_state(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Simulates one trajectory and decides on it.

        Args:
            closure: computes the mean loss (with ``num_chains``, the row of the
                chains' mean losses), calls ``backward()`` on it (on its sum) and
                returns it. Called ``num_steps`` + 1 times.

        Returns:
            The closure's result at its first call, at the trajectory's start.
        """
        return super().step(closure)

    def _run_step(self, closure: Callable[[], Any] | None) -> Any:
        return self._trajectory(closure)[0]

    def warmup(
        self,
        closure: Callable[[], Any],
        steps: int,
        target_acceptance: float = 0.8,
        *,
        finish: bool = True,
        progress: bool = True,
    ) -> None:
        """Makes steps that adapt the step size to a probability of acceptance.

        The method is dual averaging (M. D. Hoffman and A. Gelman, JMLR 2014, section
        3.2, with their γ = 0.05, t₀ = 10, κ = 0.75 and μ = log(10 ``step_size``)), on
        the mean of several chains. The final step size is the average of the tried
        ones. Draws of a warm-up are not samples of the target. The counts of
        acceptances and divergences restart when the warm-up ends.

        Args:
            closure: as for :meth:`step`.
            steps: number of trajectories, >= 1.
            target_acceptance: in (0, 1); 0.65 is about the most efficient, and more is
                safer. Default: 0.8.
            finish: whether the warm-up ends with these steps. If not, or if the closure
                raises, the next call resumes it, also in another process that has
                loaded the state dict. Two calls are exactly one call of as many steps.
            progress: show a progress bar, if tqdm is installed. Default: True.

        Raises:
            ValueError: an argument is out of range, or differs from the value of the
                warm-up in progress; or ``metropolis`` is False.
        """
        check_integer("steps", steps, low=1)
        check_real("target_acceptance", target_acceptance, high=1.0, low_open=True)
        check_groups(self)
        group = self.param_groups[0]
        if not group["metropolis"]:
            raise ValueError(
                "Invalid metropolis: False (warmup() adapts to the acceptance rate)"
            )
        if group["dual_averaging"]:
            adaptation = DualAveraging.load(group["dual_averaging"])
            if target_acceptance != adaptation.target:
                raise ValueError(
                    f"Invalid target_acceptance: {target_acceptance} (the warm-up in "
                    f"progress has {adaptation.target})"
                )
        else:
            adaptation = DualAveraging(group["step_size"], target_acceptance)
        for _ in progress_bar(range(steps), "warm-up", progress):
            _, log_ratios = self._trajectory(closure, MOST_WARMUP_STEPS)
            if len(log_ratios) == 0:
                continue  # skipped
            adaptation.update(mean_acceptance(log_ratios.tolist()))
            self._set(step_size=adaptation.step_size, dual_averaging=adaptation.state)
        if finish:
            self._set(
                step_size=adaptation.averaged,
                dual_averaging=[],
                **dict.fromkeys(_COUNTERS, 0),
            )

    @torch.no_grad()
    def _trajectory(
        self, closure: Callable[[], Any] | None, most_steps: int | None = None
    ) -> tuple[Any, Tensor]:
        """Makes one step.

        Returns:
            The closure's first result, and the logs of the chains' Metropolis ratios
            (empty without the test, or if the step was skipped).
        """
        parameters.refuse_scaler(self)
        if closure is None:
            raise TypeError(_NO_CLOSURE)
        self._begin_step()
        check_groups(self)
        parameters.refuse_accumulation(self, closure)
        loss = parameters.fresh_gradients(self, closure)
        work = gather_work(self, checked=True)
        if not work:
            raise RuntimeError(
                "HMC got no gradients from the closure (does it call backward()?)"
            )
        try:
            return loss, self._simulate(closure, loss, work, most_steps)
        except finite_check.SkipStep:
            finite_check.count_skipped_step(context_of(self))
            return loss, torch.empty(0, dtype=torch.float64)

    def _simulate(
        self,
        closure: Callable[[], Any],
        loss: Any,
        work: list[TensorLists],
        most_steps: int | None,
    ) -> Tensor:
        """Continues a step from its first gradients; returns the log ratios."""
        group, context = self.param_groups[0], context_of(self)
        finite_check.check_finite(context, work)
        trajectory, start = Trajectory(context, work), None
        if trajectory.is_tested:
            losses, start = trajectory.energies(loss)
            if not bool(start.isfinite().all()):
                raise finite_check.nonfinite_error(
                    nonfinite_policy(context),
                    "HMC got a loss or parameters that are not finite at the start of "
                    "a trajectory",
                )
            self._check_same_target(losses, closure)

        def gradients() -> tuple[Any, list[TensorLists]]:
            loss = parameters.fresh_gradients(self, closure)
            return loss, gather_work(self, checked=True)

        num_steps = leapfrog_steps(
            group["num_steps"],
            group["trajectory_length"],
            group["step_size"],
            most_steps,
        )
        log_ratios, is_made = torch.empty(0, dtype=torch.float64), False
        try:
            end = trajectory.integrate(gradients, num_steps)
            with Interrupts():  # all of this, or nothing
                counts = {}
                if start is not None and end is not None:
                    end_losses, energy = end
                    log_ratios = (start - energy) / group["temperature"]
                    accepted = trajectory.decide(log_ratios)
                    losses = torch.where(accepted, end_losses, losses)
                    counts = _counts(group, accepted, log_ratios)
                is_made = True
                trajectory.keep()
                self._set(**counts)
                context.rng.count()
                is_known = start is not None
                self._known = (losses, self._marks()) if is_known else None
        finally:
            if not is_made:
                trajectory.restore()
        return log_ratios

    def _marks(self) -> list[tuple[int, int]]:
        """Returns marks that differ after writes to parameters."""
        params = self._context.placement.local(context_of(self).params)
        return [(p._version, p.data_ptr()) for p in params]

    def _check_same_target(self, losses: Tensor, closure: Callable[[], Any]) -> None:
        """Detects losses that change where the parameters do not, as with minibatches.

        Rounding may change a loss, and so may a Gibbs step. Only Lightning's automatic
        optimization gives an error; elsewhere one warning is issued.
        """
        if self._known is None or self._known[1] != self._marks():
            return
        group = self.param_groups[0]
        self._num_changes = changes_running(
            self._num_changes,
            self._known[0].tolist(),
            losses.tolist(),
            group["temperature"],
            group["num_data"],
        )
        if self._num_changes < MOST_CHANGES:
            return
        if parameters.lightning_module(closure) is not None:
            raise RuntimeError(
                f"{changed_target()}. In Lightning's automatic optimization a batch "
                "must be all data. SGHMC is what minibatches need"
            )
        if self._num_changes == MOST_CHANGES:
            warn(changed_target())


def _counts(
    group: dict[str, Any], accepted: Tensor, log_ratios: Tensor
) -> dict[str, int]:
    """Returns the counters after a test of each chain's trajectory."""
    return {
        "num_trajectories": group["num_trajectories"] + len(accepted),
        "num_accepted": group["num_accepted"] + int(accepted.sum()),
        "num_divergences": group["num_divergences"]
        + int((~log_ratios.isfinite()).sum()),
    }
