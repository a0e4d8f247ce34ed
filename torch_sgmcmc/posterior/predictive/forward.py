"""A model that is evaluated with tensors of a draw in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from torch_sgmcmc.chain.rows import mapped

__all__ = ["Evaluation", "default_forward", "evaluating", "model_device", "moved"]

Forward = Callable[[nn.Module, Any], Any]


class Evaluation:
    """Calls ``forward(model, batch)`` with some of the model's tensors replaced.

    Nothing is copied into the model, whose own tensors are back afterwards, whatever is
    raised. They are replaced once for all batches: it takes as long as a layer.
    """

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        self._caller = _Caller(model, forward or default_forward)
        self.has_modes = has_modes(model)

    def outputs(self, tensors: Mapping[str, Tensor], batches: Iterable[Any]) -> Tensor:
        """Those for all batches, [inputs, ...]; with no tensors, the model as it is."""
        if self.has_modes:  # train() and eval() may write into the tensors
            model = self._caller.model
            named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            tensors = {k: t.clone() for k, t in {**named, **tensors}.items()}
            batches = list(batches)
        return functional_call(
            self._caller, _inside(tensors), (batches, self.has_modes)
        )

    def together(
        self, draws: Sequence[Mapping[str, Tensor]], batches: Iterable[Any]
    ) -> Tensor:
        """Those of several draws at once, [draws, inputs, ...]."""
        if self.has_modes:
            batches = list(batches)
            return torch.stack([self.outputs(draw, batches) for draw in draws])
        stacked = {
            name: torch.stack([draw[name] for draw in draws]) for name in draws[0]
        }
        tensors = _inside(stacked)

        def one(tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
            return functional_call(self._caller, tensors, ([batch],))

        # The loop is outside of vmap, in which loaders may not draw their seeds.
        parts = [vmap(lambda t, b=batch: one(t, b))(tensors) for batch in batches]
        return torch.cat(parts, 1)

    def run(self, tensors: Mapping[str, Tensor], batches: Iterable[Any]) -> None:
        """The same for what it does to buffers among the tensors."""
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
        if changes_mode:  # as a user would after loading the draw
            self.model.eval()
        outputs = self._outputs(batches, keep)
        if changes_mode:
            self.model.train()
        return outputs

    def _outputs(self, batches: Iterable[Any], keep: bool) -> Tensor | None:
        device = model_device(self.model)
        parts: list[Tensor] = []
        for batch in batches:
            outputs = self.function(self.model, moved(batch, device))
            if not keep:
                continue
            _check(outputs, parts)
            # So that log and softmax have the digits that the sums keep.
            low = outputs.dtype in (torch.float16, torch.bfloat16)
            parts.append(outputs.float() if low else outputs)
        return torch.cat(parts) if keep else None


def _check(outputs: Any, parts: list[Tensor]) -> None:
    if not isinstance(outputs, Tensor) or outputs.dim() == 0:
        is_scalar = isinstance(outputs, Tensor)
        got = "a scalar" if is_scalar else f"of type {type(outputs).__name__}"
        raise TypeError(
            f"Invalid outputs: {got} (must be a Tensor with a row for each input; "
            "forward=function(model, batch) may take it from what the model returns)"
        )
    if parts and outputs.shape[1:] != parts[0].shape[1:]:
        raise ValueError(
            f"Invalid outputs: shape {list(outputs.shape)} for a batch, and "
            f"{list(parts[0].shape)} for the first (but for rows, must be equal)"
        )


def _inside(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Of tensors, of tuples that begin with one, or of Hugging Face's mappings."""
    if isinstance(batch, Mapping):
        outputs = model(**batch)
    elif isinstance(batch, tuple | list):
        return default_forward(model, batch[0])
    else:
        outputs = model(batch)
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return getattr(outputs, "logits", outputs)


def moved(batch: Any, device: torch.device | None) -> Any:
    """A batch of tensors, mappings, lists and tuples with its tensors on a device."""
    return mapped(lambda t: t.to(device, non_blocking=True) if device else t, batch)


def model_device(model: nn.Module) -> torch.device | None:
    """That of the first tensor."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return None


def has_modes(model: nn.Module) -> bool:
    """Checks for a train() that does more than to set flags.

    Merged adapters write into weights, and Gaussian processes keep what they have
    computed, until the mode changes.
    """
    return any(
        type(m).train is not nn.Module.train or type(m).eval is not nn.Module.eval
        for m in model.modules()
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout is off, nothing is recorded, and no random number is used up.

    Calls the model's eval() and train(), which may write into its tensors: these are
    put back, and so are the flags of modules that are frozen one by one.
    """
    flags = [(module, module.training) for module in model.modules()]
    is_training = model.training
    tensors = [*model.parameters(), *model.buffers()]
    copies = [t.detach().clone() for t in tensors] if has_modes(model) else []
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
            for tensor, copy in zip(tensors, copies, strict=False):
                tensor.detach().copy_(copy)
