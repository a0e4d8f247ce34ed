"""``check_setup``: checks of model, loss, data and sampler before a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc._impl.context import context_of, state_bytes_of
from torch_sgmcmc._impl.hyperparams import wrong_result
from torch_sgmcmc._impl.utils import (
    halves,
    mapped,
    rows_of,
    tensors_in,
    unwrapped,
)
from torch_sgmcmc.diagnostics.setup_gradients import (
    LossSample,
    Match,
    as_double,
    displaced,
    failing_tensors,
    find_outputs,
    find_scale,
    guess_calls,
    has_known_heating,
    hooked,
    in_double,
    largest_curvature,
    match_likelihood,
    moving,
    noise_heating,
    output_of,
    recorded,
    stable_lr,
)
from torch_sgmcmc.diagnostics.setup_issues import (
    KINDS,
    Issue,
    Loader,
    SetupReport,
    Snapshot,
    has_dropout,
    issue,
    local,
    some_of,
    untouched,
    uses_minibatch,
)
from torch_sgmcmc.diagnostics.temperatures import names_of
from torch_sgmcmc.losses import Likelihood
from torch_sgmcmc.posterior.forward import model_device, moved
from torch_sgmcmc.samplers.hmc_ecs import HMCECS
from torch_sgmcmc.samplers.sampler import Sampler
from torch_sgmcmc.samplers.sbps import SBPS

__all__ = ["check_setup"]

_PAIRS, _ITERATIONS, _CURVED, _SAMPLES = 8, 10, 2, 4
# Number of minibatches with drawn residuals, and draws for each.
_DRAWN, _DRAWS = 8, 4
# log2 of (gradient of a minibatch) / (mean of its halves'): 0 for means and 1 for sums;
# and the allowed part of a gradient in another direction.
_EXPONENT, _REST = 0.5, 0.1
# Limits of T_kin / T - 1, of the mean coordinate and of a tensor; at a random start,
# whose noise falls in the first pass (docs/first_run.md), for one target of a datum and
# for many. At noise_lr the mean coordinate has _HEATING; a tensor above _REMARKED gives
# a remark.
_LIMITS, _START_LIMITS, _MANY_LIMITS = (0.5, 4.0), (0.5, 20.0), (5.0, 40.0)
_HEATING, _REMARKED = 0.05, 1.0

Loss = Callable[[nn.Module, Any], Tensor]
Gradients = Sequence[Tensor | None]


def check_setup(
    model: nn.Module, loss: Loss, loader: Iterable[Any], sampler: Sampler
) -> SetupReport:
    r"""Checks a set-up before it is sampled.

    .. code-block:: python

        print(sg.check_setup(model, loss, loader, sampler))

    At most 80 gradients of a few minibatches test that the loss is the mean negative
    log-likelihood of ``num_data`` data, that its gradient is its derivative, that every
    sampled tensor gets a gradient, and that minibatches represent the data
    (docs/first_run.md lists all checks). They give two limits of lr. Up to
    ``largest_lr`` the chain is stable, :math:`2 (1 + m) / h`, h the largest curvature
    of the mean loss. At ``noise_lr`` minibatches raise T_kin of the mean coordinate by
    5 %, with m the momentum (SGLD: 0) and V the variance of a gradient's element by

    .. math:: \frac{T_\text{kin}}{T} - 1 \approx \frac{\mathrm{lr}\, N V}{2 (1 - m) T}
        - \hat\beta \frac{1}{1 - m}

    (:class:`BAOA`: (1 + m) / 2 of it). Before the first step of a Gaussian likelihood,
    V is the variance for residuals with the loss's own variance. docs/first_run.md has
    the temperatures that raise an issue.

    Parameters, buffers, gradients, training flags, the default random generators
    (torch, Python, NumPy) and the loader's generators are restored.

    Args:
        model: as the loss takes it, in its mode of training.
        loss: ``loss(model, batch)``, as for :func:`sample`: the mean loss of a
            minibatch, which has been moved to the model's device; for SBPS, the loss of
            each example.
        loader: minibatches, an iterable that can be read again.
        sampler: the sampler, before its first step or later. Not an HMCECS.

    Returns:
        A :class:`SetupReport` to print: issues, the worst first, and numbers.

    Raises:
        TypeError: an argument is invalid.
        ValueError: the loader has no minibatch.
        Exception: an error of the loss.

    Note:
        A report without issues is not a proof. Curvature grows during training, and
        noise mostly falls: check again after burn-in, and see
        :class:`TemperatureMonitor`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Invalid model: of type {type(model).__name__} (a Module)")
    if not isinstance(sampler, Sampler) or isinstance(sampler, HMCECS):
        raise TypeError(
            f"Invalid sampler: a {type(sampler).__name__} (must be a sampler of "
            "torch_sgmcmc, but not HMCECS, which draws its own subsamples)"
        )
    if not callable(loss):
        raise TypeError(f"Invalid loss: {loss!r} (must be a function)")
    if isinstance(loader, Iterator):
        raise TypeError(
            f"Invalid loader: an iterator of type {type(loader).__name__} (can be read "
            "once only, and would lose minibatches: give a list or a DataLoader)"
        )
    run = _Run(model, loss, loader, sampler)
    with untouched(model, run.all, loader) as run.before:
        run.batches = [*islice(loader, 2 * _PAIRS)]
        if not run.batches:
            raise ValueError("Invalid loader: it has no minibatch")
        run.check_parameters()
        if run.sampled:
            run.check_modes()
            run.check_loss()
        run.check_data()
        run.check_steps()
    order = {kind: i for i, kind in enumerate(KINDS)}
    tensors = [*unwrapped(model).state_dict().values()]
    return SetupReport(
        issues=tuple(sorted(run.issues, key=lambda p: order[p.kind])),
        remarks=tuple(run.remarks),
        unknown=tuple(run.unknown),
        target=sampler.target_summary(),
        num_data=run.data.num_data,
        num_sampled=sum(p.numel() for p in run.sampled),
        draw_bytes=sum(t.numel() * t.element_size() for t in tensors),
        state_bytes=state_bytes_of(sampler),
        gradients=run.gradients,
        **run.numbers,
    )


class _Run:
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
        numbers = ("loss", "curvature", "largest_lr", "noise_lr")
        self.numbers: dict[str, Any] = dict.fromkeys(numbers, math.nan)
        self.numbers |= {"not_sampled": (), "heating": {}, "fitted_heating": {}}
        self.match: Match | None = None
        self.gradients, self.is_num_data_settled = 0, False
        #: The tensors that have had a gradient.
        self.reached: set[Tensor] = set()

    @property
    def is_potential(self) -> bool:
        """True if the loss is the potential of all data, not a mean."""
        return self.counts == {1.0} and len(self.batches) == 1

    def add(self, key: str, **values: Any) -> None:
        self.issues.append(issue(key, **values))

    def has(self, *kinds: str) -> bool:
        return any(p.kind in kinds for p in self.issues)

    def value(self, batch: Any) -> Tensor:
        """Returns the loss of a minibatch, or of each example."""
        value = self.loss(self.model, moved(batch, model_device(self.model)))
        if not isinstance(value, Tensor):
            wanted = "the mean loss of the minibatch, a Tensor"
            raise wrong_result("loss", value, wanted)
        self.loss_shape = list(value.shape)
        return value

    def backward(self, root: Tensor, grad: Tensor | None = None) -> Gradients:
        """Returns the gradients of a tensor by the sampled tensors."""
        for p in self.all:
            p.grad = None
        if root.requires_grad:
            root.backward(grad, retain_graph=grad is not None)
        self.gradients += 1
        grads = [p.grad for p in self.sampled]
        return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]

    def gradient(self, batch: Any) -> tuple[float, Gradients]:
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

    def flatten(self, grads: Gradients) -> Tensor:
        """Returns gradients as one vector, 0 for tensors without a gradient."""
        pairs, device = zip(grads, self.sampled, strict=True), self.sampled[0].device
        parts = [local(torch.zeros_like(p) if g is None else g) for g, p in pairs]
        return torch.cat([g.detach().double().flatten().to(device) for g in parts])

    def precisely(self, function: Callable[..., Any], *batches: Any) -> Any:
        """Calls a function with rounding unit and batches, in float64 if possible."""
        try:
            with in_double(self.model, self.sampled):
                unit = torch.finfo(torch.float64).eps
                return function(unit, *(mapped(as_double, batch) for batch in batches))
        except Exception:
            self.before.restore()
            unit = max(torch.finfo(p.dtype).eps for p in self.sampled)
            return function(unit, *batches)
        finally:
            self.before.restore()

    def check_parameters(self) -> None:
        """Compares the parameters of the sampler with the model's."""
        own, named = set(self.sampled), dict(self.model.named_parameters())
        missing = tuple(name for name, p in named.items() if p not in own)
        self.numbers["not_sampled"] = missing
        if not self.sampled:
            self.add("frozen")
        elif len(missing) == len(named):
            self.add("other model")
        for module in self.model.modules():
            row = getattr(module, "padding_idx", None)
            if isinstance(module, nn.Embedding) and module.weight in own:
                if row is not None:
                    self._add_zeros([f"{self.names[module.weight]}[{row}]"])

    def check_modes(self) -> None:
        """Finds layers that are not a function of one input."""
        kinds = {"random loss/dropout": has_dropout, "batch norm": uses_minibatch}
        for kind, is_one in kinds.items():
            found = {n: m for n, m in self.model.named_modules() if is_one(m)}
            if found:
                names = some_of(n or type(m).__name__ for n, m in found.items())
                self.add(kind, names=names)
            for module in found.values():  # the other checks are of the layers' rest
                module.training = False

    def check_data(self) -> None:
        """Compares ``num_data`` with the loader, and checks the loader's order."""
        if self.is_potential:
            return
        rows, widths = rows_of(self.batches[0]), set()
        if rows and not isinstance(self.loss, Likelihood):
            if self.match is None:
                widths = {t.numel() // rows for t in tensors_in(self.batches[0])}
            elif not self.match.is_exact:
                widths = {round(self.match.width)}
        if not self.is_num_data_settled:
            self.issues += self.data.find_num_data(self.counts, rows, widths)
        several = len(self.batches) > 1
        self.issues += self.data.find_order(self.sampler, self.counts, several)
        if self.data.num_data is None:
            self.unknown.append("whether num_data is the number of the loader's data")

    def check_loss(self) -> None:
        """Checks that the loss is finite, a mean, a likelihood, and its gradient."""
        first = self.batches[0]
        loss, grads = self.gradient(first)
        self.numbers["loss"] = loss
        changed = [self.names[t] for t in self.before.changed() if t in self.names]
        if not self._is_usable(grads, loss):
            return
        if changed:
            self.add("gradient/written", names=some_of(changed))
        self.before.restore()  # for example buffers that each call changes
        once, again = self.flatten(grads), self.flat(first)
        if (again - once).norm() > 1e-3 * once.norm():
            self.add("random loss")
            return
        parts = halves(first)
        self._check_penalty(*(parts[:2] if parts else (first, first)))
        if context_of(self.sampler).placement.is_sharded:
            self.unknown.append("whether gradients of DTensors are derivatives")
        elif not changed:
            self.precisely(partial(self._check_derivative, grads, loss), first)
        self._check_reached()
        if self.is_potential:
            self.unknown.append("the parts of the potential, as num_data is 1")
        else:
            if parts is None:
                self.unknown.append("whether the loss is a mean (no rows to cut)")
            else:
                self._check_halves(*parts)
            if not self.has("sum"):
                self._check_value([*self.batches[:_SAMPLES], *(parts or ())[:2]])

    def _is_usable(self, grads: Gradients, loss: float) -> bool:
        takes_each = isinstance(self.sampler, SBPS)
        finite = [g is None or bool(g.isfinite().all()) for g in grads]
        pairs = zip(self.sampled, grads, strict=True)
        lost = sum(g is None and p not in self.own for p, g in pairs)
        if len(self.loss_shape) != takes_each:
            wanted = ("their mean, one number", "the loss of each example")[takes_each]
            kind = type(self.sampler).__name__
            self.add("shape", shape=self.loss_shape, sampler=kind, what=wanted)
        elif not math.isfinite(loss) or not all(finite):
            some = finite.count(False)
            self.add("not finite", loss=loss, some=some, count=len(finite))
        elif not self.reached:
            self.add("other model/none")
        elif lost:
            self.add("other model/lost", lost=lost, count=len(grads))
        else:
            return True
        return False

    def _check_penalty(self, first: Any, second: Any) -> None:
        """Finds gradients that remain when the model's outputs are constants."""
        modules: list[nn.Module] = [self.model]
        one = self._gradient_detached(modules, first)
        if one is None:  # the loss calls the model's parts
            modules = [*self.model.modules()][1:]
            one = self._gradient_detached(modules, first)
        other = one and self._gradient_detached(modules, second)
        found: dict[str, float] = {}
        for p, a, b in zip(self.sampled, one or (), other or (), strict=False):
            prior = float(self.groups[p]["prior_precision"])
            if a is None or b is None or prior <= 0:
                continue
            size = float(a.norm())
            if float((a - b).norm()) < 1e-4 * size:
                precision = self.num_data * size / float(p.detach().norm())
                found[self.names[p]] = precision / prior
        if found:
            self.add("penalty", names=some_of(found), ratio=max(found.values()))

    def _gradient_detached(
        self, modules: list[nn.Module], batch: Any
    ) -> Gradients | None:
        """Returns the gradient for constant outputs, None if no module is called."""
        called: list[Any] = []

        def detach(out: Any) -> Any:
            called.append(out)
            return mapped(Tensor.detach, out)

        with hooked(modules, detach):
            _, grads = self.gradient(batch)
        return grads if called else None

    def _check_derivative(
        self, grads: Gradients, expected: float, unit: float, batch: Any
    ) -> None:
        is_double = unit < 1e-12

        def loss() -> float:
            nonlocal unit
            with torch.no_grad():
                value = self.value(batch)
            unit = max(unit, torch.finfo(value.dtype).eps)  # of a loss in float32
            return float(value.double().mean())

        error = abs(loss() - expected)
        if error > max(1e-2, 20 * unit) * abs(expected) + 1e-6:
            if not is_double:
                return
            raise TypeError("the loss depends on the dtype")
        # Gradients of autocast and TF32 have few digits.
        part = 0.005 if error <= 1e-5 * abs(expected) + 1e-9 else 0.1
        failing = failing_tensors(self.sampled, grads, loss, unit, part)
        if any(failing.values()):
            zeros = [i for i, of_zeros in failing.items() if of_zeros]
            self._add_zeros([self._place(i, grads[i]) for i in zeros])
        elif failing:
            names = [self.names[self.sampled[i]] for i in failing]
            self.add("gradient", names=some_of(names))

    def _place(self, i: int, grad: Tensor | None) -> str:
        name = self.names[self.sampled[i]]
        if grad is None or not grad.dim() or not bool(grad.any()):
            return name
        rows = (grad == 0).flatten(1).all(1) if grad.dim() > 1 else grad == 0
        some = [str(int(row)) for row in rows.nonzero()]
        return f"{name}[{some_of(some)}]" if some else f"{name} (some elements)"

    def _add_zeros(self, places: list[str], size: str = "") -> None:
        if not any(places[0] in p.message for p in self.issues):
            self.add("no gradient", names=some_of(places), size=size)

    def _check_reached(self) -> None:
        for batch in self.batches[1:_SAMPLES]:
            if len(self.reached) < len(self.sampled):
                self.gradient(batch)
        found = [p for p in self.sampled if p in self.own - self.reached]
        if found and not self.has("no gradient"):
            size = f" ({sum(p.numel() for p in found):,} numbers)"
            self._add_zeros([self.names[p] for p in found], size)

    def _check_halves(self, first: Any, second: Any, both: Any) -> None:
        try:
            one, other, whole = map(self.flat, (first, second, both))
        except Exception as error:
            self.unknown.append(
                f"whether the loss is a mean (of half a minibatch it raises {error!r})"
            )
            return
        mean = (one + other) / 2
        if not mean.any():
            self.unknown.append("whether the loss is a mean (its gradient is 0)")
            return
        ratio = float((whole @ mean) / (mean @ mean))
        exponent = math.log2(ratio) if ratio > 0 else math.nan
        # Halves with other sums of weights or tokens may differ by this.
        chance = max(_REST, 2 / math.sqrt(rows_of(both) or 1))
        is_other = (whole - ratio * mean).norm() > chance * whole.norm()
        if is_other or not -1.5 < exponent < 1.5:
            if not self.has("batch norm"):
                self.add("minibatch")
        elif abs(exponent) > _EXPONENT:
            what = "a sum over" if exponent > 0 else "divided twice by"
            self.add("sum", what=what, ratio=ratio)

    def _sample_loss(self, batch: Any) -> LossSample:
        with torch.no_grad(), recorded(self.model) as (outputs, calls):
            loss = float(self.value(batch).double().mean())
        some = calls or guess_calls(outputs, batch)
        return LossSample(loss, rows_of(batch), some, is_called=bool(calls))

    def _check_value(self, batches: list[Any]) -> None:
        def evaluate(unit: float, *batches: Any) -> tuple[list[LossSample], float]:
            return [*map(self._sample_loss, batches)], max(4 * unit, 1e-6)

        samples, rounding = self.precisely(evaluate, *batches)
        self.match = match = match_likelihood(samples, rounding)
        # Probabilities stay in [0, 1] at other weights; logits may be there by chance.
        for batch in batches[:2]:
            direction = [torch.randn_like(p) for p in self.sampled]
            with displaced(zip(self.sampled, direction, strict=True), 1.0):
                samples.append(self._sample_loss(batch))
        self.issues += find_outputs(samples, match)
        if match is not None:
            is_likelihood = isinstance(self.loss, Likelihood)
            issues, self.is_num_data_settled = find_scale(
                match, self.num_data, self.data.num_data, is_likelihood=is_likelihood
            )
            self.issues += issues

    def check_steps(self) -> None:
        """Compares lr with the curvature and the noise."""
        if not self.sampled or self.has(*KINDS[: KINDS.index("sum")]):
            return
        if context_of(self.sampler).placement.is_sharded:
            self.unknown.append("curvature and gradient noise of DTensors")
            return
        if any(p.dtype not in (torch.float32, torch.float64) for p in self.sampled):
            self.unknown.append("the curvature of parameters in low precision")
        else:
            self._check_curvature()
        if len(self.batches) > 1 and has_known_heating(self.sampler):
            self._check_noise()
        elif len(self.batches) > 1:
            self.unknown.append(
                "the gradient noise's effect on a "
                f"{type(self.sampler).__name__} with these settings (a "
                "TemperatureMonitor measures it during the run)"
            )

    def _check_curvature(self) -> None:
        some, groups = self.batches[:_CURVED], self.sampler.param_groups
        lrs = [float(group.get("lr", 0.0)) for group in self.groups.values()]
        lr = max(lrs)
        # In these coordinates all have the largest group's lr.
        scales = [math.sqrt(own / lr) if lr > 0 else 1.0 for own in lrs]
        of_loss = largest_curvature(
            self.sampled, scales, lambda: self.flat(*some), _ITERATIONS
        )
        priors = [group["prior_precision"] / group["num_data"] for group in groups]
        curvature = of_loss + max(priors)
        largest = stable_lr(self.sampler, curvature)
        self.numbers |= {"curvature": curvature, "largest_lr": largest}
        if lr > largest:
            values = {"limit": largest, "curvature": curvature, "begin": largest / 4}
            self.add("unstable", lr=lr, **values)

    def _measure_noise(self) -> Iterator[Tensor]:
        """Yields differences of minibatches' gradients, with one gradient's noise."""
        for one, other in zip(self.batches[::2], self.batches[1::2], strict=False):
            yield (self.flat(other) - self.flat(one)) / 2**0.5

    def _draw_noise(self, variance: float, factor: float) -> Iterator[Tensor]:
        """Yields gradients of ``factor`` times a squared error for drawn residuals."""
        for batch in self.batches[:_DRAWN]:
            with torch.enable_grad(), recorded(self.model) as (outputs, calls):
                self.value(batch)
            out = calls[0].args[0] if calls else output_of(outputs)
            for _ in range(0 if out is None else _DRAWS):
                scale = 2 * factor * math.sqrt(variance) / out.numel()
                yield self.flatten(self.backward(out, scale * torch.randn_like(out)))

    def _find_heating(
        self, key: str, noises: Iterable[Tensor]
    ) -> tuple[float, float, float, str] | None:
        """Returns T_kin / T - 1 of the mean coordinate and the worst tensor.

        That is the mean, and the tensor's least likely value, value, and name.
        """
        count, squares = 0, torch.zeros((), device="cpu")
        for noise in noises:
            count, squares = count + 1, squares + noise.square()
        variance = squares / max(count, 1)
        heating = noise_heating(self.sampler, variance, self.reached) if count else {}
        if not heating:
            return None
        self.numbers[key] = {self.names[p]: excess for p, excess in heating.items()}
        total = sum(excess * p.numel() for p, excess in heating.items())
        mean = total / sum(p.numel() for p in heating)
        # The noise of a tensor with few elements is known to this factor only.
        factors = {p: 1 + math.sqrt(2 / (count * p.numel())) for p in heating}
        worst = max((h / factors[p], h, self.names[p]) for p, h in heating.items())
        return mean, *worst

    def _check_noise(self) -> None:
        found = self._find_heating("heating", self._measure_noise())
        if found is None:
            return
        groups, mean = self.groups.values(), found[0]
        lr = max(float(group["lr"]) for group in groups)
        if lr > 0:
            self.numbers["noise_lr"] = lr * _HEATING / mean if mean > 0 else math.inf
        allowed, where = _LIMITS, "with the present gradient noise"
        match, is_start = self.match, int(next(iter(groups))["step"]) == 0
        if is_start and match is not None and match.is_square and match.factor > 0:
            share = (self.data.num_data or self.num_data) / self.num_data * match.width
            variance = share / (2 * match.factor)
            drawn = self._draw_noise(variance, match.factor)
            if fitted := self._find_heating("fitted_heating", drawn):
                found = fitted
                where = f"once residuals have the loss's own variance {variance:.3g}"
        elif is_start and self._has_learned_nothing():
            many = match is not None and match.width > 1
            allowed = _MANY_LIMITS if many else _START_LIMITS
        mean, surely, excess, name = found
        text = (
            f"T_kin / T would be {1 + mean:.3g} on average over all coordinates and "
            f"{1 + excess:.3g} in {name}, {where}"
        )
        too_much = max(mean / allowed[0], surely / allowed[1])
        if too_much > 1:
            limits = {"mean": 1 + allowed[0], "tensor": 1 + allowed[1]}
            self.add("above T", text=text, lr=lr / (1.5 * too_much), **limits)
        elif excess > _REMARKED:
            self.remarks.append(
                f"Minibatches raise the chain's temperature: {text} (exact: 1, "
                f"reported from {1 + _REMARKED:g}). Check again after "
                "burn-in, or lower lr."
            )

    def _has_learned_nothing(self) -> bool:
        """Returns whether a classifier's loss is not far below the labels' entropy."""
        if self.match is None or not self.match.is_exact:
            return True
        labels = self.match.calls[0].args[1]
        if labels.is_floating_point():
            return True
        shares = labels.unique(return_counts=True)[1] / labels.numel()
        entropy = float(-(shares * shares.log()).sum())
        return self.numbers["loss"] > 0.5 * self.match.factor * entropy
