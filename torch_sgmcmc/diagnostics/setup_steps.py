"""Checks of steps for ``check_setup``: limits of lr, minibatches' heat, relaxation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_sgmcmc.core import utils
from torch_sgmcmc.core.context import kind_of
from torch_sgmcmc.core.preconditioner import with_relaxation
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Motion, traits_of
from torch_sgmcmc.core.state import is_preconditioned
from torch_sgmcmc.core.steps import is_adapting
from torch_sgmcmc.data import one_gradient_a_step
from torch_sgmcmc.diagnostics import setup_gradients as gradients
from torch_sgmcmc.diagnostics import setup_issues as issues
from torch_sgmcmc.diagnostics.setup_gradients import Run, displaced, moving
from torch_sgmcmc.diagnostics.temperature_means import Step, relaxation
from torch_sgmcmc.diagnostics.temperature_sums import step_of
from torch_sgmcmc.diagnostics.temperatures import has_temperatures


def stable_lr(
    sampler: Sampler, groups: Iterable[Mapping[str, Any]], curvature: float
) -> float:
    """Returns the groups' stable lr; NaN if unknown (pSGLD, HMC, SBPS, with G)."""
    pull, groups = traits_of(sampler).pull, [*groups]
    if pull is None or curvature <= 0 or _has_preconditioner(sampler, groups):
        return math.nan
    momenta = [float(group.get("momentum", 0.0)) for group in groups]
    return min(2 * (1 + m) / pull(m) for m in momenta) / curvature


def _has_preconditioner(sampler: Sampler, groups: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether G, which differs between elements, multiplies lr."""
    return any(is_preconditioned(sampler.state, group) for group in groups)


def has_known_heating(sampler: Sampler) -> bool:
    """Returns whether a closed form gives T_kin for this sampler's settings."""
    groups = sampler.param_groups
    if not traits_of(sampler).has_known_heat or _has_preconditioner(sampler, groups):
        return False
    steps = [step_of(group, Motion.LANGEVIN) for group in sampler.param_groups]
    known = [each.minibatch_excess(1.0) for each in steps if each.temperature > 0]
    return len(known) == len(steps) and all(map(math.isfinite, known))


class Heat(NamedTuple):
    """The heat of minibatches: the step of each tensor, and its gradient's noise."""

    #: With the variance of an element, and the curvature along the noise.
    steps: Mapping[Tensor, tuple[Step, float, float]]
    #: Minibatches of a pass; infinite if they are independent.
    batches: float

    def of(self, times: float = 1.0, kind: int = 0) -> dict[Tensor, float]:
        """Returns the excess by tensor of T_kin / T, or (kind 1) of the variance.

        Args:
            times: factor of lr, and of estimates, which belong to it.
            kind: 0, or 1 for the variance along the noise over the posterior's.
        """
        found = {}
        for p, (step, variance, curvature) in self.steps.items():
            estimate = times * step.noise_estimate
            now = step._replace(lr=times * step.lr, noise_estimate=estimate)
            part = now.shuffled_parts(curvature, self.batches)[kind]
            found[p] = now.minibatch_excess(part * variance) / step.temperature
        return found

    def lr_factor(self, params: Collection[Tensor], heating: float) -> float:
        """Returns the factor of lr at which the tensors' mean excess is ``heating``."""
        own = Heat(
            {p: step for p, step in self.steps.items() if p in params}, self.batches
        )
        times = 1.0
        for _ in range(40):  # the part that cancels depends on lr
            excess = mean_of(own.of(times))
            times = times * heating / excess if excess > 0 else math.inf
            if times == math.inf:
                break
        return times

    def flat(self) -> Heat:
        """Returns the heat of the same noise in directions without curvature."""
        return self._replace(steps={p: (*s[:2], 0.0) for p, s in self.steps.items()})


def mean_of(heating: Mapping[Tensor, float]) -> float:
    """Returns the mean over all elements of tensors; 0 without any."""
    numel = sum(p.numel() for p in heating)
    return sum(h * p.numel() for p, h in heating.items()) / max(numel, 1)


def heat_of(
    sampler: Sampler,
    variances: Tensor,
    reached: set[Tensor],
    curvatures: Mapping[Tensor, float],
    batches: float,
) -> Heat:
    """Returns the heat for the variances of all elements of a minibatch's gradient."""
    ours, motion = moving(sampler.param_groups), traits_of(sampler).motion
    assert motion is not None  # has_known_heating()
    parts = variances.split([p.numel() for p in ours])
    steps = {
        p: (step_of(group, motion), float(part.mean()), curvatures.get(p, 0.0))
        for (p, group), part in zip(ours.items(), parts, strict=True)
        if p in reached and p.numel()
    }
    return Heat(steps, batches)


# The distance of a curvature's gradients, and the relative error of their differences.
_APART, _ROUNDING = 0.01, 1e-3


class Curvature:
    """Products with the Hessian of a loss, each by one gradient.

    Args:
        params: the tensors, whose elements follow each other in vectors.
        gradient: returns the gradient of the same loss as a vector.
    """

    @torch.no_grad()
    def __init__(self, params: list[Tensor], gradient: Callable[[], Tensor]) -> None:
        self._params, self._gradient, self._start = params, gradient, gradient()
        self._norms = [float(p.norm(dtype=torch.float64)) for p in params]
        self.sizes = [p.numel() for p in params]

    @torch.no_grad()
    def product(self, direction: Tensor) -> Tensor:
        """Returns H d of a direction d of about length 1."""
        parts = direction.split(self.sizes)
        pairs = zip(self._params, parts, strict=True)
        moves = [(p, part.view_as(p)) for p, part in pairs]
        moved = zip(self._norms, parts, strict=True)
        # The distance suits the tensors that move, and no larger ones beside them.
        length = math.hypot(*(norm for norm, part in moved if bool(part.any())))
        apart = _APART * (length or 1.0)
        with displaced(moves, apart):
            return (self._gradient() - self._start) / apart

    def largest(self, scales: list[float], iterations: int = 10) -> float:
        """Returns the largest curvature, by Lanczos iterations.

        The coordinates are parameters divided by their scales: the result approaches
        the largest eigenvalue of D H D, D the scales, from below, and is >= 0.
        """
        sizes = self._start.new_tensor(self.sizes).long()
        scale = self._start.new_tensor(scales).repeat_interleave(sizes)
        vector, before = scale * self._start, torch.zeros_like(scale)
        if not vector.any():  # as at weights behind a layer of zeros
            vector = scale * torch.randn_like(scale)
        lengths, diagonal = [float(vector.norm())], list[float]()
        while len(diagonal) < iterations and 0 < lengths[-1] < math.inf:
            direction = vector / lengths[-1]
            vector = scale * self.product(scale * direction)
            own = float(direction @ vector)
            if not math.isfinite(own):
                break
            diagonal.append(own)
            if len(diagonal) > 1:
                vector -= lengths[-1] * before
            vector -= own * direction
            before, rest = direction, float(vector.norm())
            # What is left of an invariant space is rounding.
            lengths.append(rest if rest > _ROUNDING * abs(own) else 0.0)
        if not diagonal:
            return 0.0
        matrix, beside = (
            torch.tensor(numbers, dtype=torch.float64, device="cpu")
            for numbers in (diagonal, lengths[1 : len(diagonal)])
        )
        matrix = matrix.diag() + beside.diag(1) + beside.diag(-1)
        return max(0.0, float(torch.linalg.eigvalsh(matrix)[-1]))


# Minibatches of the curvature's loss; Lanczos iterations for a group's own curvature.
_CURVED, _GROUP_ITERATIONS = 2, 5
# Number of minibatches with drawn residuals, and draws for each.
_DRAWN, _DRAWS = 8, 4
# Limits of T_kin / T - 1, of the mean coordinate and of a tensor; at a random start,
# whose noise falls in the first pass (docs/first_run.md), for one target of a datum and
# for many. At noise_lr the mean coordinate has _HEATING; a tensor above _REMARKED gives
# a remark.
_LIMITS, _START_LIMITS, _MANY_LIMITS = (0.5, 4.0), (0.5, 20.0), (5.0, 40.0)
_HEATING, _REMARKED = 0.05, 1.0


def check_steps(run: Run) -> None:
    """Compares lr with the curvature and the noise."""
    severe = issues.KINDS[: issues.KINDS.index("sum")]
    is_random = run.has("random loss") and not run.repeats
    if not run.sampled or is_random or run.has(*severe):
        return
    if run.is_sharded:
        run.unknown.append("derivatives, curvature and gradient noise of DTensors")
        return
    if any(float(group.get("lr", 1.0)) == 0 for group in run.groups.values()):
        run.remarks.append(
            "lr is 0, as at the start of a warm-up: T_kin at a later lr is not "
            "known. Check again with the largest lr."
        )
    curvature = None
    if all(p.dtype in (torch.float32, torch.float64) for p in run.sampled):
        curvature = Curvature(run.sampled, partial(run.flat, *run.batches[:_CURVED]))
        _check_curvature(run, curvature)
    else:
        run.unknown.append("the curvature of parameters in low precision")
    if len(run.batches) > 1 and has_known_heating(run.sampler):
        _check_noise(run, curvature)
    elif len(run.batches) > 1:
        reads = " (a TemperatureMonitor reads it)"
        reads = reads if has_temperatures(run.sampler) else ""
        run.unknown.append(f"T_kin of {_settings(run)}{reads}")


def _settings(run: Run) -> str:
    return f"a {type(run.sampler).__name__} with these settings"


def _check_curvature(run: Run, of: Curvature) -> None:
    groups = run.sampler.param_groups
    lrs = [float(group.get("lr", 0.0)) for group in run.groups.values()]
    lr = max(lrs)
    # In these coordinates all have the largest group's lr.
    scales = [math.sqrt(own / lr) if lr > 0 else 1.0 for own in lrs]
    priors = [group["prior_precision"] / group["num_data"] for group in groups]
    curvature = of.largest(scales) + max(priors)
    largest = stable_lr(run.sampler, groups, curvature)
    run.numbers |= {"curvature": curvature, "largest_lr": largest}
    if len(groups) > 1:
        run.numbers["largest_lrs"] = tuple(
            stable_lr(run.sampler, [group], own + prior)
            for group, own, prior in zip(
                groups, _curvature_by_group(run, of), priors, strict=True
            )
        )
    if math.isnan(largest) and curvature > 0:
        run.unknown.append(f"the largest stable lr of {_settings(run)}")
    if is_adapting(run.sampler):
        run.unknown.append(f"the lr of {_settings(run)} (tune_steps sets it)")
    elif lr > largest:
        values = {"limit": largest, "curvature": curvature, "begin": largest / 4}
        bounded = traits_of(run.sampler).has_bounded_steps
        run.add("unstable/bounded" if bounded else "unstable", lr=lr, **values)


def _curvature_by_group(run: Run, of: Curvature) -> Iterator[float]:
    """Yields the largest curvature where the other groups are at rest."""
    for group in run.sampler.param_groups:
        scales = [float(own is group) for own in run.groups.values()]
        yield of.largest(scales, _GROUP_ITERATIONS) if any(scales) else math.nan


def _measured_noise(run: Run) -> Iterator[Tensor]:
    """Yields differences of minibatches' gradients, with one gradient's noise."""
    for one, other in zip(run.batches[::2], run.batches[1::2], strict=False):
        yield (run.flat(other) - run.flat(one)) / 2**0.5


def _drawn_noise(run: Run, variance: float, factor: float) -> Iterator[Tensor]:
    """Yields gradients of ``factor`` times a squared error for drawn residuals."""
    for batch in run.batches[:_DRAWN]:
        with torch.enable_grad(), gradients.recorded(run.model) as (outs, calls):
            run.value(batch)
        out = calls[0].args[0] if calls else gradients.output_of(outs)
        if out is None:
            continue
        for _ in range(_DRAWS):
            scale = 2 * factor * math.sqrt(variance) / out.numel()
            yield run.flatten(run.backward(out, scale * torch.randn_like(out)))


def _share(run: Run) -> float:
    """Returns the part of the data in a minibatch, 0 if it is unknown."""
    data, size = run.data, utils.rows_of(run.batches[0])
    if not size or not data.num_data or data.is_pass is None:
        return 0.0
    return min(1.0, size / data.num_data)


def _curvatures(run: Run, of: Curvature | None, noise: Tensor) -> dict[Tensor, float]:
    """Returns the curvature of loss and prior along the noise of each tensor."""
    length = float(noise.norm())
    if of is None or not length:
        return {}
    product, sizes = of.product(noise / length), of.sizes
    parts = zip(noise.split(sizes), product.split(sizes), strict=True)
    found = {}
    for (p, group), (e, he) in zip(run.groups.items(), parts, strict=True):
        own = float(e @ he) * length / max(float(e @ e), 1e-300)
        found[p] = max(own, 0.0) + group["prior_precision"] / group["num_data"]
    return found


def _noise(run: Run) -> tuple[Iterator[Tensor], bool, str, tuple[float, float]]:
    """Returns noises, whether they are measured, their kind, and limits."""
    match, limits = run.match, _LIMITS
    where, noises = "with the present gradient noise", _measured_noise(run)
    is_start = int(run.sampler.param_groups[0]["step"]) == 0
    is_square = match and match.function is F.mse_loss and match.factor > 0
    if is_start and match is not None and is_square:
        share = (run.data.num_data or run.num_data) / run.num_data * match.width
        variance = share / (2 * match.factor)
        where = f"once residuals have the loss's own variance {variance:.3g}"
        return _drawn_noise(run, variance, match.factor), False, where, limits
    if is_start and _has_learned_nothing(run):
        many = match is not None and match.width > 1
        limits = _MANY_LIMITS if many else _START_LIMITS
    return noises, True, where, limits


def _heat(
    run: Run, of: Curvature | None, noises: Iterable[Tensor], is_measured: bool
) -> tuple[Heat | None, int]:
    """Returns the heat of noises, None without any, and their number."""
    count = 0
    squares = total = torch.zeros((), device="cpu")
    repeats, run.repeats = run.repeats, False  # its own noise raises T_kin too
    for noise in noises:
        count, squares, total = count + 1, squares + noise.square(), total + noise
    run.repeats = repeats
    if not count:
        return None, 0
    data, share = run.data, _share(run)
    # Half squared differences of two minibatches of a pass have none of their
    # covariance; drawn residuals have no correction for a finite number.
    if data.is_pass or not (is_measured or data.has_repeats):
        squares = squares * (1 - share)
    batches = 1 / share if data.is_pass and share else math.inf
    run.along = _curvatures(run, of, total)
    values = squares / count, run.reached, run.along, batches
    return heat_of(run.sampler, *values), count


def _check_noise(run: Run, curvature: Curvature | None) -> None:
    noises, is_measured, where, limits = _noise(run)
    heat, count = _heat(run, curvature, noises, is_measured)
    heating = heat.of() if heat else {}
    if heat is None or not heating:
        return
    lr = max(float(g["lr"]) for g in run.groups.values())
    mean = mean_of(heating)

    def limit(lr: float, params: Collection[Tensor]) -> float:
        return lr * heat.lr_factor(params, _HEATING) if lr > 0 else math.nan

    groups = run.sampler.param_groups
    run.numbers |= {
        "heating": {run.names[p]: h for p, h in heating.items()},
        "noise_lr": limit(lr, heating),
        "noise_lrs": tuple(
            limit(float(group["lr"]), {*group["params"]}) for group in groups
        )
        if len(groups) > 1
        else (),
        "flat_variance": 1 + max(heat.flat().of(kind=1).values()),
        "stiff_variance": 1 + max(heat.of(kind=1).values()),
    }
    # The noise of a tensor with few elements is known to this factor only.
    surely = {p: heating[p] / (1 + (2 / count / p.numel()) ** 0.5) for p in heating}
    worst = max(surely, key=surely.__getitem__)
    text = (
        f"T_kin / T would be {1 + mean:.3g} on average over all coordinates and "
        f"{1 + heating[worst]:.3g} in {run.names[worst]}, {where}"
    )
    too_much = max(mean / limits[0], surely[worst] / limits[1])
    if too_much > 1:
        most = {"mean": 1 + limits[0], "tensor": 1 + limits[1]}
        larger = "larger minibatches"
        if _share(run):
            data, size = run.data, utils.rows_of(run.batches[0])
            wanted = min(1.5 * too_much * size, data.num_data)
            larger = f"minibatches of {math.ceil(wanted):,}"
        lr /= 1.5 * too_much
        run.add("above T", text=text, lr=lr, size=larger, **most)
    elif heating[worst] > _REMARKED:
        run.remarks.append(
            f"Minibatches raise the chain's temperature: {text} (reported from "
            f"{1 + _REMARKED:g}). Check again after burn-in, or lower lr."
        )


def check_relaxation(run: Run, num_steps: int | None, is_prior: bool) -> None:
    """Compares the time in which the start is forgotten with the run."""
    kind, state = kind_of(run.sampler), run.sampler.state
    groups = [with_relaxation(state, group) for group in run.sampler.param_groups]
    found = tuple(relaxation(kind, group) for group in groups)
    is_one = one_gradient_a_step(run.sampler)
    length = utils.length_of(run.data.loader) if is_one else None
    run.numbers |= {"relaxation": found, "steps_per_pass": length}
    run.numbers["relaxation_with_data"] = tuple(
        relaxation(kind, {**group, "prior_precision": 0.0}, min(known))
        if (known := [run.along[p] for p in group["params"] if p in run.along])
        else math.nan
        for group in groups
    )
    run.numbers["num_steps"] = num_steps
    if any(map(math.isnan, found)):
        run.unknown.append(f"the relaxation of {_settings(run)}")
    elif any(group["prior_precision"] == 0 for group in groups):
        run.unknown.append("the relaxation (no prior in the sampler)")
    finite = {i: steps for i, steps in enumerate(found) if math.isfinite(steps)}
    if not num_steps or not finite or is_prior or is_adapting(run.sampler):
        return
    slowest = max(finite, key=finite.__getitem__)
    steps, needed = finite[slowest], 3 * finite[slowest]
    if num_steps < needed:
        values = {"passes": issues.in_passes(steps, length), "run": num_steps}
        precision = groups[slowest]["prior_precision"] * needed / num_steps
        values |= {"precision": precision, "needed": needed}
        run.add("relaxation", group=slowest, steps=steps, **values)


def _has_learned_nothing(run: Run) -> bool:
    """Returns whether a classifier's loss is not far below the labels' entropy."""
    match = run.match
    if match is None or match.function not in gradients.EXACT:
        return True
    labels = match.calls[0].args[1]
    if labels.is_floating_point():
        return True
    shares = labels.unique(return_counts=True)[1] / labels.numel()
    entropy = float(-(shares * shares.log()).sum())
    return run.numbers["loss"] > 0.5 * match.factor * entropy
