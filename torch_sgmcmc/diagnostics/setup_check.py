"""``check_setup``: checks of model, loss, data and sampler before a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from torch_sgmcmc.core import utils
from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.core.hyperparams import check_integer, wrong_type
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Takes, traits_of
from torch_sgmcmc.diagnostics import setup_gradients as gradients
from torch_sgmcmc.diagnostics import setup_issues as issues
from torch_sgmcmc.diagnostics.setup_steps import check_relaxation, check_steps
from torch_sgmcmc.losses import Likelihood

_PAIRS, _SAMPLES = 8, 4
# The allowed part of a minibatch's gradient that is not along its halves' mean, and the
# part that may be rounding.
_REST, _ROUNDING = 0.1, 0.02

Gradients = gradients.Tensors


def check_setup(
    model: nn.Module,
    loss: gradients.Loss,
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
        check_steps(run)
    start = start or context_of(sampler).start
    check_relaxation(run, num_steps, issues.is_from_prior(start))
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


class _Run(gradients.Run):
    """The checks of parameters, data and the loss."""

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
        counts, data = self.counts, self.data.num_data
        if match is not None and match.function in gradients.EXACT:
            widths, tolerance = {match.width / match.factor}, match.tolerance
        elif match is not None and not isinstance(self.loss, Likelihood):
            widths = {round(match.width)}
        elif rows and not isinstance(self.loss, Likelihood):
            tensors = [*utils.tensors_in(self.batches[0])]
            widths = {t.numel() // rows for t in tensors}
            masks = [t.numel() / rows for t in tensors if _is_mask(t)]
            most = (data or 0) * max(masks, default=1.0)
            counts = {n for n in counts if not (data or 0) < n < most}
        if counts != self.counts:
            self.unknown.append("whether num_data is the number of unmasked targets")
        if not self.has("num_data"):
            self.issues += self.data.find_num_data(counts, widths, tolerance)
        several = len(self.batches) > 1
        self.issues += self.data.find_order(self.sampler, self.counts, several)
        if data is None:
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
            if self._differs(grads, first):  # it uses another generator
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
        elif not self.has("batch norm", "random loss"):
            off = float((whole - mean).norm() / whole.norm())
            if off > _ROUNDING:
                self._no_mean(
                    f"a minibatch's gradient differs by {off:.0%} from the mean of its "
                    "halves', as with rows of unequal weight, or losses of several rows"
                )

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


def _is_mask(t: Tensor) -> bool:
    """Returns whether a tensor has zeros and ones, and nothing else."""
    return bool(((t == 0) | (t == 1)).all()) and 0 < int(t.sum()) < t.numel()
