"""Tests of gradients, losses and limits of lr for ``check_setup``."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Motion, traits_of
from torch_sgmcmc.core.utils import mapped, tensors_in
from torch_sgmcmc.diagnostics.setup_issues import Issue, issue
from torch_sgmcmc.diagnostics.temperature_means import Step
from torch_sgmcmc.diagnostics.temperatures import step_of
from torch_sgmcmc.draws.forward import logits_of

Tensors = Sequence[Tensor | None]


def stable_lr(
    sampler: Sampler, groups: Iterable[Mapping[str, Any]], curvature: float
) -> float:
    """Returns the groups' stable lr; NaN if unknown (pSGLD, HMC, SBPS)."""
    pull = traits_of(sampler).pull
    if pull is None or curvature <= 0:
        return math.nan
    momenta = [float(group.get("momentum", 0.0)) for group in groups]
    return min(2 * (1 + m) / pull(m) for m in momenta) / curvature


def moving(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, Mapping[str, Any]]:
    """Returns the sampled tensors with their groups."""
    return {p: g for g in groups for p in g["params"] if p.requires_grad}


def has_known_heating(sampler: Sampler) -> bool:
    """Returns whether a closed form gives T_kin for this sampler's settings."""
    if not traits_of(sampler).has_known_heat:
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


# Distances along a direction with elements of about the parameters' size, in float32
# and in float64.
_DISTANCES = (1e-2, 1e-3), (1e-3, 1e-5, 1e-7)
# The least size of a direction's elements, and the most tensors to name.
_LEAST, _NAMED = 0.1, 8
# The distance of a curvature's gradients, and the relative error of their differences.
_APART, _ROUNDING = 0.01, 1e-3


@contextmanager
def displaced(moves: Iterable[tuple[Tensor, Tensor]], by: float) -> Iterator[None]:
    """Moves tensors by a multiple of their directions, and back."""
    kept = [(p.detach(), d, p.detach().clone()) for p, d in moves]
    try:
        for p, d, _ in kept:
            p.add_(d.to(p.device, p.dtype), alpha=by)
        yield
    finally:
        for p, _, value in kept:
            p.copy_(value)


def failing_tensors(
    params: Sequence[Tensor],
    grads: Tensors,
    loss: Callable[[], float],
    unit: float,
    part_allowed: float,
) -> dict[int, bool]:
    """Finds gradients that are not the derivative of the loss.

    A smooth loss has ``(L(θ + εd) - L(θ - εd)) / 2ε = g·d`` at some distance ε, up to a
    part of the tensors' contributions to g·d (kinks, rounding of gradients) and the
    rounding of losses by ``unit`` u, ``20 u |L| / ε``. The scales of d make all tensors
    contribute about the same.

    Returns:
        Indices of tensors, and whether the elements of gradient 0 are wrong.
    """
    known = [
        torch.zeros_like(p, dtype=torch.float64) if g is None else g.double()
        for p, g in zip(params, grads, strict=True)
    ]
    norms = [float(g.norm()) for g in known]
    scales = [p.detach().double().square().mean().sqrt() for p in params]
    sizes = [3 * max(float(scale), _LEAST) for scale in scales]
    parts = sorted(n * s for n, s in zip(norms, sizes, strict=True) if n > 0)
    part, start = parts[len(parts) // 2] if parts else 0.0, loss()
    sizes = [min(s, part / n) if n else s for n, s in zip(norms, sizes, strict=True)]

    def directions(chosen: Sequence[int]) -> Iterator[tuple[dict[int, Tensor], float]]:
        """Yields directions of tensors, and the size of their contributions."""
        # Contributions add up along the gradient, but not along random directions.
        along = {i: known[i] * (sizes[i] / norms[i]) for i in chosen if norms[i]}
        yield along, part * len(chosen)
        for _ in range(2):
            drawn = {i: torch.randn_like(known[i]) * sizes[i] for i in chosen}
            yield drawn, part * math.sqrt(len(chosen))

    def differs(along: dict[int, Tensor], scale: float) -> bool:
        slope = sum(float((known[i] * d).sum()) for i, d in along.items())
        for distance in _DISTANCES[unit < 1e-12]:
            ends = []
            for sign in (1, -1):
                moves = [(params[i], d) for i, d in along.items()]
                with displaced(moves, sign * distance):
                    ends.append(loss())
            # At a minimum, terms of even order must cancel.
            even = 0.01 * abs(sum(ends) - 2 * start) / distance
            rounding = (20 * unit / distance + 1e-6) * abs(start) + even
            off = abs((ends[0] - ends[1]) / (2 * distance) - slope)
            if off <= part_allowed * scale + rounding or not math.isfinite(off):
                return False
        return True

    found: dict[int, bool] = {}
    left: list[Sequence[int]] = [range(len(known))]
    while left and len(found) < _NAMED:
        chosen = left.pop()
        if not any(differs(*each) for each in directions(chosen)):
            continue
        half, i = len(chosen) // 2, chosen[0]
        if half:
            left += [chosen[half:], chosen[:half]]
        else:
            of_zeros = torch.randn_like(known[i]) * sizes[i] * (known[i] == 0)
            found[i] = differs({i: of_zeros}, part)
    return found


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


_BCE, _CLASSES = F.binary_cross_entropy_with_logits, (F.cross_entropy, F.nll_loss)
#: Losses whose factor is a power of the likelihood, and not the noise's scale.
EXACT: tuple[Callable[..., Tensor], ...] = (
    *(*_CLASSES, F.binary_cross_entropy, _BCE, F.gaussian_nll_loss),
    *(F.poisson_nll_loss, F.kl_div),
)
_ABSOLUTE = F.l1_loss, F.smooth_l1_loss, F.huber_loss
_LOSSES = {*EXACT, *_ABSOLUTE, F.mse_loss}


class Call(NamedTuple):
    """One call of a torch loss."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def num_targets(self) -> int:
        """The number of targets in the mean."""
        out, y = self.args[:2]
        if self.function not in _CLASSES:
            return math.prod(torch.broadcast_shapes(out.shape, y.shape))
        if y.is_floating_point():
            return out.numel() // self.rows().shape[1]
        return int((y != self.options.get("ignore_index", -100)).sum())

    def rows(self) -> Tensor:
        """The outputs with classes in dimension 1."""
        return torch.atleast_2d(self.args[0].detach().double())

    def mean(self) -> float:
        """The loss of these outputs in the mean over all targets."""
        options = {**self.options, "reduction": "mean"}
        options |= {k: None for k in ("size_average", "reduce") if k in options}
        args, options = mapped(as_double, (self.args, options))
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return float(self.function(*args, **options))


def as_double(t: Tensor) -> Tensor:
    """Returns floating-point tensors in float64, and others as they are."""
    return t.detach().double() if t.is_floating_point() else t.detach()


class LossSample(NamedTuple):
    """A loss, and the calls that may have computed it."""

    loss: float
    rows: int | None
    calls: list[Call]
    #: False if the calls are guesses of the model's outputs and the batch's tensors.
    is_called: bool


@contextmanager
def hooked(
    modules: Sequence[nn.Module], function: Callable[[Any], Any]
) -> Iterator[None]:
    """Replaces what these modules return, by a hook that ScriptModules call too."""
    chosen = {id(module) for module in modules}
    handle = register_module_forward_hook(
        lambda module, args, out: function(out) if id(module) in chosen else None
    )
    try:
        yield
    finally:
        handle.remove()


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if len(args) > 1 and func in _LOSSES:
            self.calls.append(Call(func, args, options))
        return func(*args, **options)


@contextmanager
def recorded(model: nn.Module) -> Iterator[tuple[list[Any], list[Call]]]:
    """Records what the model returns, and the calls of torch's losses."""
    outputs: list[Any] = []
    with hooked([model], outputs.append), _Recorder() as mode:
        yield outputs, mode.calls


def output_of(outputs: Sequence[Any]) -> Tensor | None:
    """Returns the outputs or logits of a model, if they are one tensor."""
    out = logits_of(outputs[0]) if len(outputs) == 1 else None
    out = out[0] if isinstance(out, list | tuple) and out else out
    is_one = isinstance(out, Tensor) and out.is_floating_point() and out.dim() > 0
    return out if isinstance(out, Tensor) and is_one and len(out) else None


def guess_calls(outputs: Sequence[Any], batch: Any) -> list[Call]:
    """Lists losses that could be computed from outputs and a tensor of the batch."""
    out, found = output_of(outputs), list[Call]()
    if out is None:
        return found
    for y in tensors_in(batch):
        y = y.to(out.device)  # the loss may have moved it
        if y.dim() == 0 or len(y) != len(out):
            continue
        if not y.is_floating_point() and y.dtype != torch.bool:
            pairs = [(out, y)]
            if y.dim() == 2 and out.dim() == 3 and y.shape[1] > 1:  # of next tokens
                pairs.append((out[:, :-1], y[:, 1:]))
            pairs += [(o.movedim(-1, 1), t) for o, t in pairs if o.dim() > 2]
            known = [(o, t.long()) for o, t in pairs if _are_classes(o, t)]
            found += [Call(F.cross_entropy, pair, {}) for pair in known]
        y = y.to(out.dtype)
        if out.numel() == y.numel():
            found.append(Call(F.mse_loss, (out, y.reshape(out.shape)), {}))
            # A column beside a row broadcasts to all pairs.
            if len(out) > 1 and out.dim() != y.dim() and 1 in (out.dim(), y.dim()):
                found.append(Call(F.mse_loss, (out, y), {}))
    return found


def _are_classes(out: Tensor, y: Tensor) -> bool:
    """Returns whether labels fit outputs, with classes in dimension 1."""
    valid = y[y != -100]
    if out.dim() != y.dim() + 1 or out[:, 0].shape != y.shape or not valid.numel():
        return False
    return bool(0 <= valid.min()) and bool(valid.max() < out.shape[1])


class Match(NamedTuple):
    """A loss that is ``factor`` times a known mean loss, and a constant."""

    calls: list[Call]
    factor: float
    #: Targets of a datum, and the tolerance of that number.
    width: float
    tolerance: float

    @property
    def function(self) -> Callable[..., Tensor]:
        """The known loss."""
        return self.calls[0].function


def match_likelihood(samples: Sequence[LossSample], rounding: float) -> Match | None:
    """Finds the known loss to which all samples are proportional."""
    if len(samples) < 3 or rounding > 1e-4 or not all(s.rows for s in samples):
        return None
    kinds = {(*(call.function for call in sample.calls),) for sample in samples}
    is_called = samples[0].is_called
    if len(kinds) > 1 or (is_called and len(samples[0].calls) > 1):
        return None
    for calls in zip(*(sample.calls for sample in samples), strict=True):
        means = [call.mean() for call in calls]
        factor = _factor([s.loss for s in samples], means, rounding, is_called)
        if factor:
            pairs = zip(calls, samples, strict=True)
            widths = [call.num_targets / (sample.rows or 1) for call, sample in pairs]
            width, spread = statistics.fmean(widths), statistics.stdev(widths)
            error = spread / len(samples) ** 0.5 / max(width, 1e-9)
            return Match([*calls], factor, width, 0.01 + 4 * error)
    return None


def _factor(
    losses: list[float], means: list[float], rounding: float, is_called: bool
) -> float:
    """Returns the slope a of losses ≈ a · means + b, or 0 if they are not linear."""
    x, m = torch.tensor([losses, means], dtype=torch.float64, device="cpu")
    size = rounding * float(x.abs().max())
    if not math.isfinite(size * float(m.square().sum())) or size == 0 or not m.any():
        return 0.0
    for centre in (0.0, 1.0):  # without b, and with it
        y, r = x - centre * x.mean(), m - centre * m.mean()
        factor = float((y @ r) / (r @ r)) if r.any() else 0.0
        is_varied = abs(factor) * float(m.max() - m.min()) > 100 * size
        # Any constant is a multiple of any other.
        is_known = is_varied or (not centre and (is_called or abs(factor - 1) < 1e-4))
        if is_known and float((y - factor * r).abs().max()) <= size:
            return factor
    return 0.0


def _find_weights(call: Call) -> Iterator[Issue]:
    """Finds weights of data and changed labels, of which the posterior is another."""
    options, name = call.options, call.function.__name__
    weights = options.get("weight")
    if len(call.args) > 2 and call.function in (
        *_CLASSES,
        F.binary_cross_entropy,
        _BCE,
    ):
        weights = call.args[2]
    positive = options.get("pos_weight")
    is_uneven = isinstance(weights, Tensor) and len(weights[weights > 0].unique()) > 1
    if is_uneven or (isinstance(positive, Tensor) and bool((positive != 1).any())):
        yield issue("not a likelihood/weights", name=name)
    if smoothing := options.get("label_smoothing"):
        yield issue("not a likelihood", name=name, smoothing=smoothing)


def find_outputs(
    samples: Sequence[LossSample], moved: Sequence[LossSample], match: Match | None
) -> list[Issue]:
    """Finds outputs that do not fit the called loss, and losses of no likelihood.

    Args:
        samples: at the present weights.
        moved: at others, where outputs need not be normalised.
        match: the known loss, if the calls are not seen.
    """
    present = [call for s in samples if s.is_called for call in s.calls]
    present = present or (match.calls if match else [])
    calls = present + [call for s in moved if s.is_called for call in s.calls]
    found = [each for call in present[:1] for each in _find_weights(call)]
    for function in {call.function for call in calls}:
        some = [call for call in calls if call.function is function]
        outputs, name = [call.rows() for call in some], function.__name__
        shape, target = (list(t.shape) for t in some[0].args[:2])
        within = all(bool(((o >= 0) & (o <= 1)).all()) for o in outputs)
        if function in _CLASSES:
            sums = max(float((o.sum(1) - 1).abs().max()) for o in outputs)
            now = [call.rows() for call in present if call.function is function]
            logs = max(float(o.logsumexp(1).abs().max()) for o in now)
            if within and sums < 1e-3:
                takes = "logits" if function is F.cross_entropy else "their logarithms"
                return [*found, issue("probabilities", name=name, takes=takes)]
            if function is F.nll_loss and logs >= 1e-3:
                return [*found, issue("probabilities/logits")]
        elif shape != target:
            return [*found, issue("broadcast", outputs=shape, targets=target)]
        elif function is _BCE and within and any(bool(o.any()) for o in outputs):
            return [*found, issue("probabilities/sigmoid", name=name)]
    return found


def find_scale(match: Match, num_data: float, data: int | None) -> list[Issue]:
    """Compares the factor of a loss with ``num_data``."""
    factor, width, name = match.factor, match.width, match.function.__name__
    scaled = issue("scaled loss", factor=factor, name=name)
    if match.function in _ABSOLUTE and _near(factor, 1.0):
        return [issue("squared error/absolute", name=name, scale=width / factor)]
    if match.function is F.mse_loss:
        return _find_square(scaled, factor, round(width), num_data, data)
    is_right = _near(num_data * factor, (data or math.nan) * width, match.tolerance)
    # A factor of the width is a sum over the targets of a datum.
    is_sum = _near(factor, width, match.tolerance)
    if match.function not in EXACT or is_right or is_sum:
        return []
    is_mean = _near(factor, 1.0)
    if not is_mean or data is None:
        return [] if is_mean else [scaled]
    about = "about " * (match.tolerance > 0.01)  # minibatches have other numbers
    values = {"width": width, "number": num_data, "total": f"{about}{data * width:.0f}"}
    key = "num_data/classes" if match.function is F.kl_div else "num_data/targets"
    found = issue(key, **values, power=num_data / (data * width))
    return [found._replace(kind="scaled loss") if num_data == data else found]


def _near(a: float, b: float, part: float = 0.01) -> bool:
    return abs(a - b) <= part * abs(b)


def _find_square(
    scaled: Issue, factor: float, width: int, num_data: float, data: int | None
) -> list[Issue]:
    sums = {factor * c for c in (1, 2, 1 / width, 2 / width)}
    counts = {num_data, float(data or num_data)} - {1.0}
    if any(_near(s, n, 1e-4) or _near(s * n, 1, 1e-4) for s in sums for n in counts):
        return [scaled]  # the sampler multiplies by num_data itself
    is_counted = width > 1 and _near(num_data, (data or 0) * width)
    is_half = _near(factor, 0.5) and width > 1 and not is_counted
    if not _near(factor, 1.0) and not is_half:
        return []
    variance = (1 if is_counted else width) / (2 * factor)
    return [issue("squared error", variance=variance)]
