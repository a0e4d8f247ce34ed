"""The stochastic bouncy particle sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.context import blank, context_of
from torch_sgmcmc.core.distributed import refuse_several_ranks
from torch_sgmcmc.core.finite_check import (
    SkipStep,
    count_skipped_step,
    nonfinite_error,
)
from torch_sgmcmc.core.hyperparams import (
    MEANINGFUL_KEYS,
    check_real,
    settings,
    warn,
)
from torch_sgmcmc.core.parameters import (
    check_model,
    check_sizes,
    lightning_module,
    refuse_scaler,
)
from torch_sgmcmc.core.spec import SamplerSpec, Takes, Traits
from torch_sgmcmc.core.state import PRECONDITIONER, PRIOR_MEAN, given
from torch_sgmcmc.core.state_dict import check_count, check_part
from torch_sgmcmc.core.utils import Slots
from torch_sgmcmc.samplers._sbps.segment_stats import SegmentStats
from torch_sgmcmc.samplers._sbps.trajectory import (
    STATE,
    Observation,
    Trajectory,
    kept_of,
    moves,
    observe,
    rate_of,
)

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


class SBPS(SegmentStats):
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
        params: parameters or param groups, as for :class:`torch.optim.SGD`. A group can
            set ``prior_precision`` alone: one particle moves in the space of all
            parameters.
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
        parameter between two steps (not through ``.data``) or of a prior precision the
        particle continues from its present place. More: docs/samplers/sbps.md.

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
        refuse_several_ranks(
            context_of(self),
            "minibatches",
            "Give each rank its own chain, with a process_group of that rank alone",
        )

    @property
    def model(self) -> nn.Module | None:
        """The module for forward mode; not saved, so set it again after loading."""
        slots = self.__dict__.get("_slots")
        return None if slots is None else slots.model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        model = check_model("SBPS", model, self._all_params())
        self._slots = None if model is None else Slots(model)
        self._model_checked = False

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
        check_sizes(context_of(self))
        first = self.param_groups[0]
        values = list(chain.from_iterable(map(_hyperparameters, self.param_groups)))
        values += map(len, self.param_groups)
        values += [g.get(key) for g in self.param_groups for key in MEANINGFUL_KEYS]
        checked = self.__dict__.get("_checked", ())
        if len(values) == len(checked) and all(map(is_, values, checked)):
            return first  # numbers and bools cannot have changed in themselves
        self._check_all_groups()
        self._checked = values
        # Compared with the last step's target; a fresh list that is never changed.
        self._target = [
            float(first["num_data"]),
            float(first["temperature"]),
            *(float(group["prior_precision"]) for group in self.param_groups),
        ]
        means = [float(group[PRIOR_MEAN]) for group in self.param_groups]
        if any(means):
            self._target += means
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
        refuse_scaler(self)
        if closure is None:
            raise TypeError(_NO_CLOSURE)
        self._begin_step()
        if lightning_module(closure) is not None:
            raise RuntimeError(
                "SBPS cannot be used in Lightning's automatic optimization, whose "
                "closure calls backward(): set self.automatic_optimization = False, "
                "and in training_step call self.optimizers().step(closure) with a "
                "closure that returns the losses of the examples"
            )
        common = self._check_common()
        progress = dict(self._rng.progress)
        clock = common["clock"].copy()
        clock.observation_decay = common["observation_decay"]
        params = self._all_params()
        trajectory = self._current_trajectory(params, common, progress, clock)
        line_time = progress["line_time"]
        try:
            losses, trajectory = self._event(
                trajectory, params, common, progress, clock, closure
            )
        except BaseException as error:
            if not trajectory.is_at(line_time):
                trajectory.place(line_time)
            if isinstance(error, SkipStep):
                count_skipped_step(context_of(self))
                return error.losses
            raise
        progress["clock"] = clock
        trajectory.mark(progress["line_time"], params)
        self._store_trajectory(trajectory)
        self._set(**progress)
        self._rng.count()
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
            self.__dict__.pop("_trajectory", None)  # the user has cleared the state
        trajectory = self.__dict__.get("_trajectory")
        preconditioned, line_time = common["preconditioned"], progress["line_time"]
        same_target = self._target == progress["observed_target"]
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
        if trajectory is None or not trajectory.is_at(line_time):
            begun = trajectory and trajectory.rebased()
            trajectory = begun or Trajectory.started(context_of(self), common)
            progress["line_time"] = 0.0
            clock.restart()
        elif not same_target:
            clock.restart()
        progress["observed_target"] = self._target
        return trajectory

    def _event(
        self,
        trajectory: Trajectory,
        params: list[Tensor],
        common: dict[str, Any],
        progress: dict[str, Any],
        clock: _C.BounceClock,
        closure: Callable[[], Any],
    ) -> tuple[Tensor, Trajectory]:
        """Moves to the next event; returns the losses and the trajectory after it."""
        key = {"seed": self._rng.seed, "step": self._rng.steps}
        event, wait, rate = clock.next(common["num_std"], common["refresh_rate"], **key)
        begin, line_begin = progress["trajectory_time"], progress["line_time"]
        end, line_end = begin + wait, line_begin + wait
        if wait > 0:
            trajectory.place(line_end)
        ahead = trajectory
        if event == _C.REFRESHMENT:
            ahead = trajectory.refreshed(line_end, common)
        slots = self.__dict__.get("_slots")
        checks = slots is not None and not self._model_checked
        observed = observe("SBPS", closure, ahead.params, ahead.tangents, slots, params)
        prior = ahead.prior(line_end if ahead is trajectory else 0.0)
        value, variance = self._rate(observed, prior, common)
        grads: list[Tensor] | None = None
        if checks:
            grads = self._check_forward_mode(ahead, observed, value, common)
        bounces = event == _C.PROPOSAL and clock.accepts(rate, value, **key)
        may_learn = ahead.learns and common["adapt"]
        learns = may_learn and (bounces or common["adapt_every_step"])
        line_time = line_end if ahead is trajectory and not bounces else 0.0
        if bounces or learns:
            grads = grads or observed.gradient()
            try:
                if bounces:
                    ahead = trajectory.reflected(line_end, grads, common)
                else:
                    ahead = ahead.learned(grads, common)
            except SkipStep as skipped:
                skipped.losses = observed.losses
                raise
        reflected = -value if bounces else None
        if bounces and learns and grads is not None:
            scale = common["num_data"] / common["temperature"]
            reflected = scale * ahead.sums(grads)[0]
        clock.take(event, wait, value, variance, reflected)
        progress["num_observations"] += event == _C.LOOK
        progress["num_proposals"] += event == _C.PROPOSAL
        progress["num_bounces"] += bounces
        progress["num_violations"] += event == _C.PROPOSAL and value > rate
        progress["num_refreshments"] += event == _C.REFRESHMENT
        progress["num_derivatives"] += len(observed.losses)
        if observed.free or bounces or learns:
            progress["num_gradients"] += len(observed.losses)
        progress["trajectory_time"] = end
        progress["line_time"] = line_time
        if wait > 0:
            line = line_begin, line_end
            self._call_hooks(trajectory, common, progress, begin, line)
        return observed.losses, ahead

    def _rate(
        self, observed: Observation, prior: float, common: dict[str, Any]
    ) -> tuple[float, float]:
        """Returns G of the whole U / T and the variance c² of its estimate."""
        n, num_data = len(observed.losses), common["num_data"]
        if not common["replacement"] and n > num_data:
            raise RuntimeError(
                f"SBPS got the losses of {n} examples from the closure, and num_data = "
                f"{num_data} (must not be more; if examples are drawn with "
                "replacement, set replacement=True)"
            )
        numbers = num_data, common["temperature"], common["replacement"], prior
        bad, value, variance = rate_of(observed.losses, observed.derivatives, *numbers)
        if bad or not (math.isfinite(value) and math.isfinite(variance)):
            what = "losses from the closure whose derivatives are not finite"
            if bad:
                what = f"{bad} of {n} losses from the closure that are not finite"
            choice = common["nonfinite"]
            raise nonfinite_error(choice, f"SBPS got {what}", observed.losses)
        return value, variance

    def _check_forward_mode(
        self,
        trajectory: Trajectory,
        observed: Observation,
        value: float,
        common: dict[str, Any],
    ) -> list[Tensor]:
        """Checks the model's first derivatives against the gradient; returns it."""
        grads = observed.gradient()
        product, gradient, velocity = trajectory.sums(grads)
        expected = product * common["num_data"] / common["temperature"]
        size = math.sqrt(gradient * velocity)
        size *= common["num_data"] / common["temperature"]
        eps = max(torch.finfo(p.dtype).eps for p in trajectory.params)
        if abs(value - expected) > 200 * eps * size:
            raise RuntimeError(
                "SBPS got derivatives in forward mode that do not agree with the "
                f"gradient ({value:g}, expected {expected:g}): does the model keep "
                "copies of its parameters, as RNNs do? Set model=None for reverse mode"
            )
        self._model_checked = True
        return grads

    def _call_hooks(
        self,
        trajectory: Trajectory,
        common: dict[str, Any],
        progress: dict[str, Any],
        begin: float,
        line: tuple[float, float],
    ) -> None:
        """Calls the hooks of a segment from ``begin`` on; ``line`` has its times."""
        line_begin, line_end = line
        moved = False
        interval, end = common["sample_interval"], progress["trajectory_time"]
        first = last = 0
        if interval is not None:
            first, last = _C.samples_by(begin, interval), _C.samples_by(end, interval)
        progress["observed_interval"], progress["num_samples"] = interval, last
        for k in range(first + 1, last + 1):
            time = k * interval
            for hook in list(self._hooks("_sample_hooks").values()):
                trajectory.place(line_begin + (time - begin))
                moved = True
                hook(self, time)
        segment_hooks = self.__dict__.get("_segment_hooks")
        if segment_hooks:
            moved = True
            for hook in list(segment_hooks.values()):
                hook(trajectory, line_begin, line_end)
        if moved:
            trajectory.place(line_end)

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
        self.__dict__.pop("_trajectory", None)

    def _watch_violations(self, common: dict[str, Any]) -> None:
        if self.__dict__.get("_warned"):
            return
        counts = common["num_proposals"], common["num_violations"]
        text = _C.BounceClock.warning(*counts, common["num_std"])
        if text:
            self._warned = True
            warn(text)
