"""Loads the operator libraries and describes the operators to torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_sgmcmc import _C

_HERE = Path(__file__).parent.parent
_CUDA_LIBRARY = _HERE / "_operators_cuda.so"


def _load() -> bool:
    """Loads the libraries that this torch can use; returns True with CUDA."""
    torch.ops.load_library(_HERE / "_operators.so")
    if torch.version.cuda is None or not _CUDA_LIBRARY.exists():
        return False
    try:
        torch.ops.load_library(_CUDA_LIBRARY)
    except OSError as error:
        # Built for another major version of CUDA than this torch: the CPU works.
        warnings.warn(
            f"torch_sgmcmc's CUDA kernels could not be loaded ({error}); samplers "
            f"work on the CPU only. Reinstall torch_sgmcmc beside this torch (CUDA "
            f"{torch.version.cuda}).",
            stacklevel=2,
        )
        return False
    return True


HAS_CUDA: bool = _load()

#: Specs of the operators on lists of tensors, csrc/ops/registry.h.
OP_SPECS: dict[str, dict[str, Any]] = {spec["op"]: spec for spec in _C.op_specs()}


# Without types: mypy takes a return type of a module's __getattr__ for unknown.
def __getattr__(name):  # type: ignore[no-untyped-def]
    """Returns an operator's overload, kept here: resolving one takes time."""
    operator = globals()[name] = getattr(torch.ops.torch_sgmcmc, name).default
    return operator


def _nothing_to_allocate(*args: object, **kwargs: object) -> None:
    """The fake kernel of an in-place operator, for torch.compile."""


def _sums(count: int) -> Callable[..., torch.Tensor]:
    def fake(
        tensors: list[torch.Tensor], *args: object, num_chains: int = 1, **kw: object
    ) -> torch.Tensor:
        sizes = {-1: (), -2: (num_chains,)}.get(count, (count,))
        return tensors[0].new_empty(sizes, dtype=torch.float64)

    return fake


for _row in OP_SPECS.values():
    if _row["op"] not in ("temperature_sums", "mclmc_sums"):
        torch.library.register_fake(
            f"torch_sgmcmc::{_row['op']}",
            _sums(_row["sums"]) if _row["sums"] else _nothing_to_allocate,
        )
for _name in ("select_chains_", "noise_steps_"):
    torch.library.register_fake(f"torch_sgmcmc::{_name}", _nothing_to_allocate)


@torch.library.register_fake("torch_sgmcmc::temperature_sums")
def _(
    grads: list[torch.Tensor], *args: object, kind: int, **numbers: object
) -> torch.Tensor:
    count = (2, 2, 3, 3, 1, 1, 3)[kind]
    return grads[0].new_empty((len(grads), count), dtype=torch.float64)


@torch.library.register_fake("torch_sgmcmc::mclmc_sums")
def _(grads: list[torch.Tensor], *args: object, num_chains: int, **kw: object) -> Any:
    return grads[0].new_empty((len(grads), 6, num_chains), dtype=torch.float64)


@torch.library.register_fake("torch_sgmcmc::mclmc_turn")
def _(sums: torch.Tensor, energy: torch.Tensor, **numbers: object) -> Any:
    return torch.empty_like(energy), torch.empty_like(energy)


@torch.library.register_fake("torch_sgmcmc::chain_turn")
def _(g: object, z: object, u: object, energy: torch.Tensor, numbers: object) -> Any:
    return torch.empty_like(energy), torch.empty_like(energy)


@torch.library.register_fake("torch_sgmcmc::count_nonfinite")
def _(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].new_empty((len(tensors), 2), dtype=torch.int64)


@torch.library.register_fake("torch_sgmcmc::step_or_nothing")
def _(
    counts: torch.Tensor, *, step: int, device_step: torch.Tensor | None = None
) -> torch.Tensor:
    return counts.new_empty(())


@torch.library.register_fake("torch_sgmcmc::step_if_finite")
def _(
    tensors: list[torch.Tensor], *, step: int, device_step: torch.Tensor | None = None
) -> torch.Tensor:
    return tensors[0].new_empty((), dtype=torch.int64)


@torch.library.register_fake("torch_sgmcmc::chain_product")
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], a.shape[2])


@torch.library.register_fake("torch_sgmcmc::metropolis_decide")
def _(log_ratios: torch.Tensor, **counter: object) -> torch.Tensor:
    return torch.empty_like(log_ratios, dtype=torch.bool)


@torch.library.register_fake("torch_sgmcmc::ecs_estimate")
def _(
    values: torch.Tensor,
    theta: torch.Tensor,
    anchor: torch.Tensor,
    expansions: torch.Tensor,
    gradients: torch.Tensor,
    scales: torch.Tensor | None,
    hessians: torch.Tensor | None,
    **sizes: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hessian_terms = values.new_empty(0)
    if scales is not None:
        hessian_terms = torch.empty_like(scales)
    elif hessians is not None:
        hessian_terms = values.new_empty(len(values), len(theta))
    return torch.empty_like(values), hessian_terms, values.new_empty(5)


@torch.library.register_fake("torch_sgmcmc::ecs_density")
def _(
    estimate: torch.Tensor, gradient: torch.Tensor, *args: object, **numbers: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return estimate.new_empty(2), torch.empty_like(gradient)


@torch.library.register_fake("torch_sgmcmc::ecs_leapfrog_")
def _(x: torch.Tensor, *args: object, **steps: object) -> torch.Tensor:
    return torch.empty_like(x)
