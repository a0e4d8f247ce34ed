"""Gradients and losses of a set-up, and their tests, for ``check_setup``."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from torch_sgmcmc.core.context import context_of, local
from torch_sgmcmc.core.hyperparams import wrong_result
from torch_sgmcmc.core.parameters import exchanged
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.utils import Snapshot, mapped, tensors_in, unwrapped
from torch_sgmcmc.data import kept_generators
from torch_sgmcmc.diagnostics.setup_issues import Issue, Loader, issue
from torch_sgmcmc.diagnostics.temperature_sums import names_of
from torch_sgmcmc.draws.forward import logits_of, model_device, moved

Tensors = Sequence[Tensor | None]
Loss = Callable[[nn.Module, Any], Tensor]


def moving(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, Mapping[str, Any]]:
    """Returns the sampled tensors with their groups."""
    return {p: g for g in groups for p in g["params"] if p.requires_grad}


# Distances along a direction with elements of about the parameters' size, in float32
# and in float64.
_DISTANCES = (1e-2, 1e-3), (1e-3, 1e-5, 1e-7)
# The least size of a direction's elements, and the most tensors to name.
_LEAST, _NAMED = 0.1, 8


@contextmanager
def displaced(moves: Iterable[tuple[Tensor, Tensor]], by: float) -> Iterator[None]:
    """Moves tensors by a multiple of their directions, and back."""
    kept = [(p.detach(), d, p.detach().clone()) for p, d in moves]
    try:
        for p, d, _ in kept:
            p.add_(d.to(p.device, p.dtype), alpha=by)
        torch.clear_autocast_cache()
        yield
    finally:
        for p, _, value in kept:
            p.copy_(value)
        torch.clear_autocast_cache()


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


_BCE, _CLASSES = F.binary_cross_entropy_with_logits, (F.cross_entropy, F.nll_loss)
#: Losses whose factor is a power of the likelihood, and not the noise's scale.
EXACT: tuple[Callable[..., Tensor], ...] = (
    *_CLASSES,
    F.binary_cross_entropy,
    _BCE,
    F.gaussian_nll_loss,
    F.poisson_nll_loss,
    F.kl_div,
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


class Run:
    """A set-up, its issues so far, and the gradients of its loss."""

    before: Snapshot
    batches: list[Any]

    def __init__(
        self, model: nn.Module, loss: Loss, loader: Any, sampler: Sampler
    ) -> None:
        self.model, self.loss, self.sampler = model, loss, sampler
        self.own = set(model.parameters())
        self.all = [*{*context_of(sampler).params, *self.own}]
        groups = sampler.param_groups
        params = (p for group in groups for p in group["params"])
        self.names = dict(zip(params, names_of(groups), strict=True))
        self.names |= {p: name for name, p in unwrapped(model).named_parameters()}
        #: The param group of each sampled tensor.
        self.groups = moving(groups)
        self.sampled = [*self.groups]
        #: num_data of the first group, and of all groups.
        self.num_data = float(groups[0]["num_data"])
        self.counts = {float(group["num_data"]) for group in groups}
        self.data, self.loss_shape = Loader(loader), [0]
        self.issues: list[Issue] = []
        self.remarks: list[str] = []
        self.unknown: list[str] = []
        self.numbers: dict[str, Any] = {"not_sampled": (), "heating": {}}
        #: The curvature of loss and prior along the gradient noise of each tensor.
        self.along: dict[Tensor, float] = {}
        #: True if each call of the loss gets the same random numbers.
        self.repeats = False
        self.match: Match | None = None
        self.gradients = 0
        #: The tensors that have had a gradient, and names of those without.
        self.reached: set[Tensor] = set()
        self.zeros: list[str] = []
        self.is_sharded = context_of(sampler).placement.is_sharded

    @property
    def is_potential(self) -> bool:
        """True if the loss is the potential of all data, not a mean."""
        return self.counts == {1.0} and len(self.batches) == 1

    def add(self, key: str, **values: Any) -> None:
        """Adds an issue."""
        self.issues.append(issue(key, **values))

    def has(self, *kinds: str) -> bool:
        """Returns whether there is an issue of one of these kinds."""
        return any(p.kind in kinds for p in self.issues)

    def value(self, batch: Any) -> Tensor:
        """Returns the loss of a minibatch, or of each example."""
        batch = moved(batch, model_device(self.model))
        numbers = kept_generators(0) if self.repeats else nullcontext()
        with numbers:
            value = self.loss(self.model, batch)
        if not isinstance(value, Tensor):
            wanted = "the mean loss of the minibatch, a Tensor"
            raise wrong_result("loss", value, wanted)
        self.loss_shape = list(value.shape)
        return value

    def backward(self, root: Tensor, grad: Tensor | None = None) -> Tensors:
        """Returns the gradients of a tensor by the sampled tensors."""
        for p in self.all:
            p.grad = None
        if root.requires_grad:
            root.backward(grad, retain_graph=grad is not None)
        self.gradients += 1
        grads = [p.grad for p in self.sampled]
        return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]

    def gradient(self, batch: Any) -> tuple[float, Tensors]:
        """Returns the mean loss, and its gradients by the sampled tensors."""
        with torch.enable_grad():
            loss = self.value(batch).mean()
        grads = self.backward(loss)
        pairs = zip(self.sampled, grads, strict=True)
        self.reached |= {p for p, grad in pairs if grad is not None}
        return float(loss.detach()), grads

    def flat(self, *batches: Any) -> Tensor:
        """Returns the mean gradient as one vector."""
        vectors = [self.flatten(self.gradient(batch)[1]) for batch in batches]
        return sum(vectors[1:], vectors[0]) / len(vectors)

    def flatten(self, grads: Tensors) -> Tensor:
        """Returns gradients as one vector, 0 for tensors without a gradient."""
        pairs, device = zip(grads, self.sampled, strict=True), self.sampled[0].device
        parts = [local(torch.zeros_like(p) if g is None else g) for g, p in pairs]
        return torch.cat([g.detach().double().flatten().to(device) for g in parts])

    def precisely(self, function: Callable[..., Any], *batches: Any) -> Any:
        """Calls a function with rounding unit and batches, in float64 if possible."""
        doubled = (mapped(as_double, batch) for batch in batches)
        held = *self.sampled, *self.model.parameters(), *self.model.buffers()
        own = [t for t in dict.fromkeys(held) if t.is_floating_point()]
        try:
            with exchanged(own, [t.data.double() for t in own]):
                return function(torch.finfo(torch.float64).eps, *doubled)
        except Exception:
            self.before.restore()
            unit = max(torch.finfo(p.dtype).eps for p in self.sampled)
            return function(unit, *batches)
        finally:
            self.before.restore()
