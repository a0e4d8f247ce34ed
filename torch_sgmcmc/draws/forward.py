"""Evaluation of a model with the tensors of draws, on batches of inputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from torch_sgmcmc.core import utils
from torch_sgmcmc.core.hyperparams import check_integer, check_real, wrong_type
from torch_sgmcmc.core.random_state import fold_in
from torch_sgmcmc.data import IndependentBatchSampler, samplers_of
from torch_sgmcmc.draws.store import Draw
from torch_sgmcmc.draws.store_files import checksums

Forward = Callable[[nn.Module, Any], Any]


class Evaluation:
    """Calls ``forward(model, batch)`` with some of the model's tensors replaced.

    Nothing is copied into the model, whose own tensors return afterwards, also after an
    error. All batches share one replacement, which takes as long as a layer.
    """

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        self._caller = _Caller(model, forward or default_forward)
        self.has_modes = has_modes(model)
        # Whether calls write into tensors, as an Embedding with max_norm does, and
        # train() and eval() may; None is unknown.
        self._writes = True if self.has_modes else None

    def outputs(self, tensors: Mapping[str, Tensor], batches: Iterable[Any]) -> Tensor:
        """Returns all batches' outputs, [inputs, ...]; no tensors: the model's own."""
        tensors = self.protected(tensors)
        if self.has_modes:
            batches = list(batches)
        given = batches, self.has_modes
        outputs = functional_call(self._caller, _inside(tensors), given)
        if self._writes is None:
            own = tensors.values()
            self._writes = any(t.is_inference() or t._version > 0 for t in own)
        return outputs

    def protected(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns copies, with the model's tensors, if calls may write into these."""
        if self._writes is False:
            return tensors
        model = self._caller.model
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {k: t.clone() for k, t in {**named, **tensors}.items()}

    def together(
        self, draws: Sequence[Mapping[str, Tensor]], batches: Iterable[Any]
    ) -> Tensor:
        """Returns outputs of several draws at once, [draws, inputs, ...]."""
        if self.has_modes:
            batches = list(batches)
            return torch.stack([self.outputs(draw, batches) for draw in draws])
        tensors = _inside({k: torch.stack([d[k] for d in draws]) for k in draws[0]})

        def one(tensors: dict[str, Tensor], batch: Any) -> Tensor:
            return functional_call(self._caller, tensors, ([batch],))

        # The loop is outside of vmap, in which loaders may not draw their seeds.
        parts = [vmap(lambda t, b=batch: one(t, b))(tensors) for batch in batches]
        return torch.cat(parts, 1)

    def run(self, tensors: Mapping[str, Tensor], batches: Iterable[Any]) -> None:
        """Evaluates for the updates of buffers among the tensors; no outputs."""
        functional_call(self._caller, _inside(tensors), (batches, False, False))


class _Caller(nn.Module):
    # functional_call replaces tensors for a call of a module: this one.
    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.function = forward

    def forward(
        self, batches: Iterable[Any], changes_mode: bool = False, keep: bool = True
    ) -> Tensor | None:
        # A caller's parametrize.cached() has weights of other draws.
        cached, parametrize._cache = parametrize._cache, {}
        try:
            if changes_mode:  # as a user would after loading the draw
                self.model.eval()
            outputs = self._outputs(batches, keep)
            if changes_mode:
                self.model.train()
        finally:
            parametrize._cache = cached
        return outputs

    def _outputs(self, batches: Iterable[Any], keep: bool) -> Tensor | None:
        device = model_device(self.model)
        parts: list[Tensor] = []
        for batch in batches:
            outputs = self.function(self.model, moved(batch, device))
            if not keep:
                continue
            _check(outputs, parts)
            # The sums keep more digits of log and softmax than 16 bits have.
            low = outputs.dtype in (torch.float16, torch.bfloat16)
            parts.append(outputs.float() if low else outputs)
        return torch.cat(parts) if keep else None


def _check(outputs: Any, parts: list[Tensor]) -> None:
    if not isinstance(outputs, Tensor) or outputs.dim() == 0:
        is_scalar = isinstance(outputs, Tensor)
        got = "a scalar" if is_scalar else f"of type {type(outputs).__name__}"
        raise TypeError(
            f"Invalid outputs: {got} (must be a Tensor with a row for each input; "
            "forward=function(model, batch) may take it from the model's output)"
        )
    if parts and outputs.shape[1:] != parts[0].shape[1:]:
        raise ValueError(
            f"Invalid outputs: shape {list(outputs.shape)} for a batch, and "
            f"{list(parts[0].shape)} for the first (all but rows must be equal)"
        )


def _inside(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Returns the model's output tensor, also for tuples and Hugging Face mappings."""
    if isinstance(batch, Mapping):
        outputs = model(**batch)
    elif isinstance(batch, tuple | list):
        return default_forward(model, batch[0])
    else:
        outputs = model(batch)
    return logits_of(outputs)


def logits_of(outputs: Any) -> Any:
    """Returns the logits of a Hugging Face model's outputs, or what was given."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return getattr(outputs, "logits", outputs)


def moved(batch: Any, device: torch.device | None) -> Any:
    """Returns a batch (a nest of tensors and of objects with ``to``) on a device."""
    if device is None:
        return batch
    return utils.mapped(lambda t: t.to(device, non_blocking=True), batch, "to")


def model_device(model: nn.Module) -> torch.device | None:
    """Returns the device of the first tensor."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return None


def has_modes(model: nn.Module) -> bool:
    """Checks for a train() that does more than set flags.

    Merged adapters write into weights, and Gaussian processes cache results, until the
    mode changes.
    """
    return any(
        type(m).train is not nn.Module.train or type(m).eval is not nn.Module.eval
        for m in model.modules()
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluates without dropout or recorded graph.

    Calls the model's eval() and train(), which may write into its tensors. Tensors, the
    flags of single frozen modules and the program's random numbers are restored.
    """
    flags = [(module, module.training) for module in model.modules()]
    is_training = model.training
    before = utils.Snapshot(model, model.parameters()) if has_modes(model) else None
    device = model_device(model)
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(cuda), torch.no_grad():  # loaders draw seeds
        try:
            model.train(has_modes(model))  # its eval() is called with a draw's tensors
            yield
        finally:
            model.train(is_training)
            for module, training in flags:
                module.training = training
            if before is not None:
                before.restore()


def seed_evaluation(model: nn.Module, number: int) -> None:
    """Gives an evaluation its own random numbers: what depends on them is noticed."""
    seed = fold_in(int(torch.randint(2**63 - 1, (), device="cpu")), number)
    torch.default_generator.manual_seed(seed)
    device = model_device(model)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


class Replacements:
    """Checks that a draw fits a model, and converts it to the model's dtypes."""

    def __init__(self, model: nn.Module) -> None:
        self._own: dict[str, Tensor] = {}
        self._first: dict[str, str] = {}  # name of each tied weight
        seen: dict[int, str] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._own[name] = tensor
                self._first[name] = seen.setdefault(id(tensor), name)
        plain_names = utils.plain_names(model, self._own)
        self._of_plain = {plain: name for name, plain in plain_names.items()}
        self._places: dict[str, tuple[Tensor, str]] = {}
        self._checked: set[int] = set()  # ids of stores' checksums

    def of(self, draw: Any) -> dict[str, Tensor]:
        """Returns the draw's tensors by name."""
        if isinstance(draw, nn.Module):
            draw = utils.unwrapped(draw)
            draw = {**dict(draw.named_parameters()), **dict(draw.named_buffers())}
        elif not isinstance(draw, Mapping):
            wanted = "a mapping from names to tensors, or a module"
            raise wrong_type("draw", draw, wanted)
        if isinstance(draw, Draw):
            self._check_base(draw)
        found: dict[str, Tensor] = {}
        for name in draw:
            if name.rpartition(".")[2] == "_extra_state":
                continue  # part of a state dict, not a tensor of the model
            value = draw[name]
            own, first = self._place(name)
            if not isinstance(value, Tensor):
                raise wrong_type(f"draw: {name!r}", value, "a Tensor")
            if value.shape != own.shape:
                raise ValueError(
                    f"Invalid draw: {name!r} has shape {list(value.shape)}, in the "
                    f"model {list(own.shape)}"
                )
            # Checked first: to() would dominate for thousands of small draws.
            if value.dtype != own.dtype or value.device != own.device:
                value = value.to(own.device, own.dtype)
            found.setdefault(first, value)
        if not found:
            raise ValueError("Invalid draw: it has no tensor")
        return found

    def _place(self, given: str) -> tuple[Tensor, str]:
        """Returns the model's tensor and its first name for a name in a draw."""
        place = self._places.get(given)
        if place is None:
            name = self._of_plain.get(utils.resolved(given, self._of_plain), given)
            if name not in self._own:
                raise ValueError(
                    f"Invalid draw: the model has no parameter or buffer {given!r}"
                )
            place = self._places[given] = self._own[name], self._first[name]
        return place

    def _check_base(self, draw: Draw) -> None:
        """Warns once per store if draws do not determine the model's other tensors."""
        sums = draw.not_sampled
        if id(sums) in self._checked:
            return
        self._checked.add(id(sums))
        plain = {plain: self._own[name] for plain, name in self._of_plain.items()}
        own = checksums({name: plain[name] for name in sums if name in plain})
        others = [
            k for k, value in sums.items() if value is None or own.get(k) != value
        ]
        if others:
            place = "memory" if draw.path is None else str(draw.path.parents[1])
            warnings.warn(
                f"Draws of chain {draw.chain} of {place} are of a part of a "
                f"model, and {len(others)} of its other parameters, {others[0]!r} "
                "among them, are not those that the draws were made with: load these "
                "into the model, in their dtype (what was sampled must be stored)",
                stacklevel=2,
            )


def weight_of(draw: Any, weight: Any) -> float:
    """Returns the given weight, else the draw's own, else 1."""
    if weight is None:
        # A module's weight is a parameter.
        weight = 1.0 if isinstance(draw, nn.Module) else getattr(draw, "weight", 1.0)
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    number = check_real("weight", weight, low=-math.inf)
    if number == -math.inf:
        raise ValueError(f"Invalid weight: {number} (must be finite)")
    return number


_SHUFFLING = (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    IndependentBatchSampler,
)
# Numbers of a batch that are compared between passes.
_PROBED = 64


class Batches:
    """Batches of inputs, the same in the same order at each pass.

    Args:
        name: the argument's name, for messages.
        inputs: a Tensor, a mapping from names to Tensors with as many rows, or an
            iterable of batches that can be read again.
        batch_size: rows of a batch, unless the inputs are batches.
        in_order: refuse shuffled inputs.
        dtype: of NumPy's floating-point numbers. Default: torch's default.

    Raises:
        TypeError: an iterator, which can be read once only, or not an iterable.
        ValueError: no inputs, or shuffled ones.
    """

    def __init__(
        self,
        name: str,
        inputs: Any,
        batch_size: int,
        *,
        in_order: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._name = name
        self._size = check_integer("batch_size", batch_size, low=1)
        self._in_order = in_order
        self._probes: list[Tensor | None] | None = None
        self._inputs: Iterable[Any] | None = None
        #: The first batch of the last pass.
        self.first: Any = None
        inputs = as_tensor(inputs, dtype or torch.get_default_dtype())
        if isinstance(inputs, Tensor):
            if inputs.dim() == 0 or len(inputs) == 0:
                raise ValueError(
                    f"Invalid {name}: shape {list(inputs.shape)} (there is no input)"
                )
            self._inputs = inputs.split(self._size)
        elif isinstance(inputs, Mapping):
            self._inputs = self._split(inputs)
        if self._inputs is not None:
            self._in_order = False  # tensors cannot change their order
            return
        if isinstance(inputs, Iterator):
            raise TypeError(
                f"Invalid {name}: an iterator of type {type(inputs).__name__} (is read "
                "once for each draw: give a list or a DataLoader)"
            )
        if isinstance(inputs, tuple) or not isinstance(inputs, Iterable):
            wanted = (
                "a Tensor, a mapping from names to Tensors, or a list or DataLoader"
            )
            raise wrong_type(name, inputs, f"{wanted} of batches")
        if in_order and any(isinstance(s, _SHUFFLING) for s in samplers_of(inputs)):
            raise ValueError(
                f"Invalid {name}: a DataLoader that shuffles (rows of predictions are "
                "in the order of the inputs: shuffle=False)"
            )
        self._inputs = inputs

    def __iter__(self) -> Iterator[Any]:
        assert self._inputs is not None
        count = 0
        probes: list[Tensor | None] = []
        for batch in self._inputs:
            if self._in_order:
                probes.append(_probe(batch))
                if self._probes is not None:
                    self._compare(probes)
            if count == 0:
                self.first = batch
            yield batch
            count += 1
        if count == 0:
            raise ValueError(f"Invalid {self._name}: it has no batch")
        if not self._in_order:
            return
        if self._probes is not None and count < len(self._probes):
            raise self._differ(f"{count} batches, and {len(self._probes)} before")
        self._probes = probes

    def _compare(self, probes: list[Tensor | None]) -> None:
        assert self._probes is not None
        number, probe = len(probes), probes[-1]
        if number > len(self._probes):
            raise self._differ(f"batch {number}, and {len(self._probes)} before")
        before = self._probes[number - 1]
        if probe is None or before is None:
            return
        same = probe.shape == before.shape and bool(
            ((probe == before) | ((probe != probe) & (before != before))).all()
        )
        if not same:
            raise self._differ(f"batch {number} is another than before")

    def _differ(self, how: str) -> ValueError:
        return ValueError(
            f"Invalid {self._name}: other batches at another pass: {how} (they must "
            "be the same in the same order, without shuffling and augmentation)"
        )

    def _split(self, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        for key, value in inputs.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise ValueError(
                    f"Invalid {self._name}: {key!r} is not a Tensor with a row for "
                    "each input"
                )
        rows = {len(tensor) for tensor in inputs.values()}
        if len(rows) != 1:
            raise ValueError(
                f"Invalid {self._name}: a mapping with values of {sorted(rows)} rows "
                "(must be Tensors of as many rows each)"
            )
        (count,) = rows
        return [
            {key: value[i : i + self._size] for key, value in inputs.items()}
            for i in range(0, count, self._size)
        ]


def as_tensor(given: Any, dtype: torch.dtype, name: str = "inputs") -> Any:
    """Returns arrays as tensors, their floats in a dtype, and others as they are."""
    if isinstance(given, Tensor | Mapping) or not hasattr(given, "__array__"):
        return given
    array = given.__array__()
    if array.dtype.kind not in "fiub":
        found = f"an array of dtype {array.dtype}"
        raise TypeError(f"Invalid {name}: {found} (must have numbers)")
    tensor = torch.from_numpy(array.copy())
    return tensor.to(dtype) if array.dtype.kind == "f" else tensor


def _probe(batch: Any) -> Tensor | None:
    for tensor in utils.tensors_in(batch):
        flat = tensor.reshape(-1)
        return flat[:: max(1, len(flat) // _PROBED)].clone()
    return None


class BatchNorm:
    """Provides batch norm layers with the running statistics of a draw.

    Statistics are computed on the data ``refresh`` for each draw, or are the draw's
    own. One warning is issued for a draw without statistics.
    """

    def __init__(self, model: nn.Module, refresh: Batches | None) -> None:
        self._layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        }
        self._modules = [*model.modules()]
        self._refresh = refresh
        self._buffers = [
            f"{name}.{kind}" if name else kind
            for name in self._layers
            for kind in ("running_mean", "running_var")
        ]
        self._before = _before_last(model, list(self._layers))
        self._warned = False

    def of(
        self, tensors: Mapping[str, Tensor], evaluation: Evaluation, *, live: bool
    ) -> Mapping[str, Tensor]:
        """Returns a draw's tensors with the draw's running statistics."""
        if not self._layers:
            return tensors
        if self._refresh is not None:
            return self._refreshed(tensors, evaluation, self._refresh)
        if not live and not self._warned and self._are_stale(tensors):
            self._warned = True
            missing = next(name for name in self._buffers if name not in tensors)
            warnings.warn(
                "The model has batch norm, and a draw has parameters before it but no "
                f"statistics ({missing!r}): the model's own are used, which belong to "
                "other parameters. Keep buffers with the draws, or give "
                "refresh_batch_norm=loader",
                stacklevel=2,
            )
        return tensors

    def _are_stale(self, tensors: Mapping[str, Tensor]) -> bool:
        complete = all(name in tensors for name in self._buffers)
        return not complete and not self._before.isdisjoint(tensors)

    def _refreshed(
        self, tensors: Mapping[str, Tensor], evaluation: Evaluation, batches: Batches
    ) -> dict[str, Tensor]:
        fresh: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            for kind in ("running_mean", "running_var", "num_batches_tracked"):
                new = torch.full_like(getattr(layer, kind), kind == "running_var")
                fresh[f"{name}.{kind}" if name else kind] = new
        together = {**evaluation.protected(tensors), **fresh}
        # All draws see the loader in one order.
        with self._averaging(), torch.random.fork_rng(devices=[]):
            evaluation.run(together, batches)  # writes into the fresh ones
        return together

    @contextmanager
    def _averaging(self) -> Iterator[None]:
        """Sets only these layers to training mode, with equal weights of batches."""
        modes = [(module, module.training) for module in self._modules]
        momenta = [(layer, layer.momentum) for layer in self._layers.values()]
        try:
            for module in self._modules:
                module.training = False
            for layer in self._layers.values():
                layer.momentum = None
                layer.training = True
            yield
        finally:
            for layer, momentum in momenta:
                layer.momentum = momentum
            for module, training in modes:
                module.training = training


def _before_last(model: nn.Module, layers: list[str]) -> set[str]:
    """Returns names of parameters registered before the last of these layers."""
    found: set[str] = set()
    if layers:
        for name, module in model.named_modules():
            if name == layers[-1]:
                break
            for own, _ in module.named_parameters(recurse=False):
                found.add(f"{name}.{own}" if name else own)
    return found
