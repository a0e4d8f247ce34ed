"""Issues of a set-up: texts, the report, and checks without gradients."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from torch_sgmcmc._impl.parameters import kept_gradients
from torch_sgmcmc._impl.utils import length_of, rows_of, tensors_in
from torch_sgmcmc.samplers.hmc import HMC
from torch_sgmcmc.samplers.sampler import Sampler
from torch_sgmcmc.samplers.sbps import SBPS

__all__ = ["Issue", "SetupReport"]


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
    "other model": "None of the model's parameters is the sampler's: the sampler would "
    "sample another model, or this one before it was copied or moved. Make the sampler "
    "of model.parameters(), last of all.",
    "other model/lost": "{lost} of the sampler's {count} tensors are not the model's, "
    "and have no gradient: was a layer replaced after the sampler was made? Make the "
    "sampler last of all.",
    "other model/none": "No parameter has a gradient of the loss. Make the sampler of "
    "the parameters of the model that the loss calls.",
    "frozen": "No parameter of the sampler requires a gradient: there is nothing to "
    "sample. Set requires_grad of the parameters to sample.",
    "shape": "The loss of a minibatch has shape {shape}, and {sampler} takes {what}.",
    "not finite": "The loss of a minibatch is {loss:.3g}, and {some} of {count} "
    "tensors have gradients that are not finite. Check the data and the initial "
    "values.",
    "sum": "The loss is {what} the minibatch: a minibatch of twice the size has "
    "{ratio:.3g} times its halves' gradient. Samplers take the mean, and num_data for "
    'the number of data (reduction="mean").',
    "broadcast": "Outputs of shape {outputs} are compared with targets of shape "
    "{targets}, each with all others. Give them one shape, as by y[:, None].",
    "gradient": "The gradient of {names} is not the derivative of the loss, and the "
    "sampler follows the gradient: it samples another distribution, or none. Remove "
    "what alters gradients: Embedding(scale_grad_by_freq=True), hooks that clip or "
    "mask, gradient reversal, straight-through estimators, detach().",
    "gradient/written": "The model writes into its weights ({names}) when it is "
    "called, like Embedding(max_norm=...): draws are altered after each step, and are "
    "not the posterior's. Remove max_norm; the prior keeps weights small.",
    "no gradient": "The gradient of {names} is always 0 or missing{size}: the prior "
    "alone draws them, or nothing does. Use them in the loss and remove what cuts the "
    "gradient (padding_idx: multiply by a mask instead; detach(), no_grad(), hooks "
    "that mask, rounding), or freeze them with requires_grad_(False) first.",
    "num_data": "num_data is {number:,.10g}, {what}: the log-likelihood is "
    "{factor:.3g} times {weaker} than intended. Set num_data={data} (temperature= sets "
    "another temperature).",
    "num_data/targets": "The loss is a mean over the {width:.4g} targets (tokens, "
    "pixels, labels) of each datum too, and num_data is {number:,.10g}: the likelihood "
    "is raised to the power {power:.3g}. Set num_data={total}, the number of all "
    "targets, or sum over the targets of a datum.",
    "scaled loss": "The loss is {factor:.4g} times the mean {name}, and so is the "
    "log-likelihood. Return the mean loss. num_data is the number of data, and "
    "temperature= sets another temperature.",
    "probabilities": "The outputs are probabilities, and {name} takes {takes}: the "
    "likelihood is nearly flat in them. Remove the model's softmax and use "
    "cross_entropy.",
    "probabilities/sigmoid": "The outputs stay in [0, 1] at all weights, like "
    "probabilities, and {name} takes logits. Remove the model's sigmoid.",
    "probabilities/logits": "nll_loss takes logarithms of probabilities, and the "
    "outputs are not normalised. Use cross_entropy.",
    "penalty": "The loss contains a penalty on weights ({names}), whose gradient is up "
    "to {ratio:.3g} times the prior's: with prior_precision there are two priors. "
    "Remove the penalty from the loss, or set prior_precision=0.",
    "random loss": "The loss of one minibatch changes from call to call: something in "
    "the model or the loss is random (dropout as a function, noise), so the loss is "
    "not a likelihood. Make the loss a function of weights and data.",
    "random loss/dropout": "Dropout is on ({names}): each loss belongs to another "
    "random network, and is not a likelihood. Call model.eval() or set p=0; the prior "
    "regularises.",
    "batch norm": "Batch norm uses the minibatch's statistics ({names}): the loss of "
    "an example depends on others, and predictions use another function. Call eval() "
    "on these layers once they have statistics, or use group norm.",
    "minibatch": "The gradient of a minibatch is not the mean of its halves'. Either "
    "the loss is divided by the sum of weights or of tokens that are not padding "
    "(divide by the number of data), or the loss of an example depends on others, like "
    "a contrastive loss, which is not a likelihood.",
    "dependent minibatches": "SBPS needs independent minibatches, and the minibatches "
    "of an epoch depend on each other. Give the DataLoader "
    "batch_sampler=IndependentBatchSampler(num_data, batch_size).",
    "dependent minibatches/HMC": "HMC needs the potential of all data, and the loader "
    "has minibatches: its acceptance compares different potentials, and the chain "
    "samples another distribution. Use one batch of all data, or SGHMC.",
    "weighted data": "WeightedRandomSampler draws some data more often than others: "
    "the posterior belongs to another data set, with repeated data (and its "
    "num_samples is not num_data). Use shuffle=True; class imbalance is part of the "
    "likelihood.",
    "data order/unseen": "The loader does not shuffle and drops the last {unseen:,} of "
    "{data:,} data: the chain never uses them. Set shuffle=True (then drop_last=True "
    "loses nothing), or drop_last=False.",
    "data order/sizes": "The loader does not shuffle, and its minibatches have {least} "
    "to {most} data: each minibatch counts the same, so the data in the smallest count "
    "{ratio:.3g} times as much, always. Set shuffle=True, or use minibatches of one "
    "size.",
    "data order/sorted": "The loader does not shuffle, and its data are sorted by "
    "target: minibatches in order do not represent the data, and the chain follows "
    "them. Set shuffle=True.",
    "unstable": "lr {lr:.3g} is beyond {limit:.2g}, the limit at the largest "
    "curvature, {curvature:.3g}: the chain diverges there. Start with {begin:.1g}.",
    "above T": "Minibatches raise the chain's temperature: {text} (reported from "
    "{mean:g} on average, {tensor:g} in a tensor). The excess falls with "
    "lr / (1 - momentum). Start with lr = {lr:.1g}, or use larger minibatches.",
    "squared error": "The loss is {half}the mean squared error{over}: as a likelihood, "
    "Gaussian noise of variance {variance:.4g}. If the noise has variance σ², the loss "
    "is the sum over outputs of (y - f)² / (2 σ²), averaged over data: "
    "sg.losses.gaussian(noise=σ).",
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
    #: The loss of a minibatch.
    loss: float
    #: The largest curvature of the mean loss and the prior at the present parameters,
    #: and the lr beyond which a chain diverges; NaN if unknown.
    curvature: float
    largest_lr: float
    #: The lr at which minibatches add 5 % to T_kin, averaged over coordinates, with the
    #: present gradient noise; NaN if unknown. Both limits are the largest group's lr;
    #: other groups keep their ratios to it.
    noise_lr: float
    #: By tensor, the minibatches' part of T_kin / T with the present gradient noise. At
    #: a random start the last layer has more than later.
    heating: Mapping[str, float]
    #: The same for residuals with the variance of a Gaussian likelihood; empty after
    #: the first step, and for other likelihoods.
    fitted_heating: Mapping[str, float]
    #: Bytes of a draw in a store, and of the sampler's state.
    draw_bytes: int
    state_bytes: int
    #: Number of computed gradients.
    gradients: int

    @property
    def limit(self) -> str:
        """The smaller limit of lr: "stability", "gradient noise", or "" if unknown."""
        if math.isnan(self.largest_lr) or math.isnan(self.noise_lr):
            return ""
        return "stability" if self.largest_lr <= self.noise_lr else "gradient noise"

    def summary(self) -> str:
        """Returns issues and numbers as text."""
        lines = [f"{i}. {p.message}" for i, p in enumerate(self.issues, 1)]
        if not lines and not self.remarks:
            lines.append("No issue was found.")
        lines += [f"Remark: {text}" for text in self.remarks]
        sampled = f"Sampled: {self.num_sampled:,} numbers."
        if self.not_sampled:
            sampled += f" Not sampled: {some_of(self.not_sampled, 6)}."
        lines += ["", self.target, sampled]
        if not math.isnan(self.curvature):
            lines.append(
                f"Largest curvature {self.curvature:.3g}: stable up to lr = "
                f"{self.largest_lr:.2g}."
            )
        if math.isfinite(self.noise_lr):
            lines.append(
                f"Minibatches add 5 % to T_kin at lr = {self.noise_lr:.2g}, with the "
                "present gradient noise."
            )
        if self.limit:
            smaller = min(self.largest_lr, self.noise_lr)
            lines.append(f"The smaller limit of lr is {self.limit}: {smaller:.2g}.")
        for text, heating in (
            ("T_kin / T with the present gradient noise", self.heating),
            ("With residuals of the loss's own variance", self.fitted_heating),
        ):
            highest = sorted(heating, key=lambda name: -heating[name])[:4]
            if highest:
                some = ", ".join(f"{name} {1 + heating[name]:.3g}" for name in highest)
                lines.append(f"{text}: {some}.")
        lines.append(
            f"A draw takes {_size(self.draw_bytes)} in a store, the sampler's state "
            f"{_size(self.state_bytes)} of memory."
        )
        return "\n".join(lines + [f"Not known: {text}." for text in self.unknown])

    __str__ = summary


def some_of(names: Iterable[str], most: int = 3) -> str:
    """Returns the first names, and the number of others."""
    every = list(names)
    more = f" and {len(every) - most} more" if every[most:] else ""
    return ", ".join(every[:most]) + more


def _size(count: float) -> str:
    place = min(3, int(math.log(max(count, 1), 999.99)))
    return f"{count / 1000**place:.3g} {('bytes', 'kB', 'MB', 'GB')[place]}"


_OF_ALL = SequentialSampler, RandomSampler, DistributedSampler, WeightedRandomSampler
# Number of compared pairs of neighbours; the ratio of their mean difference to all
# data's that marks sorted data (five standard deviations below 1).
_PAIRS, _SORTED = 64, 0.3
# The ratio of unequal sizes of minibatches.
_UNEQUAL = 1.05


class Loader:
    """The data of a loader, and their order."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        #: The number of data of all ranks together; None if unknown.
        self.num_data: int | None = None
        #: Number of data that drop_last drops in every epoch, and sizes of minibatches.
        self._unseen, self._sizes = 0, []
        batches = getattr(loader, "batch_sampler", None)
        # A loader without batch_size takes its sampler's batches.
        batches = getattr(loader, "sampler", None) if batches is None else batches
        draws = hasattr(batches, "num_drawn")
        # The sampler of single data or this library's batch sampler; None if unknown.
        indices = batches if draws else getattr(batches, "sampler", None)
        self._indices, self._is_list = indices, isinstance(loader, list | tuple)
        is_ordered = isinstance(indices, DistributedSampler) and not indices.shuffle
        self.is_in_order = (
            self._is_list or isinstance(indices, SequentialSampler) or is_ordered
        )
        if self._is_list:
            rows = [rows_of(batch) for batch in loader]
            if None not in rows:
                self._sizes, self.num_data = rows, sum(rows)
            return
        data = length_of(getattr(loader, "dataset", None))
        count = length_of(indices) or 0  # for example a SubsetRandomSampler's
        if draws:
            self.num_data = indices.num_data
        elif data is not None and indices is not None:
            # num_samples is the length of an epoch.
            is_of_all = isinstance(indices, _OF_ALL) or not count
            self.num_data = data if is_of_all else min(count, data)
        size = getattr(batches, "batch_size", None) if self.is_in_order else None
        if size and getattr(batches, "drop_last", False):
            self._unseen = count % size
        elif size and count > size:
            self._sizes = [size, count % size or size]

    def find_num_data(
        self, given: set[float], rows: int | None, widths: set[int]
    ) -> Iterator[Issue]:
        """Compares the groups' ``num_data`` with the data.

        Also compares ``rows`` of a minibatch and possible ``widths``, targets of a
        datum.
        """
        data, batches = self.num_data, length_of(self.loader)
        for number in sorted(given):
            if data is None or number in {data - self._unseen, data}:
                continue
            if any(number == width * data for width in widths):
                continue
            what = f"and the loader has {data:,} data"
            if number == rows:
                what = f"the size of a minibatch, {what}"
            elif number == batches:
                what = f"the number of minibatches, {what}"
            weaker = "flatter" if number < data else "narrower"
            factor = max(number, data) / max(min(number, data), 1e-300)
            values = {"number": number, "data": data, "what": what, "factor": factor}
            yield issue("num_data", **values, weaker=weaker)

    def find_order(
        self, sampler: Sampler, given: set[float], several: bool
    ) -> Iterator[Issue]:
        """Finds minibatches that do not represent the data or suit the sampler."""
        data, unseen, indices = self.num_data, self._unseen, self._indices
        if data and unseen and given != {float(data - unseen)}:
            yield issue("data order/unseen", unseen=unseen, data=data)
        if not several:
            return
        if isinstance(sampler, HMC):
            yield issue("dependent minibatches/HMC")
        is_shuffled = isinstance(indices, RandomSampler) and not indices.replacement
        if isinstance(sampler, SBPS) and (is_shuffled or self.is_in_order):
            yield issue("dependent minibatches")
        if isinstance(indices, WeightedRandomSampler):
            if len(indices.weights.unique()) > 1:
                yield issue("weighted data")
        if not self.is_in_order:
            return
        least, most = min(self._sizes, default=0), max(self._sizes, default=0)
        if most > _UNEQUAL * least:
            ratio = most / least
            yield issue("data order/sizes", least=least, most=most, ratio=ratio)
        options = {"dtype": torch.float64, "device": "cpu"}
        values = torch.tensor([*self._neighbours()], **options).view(-1, 2)
        near = (values[:, 0] - values[:, 1]).abs().mean()
        far = (values[:, :1] - values[:, 1]).abs().mean()
        if len(values) >= _PAIRS // 2 and near < _SORTED * far:
            yield issue("data order/sorted")

    def _neighbours(self) -> Iterator[tuple[float, float]]:
        if self._is_list:
            last = [[*tensors_in(batch)][-1:] for batch in self.loader]
            flat = [t for ts in last for t in ts if t.dim() and t.numel() == len(t)]
            rows: Any = [value for t in flat for value in t.flatten().tolist()]
        else:
            rows = self.loader.dataset
        count = length_of(rows) or 0
        pairs = min(_PAIRS, count // 2)
        for i in range(pairs):
            first = i * (count - 2) // max(pairs - 1, 1)
            pair = [_target_of(rows[first + k]) for k in (0, 1)]
            if None in pair:
                return
            yield pair[0], pair[1]  # type: ignore[misc]


def _target_of(row: Any) -> float | None:
    row = [*row.values()] if isinstance(row, Mapping) else row
    last = row[-1] if isinstance(row, tuple | list) and len(row) > 1 else row
    if isinstance(last, Tensor) and last.numel() == 1:
        return float(last)
    return float(last) if isinstance(last, int | float) else None


def local(tensor: Tensor) -> Tensor:
    """Returns this process's part of a DTensor, and other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Snapshot:
    """Values of tensors, and a model's buffers."""

    def __init__(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        held = [*params, *(b for _, _, b in self._buffers if b is not None)]
        self._values = [
            (t, _distinct(t).clone())
            for t in {id(t): t for t in held}.values()
            if not (t.is_meta or is_lazy(t))
        ]

    def changed(self) -> list[Tensor]:
        """Returns the tensors that have other values now."""
        return [t for t, v in self._values if not torch.equal(_distinct(t), v)]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts buffers and values back."""
        for module, name, buffer in self._buffers:
            if module._buffers[name] is not buffer:  # or a ScriptModule's handle
                setattr(module, name, buffer)
        for tensor, value in self._values:
            if not torch.equal(_distinct(tensor), value):
                _distinct(tensor).copy_(value)


def _distinct(tensor: Tensor) -> Tensor:
    """Returns a view without the elements that an expanded tensor repeats."""
    part = local(tensor.detach())
    if part.layout is torch.strided:
        for dim, stride in enumerate(part.stride()):
            if stride == 0 and part.shape[dim]:
                part = part.narrow(dim, 0, 1)
    return part


@contextmanager
def untouched(
    model: nn.Module, params: list[Tensor], loader: Any
) -> Iterator[Snapshot]:
    """Restores tensors, gradients, flags and random numbers at the end."""
    owners = [loader, *(getattr(loader, k, None) for k in ("sampler", "batch_sampler"))]
    owners += [getattr(owner, "sampler", None) for owner in owners[1:]]
    devices = sorted({p.device.index for p in params if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            numbers = sys.modules["numpy"].random
            stack.callback(numbers.set_state, numbers.get_state())
        for owner in owners:
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
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(kept_gradients(params))
        if "torch._dynamo" in sys.modules:  # compiling takes longer than a check
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        before = Snapshot(model, params)
        stack.callback(before.restore)
        yield before


def has_dropout(module: nn.Module) -> bool:
    """Returns whether dropout of a layer is on."""
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.training and module.dropout > 0
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def uses_minibatch(module: nn.Module) -> bool:
    """Returns whether a layer is a batch norm with the minibatch's statistics."""
    is_norm = isinstance(module, _BatchNorm)
    return is_norm and (module.training or module.running_mean is None)
