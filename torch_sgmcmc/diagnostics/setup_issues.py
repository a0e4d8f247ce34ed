"""Issues of a set-up: texts, the report, and checks without gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from torch_sgmcmc.core.parameters import kept_gradients
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Takes, traits_of
from torch_sgmcmc.core.steps import is_adapting
from torch_sgmcmc.core.utils import Snapshot, length_of, rows_of, tensors_in
from torch_sgmcmc.data import kept_generators, samplers_of


class Issue(NamedTuple):
    """A fault of a set-up or a run: the draws are not the intended posterior's."""

    #: Such as "sum", "num_data", "above T", "chains differ", "few draws".
    kind: str
    #: What happened, why it matters, what to do.
    message: str


def issue(key: str, **values: Any) -> Issue:
    """Returns the issue of a key, which is a kind or begins with one."""
    return Issue(key.split("/")[0], _TEXTS[key].format(**values))


# By kind, the worst first: what is wrong, and what to do.
_TEXTS = {
    "other model": "{what}: the sampler would sample another model. Make it of "
    "model.parameters(), after all copies, moves and replaced layers.",
    "frozen": "No parameter of the sampler requires a gradient: nothing is sampled.",
    "shape": "The loss of a minibatch has shape {shape}. SBPS takes the loss of each "
    "example, other samplers their mean.",
    "not finite": "The loss of a minibatch is {loss:.3g}, and {some} of {count} "
    "gradients are not finite. Check the data and the initial values.",
    "sum": "The loss is {what} the minibatch: a minibatch of twice the size has "
    "{ratio:.3g} times its halves' gradient. Samplers take the mean, and num_data for "
    'the number of data (reduction="mean").',
    "broadcast": "Outputs of shape {outputs} are compared with targets of shape "
    "{targets}, each with all others. Give them one shape, as by y[:, None].",
    "gradient": "The gradient of {names} is not the derivative of the loss, and the "
    "draws are not the posterior's. Remove what alters gradients: hooks that clip or "
    "mask, Embedding(scale_grad_by_freq=True), gradient reversal, straight-through "
    "estimators, detach().",
    "gradient/written": "The model writes into its weights ({names}) when it is "
    "called, like Embedding(max_norm=...), which alters draws. Remove max_norm; the "
    "prior keeps weights small.",
    "no gradient": "The gradient of {names} is always 0 or missing: the prior alone "
    "draws them, or nothing does. Remove what cuts the gradient (padding_idx: multiply "
    "by a mask; detach(), masking hooks, rounding), or freeze them before the sampler.",
    "num_data": "num_data is {number:,.10g}, and the loader has {data:,} data: the "
    "likelihood is raised to the power {power:.3g}. Set num_data={data} (temperature= "
    "sets another temperature).",
    "num_data/targets": "The loss is a mean over the {width:.4g} targets (tokens, "
    "pixels, labels) of each datum too: with num_data {number:,.10g} the likelihood is "
    "raised to the power {power:.3g}. Set num_data to {total}, the number of all "
    "targets, or sum over the targets of a datum.",
    "num_data/classes": 'kl_div(reduction="mean") divides by the {width:.4g} classes '
    "too: with num_data {number:,.10g} the likelihood is raised to the power "
    '{power:.3g}. Use reduction="batchmean".',
    "not a likelihood": "{name} has label_smoothing={smoothing:g}: the chain samples "
    "the posterior of other labels. Remove it: averages over draws are smooth.",
    "not a likelihood/weights": "{name} has weights: the chain samples the posterior "
    "of data of which some count more than once. Remove weight= and pos_weight=.",
    "scaled loss": "The loss is {factor:.4g} times the mean {name}, and so is the "
    "log-likelihood. Return the mean loss (temperature= sets another temperature).",
    "probabilities": "The outputs are probabilities, and {name} takes {takes}: the "
    "likelihood is nearly flat. Remove the model's softmax and use cross_entropy.",
    "probabilities/sigmoid": "The outputs stay in [0, 1] at all weights, like "
    "probabilities, and {name} takes logits. Remove the model's sigmoid.",
    "probabilities/logits": "nll_loss takes logarithms of probabilities, and the "
    "outputs are not normalised. Use cross_entropy.",
    "penalty": "The loss contains a penalty on weights ({names}): with prior_precision "
    "there are two priors. Remove it, or set prior_precision=0.",
    "random loss": "The loss of one minibatch changes from call to call (dropout, "
    "noise, mixup): it is not a likelihood. Make it a function of weights and data: "
    "call model.eval() or set the dropout's p=0; the prior regularises.",
    "batch norm": "Batch norm uses the minibatch's statistics ({names}): the loss of "
    "an example depends on others, and predictions use another function. Call eval() "
    "on these layers once they have statistics, or use group norm.",
    "minibatch": "The gradient of a minibatch is not the mean of its halves'. Either "
    "the loss is divided by weights or by tokens that are not padding (divide by the "
    "number of data), or the loss of an example depends on others.",
    "dependent minibatches": "SBPS needs independent minibatches, and minibatches of "
    "an epoch depend on each other. Give the DataLoader "
    "batch_sampler=IndependentBatchSampler(num_data, batch_size).",
    "dependent minibatches/HMC": "HMC needs the potential of all data, and the loader "
    "has minibatches: its acceptance compares different potentials. Use one batch of "
    "all data, or SGHMC.",
    "dependent minibatches/tuning": "tune_steps needs the gradient of all data in each "
    "step, and the loader has minibatches, whose noise looks like an energy error. Use "
    "one batch of all data, or give lr and momentum.",
    "weighted data": "WeightedRandomSampler draws some data more often than others: "
    "the chain samples the posterior of repeated data. Use shuffle=True.",
    "data order": "The loader does not shuffle, and {what}. Set shuffle=True.",
    "unstable": "lr {lr:.3g} is beyond {limit:.2g}, the limit at the largest "
    "curvature, {curvature:.3g}: the chain diverges. Start with {begin:.1g}.",
    "unstable/bounded": "lr {lr:.3g} is beyond {limit:.2g}, the limit at the largest "
    "curvature, {curvature:.3g}: along it the chain does not sample the posterior. "
    "Start with {begin:.1g}, or tune_steps.",
    "above T": "Minibatches raise the chain's temperature: {text} (reported from "
    "{mean:g} on average, {tensor:g} in a tensor). The excess falls with "
    "lr / (1 - momentum). Start with lr = {lr:.1g}, or use {size}.",
    "relaxation": "Where there are no data (constant inputs, dead units), group "
    "{group} forgets its start in {steps:,.0f} steps{passes}, and the run has {run:,}: "
    "such weights remember where they begin. Raise prior_precision to {precision:.2g} "
    "or more, start at a draw from the prior, or make {needed:,.0f} steps.",
    "squared error": "As a likelihood, this mean squared error is Gaussian noise of "
    "variance {variance:.4g}. For noise of sd σ, the loss is the sum over outputs of "
    "(y - f)² / (2 σ²), averaged over data: sg.losses.gaussian(σ).",
    "squared error/absolute": "As a likelihood, this mean {name} is noise with a "
    "density that falls as exp(-|y - f| / s), s = {scale:.4g}. For another s, sum "
    "{name} of y / s and f / s over outputs, and average over data.",
}
#: All kinds of issues, the worst first.
KINDS = tuple(dict.fromkeys(key.split("/")[0] for key in _TEXTS))


@dataclass(frozen=True)
class SetupReport:
    """The report of :func:`check_setup`."""

    #: The worst first; empty if nothing was found.
    issues: tuple[Issue, ...]
    #: Borderline results, such as a tensor with T_kin above 2 T.
    remarks: tuple[str, ...]
    #: What could not be checked, and why.
    unknown: tuple[str, ...]
    #: A description of the sampler's target.
    target: str
    #: Number of the loader's data; None if unknown.
    num_data: int | None
    #: Number of sampled elements, and names of the model's other parameters.
    num_sampled: int
    not_sampled: tuple[str, ...]
    #: Number of computed gradients.
    gradients: int
    #: The loss of a minibatch.
    loss: float = math.nan
    #: The largest curvature of the mean loss and the prior at the present parameters,
    #: and the lr beyond which a chain diverges; NaN if unknown.
    curvature: float = math.nan
    largest_lr: float = math.nan
    #: The lr at which minibatches add 5 % to T_kin, averaged over coordinates; NaN if
    #: unknown. Both limits are the largest group's lr; other groups keep their ratios.
    noise_lr: float = math.nan
    #: Both limits of each of several groups: the lr that is stable while the others are
    #: at rest, and the one at which minibatches add 5 % to the mean T_kin of the group.
    #: largest_lr is for the groups' present ratios; all at their own limits diverge.
    largest_lrs: tuple[float, ...] = ()
    noise_lrs: tuple[float, ...] = ()
    #: By tensor, the minibatches' part of T_kin / T with the present gradient noise;
    #: before the first step of a Gaussian likelihood, with residuals of its variance.
    heating: Mapping[str, float] = field(default_factory=dict)
    #: The variance over the posterior's with the noise of the hottest tensor: in flat
    #: directions, and with the curvature along the noise; NaN if unknown.
    flat_variance: float = math.nan
    stiff_variance: float = math.nan
    #: Steps in which directions without data forget the start by a factor of e, by
    #: param group; NaN if not known. Steps of a pass, and of the run; None if unknown.
    relaxation: tuple[float, ...] = ()
    #: The same with data, along the flattest gradient noise of a tensor of the group.
    relaxation_with_data: tuple[float, ...] = ()
    steps_per_pass: int | None = None
    num_steps: int | None = None

    def summary(self) -> str:
        """Returns issues and numbers as text."""
        lines = [f"{i}. {p.message}" for i, p in enumerate(self.issues, 1)]
        lines += [f"Remark: {text}" for text in self.remarks]
        lines = lines or ["No issue was found."]
        sampled = f"Sampled: {self.num_sampled:,} numbers."
        if self.not_sampled:
            sampled += f" Not sampled: {some_of(self.not_sampled, 6)}."
        lines += ["", self.target, sampled]
        if not math.isnan(self.curvature):
            limit = f": stable up to lr = {self.largest_lr:.2g}"
            limit = "" if math.isnan(self.largest_lr) else limit
            lines.append(f"Largest curvature {self.curvature:.3g}{limit}.")
        if math.isfinite(self.noise_lr):
            lines.append(f"Minibatches add 5 % to T_kin at lr = {self.noise_lr:.2g}.")
        if not math.isnan(self.largest_lr + self.noise_lr):
            smaller = min(self.largest_lr, self.noise_lr)
            limit = "stability" if self.largest_lr == smaller else "gradient noise"
            lines.append(f"The smaller limit of lr is {limit}: {smaller:.2g}.")
        lines += self._limits()
        highest = sorted(self.heating, key=lambda name: -self.heating[name])[:4]
        some = ", ".join(f"{name} {1 + self.heating[name]:.3g}" for name in highest)
        lines += [f"T_kin / T with minibatches' noise: {some}."] if highest else []
        if not math.isnan(self.flat_variance + self.stiff_variance):
            lines.append(
                "Variance with this noise over the posterior's: "
                f"{self.flat_variance:.3g} in flat directions, "
                f"{self.stiff_variance:.3g} in stiff ones."
            )
        lines += self._relaxations()
        return "\n".join(lines + [f"Not known: {text}." for text in self.unknown])

    __str__ = summary

    def _limits(self) -> Iterator[str]:
        """Yields both limits of lr of several groups."""
        for what, limits in (
            ("stability alone", self.largest_lrs),
            ("5 % of T_kin", self.noise_lrs),
        ):
            known = [
                f"{lr:.2g} (group {i})"
                for i, lr in enumerate(limits)
                if math.isfinite(lr)
            ]
            if known:
                yield f"Limits of lr by group, {what}: {some_of(known, 6)}."

    def _relaxations(self) -> Iterator[str]:
        """Yields a line for groups with the same relaxation."""
        groups: dict[tuple[float, float], list[str]] = {}
        for i, times in enumerate(
            zip(self.relaxation, self.relaxation_with_data, strict=True)
        ):
            if math.isfinite(times[0]):
                groups.setdefault(times, []).append(str(i))
        run = (
            "" if self.num_steps is None else f"; the run has {self.num_steps:,} steps"
        )
        for (steps, with_data), some in groups.items():
            many = f"group{'s' * (len(some) > 1)} {some_of(some, 6)}"
            passes = in_passes(steps, self.steps_per_pass)
            time = f"{steps:,.0f} steps{passes} ({many})"
            if math.isfinite(with_data):
                time += f", the flattest tensor with data in {with_data:,.0f}"
            yield f"Directions without data forget the start in {time}{run}."


def some_of(names: Iterable[str], most: int = 3) -> str:
    """Returns the first names, and the number of others."""
    every = list(names)
    more = f" and {len(every) - most} more" if every[most:] else ""
    return ", ".join(every[:most]) + more


def is_from_prior(start: str | None) -> bool:
    """Returns whether a start's name is of a draw from the prior."""
    return (start or "").partition(",")[0] == "prior"


def in_passes(steps: float, steps_per_pass: float | None) -> str:
    """Returns the passes of so many steps in words, nothing if unknown."""
    return f", {steps / steps_per_pass:.3g} passes" if steps_per_pass else ""


_OF_ALL = SequentialSampler, RandomSampler, DistributedSampler, WeightedRandomSampler
# Number of compared pairs of neighbours; the ratio of their mean difference to all
# data's that marks sorted data (five standard deviations below 1).
_PAIRS, _SORTED = 64, 0.3
# The ratio of unequal sizes of minibatches.
_UNEQUAL = 1.05


class Loader:
    """The data of a loader, and their order."""

    def __init__(self, loader: Any) -> None:
        #: The number of data of all ranks together; None if unknown.
        self.num_data: int | None = None
        #: Number of data that drop_last drops in every epoch, and sizes of minibatches.
        self._unseen, self.loader = 0, loader
        self._sizes: list[int] = []
        batches = getattr(loader, "batch_sampler", None)
        # A loader without batch_size takes its sampler's batches.
        batches = getattr(loader, "sampler", None) if batches is None else batches
        draws = hasattr(batches, "num_drawn")
        # The sampler of single data or this library's batch sampler; None if unknown.
        self._indices = batches if draws else getattr(batches, "sampler", None)
        indices: Any = self._indices
        self.is_list = isinstance(loader, list | tuple)
        self.is_in_order = self.is_list or isinstance(indices, SequentialSampler)
        if isinstance(indices, DistributedSampler) and not indices.shuffle:
            self.is_in_order = True
        data, count = length_of(getattr(loader, "dataset", None)), length_of(indices)
        if self.is_list:
            rows = [n for batch in loader if (n := rows_of(batch)) is not None]
            if len(rows) == len(loader):
                self._sizes, self.num_data = rows, sum(rows)
        elif draws:
            self.num_data = indices.num_data
        elif data is not None and indices is not None:
            # A SubsetRandomSampler has less; num_samples is the length of an epoch.
            is_part = count and not isinstance(indices, _OF_ALL)
            self.num_data = min(count or data, data) if is_part else data
            if isinstance(indices, WeightedRandomSampler):
                self.num_data = int(indices.weights.count_nonzero())
        self.has_repeats = bool(getattr(indices, "replacement", False))
        #: True of loaders whose minibatches are parts of a pass, which takes each datum
        #: once, in any order; None if unknown.
        self.is_pass: bool | None = None
        if indices is not None or self.is_list:
            self.is_pass = not (draws or self.has_repeats)
        size = getattr(batches, "batch_size", None)
        if size and count and self.is_in_order:
            self._unseen = count % size * getattr(batches, "drop_last", False)
            self._sizes = [size, count % size or size] if count > size else []

    def find_num_data(
        self, given: set[float], widths: set[float], tolerance: float = 0.0
    ) -> Iterator[Issue]:
        """Compares the groups' ``num_data`` with the data, or ``widths`` times it."""
        data = self.num_data
        if not data:
            return
        for number in sorted(given):
            off = min(abs(number - w * data) for w in (1, *widths))
            if number != data - self._unseen and off > tolerance * number:
                yield issue("num_data", number=number, data=data, power=number / data)

    def find_order(
        self, sampler: Sampler, given: set[float], several: bool
    ) -> Iterator[Issue]:
        """Finds minibatches that do not represent the data or suit the sampler."""
        data, unseen, indices = self.num_data, self._unseen, self._indices
        if data and unseen and given != {float(data - unseen)}:
            what = f"drops the last {unseen:,} of {data:,} data, always"
            yield issue("data order", what=what)
        if not several:
            return
        takes = traits_of(sampler).takes
        if takes is Takes.POTENTIAL:
            yield issue("dependent minibatches/HMC")
        if is_adapting(sampler):
            yield issue("dependent minibatches/tuning")
        is_shuffled = isinstance(indices, RandomSampler) and not indices.replacement
        if takes is Takes.EXAMPLES and (is_shuffled or self.is_in_order):
            yield issue("dependent minibatches")
        if isinstance(indices, WeightedRandomSampler):
            if len(indices.weights[indices.weights > 0].unique()) > 1:
                yield issue("weighted data")
        if not self.is_in_order:
            return
        least, most = min(self._sizes, default=0), max(self._sizes, default=0)
        if most > _UNEQUAL * least and not unseen:
            what = f"minibatches of {least} to {most} data count the same, always"
            yield issue("data order", what=what)
        if self._is_sorted():
            yield issue("data order", what="its data are sorted by target")

    def _is_sorted(self) -> bool:
        """Compares pairs of neighbours with all pairs of these targets."""
        rows: Any = getattr(self.loader, "dataset", None)
        if self.is_list:
            last = [[*tensors_in(batch)][-1:] for batch in self.loader]
            flat = [t for ts in last for t in ts if t.dim() and t.numel() == len(t)]
            rows = [value for t in flat for value in t.flatten().tolist()]
        count = length_of(rows) or 0
        pairs = min(_PAIRS, count // 2)
        firsts = [i * (count - 2) // max(pairs - 1, 1) for i in range(pairs)]
        found = [[_target_of(rows[i]), _target_of(rows[i + 1])] for i in firsts]
        if pairs < _PAIRS // 2 or any(None in pair for pair in found):
            return False
        one, other = torch.tensor(found, dtype=torch.float64, device="cpu").T
        near = (one - other).abs().mean()
        return bool(near < _SORTED * (one[:, None] - other).abs().mean())


def _target_of(row: Any) -> float | None:
    row = [*row.values()] if isinstance(row, Mapping) else row
    last = row[-1] if isinstance(row, tuple | list) and len(row) > 1 else row
    is_one = isinstance(last, Tensor) and last.numel() == 1
    return float(last) if is_one or isinstance(last, int | float) else None


@contextmanager
def untouched(
    model: nn.Module, params: list[Tensor], loader: Any
) -> Iterator[Snapshot]:
    """Restores tensors, gradients, flags and random numbers at the end."""
    with ExitStack() as stack:
        stack.enter_context(kept_generators())
        for owner in (loader, *samplers_of(loader)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                stack.callback(generator.set_state, generator.get_state())
            if hasattr(owner, "num_drawn"):
                stack.callback(owner.load_state_dict, owner.state_dict())
        if getattr(loader, "_iterator", loader) is None:
            # Persistent workers would continue with this check's random numbers.
            stack.callback(setattr, loader, "_iterator", None)
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        stack.enter_context(kept_gradients(params))
        if "torch._dynamo" in sys.modules:  # compiling takes longer than a check
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        before = Snapshot(model, params)
        stack.callback(before.restore)
        yield before
