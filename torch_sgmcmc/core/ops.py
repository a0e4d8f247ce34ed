"""Loads the operator libraries and describes the operators to torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


# Overloads, since resolving them at every call takes time.
_OPS = torch.ops.torch_sgmcmc
sgld_step_ = _OPS.sgld_step_.default
sghmc_step_ = _OPS.sghmc_step_.default
psgld_step_ = _OPS.psgld_step_.default
psgld_frozen_step_ = _OPS.psgld_frozen_step_.default
sgnht_step_ = _OPS.sgnht_step_.default
sglrw_step_ = _OPS.sglrw_step_.default
baoa_step_ = _OPS.baoa_step_.default
mclmc_step_ = _OPS.mclmc_step_.default
mclmc_sums = _OPS.mclmc_sums.default
mclmc_turn = _OPS.mclmc_turn.default
running_mean_ = _OPS.running_mean_.default
sghmc_preconditioned_step_ = _OPS.sghmc_preconditioned_step_.default
baoa_preconditioned_step_ = _OPS.baoa_preconditioned_step_.default
gradient_variance_ = _OPS.gradient_variance_.default
control_variate_ = _OPS.control_variate_.default
gaussian_ = _OPS.gaussian_.default
square_root_ = _OPS.square_root_.default
hmc_momenta_ = _OPS.hmc_momenta_.default
hmc_leapfrog_ = _OPS.hmc_leapfrog_.default
sbps_place_ = _OPS.sbps_place_.default
sbps_reflect_ = _OPS.sbps_reflect_.default
sbps_adapt_ = _OPS.sbps_adapt_.default
sbps_precondition_ = _OPS.sbps_precondition_.default
ewsg_log_ratio = _OPS.ewsg_log_ratio.default
hmc_energy = _OPS.hmc_energy.default
sbps_reflect_sums_ = _OPS.sbps_reflect_sums_.default
sbps_precondition_sums_ = _OPS.sbps_precondition_sums_.default
sbps_line_sums = _OPS.sbps_line_sums.default
sbps_reflection_sums = _OPS.sbps_reflection_sums.default
sbps_preconditioner_sum = _OPS.sbps_preconditioner_sum.default
temperature_sums = _OPS.temperature_sums.default
sum_of_squares = _OPS.sum_of_squares.default
any_nonfinite = _OPS.any_nonfinite.default
count_nonfinite = _OPS.count_nonfinite.default
step_if_finite = _OPS.step_if_finite.default
step_or_nothing = _OPS.step_or_nothing.default
fused_step_ = _OPS.fused_step_.default
deferred_step_ = _OPS.deferred_step_.default
ewsg_step_ = _OPS.ewsg_step_.default
noise_steps_ = _OPS.noise_steps_.default
chain_product = _OPS.chain_product.default
chain_turn = _OPS.chain_turn.default
ecs_density = _OPS.ecs_density.default
ecs_estimate = _OPS.ecs_estimate.default
ecs_leapfrog_ = _OPS.ecs_leapfrog_.default
metropolis_decide = _OPS.metropolis_decide.default
select_chains_ = _OPS.select_chains_.default


# Fake kernels for torch.compile.


def _fake(operator: str) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.register_fake(f"torch_sgmcmc::{operator}")


def _nothing(*args: object, **kwargs: object) -> None:
    """The fake kernel of an in-place operator."""


def _sums(count: int) -> Callable[..., Tensor]:
    def fake(
        tensors: list[Tensor], *_: object, num_chains: int = 1, **kw: object
    ) -> Tensor:
        sizes = {-1: (), -2: (num_chains,)}.get(count, (count,))
        return tensors[0].new_empty(sizes, dtype=torch.float64)

    return fake


for _row in OP_SPECS.values():
    if _row["op"] not in ("temperature_sums", "mclmc_sums"):
        _fake(_row["op"])(_sums(_row["sums"]) if _row["sums"] else _nothing)
for _name in ("select_chains_", "noise_steps_"):
    _fake(_name)(_nothing)


@_fake("temperature_sums")
def _(grads: list[Tensor], *_: object, kind: int, **numbers: object) -> Tensor:
    count = (2, 2, 3, 3, 1, 1, 3)[kind]
    return grads[0].new_empty((len(grads), count), dtype=torch.float64)


@_fake("mclmc_sums")
def _(grads: list[Tensor], *_: object, num_chains: int, **numbers: object) -> Tensor:
    return grads[0].new_empty((len(grads), 6, num_chains), dtype=torch.float64)


@_fake("mclmc_turn")
def _(sums: Tensor, energy: Tensor, **numbers: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(energy), torch.empty_like(energy)


@_fake("chain_turn")
def _(g: Tensor, z: Tensor, u: Tensor, energy: Tensor, numbers: Tensor) -> Any:
    return torch.empty_like(energy), torch.empty_like(energy)


@_fake("count_nonfinite")
def _(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((len(tensors), 2), dtype=torch.int64)


@_fake("step_or_nothing")
def _(counts: Tensor, **steps: object) -> Tensor:
    return counts.new_empty(())


@_fake("step_if_finite")
def _(tensors: list[Tensor], **steps: object) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.int64)


@_fake("chain_product")
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], a.shape[2])


@_fake("metropolis_decide")
def _(log_ratios: Tensor, **counter: object) -> Tensor:
    return torch.empty_like(log_ratios, dtype=torch.bool)


@_fake("ecs_estimate")
def _(
    values: Tensor, theta: Tensor, *others: Tensor | None, **numbers: object
) -> tuple[Tensor, Tensor, Tensor]:
    scales, hessians = others[-2:]
    hessian_terms = values.new_empty(0)
    if scales is not None:
        hessian_terms = torch.empty_like(scales)
    elif hessians is not None:
        hessian_terms = values.new_empty(len(values), len(theta))
    return torch.empty_like(values), hessian_terms, values.new_empty(5)


@_fake("ecs_density")
def _(
    estimate: Tensor, gradient: Tensor, *_: object, **numbers: object
) -> tuple[Tensor, Tensor]:
    return estimate.new_empty(2), torch.empty_like(gradient)


@_fake("ecs_leapfrog_")
def _(x: Tensor, *_: object, **steps: object) -> Tensor:
    return torch.empty_like(x)
