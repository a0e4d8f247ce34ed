"""Checks of parameters, gradients and closures, and the lists that a step updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import dtensor
from torch_sgmcmc.core.context import (
    Replicated,
    StepContext,
    TensorLists,
    local,
    name_of,
    state_dtype,
)
from torch_sgmcmc.core.hyperparams import wrong_type
from torch_sgmcmc.core.ops import HAS_CUDA
from torch_sgmcmc.core.random_state import SIZES, STEP
from torch_sgmcmc.core.state import check_means
from torch_sgmcmc.core.utils import DTYPES


def check_parameter(context: StepContext, p: Tensor) -> None:
    """Raises if a sampler cannot sample a parameter."""
    whole, cannot = p, f"Invalid parameter: {context.name} cannot sample"
    if dtensor.is_dtensor(p):
        if not context.spec.takes_shards:
            raise ValueError(
                f"{cannot} a DTensor (it decides by all parameters together: use a "
                "sampler that does not, such as SGHMC)"
            )
        p = dtensor.check_shard(cannot, p)
    if is_lazy(p):
        raise ValueError(
            f"{cannot} an uninitialized parameter (run the lazy module once before)"
        )
    if p.layout is not torch.strided or p.is_nested:
        layout = "nested" if p.is_nested else p.layout
        raise ValueError(f"{cannot} the layout {layout} (must be torch.strided)")
    if p.dtype not in DTYPES:
        raise ValueError(
            f"{cannot} {p.dtype} (must be float32, float64, bfloat16 or float16; a "
            "complex parameter can be kept as torch.view_as_real of it)"
        )
    if p.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{cannot} on the device {p.device} (must be cpu or cuda; a module on meta "
            "has no numbers before to_empty() and its initialisation)"
        )
    if p.is_neg():
        raise ValueError(f"{cannot} a negative view (take resolve_neg() of it)")
    repeats = p.numel() > 0 and _C.may_repeat(p.shape, p.stride())
    if repeats and _C.find_overlap([_memory_of(p)]) is not None:
        raise ValueError(
            f"{cannot} an expanded parameter (several elements share memory): shape "
            f"{list(p.shape)}, strides {list(p.stride())}"
        )
    check_chains(whole, context.groups[0].get("num_chains"))


def check_chains(p: Tensor, num_chains: int | None) -> None:
    """Raises if a parameter does not have num_chains rows."""
    if num_chains is not None and dtensor.is_dtensor(p):
        raise ValueError(
            f"Invalid num_chains: {num_chains} (a DTensor belongs to one chain)"
        )
    if num_chains is not None and (p.dim() == 0 or p.shape[0] != num_chains):
        raise ValueError(
            f"Invalid parameter: shape {list(p.shape)} (must have a leading dimension "
            f"of num_chains = {num_chains})"
        )


def check_memory(context: StepContext) -> None:
    """Raises if parameters, each without repetitions, overlap each other."""
    places, memories = [], []
    for i, group in enumerate(context.groups):
        for j, p in enumerate(dtensor.locals_of(group["params"])):
            if p.numel() > 0 and not isinstance(p, FakeTensor):
                places.append((i, j))
                memories.append(_memory_of(p))
    shared = _C.find_overlap(memories)
    if shared is not None:
        first, second = (
            "number {1} of group {0}".format(*place)
            for place in sorted(places[index] for index in shared)
        )
        raise ValueError(
            f"Invalid parameters: {first} and {second} overlap in memory (each "
            "must have its own)"
        )


def _memory_of(p: Tensor) -> tuple[str, int, int, Sequence[int], Sequence[int]]:
    return str(p.device), p.data_ptr(), p.element_size(), p.shape, p.stride()


def check_fits(context: StepContext, work: list[TensorLists]) -> None:
    """Raises if an operator would refuse a parameter, its gradient or its state.

    An operator that refuses changes nothing. Before the first of several operators, all
    refusals must be known.
    """
    states = context.state
    for group, params, grads, _ in work:
        device = params[0].device  # a list has one device
        on_cpu = device.type == "cpu"
        if not on_cpu:
            _check_device(context, group, device)
        for p, grad in zip(params, grads, strict=True):
            shape, dtype = p.shape, p.dtype
            # (The fastest comparison of devices.)
            if (
                grad.dtype is not dtype
                or grad.shape != shape
                or not (grad.is_cpu if on_cpu else grad.device == device)
            ):
                raise _unlike_gradient(context, p, grad)
            if not p.is_contiguous() or dtype not in DTYPES:
                _check_parameter(context, p)
            wanted = torch.float64 if dtype is torch.float64 else torch.float32
            state = states.get(p)
            for key, value in state.items() if state else ():
                if (
                    isinstance(value, Tensor)
                    and key != STEP
                    and (
                        value.shape != shape
                        or value.dtype is not wanted
                        or value.layout is not torch.strided
                        or not (value.is_cpu if on_cpu else value.device == device)
                    )
                ):
                    raise _unlike_state(context, p, key, value)


def _check_parameter(context: StepContext, p: Tensor) -> None:
    try:
        check_parameter(context, p)
    except ValueError as error:  # it was valid before
        raise RuntimeError(str(error)) from error


def _unlike_gradient(context: StepContext, p: Tensor, grad: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{context.name} got a gradient of {grad.dtype} and shape "
        f"{list(grad.shape)} on {grad.device} for a parameter of {p.dtype} and shape "
        f"{list(p.shape)} on {p.device} (must be equal)"
    )


def _unlike_state(
    context: StepContext, p: Tensor, key: str, value: Tensor
) -> RuntimeError:
    return RuntimeError(
        f"{context.name} has a {key} of {value.dtype}, shape "
        f"{list(value.shape)} and layout {value.layout} on {value.device} for "
        f"parameter {name_of(context.groups, p)} (must be of {state_dtype(p)}, "
        f"{list(p.shape)} and torch.strided on {p.device}): was the parameter "
        "replaced, or moved?"
    )


def _check_device(
    context: StepContext, group: Mapping[str, Any], device: torch.device
) -> None:
    name, step = context.name, context.rng.step
    if device.type != "cuda":
        raise RuntimeError(
            f"{name} got a parameter on the device {device} (must be cpu or cuda)"
        )
    if group["capturable"] and step.device != device:
        raise RuntimeError(
            f"{name} counts its steps on {step.device}, and has a parameter "
            f"on {device} (with capturable=True all parameters must lie on one device)"
        )


def unlike_sizes(context: StepContext, group: dict[str, Any]) -> RuntimeError:
    """Returns the error for parameters whose sizes differ from their offsets'."""
    params, sizes = group["params"], group[SIZES]
    at = next(i for i, g in enumerate(context.groups) if g["params"] is params)
    if len(params) != len(sizes):
        what = f"group {at} has {len(params)} parameters; it had {len(sizes)}"
    else:
        now = map(context.numel, params)
        i, new, old = next(
            (i, new, old)
            for i, (new, old) in enumerate(zip(now, sizes, strict=True))
            if new != old
        )
        what = f"parameter {i} of group {at} has {new} elements; it had {old}"
    return RuntimeError(
        f"{context.name}: {what} when noise offsets were assigned: call "
        "reassign_noise_offsets() after parameters have grown, shrunk or been replaced "
        "(add_param_group adds further ones)"
    )


def check_sizes(context: StepContext) -> None:
    """Raises if a parameter's size differs from its noise offsets'."""
    for group in context.groups:
        if [context.numel(p) for p in group["params"]] != group[SIZES]:
            raise unlike_sizes(context, group)


def reassign_noise_offsets(context: StepContext) -> bool:
    """Reassigns offsets; returns whether one has changed. See :class:`Sampler`."""
    params = context.params
    if len({id(p) for p in params}) < len(params):
        raise ValueError("Invalid parameters: one is listed twice")
    for p in params:
        check_parameter(context, p)
        for key, value in context.state.get(p, {}).items():
            if isinstance(value, Tensor) and key != STEP and value.shape != p.shape:
                raise ValueError(
                    f"Invalid state: {key} of shape {list(value.shape)} for a "
                    f"parameter of shape {list(p.shape)} (put one of its shape into "
                    f"state[p][{key!r}], or delete it to restart it)"
                )
    check_memory(context)
    for group in context.groups:
        check_means(context.state, group["params"])
    sizes = [[context.numel(p) for p in group["params"]] for group in context.groups]
    changed = context.rng.reassign_noise_offsets(sizes)
    known = set(params)
    for p in [p for p in context.state if isinstance(p, Tensor) and p not in known]:
        del context.state[p]
        changed = True
    return changed


def check_cuda(sampler: str, group: dict[str, Any]) -> None:
    """Raises if the sampler cannot update parameters on a GPU now."""
    if not HAS_CUDA:
        raise RuntimeError(
            f"{sampler} got parameters on a CUDA device, but torch_sgmcmc was built "
            "without CUDA kernels: reinstall it with TORCH_SGMCMC_CUDA=1"
        )
    refuse_capture(sampler, group)


def refuse_capture(sampler: str, group: dict[str, Any]) -> None:
    """Raises during the capture of a CUDA graph, unless the sampler is capturable.

    The graph would freeze a step counter on the host, and every replay would inject the
    same noise.
    """
    if not group["capturable"] and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{sampler} cannot be captured in a CUDA graph: construct it with "
            "capturable=True"
        )


_ADDRESS = methodcaller("data_ptr")


def refuse_scaler(
    sampler: Optimizer,
    name: str | None = None,
    scaled: str = "the gradients of the closure",
    otherwise: str = "",
) -> None:
    """Raises if ``torch.amp.GradScaler.step`` has called, and clears its marks."""
    if hasattr(sampler, "grad_scale"):
        for mark in ("grad_scale", "found_inf"):
            delattr(sampler, mark)
        raise RuntimeError(
            f"{name or type(sampler).__name__} cannot be used with GradScaler, which "
            f"scales {scaled}: use torch.autocast with bfloat16, which needs no scaler"
            f"{otherwise}"
        )


def by_lightning(closure: Any) -> bool:
    """Returns whether Lightning's ``optimizer.step(closure)`` wraps this closure."""
    return (
        isinstance(closure, partial)
        and len(closure.args) == 3
        and getattr(closure.func, "__name__", "") == "_wrap_closure"
    )


def lightning_module(closure: Any) -> Any:
    """Returns the LightningModule that made the closure automatically, or None.

    Such a closure calls ``training_step`` with the same batch each time.
    """
    if by_lightning(closure):
        module, _, made = closure.args
        if type(made).__module__.endswith(".loops.optimization.automatic"):
            return module
    return None


def refuse_accumulation(sampler: Optimizer, closure: Any) -> None:
    """Raises if Lightning accumulates gradients, which the sampler clears."""
    module = lightning_module(closure)
    parts = 1 if module is None else module.trainer.accumulate_grad_batches
    if parts != 1:
        raise RuntimeError(
            f"{type(sampler).__name__} cannot be used with Lightning's "
            f"accumulate_grad_batches={parts}: it has gradients cleared before each "
            f"call of the closure, which leaves one loss of {parts}, divided by "
            f"{parts}. Use larger batches, or manual optimization "
            "(self.automatic_optimization = False) and a closure that accumulates "
            "within a call"
        )


# Note [Autocast around a loop]
# torch.autocast keeps the casts of parameters until its outermost context ends, and
# does not see that they change. So its cache is cleared after each step, and wherever
# else parameters change before a model is evaluated.


def fresh_gradients(sampler: Optimizer, closure: Callable[[], Any]) -> Any:
    """Clears gradients, calls the closure and returns its loss."""
    torch.clear_autocast_cache()
    for group in sampler.param_groups:
        for p in group["params"]:
            p.grad = None
    # Does the work of enable_grad() in a third of its time.
    enabled = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(True)
        return closure()
    finally:
        torch._C._set_grad_enabled(enabled)


def same_parameters(first: list[TensorLists], second: list[TensorLists]) -> bool:
    """Returns whether the same parameters have gradients."""
    return len(first) == len(second) and all(
        a.params is b.params
        or (len(a.params) == len(b.params) and all(map(is_, a.params, b.params)))
        for a, b in zip(first, second, strict=True)
    )


OTHER_PARAMETERS = (
    "EWSG got gradients of other parameters from the closure than at its first call in "
    "this step: minibatches could not be compared"
)


def check_comparable(
    current: list[TensorLists], proposed: list[TensorLists], placement: Replicated
) -> None:
    """Raises if minibatches' gradients share memory."""
    for a, b in zip(current, proposed, strict=True):
        old, new = (map(_ADDRESS, placement.local(work.grads)) for work in (a, b))
        # Empty tensors have no address.
        if any(one and one == other for one, other in zip(old, new, strict=True)):
            raise RuntimeError(
                "EWSG got the gradients of a minibatch in the memory of the previous "
                "minibatch's, which it still needs: the closure must not reuse "
                "gradients (for DistributedDataParallel, set "
                "gradient_as_bucket_view=False)"
            )


@contextmanager
def exchanged(params: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Replaces the parameters' memory within the context."""
    own = [p.data for p in params]
    try:
        for p, value in zip(params, values, strict=True):
            p.data = value
        torch.clear_autocast_cache()
        yield
    finally:
        for p, data in zip(params, own, strict=True):
            p.data = data
        torch.clear_autocast_cache()


@contextmanager
def kept_gradients(params: list[Tensor]) -> Iterator[list[Tensor | None]]:
    """Restores the parameters' gradients at the end.

    Gradients may be views of memory that each backward pass writes to, such as
    DistributedDataParallel's, so that their values are restored, too. Others are not
    written: autograd may have saved them.
    """
    before = [p.grad for p in params]
    own = [
        local(g.detach()) if g is not None and g.layout is torch.strided else None
        for g in before
    ]
    values = [None if g is None else g.clone() for g in own]
    try:
        yield before
    finally:
        for p, grad, now, value in zip(params, before, own, values, strict=True):
            if now is not None and value is not None and not torch.equal(now, value):
                now.copy_(value)
            p.grad = grad


def check_model(name: str, model: object, params: Sequence[Tensor]) -> nn.Module | None:
    """Returns the model if it is None or a module that holds all parameters."""
    if model is None:
        return None
    if not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a torch.nn.Module or None")
    known = {id(p) for p in model.parameters()}
    foreign = sum(id(p) not in known for p in params)
    if foreign:
        raise ValueError(
            f"Invalid model: {foreign} of the {len(params)} parameters of {name} are "
            "not parameters of it"
        )
    return model


def are_others(known: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Returns whether there are known parameters, and these are not the same."""
    return bool(known) and [*map(id, known)] != [*map(id, params)]
