"""Layers whose output is random, or depends on other rows, in the mode they are in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["batch_norms", "dropouts", "kept", "quiet"]


def dropouts(model: nn.Module) -> list[str]:
    """Names of modules that drop something now."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module.training and _drops(module)
    ]


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return False


def batch_norms(model: nn.Module) -> list[str]:
    """Names of batch norms that take statistics of the minibatch now."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and (module.training or module.running_mean is None)
    ]


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Within, these layers are as for predictions, and all others as they were."""
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


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the buffers are as before, such as running means."""
    before = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in before:
            if buffer is not None:
                buffer.data.copy_(value)
            module._buffers[name] = buffer  # which may have been replaced
