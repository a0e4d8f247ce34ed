"""What a step is to update: parameters that have a gradient, in lists for operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.fit import unlike_sizes
from torch_sgmcmc.chain.group_settings import rests
from torch_sgmcmc.chain.operators import HAS_CUDA
from torch_sgmcmc.chain.record import Chain, Work

__all__ = ["check_cuda", "gather", "refuse_capture"]


def gather(chain: Chain) -> list[Work]:
    """Checks gradients and lists what is to be updated."""
    absences = chain.absences
    if absences.any:
        absences.begin()
    work: list[Work] = []
    for group in chain.groups:
        if rests(group):
            continue
        work.extend(_of_group(chain, group))
    if not work and not all(map(rests, chain.groups)):
        absences.nothing_moves()
    return work


def _of_group(chain: Chain, group: dict[str, Any]) -> list[Work]:
    """The group's parameters that have a gradient, a list for each device."""
    params: list[Tensor] = []
    grads: list[Tensor] = []
    offsets: list[int] = []
    sizes = group["sizes"]
    if chain.chains_have_seeds and group["num_chains"] is not None:
        sizes = [group["num_chains"] * size for size in sizes]
    if len(group["params"]) != len(sizes):
        raise unlike_sizes(chain, group)
    strided, on_cpu = torch.strided, True
    check_gradient = chain.placement.check_gradient
    for p, offset, size in zip(group["params"], group["offsets"], sizes, strict=True):
        if not p.requires_grad:
            continue
        if p.numel() != size:
            raise unlike_sizes(chain, group)
        grad = p.grad
        if grad is None:
            chain.absences.add(p)
            continue
        if grad.layout is not strided:
            raise RuntimeError(
                f"{chain.name} does not support sparse gradients: got one of layout "
                f"{grad.layout} for a parameter of shape {list(p.shape)} (for "
                "nn.Embedding, use sparse=False)"
            )
        check_gradient(chain.name, p, grad)
        params.append(p)
        grads.append(grad)
        offsets.append(offset)
        if not p.is_cpu:
            on_cpu = False
    if not params:
        return []
    if on_cpu:
        return [Work(group, params, grads, offsets)]
    devices = {p.device for p in params}
    if any(device.type == "cuda" for device in devices):
        check_cuda(chain.name, group)
    if len(devices) == 1:
        return [Work(group, params, grads, offsets)]
    work: dict[torch.device, Work] = {}
    for p, grad, offset in zip(params, grads, offsets, strict=True):
        lists = work.setdefault(p.device, Work(group, [], [], []))
        lists.params.append(p)
        lists.grads.append(grad)
        lists.offsets.append(offset)
    return list(work.values())


def check_cuda(sampler: str, group: dict[str, Any]) -> None:
    """Raises if the sampler of this name cannot move parameters on a GPU now."""
    if not HAS_CUDA:
        raise RuntimeError(
            f"{sampler} got parameters on a CUDA device, but torch_sgmcmc was built "
            "without CUDA kernels: reinstall it with TORCH_SGMCMC_CUDA=1"
        )
    refuse_capture(sampler, group)


def refuse_capture(sampler: str, group: dict[str, Any]) -> None:
    """Raises in the capture of a CUDA graph, if the sampler is not capturable.

    A step counter on the host would be frozen into the graph, and every replay would
    inject the same noise.
    """
    if not group["capturable"] and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{sampler} cannot be captured in a CUDA graph: construct it with "
            "capturable=True"
        )
