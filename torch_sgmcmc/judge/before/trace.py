"""State that a check restores, and layers that it switches to evaluation."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from torch_sgmcmc.chain.closures import kept_gradients

__all__ = ["Snapshot", "batch_norms", "dropouts", "local", "quiet", "untouched"]


def local(tensor: Tensor) -> Tensor:
    """Returns this process's part of a DTensor, and other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Snapshot:
    """Values of the tensors, and which buffers a model has."""

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
    found = [getattr(owner, "generator", None) for owner in owners]
    generators = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
    draws = [(o, o.state_dict()) for o in owners if hasattr(o, "num_drawn")]
    # Workers that persist would read on with this check's random numbers.
    iterates = getattr(loader, "_iterator", loader) is None
    devices = sorted({p.device.index for p in params if p.device.type == "cuda"})
    numpy = sys.modules.get("numpy")
    python, numbers = random.getstate(), numpy and numpy.random.get_state()
    modes = [(module, module.training) for module in model.modules()]
    before = Snapshot(model, params)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(kept_gradients(params))
            if "torch._dynamo" in sys.modules:  # compiling takes longer than a check
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield before
    finally:
        before.restore()
        for module, training in modes:
            module.training = training
        random.setstate(python)
        if numpy:
            numpy.random.set_state(numbers)
        for generator, state in generators:
            generator.set_state(state)
        for owner, drawn in draws:
            owner.load_state_dict(drawn)
        if iterates:
            loader._iterator = None


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.training and module.dropout > 0
    return False


def dropouts(model: nn.Module) -> list[str]:
    """Returns the names of modules with active dropout."""
    named = model.named_modules()
    return [name or type(m).__name__ for name, m in named if _drops(m)]


def batch_norms(model: nn.Module) -> list[str]:
    """Returns the names of batch norms that use the minibatch's statistics."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and (module.training or module.running_mean is None)
    ]


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluates with these layers in evaluation mode, and all others unchanged."""
    changed = [
        module
        for module in model.modules()
        if module.training and (_drops(module) or isinstance(module, _BatchNorm))
    ]
    try:
        for module in changed:
            module.training = False
        yield
    finally:
        for module in changed:
            module.training = True
