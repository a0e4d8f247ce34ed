"""The stochastic bouncy particle sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import parameters
from torch_sgmcmc.core.context import blank, context_of
from torch_sgmcmc.core.distributed import refuse_several_ranks
from torch_sgmcmc.core.finite_check import SkipStep, count_skipped_step
from torch_sgmcmc.core.groups import fill_state
from torch_sgmcmc.core.hyperparams import MEANINGFUL_KEYS, check_real, settings, warn
from torch_sgmcmc.core.random_state import STEP
from torch_sgmcmc.core.sampler import SharedSettings
from torch_sgmcmc.core.spec import SamplerSpec, Takes, Traits
from torch_sgmcmc.core.state import (
    PRECONDITIONER,
    PRIOR_MEAN,
    check_saved_diagonal,
    diagonals,
    given,
    note_given,
)
from torch_sgmcmc.core.state_dict import check_count, check_part
from torch_sgmcmc.core.steps import check_groups
from torch_sgmcmc.core.utils import Interrupts, Slots
from torch_sgmcmc.samplers._sbps.event import Event
from torch_sgmcmc.samplers._sbps.statistics import (
    Diagnostics,
    Evaluations,
    Listeners,
    register,
)
from torch_sgmcmc.samplers._sbps.trajectory import STATE, Trajectory, kept_of, moves

_hyperparameters = itemgetter(*(row.name for row in settings("SBPS")))

# Progress, the same in all param groups. A clock is never changed, only replaced; a
# state dict holds it as a list of numbers.
_PROGRESS: dict[str, Any] = {
    "trajectory_time": 0.0,
    "line_time": 0.0,
    "clock": _C.BounceClock(),
    "observed_target": [],
    "observed_interval": None,
    **dict.fromkeys(
        ("num_samples", "num_observations", "num_proposals", "num_bounces"), 0
    ),
    **dict.fromkeys(("num_violations", "num_refreshments"), 0),
    **dict.fromkeys(("num_derivatives", "num_gradients"), 0),
}

_NO_CLOSURE = """\
SBPS.step() needs a closure, which returns the losses of the examples:

    def closure():
        x, y = draw_minibatch()  # a fresh one at each call, independent of all others
        return F.cross_entropy(model(x), y, reduction="none")

    sampler.step(closure)"""


class SBPS(SharedSettings):
    r"""Stochastic bouncy particle sampler; with ``preconditioned=True``, pSBPS.

    A particle moves at unit speed along straight lines, :math:`\theta(t) = \theta_0 +
    v t` with :math:`\|v\| = 1`. With :math:`g` the stochastic gradient of U / T on a
    fresh, independent minibatch, it bounces at the rate

    .. math::
        [G]_+ = \max(0,\, v \cdot g), \qquad
        v \leftarrow v - 2 \frac{v \cdot g}{\|g\|^2}\, g.

    There is no step size. Minibatch noise does not bias the sampler if minibatches are
    independent of each other. Bounces come by thinning. A regression predicts a band
    for the next G, and bounces are proposed at the rate of the band's upper end,

    .. math::
        \hat\beta_0 + \hat\beta_1 t + k\, \rho(t),

    accepted with the probability :math:`\min(1, [G]_+ / \text{rate})`. Where G is
    above the band, a **violation**, bounces are lost, and that is the only bias.

    One step is one event: the particle moves to the proposed bounce, observes a
    minibatch there, and bounces or continues. With ``preconditioned=True``, θ moves
    along Av and bounces with Ag, where the diagonal A is given by
    :meth:`set_preconditioner`, or learned at bounces from :math:`V \leftarrow b V + (1
    - b) \bar g^2` with :math:`\bar g = g\,T/N`: :math:`A = 1 / (\sqrt{V} + \epsilon)`,
    divided by its mean.

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`, for points
    uniform in trajectory time: take draws by ``register_sample_hook``, not at the ends
    of steps.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`. A group
            sets its prior alone: one particle moves in the space of all parameters.
        num_data: N, the number of training examples, > 0.
        {prior_precision} {prior_mean} {temperature}
        num_std: k >= 0, half width of the band in standard deviations. More is less
            bias and more proposals; the paper has 3. Default: 5.
        observation_decay: f >= 0, decay of an observation's weight in the regression,
            per :math:`1 / \sqrt{b}` of path length since then; b is the scale of
            slopes. For targets whose slope changes along a line; 1 is reasonable.
            Default: 0, all observations of a line count alike.
        refresh_rate: rate, per trajectory time, of drawing a new velocity, uniform on
            the unit sphere; >= 0. With exact gradients (n = N) choose about 1 / (the
            length of some typical segments), or the chain may not reach all of the
            space. Default: 0.
        preconditioned: pSBPS. Default: False.
        adapt: whether A is learned. Meanwhile the target is sampled up to an error of
            the order of 1 - ``decay``; set ``group["adapt"] = False`` in all groups
            after burn-in. Default: True.
        adapt_every_step: whether V averages over every minibatch and not only over
            bounces: ten times as fast, for a gradient at every step in forward mode
            (reverse mode has one). A is updated at bounces and refreshments only, so
            that lines are straight. Default: False.
        decay: b in [0, 1). Default: 0.99.
        eps: ε > 0. Default: 1e-4.
        sample_interval: trajectory time between two samples, > 0; None takes no
            samples. A multiple of the mean segment length (see :attr:`diagnostics`) is
            reasonable. Default: None.
        replacement: whether minibatches are drawn with replacement: if not, n <= N.
            Default: False.
        model: the module that the closure calls, with the sampled parameters. It
            switches to forward mode: gradients are computed only at bounces. None is
            reverse mode. Default: None.
        {seed}
        nonfinite: policy for losses and derivatives that are not finite: "raise", or
            "skip", which skips the event, see :class:`Sampler`. Default: "raise".
        process_group: a group of this rank alone, where ``torch.distributed`` has
            several: see :class:`Sampler`. Default: all ranks.

    State:
        ``origin`` and ``velocity`` (shape of the parameter; fp64 for fp64 parameters,
        else fp32): the start of the straight line, and v. Preconditioned, in addition
        ``square_average`` (V, unless A was given), ``preconditioner`` (A) and
        ``direction`` (Av). The clock and the counters are in the param groups.

    Raises:
        ValueError: a hyperparameter out of range, here or at a later step.
        TypeError: a hyperparameter of the wrong type, or ``step()`` without a closure.
        RuntimeError: the closure returns anything but the finite losses of n >= 2
            examples, or calls ``backward()``; or the process group has several ranks.
            Nothing has moved then.

    Example:
        >>> sampler = SBPS(model.parameters(), num_data=50_000, prior_precision=1.0,
        ...                sample_interval=0.5, model=model, seed=0)
        >>> samples = []
        >>> def keep(sampler, time):
        ...     samples.append([p.detach().clone() for p in model.parameters()])
        >>> handle = sampler.register_sample_hook(keep)
        >>> def closure():
        ...     x, y = next(minibatches)  # independent, not from a shuffled epoch
        ...     return F.cross_entropy(model(x), y, reduction="none")
        >>> for _ in range(steps):
        ...     sampler.step(closure)
        >>> sampler.diagnostics, sampler.evaluations

    Note:
        All parameters that require gradients move, also where a loss does not depend on
        them. The sampler clears gradients and leaves none. After a change of a
        parameter between two steps (not through ``.data``), or of T, N or a prior, the
        next step only observes, at the present place. More: docs/samplers/sbps.md.

    Reference:
        A. Pakman, D. Gilboa, D. Carlson and L. Paninski, Stochastic Bouncy Particle
        Sampler, ICML 2017, algorithm 1, eq. 8 to 13, 16; the local regression of
        section 4; V as in the text around eq. 17, which prints the weights the other
        way round.
    """

    _SPEC = SamplerSpec(
        "SBPS",
        state=dict.fromkeys((*STATE, "prior_mean"), Tensor),
        needs_closure=True,
        why_equal="there is one particle for all",
        progress=_PROGRESS,
        # It cannot bounce at a rate that is not finite.
        nonfinite=("raise", "skip"),
        takes_shards=False,  # its velocities are drawn for whole tensors
        traits=Traits(
            takes=Takes.EXAMPLES, instead="see diagnostics.violation_rate", is_path=True
        ),
    )

    # Of this process, not saved.
    _trajectory: Trajectory | None = None
    _slots: Slots | None = None  # of the model, for forward mode
    _model_checked = False
    _warned = False
    # Settings as last checked, and the target of the last step.
    _checked: Sequence[Any] = ()
    _target: list[float]

    def __init__(
        self,
        params: Iterable[Any],
        *,
        num_data: float,
        prior_precision: float = 0.0,
        prior_mean: float | Tensor | Iterable[Tensor] = 0.0,
        temperature: float = 1.0,
        num_std: float = 5.0,
        observation_decay: float = 0.0,
        refresh_rate: float = 0.0,
        preconditioned: bool = False,
        adapt: bool = True,
        adapt_every_step: bool = False,
        decay: float = 0.99,
        eps: float = 1e-4,
        sample_interval: float | None = None,
        replacement: bool = False,
        model: nn.Module | None = None,
        seed: int | None = None,
        nonfinite: str = "raise",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**self._SPEC.arguments(locals()))
        self.model = model

    def _check_ranks(self) -> None:
        super()._check_ranks()
        refuse_several_ranks(context_of(self), "minibatches")

    @property
    def model(self) -> nn.Module | None:
        """The module for forward mode; not saved, so set it again after loading."""
        return None if self._slots is None else self._slots.model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        model = parameters.check_model("SBPS", model, context_of(self).params)
        self._slots = None if model is None else Slots(model)
        self._model_checked = False

    def register_sample_hook(
        self, hook: Callable[[Any, float], None]
    ) -> RemovableHandle:
        """Registers a function that is called for each sample.

        Args:
            hook: called as ``hook(sampler, time)`` at every multiple of
                ``sample_interval`` of trajectory time that a step passes, without
                gradients, with the parameters at the particle's position of that time.
                The hook must not change them.

        Returns:
            A handle whose ``remove()`` removes the hook.

        Raises:
            ValueError: ``sample_interval`` is None.
        """
        if self.param_groups[0]["sample_interval"] is None:
            raise ValueError(
                "Invalid sample_interval: None (must be a trajectory time, for there "
                "to be samples)"
            )
        return register(self._listeners.samples, hook)

    def register_segment_hook(
        self, hook: Callable[[Trajectory, float, float], None]
    ) -> RemovableHandle:
        """Registers hook(trajectory, begin, end), with times since the line's start."""
        return register(self._listeners.segments, hook)

    @property
    def trajectory_time(self) -> float:
        """The length of the trajectory so far."""
        return self.param_groups[0]["trajectory_time"]

    @property
    def evaluations(self) -> Evaluations:
        """The cost of the trajectory."""
        group = self.param_groups[0]
        return Evaluations(group["num_derivatives"], group["num_gradients"])

    @property
    def diagnostics(self) -> Diagnostics:
        """The statistics of the trajectory."""
        return Diagnostics.of(self.param_groups[0])

    @property
    def _listeners(self) -> Listeners:
        return self.__dict__.setdefault("_registered", Listeners())

    @torch.no_grad()
    def set_preconditioner(
        self, preconditioner: Iterable[Tensor | float] | None
    ) -> None:
        r"""Sets the diagonal A, which is then not learned, and draws a new velocity.

        The best A of a coordinate is about its posterior standard deviation. Trajectory
        time is then in units of :math:`A^{-1} \theta`, and ``adapt``, ``decay`` and
        ``eps`` have no effect.

        Args:
            preconditioner: a tensor (or number) for each parameter, in the order of the
                param groups, finite and > 0, that broadcasts to the parameter's shape.
                Tensors are copied, and are part of the state dict. None learns A again,
                from the beginning.

        Raises:
            ValueError: ``preconditioned`` is False, or the number of tensors, a shape
                or an element is invalid. Nothing has changed.
        """
        if not self.param_groups[0]["preconditioned"]:
            raise ValueError(
                "Invalid preconditioned: False (must be True to set a preconditioner)"
            )
        params = context_of(self).params
        new: list[Tensor] | None = None
        if preconditioner is not None:
            new = diagonals(PRECONDITIONER, preconditioner, params)
        elif not any(PRECONDITIONER in given(self.state.get(p, {})) for p in params):
            return
        context_of(self).clear_blank_state()
        self._trajectory = None
        for i, p in enumerate(params):
            # A new dict: the former one may be in a state dict.
            known = self.state.pop(p, {}).items()
            state = {key: value for key, value in known if key not in STATE}
            if new is not None:
                state[PRECONDITIONER] = new[i]
            if state:
                self.state[p] = state
        note_given(self._context)
        fill_state(self)

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        if PRECONDITIONER in given(state):
            check_saved_diagonal(PRECONDITIONER, index, state[PRECONDITIONER], p)

    def _store_trajectory(self, trajectory: Trajectory) -> None:
        if trajectory is self._trajectory:
            return
        self._trajectory = trajectory
        states = {
            p: {key: kept[key] for key in (STEP, *given(kept)) if key in kept}
            for p, kept in self.state.items()
        }
        for p, kept in trajectory.states():
            states.setdefault(p, {}).update(kept)
        self.state.clear()
        self.state.update(states)

    def _parameters_changed(self) -> None:
        self._trajectory = None

    def _check_progress(self, group: dict[str, Any]) -> None:
        for name in ("trajectory_time", "line_time"):
            check_real(name, group[name])
        for name in (key for key in _PROGRESS if key.startswith("num_")):
            check_count(name, group[name])
        for name in ("num_bounces", "num_violations"):
            check_part(group, name, "num_proposals")
        for value in group["observed_target"]:
            check_real("observed_target", value, low=-math.inf, low_open=True)
        if group["observed_interval"] is not None:
            check_real("observed_interval", group["observed_interval"], low_open=True)
        _C.BounceClock.load(group["clock"])

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        if p.numel() == 0:
            return {}
        known = given(self.state.get(p, {}))
        names = kept_of(group["preconditioned"], PRECONDITIONER in known)
        return blank(p, *(name for name in names if name not in known))

    def _check_common(self) -> dict[str, Any]:
        parameters.check_sizes(context_of(self))
        first = self.param_groups[0]
        values = list(chain.from_iterable(map(_hyperparameters, self.param_groups)))
        values += map(len, self.param_groups)
        values += [g.get(key) for g in self.param_groups for key in MEANINGFUL_KEYS]
        checked = self._checked
        if len(values) == len(checked) and all(map(is_, values, checked)):
            return first  # numbers and bools cannot have changed in themselves
        check_groups(self)
        # Compared with the last step's target.
        target = [
            float(first["num_data"]),
            float(first["temperature"]),
            *(float(group["prior_precision"]) for group in self.param_groups),
        ]
        means = [float(group[PRIOR_MEAN]) for group in self.param_groups]
        if any(means):
            target += means
        self._target, self._checked = target, values
        return first

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves the particle to its next event and observes a minibatch there.

        Args:
            closure: draws a fresh minibatch, independent of all others, and returns
                the losses of its examples, shape [n], n >= 2, without calling
                ``backward()``. Called once.

        Returns:
            The losses, without a graph.
        """
        return super().step(closure)

    def _run_step(self, closure: Callable[[], Any] | None) -> Any:
        parameters.refuse_scaler(self)
        if closure is None:
            raise TypeError(_NO_CLOSURE)
        self._begin_step()
        if parameters.lightning_module(closure) is not None:
            raise RuntimeError(
                "SBPS cannot be used in Lightning's automatic optimization, whose "
                "closure calls backward(): set self.automatic_optimization = False, "
                "and in training_step call self.optimizers().step(closure) with a "
                "closure that returns the losses of the examples"
            )
        common = self._check_common()
        progress = dict(self._context.rng.progress)
        clock = common["clock"].copy()
        clock.observation_decay = common["observation_decay"]
        params = context_of(self).params
        trajectory = self._current_trajectory(params, common, progress, clock)
        line_time = progress["line_time"]
        event = Event(
            common,
            progress,
            clock,
            {"seed": self._context.rng.seed, "step": self._context.rng.steps},
            params,
            self._slots,
            checks_model=self._slots is not None and not self._model_checked,
        )
        is_made = False
        try:
            losses, ahead = event.happen(trajectory, closure)
            with Interrupts():  # all of this, or nothing
                if event.has_moved:
                    interval = progress["observed_interval"] = common["sample_interval"]
                    times = common["trajectory_time"], progress["trajectory_time"]
                    progress["num_samples"] = self._listeners.call(
                        self, trajectory, times, event.line, interval
                    )
                is_made = True
                self._model_checked |= event.checks_model
                progress["clock"] = clock
                ahead.mark(progress["line_time"], params)
                self._store_trajectory(ahead)
                self._set(**progress)
                self._context.rng.count()
        except BaseException as error:
            if is_made:
                raise
            if not trajectory.is_at(line_time):
                trajectory.place(line_time)
            if isinstance(error, SkipStep):
                count_skipped_step(context_of(self))
                return error.losses
            raise
        self._watch_violations(common)
        return losses

    def _current_trajectory(
        self,
        params: list[Tensor],
        common: dict[str, Any],
        progress: dict[str, Any],
        clock: _C.BounceClock,
    ) -> Trajectory:
        """Returns the current trajectory; a new one after a change by the user."""
        if any("velocity" not in self.state.get(p, ()) for p in params if moves(p)):
            self._trajectory = None  # the user has cleared the state
        trajectory = self._trajectory
        preconditioned, line_time = common["preconditioned"], progress["line_time"]
        same_means = not trajectory or trajectory.has_means_of(self.state)
        same_target = same_means and self._target == progress["observed_target"]
        if (
            trajectory is not None
            and same_target
            and trajectory.is_unchanged(line_time, params)
            and preconditioned == trajectory.preconditioned
        ):
            return trajectory
        if (
            trajectory is None
            or not same_target
            or not trajectory.same_as(params, preconditioned)
        ):
            trajectory = Trajectory.resumed(context_of(self), preconditioned)
        if not trajectory or not trajectory.is_at(line_time):
            begun = trajectory and trajectory.rebased()
            trajectory = begun or Trajectory.started(context_of(self), common)
            progress["line_time"] = 0.0
            clock.restart()
        elif not same_target:
            clock.restart()
        progress["observed_target"] = self._target
        return trajectory

    def _note_changes(self) -> None:
        if self._trajectory and not self._trajectory.has_means_of(self.state):
            self._set(observed_target=[])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of optimizer and chain, see torch.optim.Optimizer."""
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            group["clock"] = group["clock"].save()
        return state_dict

    def _finish_loading(self, state_dict: dict[str, Any]) -> None:
        super()._finish_loading(state_dict)
        for group in self.param_groups:
            group["clock"] = _C.BounceClock.load(group["clock"])
        self._trajectory = None

    def _watch_violations(self, common: dict[str, Any]) -> None:
        text = _C.BounceClock.warning(
            common["num_proposals"], common["num_violations"], common["num_std"]
        )
        if text and not self._warned:
            self._warned = True
            warn(text)
