"""``check_setup``: checks of model, loss, data and sampler before a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from torch_sgmcmc.core import utils
from torch_sgmcmc.core.context import context_of, kind_of, local
from torch_sgmcmc.core.hyperparams import check_integer, wrong_result, wrong_type
from torch_sgmcmc.core.parameters import exchanged
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Takes, traits_of
from torch_sgmcmc.data import kept_generators, one_gradient_a_step
from torch_sgmcmc.diagnostics import setup_gradients as gradients
from torch_sgmcmc.diagnostics import setup_issues as issues
from torch_sgmcmc.diagnostics.temperature_means import relaxation
from torch_sgmcmc.diagnostics.temperatures import has_temperatures, names_of
from torch_sgmcmc.draws.forward import model_device, moved
from torch_sgmcmc.losses import Likelihood

_PAIRS, _CURVED, _SAMPLES = 8, 2, 4
# Lanczos iterations for a group's own curvature.
_GROUP_ITERATIONS = 5
# Number of minibatches with drawn residuals, and draws for each.
_DRAWN, _DRAWS = 8, 4
# The allowed part of a minibatch's gradient that is not along its halves' mean.
_REST = 0.1
# Limits of T_kin / T - 1, of the mean coordinate and of a tensor; at a random start,
# whose noise falls in the first pass (docs/first_run.md), for one target of a datum and
# for many. At noise_lr the mean coordinate has _HEATING; a tensor above _REMARKED gives
# a remark.
_LIMITS, _START_LIMITS, _MANY_LIMITS = (0.5, 4.0), (0.5, 20.0), (5.0, 40.0)
_HEATING, _REMARKED = 0.05, 1.0

Loss = Callable[[nn.Module, Any], Tensor]
Gradients = gradients.Tensors


def check_setup(
    model: nn.Module,
    loss: Loss,
    loader: Iterable[Any],
    sampler: Sampler,
    *,
    num_steps: int | None = None,
    start: str | None = None,
) -> issues.SetupReport:
    r"""Checks a set-up before it is sampled.

    .. code-block:: python

        print(sg.check_setup(model, loss, loader, sampler))

    At most 80 gradients of a few minibatches, and ten for each of several groups, test
    that the loss is the mean negative log-likelihood of ``num_data`` data, that its
    gradient is its derivative, that every sampled tensor gets a gradient, and that
    minibatches represent the data (docs/first_run.md lists all checks). They give two
    limits of lr, also by group. Up to ``largest_lr`` the chain is stable,
    :math:`2 (1 + m) / h`, h the largest curvature of the mean loss. At ``noise_lr``
    minibatches raise T_kin of the mean coordinate by 5 %, with m the momentum (SGLD: 0)
    and V the variance of a gradient's element by

    .. math:: \frac{T_\text{kin}}{T} - 1 \approx \frac{\mathrm{lr}\, N V}{2 (1 - m) T}
        - \hat\beta \frac{1}{1 - m}

    (:class:`BAOA`: (1 + m) / 2 of it; where a loader shuffles, the part that remains
    of it by docs/temperatures.md). V is the present one, except before the first step
    of a Gaussian likelihood: then residuals are drawn with the loss's own variance.
    docs/first_run.md has the temperatures that raise an issue.

    A report without issues is not a proof. Curvature grows during training, and noise
    mostly falls: check again after burn-in.

    Parameters, buffers, gradients, training flags, the default random generators
    (torch, Python, NumPy) and the loader's generators are restored.

    Args:
        model: as the loss takes it, in its mode of training.
        loss: ``loss(model, batch)``, as for :func:`sample`: the mean loss of a
            minibatch, which has been moved to the model's device; for SBPS, the loss of
            each example.
        loader: minibatches, an iterable that can be read again.
        sampler: the sampler, before its first step or later. Not an HMCECS.
        num_steps: the length of the run. A run of less than three relaxation times
            (docs/temperatures.md) that does not start at a draw from the prior is an
            issue. Default: None, not known.
        start: how the chain begins. Default: "prior" after
            :meth:`Sampler.draw_from_prior`, else not there.

    Returns:
        A :class:`SetupReport` to print: issues, the worst first, and numbers.

    Raises:
        TypeError: an argument is invalid.
        ValueError: the loader has no minibatch.
        Exception: an error of the loss.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a Module")
    if not isinstance(sampler, Sampler) or (
        traits_of(sampler).takes is Takes.SUBSAMPLES
    ):
        wanted = "a sampler of torch_sgmcmc, but not HMCECS, which draws subsamples"
        raise wrong_type("sampler", sampler, wanted)
    if not callable(loss):
        raise wrong_type("loss", loss, "a function")
    if isinstance(loader, Iterator):
        wanted = "a list or a DataLoader: an iterator can be read once only"
        raise wrong_type("loader", loader, wanted)
    if num_steps is not None:
        check_integer("num_steps", num_steps, low=1)
    run = _Run(model, loss, loader, sampler)
    with issues.untouched(model, run.all, loader) as run.before:
        run.batches = [*islice(loader, 2 * _PAIRS)]
        if not run.batches:
            raise ValueError("Invalid loader: it has no minibatch")
        run.check_parameters()
        if run.sampled:
            run.check_loss()
        run.check_data()
        run.check_steps()
    start = start or context_of(sampler).start
    run.check_relaxation(num_steps, issues.is_from_prior(start))
    return issues.SetupReport(
        issues=tuple(sorted(run.issues, key=lambda p: issues.KINDS.index(p.kind))),
        remarks=tuple(run.remarks),
        unknown=tuple(run.unknown),
        target=sampler.target_summary(),
        num_data=run.data.num_data,
        num_sampled=sum(p.numel() for p in run.sampled),
        gradients=run.gradients,
        **run.numbers,
    )


class _Run:
    before: utils.Snapshot
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
        self.names |= {p: name for name, p in utils.unwrapped(model).named_parameters()}
        #: The param group of each sampled tensor.
        self.groups = gradients.moving(groups)
        self.sampled = [*self.groups]
        #: num_data of the first group, and of all groups.
        self.num_data = float(groups[0]["num_data"])
        self.counts = {float(group["num_data"]) for group in groups}
        self.data, self.loss_shape = issues.Loader(loader), [0]
        self.issues: list[issues.Issue] = []
        self.remarks: list[str] = []
        self.unknown: list[str] = []
        self.numbers: dict[str, Any] = {"not_sampled": (), "heating": {}}
        #: The curvature of loss and prior along the gradient noise of each tensor.
        self.along: dict[Tensor, float] = {}
        #: True if each call of the loss gets the same random numbers.
        self.repeats = False
        self.match: gradients.Match | None = None
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
        self.issues.append(issues.issue(key, **values))

    def has(self, *kinds: str) -> bool:
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
        doubled = (utils.mapped(gradients.as_double, batch) for batch in batches)
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

    def check_parameters(self) -> None:
        """Compares the sampler's parameters with the model's, and looks at layers."""
        own, named = set(self.sampled), dict(self.model.named_parameters())
        missing = tuple(name for name, p in named.items() if p not in own)
        self.numbers["not_sampled"] = missing
        if not self.sampled:
            self.add("frozen")
        elif len(missing) == len(named):
            self.add("other model", what="No parameter of the model is the sampler's")
        norms = []
        for name, module in self.model.named_modules():
            is_norm = isinstance(module, _BatchNorm)
            if is_norm and (module.training or module.running_mean is None):
                module.training = False  # the other checks are of the rest
                norms.append(name or type(module).__name__)
            row = getattr(module, "padding_idx", None)
            if row is not None and module.weight in own:
                self.zeros.append(f"{self.names[module.weight]}[{row}]")
        if norms:
            self.add("batch norm", names=issues.some_of(norms))

    def check_data(self) -> None:
        """Compares ``num_data`` with the loader, and checks the loader's order."""
        if self.is_potential:
            return
        match, rows, tolerance = self.match, utils.rows_of(self.batches[0]), 0.0
        widths: set[float] = set()  # possible numbers of targets that a datum counts
        if match is not None and match.function in gradients.EXACT:
            widths, tolerance = {match.width / match.factor}, match.tolerance
        elif match is not None and not isinstance(self.loss, Likelihood):
            widths = {round(match.width)}
        elif rows and not isinstance(self.loss, Likelihood):
            widths = {t.numel() // rows for t in utils.tensors_in(self.batches[0])}
        if not self.has("num_data"):
            self.issues += self.data.find_num_data(self.counts, widths, tolerance)
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
            self.add("gradient/written", names=issues.some_of(changed))
        self.before.restore()  # for example buffers that each call changes
        if self._differs(grads, first):
            self.add("random loss")
            self.repeats = True
            loss, grads = self.gradient(first)
            if self._differs(grads, first):  # it has a generator of its own
                self.repeats = False
                return
        parts = self._halves_of(first)
        self._check_penalty(*(parts[:2] if parts else (first, first)))
        if not changed and not self.is_sharded:
            self.precisely(partial(self._check_derivative, grads, loss), first)
        self._check_reached()
        if self.is_potential:
            self.unknown.append("the parts of the potential, as num_data is 1")
            return
        if parts is not None:
            self._check_halves(*parts)
        if not self.has("sum"):
            self._check_value([*self.batches[:_SAMPLES], *(parts or ())[:2]])

    def _differs(self, grads: Gradients, batch: Any) -> bool:
        once, again = self.flatten(grads), self.flat(batch)
        return bool((again - once).norm() > 1e-3 * once.norm())

    def _is_usable(self, grads: Gradients, loss: float) -> bool:
        takes_each, count = traits_of(self.sampler).takes is Takes.EXAMPLES, len(grads)
        finite = [g is None or bool(g.isfinite().all()) for g in grads]
        pairs = zip(self.sampled, grads, strict=True)
        lost = sum(g is None and p not in self.own for p, g in pairs)
        if len(self.loss_shape) != takes_each:
            self.add("shape", shape=self.loss_shape)
        elif not math.isfinite(loss) or not all(finite):
            self.add("not finite", loss=loss, some=finite.count(False), count=count)
        elif not self.reached or lost:
            what = f"{lost or count} of {count} tensors have no gradient of the loss"
            self.add("other model", what=what)
        else:
            return True
        return False

    def _check_penalty(self, first: Any, second: Any) -> None:
        """Finds gradients that remain when the model's outputs are constants."""
        one, other = self._constant(first), self._constant(second)
        found = []
        for p, a, b in zip(self.sampled, one, other, strict=True):
            has_prior = self.groups[p]["prior_precision"] > 0
            if has_prior and a is not None and b is not None:
                if float((a - b).norm()) < 1e-4 * float(a.norm()):
                    found.append(self.names[p])
        if found:
            self.add("penalty", names=issues.some_of(found))

    def _constant(self, batch: Any) -> Gradients:
        """Returns the gradient for constant outputs of all modules."""
        called: list[Any] = []

        def detach(out: Any) -> Any:
            called.append(out)
            return utils.mapped(Tensor.detach, out)

        with gradients.hooked([*self.model.modules()], detach):
            _, grads = self.gradient(batch)
        return grads if called else [None] * len(grads)

    def _check_derivative(
        self, grads: Gradients, expected: float, unit: float, batch: Any
    ) -> None:
        is_double = unit < 1e-12

        @torch.no_grad()
        def loss() -> float:
            nonlocal unit
            value = self.value(batch)
            unit = max(unit, torch.finfo(value.dtype).eps)  # of a loss in float32
            return float(value.double().mean())

        error = abs(loss() - expected)
        if error > max(1e-2, 20 * unit) * abs(expected) + 1e-6:
            if is_double:
                raise TypeError("the loss depends on the dtype")
            return
        # Gradients of autocast and TF32 have few digits.
        part = 0.005 if error <= 1e-5 * abs(expected) + 1e-9 else 0.1
        failing = gradients.failing_tensors(self.sampled, grads, loss, unit, part)
        zeros = [i for i, of_zeros in failing.items() if of_zeros]
        self.zeros += [self._place(i, grads[i]) for i in zeros]
        if failing and not zeros:
            names = [self.names[self.sampled[i]] for i in failing]
            self.add("gradient", names=issues.some_of(names))

    def _place(self, i: int, grad: Tensor | None) -> str:
        name = self.names[self.sampled[i]]
        if grad is None or not grad.dim() or not bool(grad.any()):
            return name
        rows = (grad == 0).reshape(len(grad), -1).all(1)
        some = [str(int(row)) for row in rows.nonzero()]
        return f"{name}[{issues.some_of(some)}]" if some else f"{name} (some elements)"

    def _check_reached(self) -> None:
        for batch in self.batches[1:_SAMPLES]:
            if len(self.reached) < len(self.sampled):
                self.gradient(batch)
        never = self.own - self.reached
        self.zeros += [self.names[p] for p in self.sampled if p in never]
        if self.zeros:
            self.add("no gradient", names=issues.some_of(dict.fromkeys(self.zeros)))

    def _halves_of(self, batch: Any) -> tuple[Any, Any, Any] | None:
        """Returns a batch's halves and both together, if the loss takes halves."""
        parts = utils.halves(batch)
        if parts is None:
            self._no_mean("no rows to cut")
            return None
        try:
            for part in parts[:2]:
                self.gradient(part)
            return parts
        except Exception as error:
            self.before.restore()
            if self.data.is_list:  # the rows may not be data, as a graph's nodes
                self.data.num_data = None
            self._no_mean(f"of half a minibatch it raises {error!r}")
            return None

    def _no_mean(self, why: str) -> None:
        self.unknown.append(f"whether the loss is a mean ({why})")

    def _check_halves(self, first: Any, second: Any, both: Any) -> None:
        one, other, whole = map(self.flat, (first, second, both))
        if not (one + other).any():
            return self._no_mean("its gradient is 0")
        mean = (one + other) / 2
        ratio = float((whole @ mean) / (mean @ mean))
        # Halves with other sums of weights or tokens may differ by this.
        chance = max(_REST, 2 / math.sqrt(utils.rows_of(both) or 1))
        is_along = (whole - ratio * mean).norm() <= chance * whole.norm()
        if not is_along or not 2**-1.5 < ratio < 2**1.5:
            if len(self.batches) == 1:  # each step has all data
                self._no_mean("halves of all data have other gradients")
            elif not self.has("batch norm", "random loss"):
                self.add("minibatch")
        elif not 2**-0.5 <= ratio <= 2**0.5:  # 2 of a sum, 1/2 if divided twice
            what = "a sum over" if ratio > 1 else "divided twice by"
            self.add("sum", what=what, ratio=ratio)

    def _sample_losses(
        self, unit: float, *batches: Any
    ) -> tuple[list[gradients.LossSample], float]:
        """Returns losses with what may have computed them, and their rounding."""
        samples = []
        for batch in batches:
            with torch.no_grad(), gradients.recorded(self.model) as (outputs, calls):
                loss = float(self.value(batch).double().mean())
            some = calls or gradients.guess_calls(outputs, batch)
            each = loss, utils.rows_of(batch), some, bool(calls)
            samples.append(gradients.LossSample(*each))
        return samples, max(4 * unit, 1e-6)

    def _check_value(self, batches: list[Any]) -> None:
        samples, rounding = self.precisely(self._sample_losses, *batches)
        self.match = match = gradients.match_likelihood(samples, rounding)
        # Probabilities stay in [0, 1] at other weights; logits may be there by chance.
        displaced: list[gradients.LossSample] = []
        for batch in batches[:2]:
            direction = [torch.randn_like(p) for p in self.sampled]
            with gradients.displaced(zip(self.sampled, direction, strict=True), 1.0):
                displaced += self._sample_losses(0.0, batch)[0]
        self.issues += gradients.find_outputs(samples, displaced, match)
        is_given = isinstance(self.loss, Likelihood)
        if match is not None and not (match.function is F.mse_loss and is_given):
            data = self.data.num_data
            self.issues += gradients.find_scale(match, self.num_data, data)

    def check_steps(self) -> None:
        """Compares lr with the curvature and the noise."""
        severe = issues.KINDS[: issues.KINDS.index("sum")]
        is_random = self.has("random loss") and not self.repeats
        if not self.sampled or is_random or self.has(*severe):
            return
        if self.is_sharded:
            self.unknown.append("derivatives, curvature and gradient noise of DTensors")
            return
        if any(float(group.get("lr", 1.0)) == 0 for group in self.groups.values()):
            self.remarks.append(
                "lr is 0, as at the start of a warm-up: T_kin at a later lr is not "
                "known. Check again with the largest lr."
            )
        curvature = None
        if all(p.dtype in (torch.float32, torch.float64) for p in self.sampled):
            curvature = gradients.Curvature(
                self.sampled, partial(self.flat, *self.batches[:_CURVED])
            )
            self._check_curvature(curvature)
        else:
            self.unknown.append("the curvature of parameters in low precision")
        if len(self.batches) > 1 and gradients.has_known_heating(self.sampler):
            self._check_noise(curvature)
        elif len(self.batches) > 1:
            reads = " (a TemperatureMonitor reads it)"
            reads = reads if has_temperatures(self.sampler) else ""
            self.unknown.append(f"T_kin of {self._settings}{reads}")

    @property
    def _settings(self) -> str:
        return f"a {type(self.sampler).__name__} with these settings"

    def _check_curvature(self, of: gradients.Curvature) -> None:
        groups = self.sampler.param_groups
        lrs = [float(group.get("lr", 0.0)) for group in self.groups.values()]
        lr = max(lrs)
        # In these coordinates all have the largest group's lr.
        scales = [math.sqrt(own / lr) if lr > 0 else 1.0 for own in lrs]
        priors = [group["prior_precision"] / group["num_data"] for group in groups]
        curvature = of.largest(scales) + max(priors)
        largest = gradients.stable_lr(self.sampler, groups, curvature)
        self.numbers |= {"curvature": curvature, "largest_lr": largest}
        if len(groups) > 1:
            self.numbers["largest_lrs"] = tuple(
                gradients.stable_lr(self.sampler, [group], own + prior)
                for group, own, prior in zip(
                    groups, self._curvature_by_group(of), priors, strict=True
                )
            )
        if math.isnan(largest) and curvature > 0:
            self.unknown.append(f"the largest stable lr of {self._settings}")
        if lr > largest:
            values = {"limit": largest, "curvature": curvature, "begin": largest / 4}
            self.add("unstable", lr=lr, **values)

    def _curvature_by_group(self, of: gradients.Curvature) -> Iterator[float]:
        """Yields the largest curvature where the other groups are at rest."""
        for group in self.sampler.param_groups:
            scales = [float(own is group) for own in self.groups.values()]
            yield of.largest(scales, _GROUP_ITERATIONS) if any(scales) else math.nan

    def _measured_noise(self) -> Iterator[Tensor]:
        """Yields differences of minibatches' gradients, with one gradient's noise."""
        for one, other in zip(self.batches[::2], self.batches[1::2], strict=False):
            yield (self.flat(other) - self.flat(one)) / 2**0.5

    def _drawn_noise(self, variance: float, factor: float) -> Iterator[Tensor]:
        """Yields gradients of ``factor`` times a squared error for drawn residuals."""
        for batch in self.batches[:_DRAWN]:
            with torch.enable_grad(), gradients.recorded(self.model) as (outs, calls):
                self.value(batch)
            out = calls[0].args[0] if calls else gradients.output_of(outs)
            if out is None:
                continue
            for _ in range(_DRAWS):
                scale = 2 * factor * math.sqrt(variance) / out.numel()
                yield self.flatten(self.backward(out, scale * torch.randn_like(out)))

    def _share(self) -> float:
        """Returns the part of the data in a minibatch, 0 if it is unknown."""
        data, size = self.data, utils.rows_of(self.batches[0])
        if not size or not data.num_data or data.is_pass is None:
            return 0.0
        return min(1.0, size / data.num_data)

    def _curvatures(
        self, of: gradients.Curvature | None, noise: Tensor
    ) -> dict[Tensor, float]:
        """Returns the curvature of loss and prior along the noise of each tensor."""
        length = float(noise.norm())
        if of is None or not length:
            return {}
        product, sizes = of.product(noise / length), of.sizes
        parts = zip(noise.split(sizes), product.split(sizes), strict=True)
        found = {}
        for (p, group), (e, he) in zip(self.groups.items(), parts, strict=True):
            own = float(e @ he) * length / max(float(e @ e), 1e-300)
            found[p] = max(own, 0.0) + group["prior_precision"] / group["num_data"]
        return found

    def _noise(self) -> tuple[Iterator[Tensor], bool, str, tuple[float, float]]:
        """Returns noises, whether they are measured, their kind, and limits."""
        match, limits = self.match, _LIMITS
        where, noises = "with the present gradient noise", self._measured_noise()
        is_start = int(self.sampler.param_groups[0]["step"]) == 0
        is_square = match and match.function is F.mse_loss and match.factor > 0
        if is_start and match is not None and is_square:
            share = (self.data.num_data or self.num_data) / self.num_data * match.width
            variance = share / (2 * match.factor)
            where = f"once residuals have the loss's own variance {variance:.3g}"
            return self._drawn_noise(variance, match.factor), False, where, limits
        if is_start and self._has_learned_nothing():
            many = match is not None and match.width > 1
            limits = _MANY_LIMITS if many else _START_LIMITS
        return noises, True, where, limits

    def _check_noise(self, curvature: gradients.Curvature | None) -> None:
        noises, is_measured, where, limits = self._noise()
        count = 0
        squares = total = torch.zeros((), device="cpu")
        repeats, self.repeats = self.repeats, False  # its own noise raises T_kin too
        for noise in noises:
            count, squares, total = count + 1, squares + noise.square(), total + noise
        self.repeats = repeats
        if not count:
            return
        data, size, share = self.data, utils.rows_of(self.batches[0]), self._share()
        # Half squared differences of two minibatches of a pass have none of their
        # covariance; drawn residuals have no correction for a finite number.
        if data.is_pass or not (is_measured or data.has_repeats):
            squares = squares * (1 - share)
        batches = 1 / share if data.is_pass and share else math.inf
        self.along = curvatures = self._curvatures(curvature, total)
        values = squares / count, self.reached, curvatures, batches
        heat = gradients.heat_of(self.sampler, *values)
        heating = heat.of()
        if not heating:
            return
        lr = max(float(g["lr"]) for g in self.groups.values())
        mean = gradients.mean_of(heating)

        def limit(lr: float, params: Collection[Tensor]) -> float:
            return lr * heat.lr_factor(params, _HEATING) if lr > 0 else math.nan

        groups = self.sampler.param_groups
        self.numbers |= {
            "heating": {self.names[p]: h for p, h in heating.items()},
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
            f"{1 + heating[worst]:.3g} in {self.names[worst]}, {where}"
        )
        too_much = max(mean / limits[0], surely[worst] / limits[1])
        if too_much > 1:
            most = {"mean": 1 + limits[0], "tensor": 1 + limits[1]}
            larger = "larger minibatches"
            if share:
                wanted = min(1.5 * too_much * size, data.num_data)
                larger = f"minibatches of {math.ceil(wanted):,}"
            lr /= 1.5 * too_much
            self.add("above T", text=text, lr=lr, size=larger, **most)
        elif heating[worst] > _REMARKED:
            self.remarks.append(
                f"Minibatches raise the chain's temperature: {text} (reported from "
                f"{1 + _REMARKED:g}). Check again after burn-in, or lower lr."
            )

    def check_relaxation(self, num_steps: int | None, is_prior: bool) -> None:
        """Compares the time in which the start is forgotten with the run."""
        kind, groups = kind_of(self.sampler), self.sampler.param_groups
        found = tuple(relaxation(kind, group) for group in groups)
        is_one = one_gradient_a_step(self.sampler)
        length = utils.length_of(self.data.loader) if is_one else None
        self.numbers |= {"relaxation": found, "steps_per_pass": length}
        self.numbers["relaxation_with_data"] = tuple(
            relaxation(kind, {**group, "prior_precision": 0.0}, min(known))
            if (known := [self.along[p] for p in group["params"] if p in self.along])
            else math.nan
            for group in groups
        )
        self.numbers["num_steps"] = num_steps
        if any(map(math.isnan, found)):
            self.unknown.append(f"the relaxation of {self._settings}")
        elif any(group["prior_precision"] == 0 for group in groups):
            self.unknown.append("the relaxation (no prior in the sampler)")
        finite = {i: steps for i, steps in enumerate(found) if math.isfinite(steps)}
        if not num_steps or not finite or is_prior:
            return
        slowest = max(finite, key=finite.__getitem__)
        steps, needed = finite[slowest], 3 * finite[slowest]
        if num_steps < needed:
            values = {"passes": issues.in_passes(steps, length), "run": num_steps}
            precision = groups[slowest]["prior_precision"] * needed / num_steps
            values |= {"precision": precision, "needed": needed}
            self.add("relaxation", group=slowest, steps=steps, **values)

    def _has_learned_nothing(self) -> bool:
        """Returns whether a classifier's loss is not far below the labels' entropy."""
        match = self.match
        if match is None or match.function not in gradients.EXACT:
            return True
        labels = match.calls[0].args[1]
        if labels.is_floating_point():
            return True
        shares = labels.unique(return_counts=True)[1] / labels.numel()
        entropy = float(-(shares * shares.log()).sum())
        return self.numbers["loss"] > 0.5 * match.factor * entropy
