"""The local learning coefficient, a measure of a minimum's singularity."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.core import hyperparams
from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.core.dtensor import refuse
from torch_sgmcmc.core.parameters import exchanged, kept_gradients
from torch_sgmcmc.core.random_state import fold_in
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Takes, needs_graph, traits_of
from torch_sgmcmc.core.state import PRIOR_MEAN
from torch_sgmcmc.core.utils import panels, progress_bar
from torch_sgmcmc.diagnostics.temperatures import TemperatureMonitor, has_temperatures

# Probability of the interval.
_CONFIDENCE = 0.95
# Thresholds of warnings: a change between the halves of the chains, in parts of λ̂;
# T_kin's deviation and a distance from equilibrium, in parts of T.
_DRIFT, _HEATING, _EXCESS = 0.1, 0.05, 0.1
# Observations of a chain's temperatures.
_OBSERVATIONS = 200


@dataclass(frozen=True)
class LearningCoefficient:
    """An estimate of the local learning coefficient, with the losses behind it."""

    #: λ̂, the mean over chains.
    value: float
    #: Half the width of its 95 % interval, by Student's distribution over chains.
    half_width: float
    #: λ̂ of each chain, [chains] in float64.
    chains: Tensor
    #: nβ (L(w) − L(w*)) of every draw's minibatch, [chains, draws].
    traces: Tensor
    #: L(w*), the mean over the chains' minibatches.
    initial_loss: float
    #: nβ.
    inverse_temperature: float
    #: T_kin and T_conf of each chain in units of T, [chains, 2], see
    #: :class:`TemperatureMonitor`: 1 if the chain samples the target. NaN where they
    #: are unknown (capturable, HMC).
    temperatures: Tensor
    #: Warnings about the estimate.
    warnings: tuple[str, ...]

    def summary(self) -> str:
        """Returns the estimate and its warnings as text."""
        lines = [
            f"Local learning coefficient: {self.value:.4g} ± {self.half_width:.2g} "
            f"(95 %, {len(self.chains)} chains of {self.traces.shape[1]} draws, "
            f"nβ = {self.inverse_temperature:.4g})"
        ]
        return "\n".join([*lines, *self.warnings])

    __repr__ = __str__ = summary

    def plot(self) -> Any:
        """Draws the traces, and the estimate along them.

        The right panel shows λ̂ of the draws so far, of each chain and of all with its
        95 % interval. It includes the approach if ``burn_in`` was 0.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        count = self.traces.shape[1]
        draws = torch.arange(1, count + 1, device="cpu")
        running = self.traces.cumsum(1) / draws
        value, chains = running.mean(0), len(running)
        band = running.std(0) * (_student(chains - 1) / math.sqrt(chains))
        figure, (left, right) = panels("LearningCoefficient.plot()", 2, 4.5, 3.2)
        for k, (trace, mean) in enumerate(zip(self.traces, running, strict=True)):
            color = f"C{k % 10}"
            left.plot(draws, trace, color=color, linewidth=0.4)
            right.plot(draws, mean, color=color, linewidth=0.8)
        left.set(xlabel="draw", ylabel="nβ (L(w) − L(w*))", title="traces")
        low, high = value - band, value + band
        right.fill_between(draws, low, high, color="0.85", label="95 %")
        right.plot(draws, value, color="black", label="all chains")
        right.axhline(self.value, color="0.5", linestyle=":")
        title = f"λ̂ = {self.value:.4g} ± {self.half_width:.2g}"
        right.set(xlabel="draws so far", title=title)
        settled = running[:, count // 20 :]  # the first few vary most
        if settled.isfinite().all():
            least, most = float(settled.min()), float(settled.max())
            margin = 0.5 * (most - least)
            right.set_ylim(least - margin, most + margin)
        right.legend(fontsize="small")
        return figure


def local_learning_coefficient(
    params: Iterable[Tensor],
    loss: Callable[[Tensor], Tensor],
    sampler: Callable[..., Sampler],
    *,
    num_data: int,
    localization: float,
    burn_in: int,
    draws: int,
    chains: int = 4,
    batch_size: int | None = None,
    inverse_temperature: float | None = None,
    seed: int | None = None,
    progress: bool = True,
) -> LearningCoefficient:
    r"""Estimates the local learning coefficient at the present parameters.

    The local learning coefficient λ is the exponent with which the volume of parameters
    shrinks with the allowed excess loss ε: :math:`V(\epsilon) \propto \epsilon^\lambda`
    (to logarithms). At a minimum with a regular Hessian λ is d/2, at a singular one
    less. With the mean loss L over n data, at w* a local minimum of L (Lau et al.
    2023),

    .. math::
        \hat\lambda = n\beta \left( E\,L(w) - L(w^*) \right), \qquad
        w \sim \exp\left( -n\beta L(w) - \tfrac{\gamma}{2} \|w - w^*\|^2 \right),
        \qquad n\beta = \frac{n}{\log n}.

    Chains begin at w*, in samplers that the factory makes with ``num_data`` n,
    ``temperature`` T = n / nβ, ``prior_mean`` w* and ``prior_precision`` γ T. Losses
    are the chains' minibatch losses, each minus the loss of w* on the same minibatch,
    which takes another forward pass (none without minibatches).

    Args:
        params: w*, a model's parameters; those that require gradients move. A part of
            the model's parameters gives the coefficient restricted to that part.
        loss: ``loss(indices)`` returns the mean loss (minus the log-likelihood) of the
            data with these indices, an int64 tensor, as a scalar with a graph. Switch
            off dropout and running statistics of batch norm.
        sampler: ``sampler(params, **target)`` returns a sampler of a list of
            parameters, not SBPS or HMCECS, as in ``lambda params, **target:
            SGLD(params, lr=1e-3, **target)``. ``target`` holds the four settings above
            and ``seed``.
        num_data: n, >= 3.
        localization: γ > 0. It keeps chains at this minimum, and causes a bias: on a
            quadratic with Hessian h, a direction counts :math:`\tfrac12\, n\beta\, h /
            (n\beta\, h + \gamma)` instead of ½. Choose γ well below nβ times the
            curvatures that should count, and lower it until λ̂ stays the same.
        burn_in: steps of each chain before its draws, >= 0.
        draws: steps of each chain that count, >= 2.
        chains: >= 2. The interval is over their means. Default: 4.
        batch_size: size of minibatches, drawn afresh at each step, without replacement.
            None is all data. Default: None.
        inverse_temperature: nβ > 0. None is n / log n. Default: None.
        seed: key of all randomness, a 64-bit int. None draws one from torch's default
            generator. Default: None.
        progress: show a progress bar, if tqdm is installed. Default: True.

    Returns:
        λ̂ with an interval. Parameters and their gradients are restored, also after an
        error.

    Raises:
        TypeError, ValueError: an argument is invalid, or the sampler of the factory has
            another target or is of another kind.

    Warns:
        UserWarning: λ̂ is negative (w* is not a minimum, or there are too few draws), a
            chain has diverged or does not move, or the second halves of the chains
            differ from the first; by their :class:`TemperatureMonitor`, chains are
            above or below T (for example by the noise of minibatches), or not in
            equilibrium.

    Reference:
        E. Lau, Z. Furman, G. Wang, D. Murfet and S. Wei, The Local Learning
        Coefficient: A Singularity-Aware Complexity Measure, arXiv 2308.12108, 2023.
    """
    hyperparams.check_integer("num_data", num_data, low=3)
    hyperparams.check_integer("burn_in", burn_in)
    hyperparams.check_integer("draws", draws, low=2)
    hyperparams.check_integer("chains", chains, low=2)
    hyperparams.check_real("localization", localization, low_open=True)
    if inverse_temperature is None:
        inverse_temperature = num_data / math.log(num_data)
    hyperparams.check_real("inverse_temperature", inverse_temperature, low_open=True)
    if batch_size is not None:
        hyperparams.check_integer("batch_size", batch_size, low=1, high=num_data + 1)
        batch_size = None if batch_size == num_data else batch_size
    seed = hyperparams.draw_seed(seed)
    moving = [p for p in params if p.requires_grad]
    if not moving:
        raise ValueError("Invalid params: none requires gradients")
    refuse("params", moving)
    best = [p.detach().clone() for p in moving]
    steps = range(chains * (burn_in + draws))
    bar = iter(progress_bar(steps, "learning coefficient", progress))
    temperature = num_data / inverse_temperature
    target = {"num_data": num_data, "temperature": temperature}
    target["prior_precision"] = localization * temperature
    base = _Losses(loss, moving, best, num_data, batch_size)
    found = []
    try:
        with kept_gradients(moving):
            for k in range(chains):
                _put(moving, best)
                key = fold_in(seed, k)
                chain = sampler(moving, **target, prior_mean=best, seed=key)
                _check(chain, moving, target, batch_size)
                found.append(base.along(chain, burn_in, draws, fold_in(key, 1), bar))
    finally:
        _put(moving, best)
        getattr(bar, "close", lambda: None)()
    rows, readings = (
        torch.tensor(each, dtype=torch.float64, device="cpu")
        for each in zip(*found, strict=True)
    )
    traces = inverse_temperature * rows[:, burn_in:]
    temperatures = readings / temperature
    result = _estimate(traces, base.initial(), inverse_temperature, temperatures)
    for text in result.warnings:
        warnings.warn(text, stacklevel=2)
    return result


class _Losses:
    def __init__(
        self,
        loss: Callable[[Tensor], Tensor],
        params: list[Tensor],
        best: list[Tensor],
        num_data: int,
        batch_size: int | None,
    ) -> None:
        self._loss, self._params, self._best = loss, params, best
        self._num_data, self._batch_size = num_data, batch_size
        self._all = torch.arange(num_data, device=params[0].device)
        self._of_all: float | None = None
        self._seen = [0.0, 0]  # losses of w*: their sum and number

    def initial(self) -> float:
        return self._seen[0] / max(self._seen[1], 1)

    @torch.no_grad()
    def _loss_at_center(self, indices: Tensor) -> float:
        if self._batch_size is None and self._of_all is not None:
            return self._of_all
        with exchanged(self._params, self._best):
            value = float(_scalar(self._loss(indices)))
        if self._batch_size is None:
            self._of_all = value
        self._seen[0] += value
        self._seen[1] += 1
        return value

    def along(
        self, sampler: Sampler, burn_in: int, draws: int, seed: int, bar: Any
    ) -> tuple[list[float], tuple[float, float]]:
        """Returns excess losses of all steps, infinite at divergence; T_kin, T_conf."""
        generator = torch.Generator().manual_seed(seed)
        twice = needs_graph(sampler)
        first: list[float] = []

        def closure() -> Tensor:
            indices = self._all
            if self._batch_size is not None:
                order = torch.randperm(
                    self._num_data, generator=generator, device="cpu"
                )
                indices = order[: self._batch_size].to(indices.device)
            base = 0.0 if first else self._loss_at_center(indices)
            for p in self._params:
                p.grad = None
            with torch.enable_grad():
                value = _scalar(self._loss(indices))
                # Fixed parameters get no gradients.
                value.backward(create_graph=twice, inputs=self._params)
            if not first:  # later calls are at other parameters, or were selected
                first.append(float(value.detach()) - base)
                if not math.isfinite(first[0]):
                    raise _LeftError
            return value.detach()

        row: list[float] = []
        steps, monitor = burn_in + draws, None
        observed = has_temperatures(sampler) and not sampler.defaults["capturable"]
        for i in range(steps):
            if i == burn_in and observed:
                every = 1 + draws // _OBSERVATIONS
                monitor = TemperatureMonitor(sampler, every=every, center=PRIOR_MEAN)
            next(bar, None)
            first.clear()
            try:
                sampler.step(closure)
            except _LeftError:
                return row + [math.inf] * (steps - len(row)), (math.nan, math.nan)
            row.append(first[0])
        if monitor is None:
            return row, (math.nan, math.nan)
        found = monitor.all()
        return row, (found.kinetic.mean, found.configurational.mean)


class _LeftError(Exception):
    """Raised when the loss is not finite."""


def _scalar(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"Invalid loss: {got} (must be a scalar, the mean of the data)"
        )
    return value


@torch.no_grad()
def _put(params: list[Tensor], values: list[Tensor]) -> None:
    for p, value in zip(params, values, strict=True):
        p.copy_(value)
    torch.clear_autocast_cache()


def _check(
    sampler: object,
    params: list[Tensor],
    target: dict[str, float],
    batch_size: int | None,
) -> None:
    if not isinstance(sampler, Sampler) or traits_of(sampler).takes in (
        Takes.EXAMPLES,
        Takes.SUBSAMPLES,
    ):
        raise hyperparams.wrong_type(
            "sampler", sampler, "a sampler, and not SBPS or HMCECS"
        )
    if traits_of(sampler).takes is Takes.POTENTIAL and batch_size is not None:
        raise ValueError("Invalid batch_size: HMC needs all data (None)")
    groups = sampler.param_groups
    if {*map(id, params)} != {id(p) for g in groups for p in g["params"]}:
        raise ValueError(
            "Invalid sampler: it lacks some of the parameters that it was given"
        )
    for group in groups:
        if group.get("num_chains") is not None:
            raise ValueError("Invalid num_chains: there is one chain in the parameters")
        for name, value in target.items():
            if group[name] != value:
                raise ValueError(
                    f"Invalid sampler: it has {name} {group[name]} (must be the "
                    f"{value} that it was given)"
                )
    if any(PRIOR_MEAN not in sampler.state.get(p, {}) for p in params):
        raise ValueError("Invalid sampler: it lacks the prior_mean that it was given")
    # Estimates at other w* reuse the seed by design.
    context_of(sampler).has_warned_of_shared_noise = True


def _estimate(
    traces: Tensor, initial: float, inverse_temperature: float, temperatures: Tensor
) -> LearningCoefficient:
    means = traces.mean(1)
    value, half_width = _interval(means)
    found = []
    left = (~traces.isfinite()).any(1).nonzero().flatten().tolist()
    if left:
        found.append(
            f"Chains {left} have diverged, their losses are not finite: lower lr, or "
            "raise the localization"
        )
    else:
        half = traces.shape[1] // 2
        change, error = _interval(traces[:, -half:].mean(1) - traces[:, :half].mean(1))
        if abs(change) > max(error, _DRIFT * abs(value)):
            found.append(
                f"The chains' second halves differ from the first by {change:.2g} ± "
                f"{error:.2g}: they have not settled (a longer burn_in, or a larger lr)"
            )
        found += _temperature_warnings(temperatures)
    still = (traces == traces[:, :1]).all(1).nonzero().flatten().tolist()
    if still := [k for k in still if k not in left]:
        found.append(
            f"Chains {still} do not move, their losses are constant: the estimate is "
            "not of the target (a smaller step_size, lr not 0, a loss with gradients)"
        )
    if value < 0:
        found.append(
            f"The estimate is negative ({value:.3g} ± {half_width:.2g}): chains find "
            "smaller losses than at their start, which is not a minimum (train on), or "
            "there are too few draws"
        )
    return LearningCoefficient(
        value=value,
        half_width=half_width,
        chains=means,
        traces=traces,
        initial_loss=initial,
        inverse_temperature=inverse_temperature,
        temperatures=temperatures,
        warnings=tuple(found),
    )


def _temperature_warnings(temperatures: Tensor) -> list[str]:
    found = []
    ratio, error = _interval(temperatures[:, 0])
    if abs(ratio - 1) > max(error, _HEATING):
        is_above = ratio > 1
        found.append(
            f"Chains are {'above' if is_above else 'below'} the target's temperature: "
            f"T_kin is {ratio:.3g} ± {error:.2g} T, and the estimate is too "
            f"{'large' if is_above else 'small'} by about this factor"
            + (
                " (lower lr, a larger batch_size, or SGNHT with thermostat_rate=1e-2)"
                if is_above
                else ""
            )
        )
    excess, error = _interval(temperatures[:, 1] - temperatures[:, 0])
    if abs(excess) > max(2 * error, _EXCESS):
        found.append(
            f"Chains are not in equilibrium: T_conf is {ratio + excess:.3g} T, T_kin "
            f"{ratio:.3g} T (a longer burn_in, a larger lr)"
        )
    return found


def _interval(means: Tensor) -> tuple[float, float]:
    error = float(means.std()) / math.sqrt(len(means))
    return float(means.mean()), _student(len(means) - 1) * error


def _student(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + _CONFIDENCE) / 2, freedom))
