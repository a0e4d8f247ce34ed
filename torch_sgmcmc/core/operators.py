"""Loads the operator libraries and describes the operators to torch.compile."""

import warnings
from pathlib import Path

import torch

__all__ = [
    "HAS_CUDA",
    "any_nonfinite",
    "control_variate_",
    "count_nonfinite",
    "ecs_density",
    "ecs_estimate",
    "ecs_leapfrog_",
    "ewsg_log_ratio",
    "gauge_sums",
    "gaussian_",
    "gradient_variance_",
    "hmc_energy",
    "hmc_leapfrog_",
    "hmc_momenta_",
    "metropolis_decide",
    "psgld_frozen_step_",
    "psgld_step_",
    "sbps_adapt_",
    "sbps_line_sums",
    "sbps_place_",
    "sbps_precondition_",
    "sbps_precondition_sums_",
    "sbps_preconditioner_sum",
    "sbps_reflect_",
    "sbps_reflect_sums_",
    "sbps_reflection_sums",
    "select_chains_",
    "sghmc_by_coordinate_step_",
    "sghmc_step_",
    "sgld_step_",
    "sgnht_step_",
    "step_or_nothing",
    "sum_of_squares",
]

_HERE = Path(__file__).parent.parent
_CUDA_LIBRARY = _HERE / "_operators_cuda.so"


def _load() -> bool:
    """Loads what was built and this torch can use; returns whether CUDA was."""
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

# The overloads themselves: resolving them at every call would take time.
any_nonfinite = torch.ops.torch_sgmcmc.any_nonfinite.default
control_variate_ = torch.ops.torch_sgmcmc.control_variate_.default
count_nonfinite = torch.ops.torch_sgmcmc.count_nonfinite.default
ecs_density = torch.ops.torch_sgmcmc.ecs_density.default
ecs_estimate = torch.ops.torch_sgmcmc.ecs_estimate.default
ecs_leapfrog_ = torch.ops.torch_sgmcmc.ecs_leapfrog_.default
ewsg_log_ratio = torch.ops.torch_sgmcmc.ewsg_log_ratio.default
gauge_sums = torch.ops.torch_sgmcmc.gauge_sums.default
gaussian_ = torch.ops.torch_sgmcmc.gaussian_.default
gradient_variance_ = torch.ops.torch_sgmcmc.gradient_variance_.default
hmc_energy = torch.ops.torch_sgmcmc.hmc_energy.default
hmc_leapfrog_ = torch.ops.torch_sgmcmc.hmc_leapfrog_.default
hmc_momenta_ = torch.ops.torch_sgmcmc.hmc_momenta_.default
metropolis_decide = torch.ops.torch_sgmcmc.metropolis_decide.default
psgld_frozen_step_ = torch.ops.torch_sgmcmc.psgld_frozen_step_.default
psgld_step_ = torch.ops.torch_sgmcmc.psgld_step_.default
sbps_adapt_ = torch.ops.torch_sgmcmc.sbps_adapt_.default
sbps_line_sums = torch.ops.torch_sgmcmc.sbps_line_sums.default
sbps_place_ = torch.ops.torch_sgmcmc.sbps_place_.default
sbps_precondition_ = torch.ops.torch_sgmcmc.sbps_precondition_.default
sbps_precondition_sums_ = torch.ops.torch_sgmcmc.sbps_precondition_sums_.default
sbps_preconditioner_sum = torch.ops.torch_sgmcmc.sbps_preconditioner_sum.default
sbps_reflect_ = torch.ops.torch_sgmcmc.sbps_reflect_.default
sbps_reflect_sums_ = torch.ops.torch_sgmcmc.sbps_reflect_sums_.default
sbps_reflection_sums = torch.ops.torch_sgmcmc.sbps_reflection_sums.default
select_chains_ = torch.ops.torch_sgmcmc.select_chains_.default
sghmc_by_coordinate_step_ = torch.ops.torch_sgmcmc.sghmc_by_coordinate_step_.default
sghmc_step_ = torch.ops.torch_sgmcmc.sghmc_step_.default
sgld_step_ = torch.ops.torch_sgmcmc.sgld_step_.default
sgnht_step_ = torch.ops.torch_sgmcmc.sgnht_step_.default
step_or_nothing = torch.ops.torch_sgmcmc.step_or_nothing.default
sum_of_squares = torch.ops.torch_sgmcmc.sum_of_squares.default


def _nothing_to_allocate(*args: object, **kwargs: object) -> None:
    """What torch.compile needs to know of an operator that works in place."""


for _name in (
    "control_variate_",
    "gaussian_",
    "gradient_variance_",
    "hmc_leapfrog_",
    "hmc_momenta_",
    "psgld_frozen_step_",
    "psgld_step_",
    "sbps_adapt_",
    "sbps_place_",
    "sbps_precondition_",
    "sbps_reflect_",
    "select_chains_",
    "sghmc_by_coordinate_step_",
    "sghmc_step_",
    "sgld_step_",
    "sgnht_step_",
):
    torch.library.register_fake(f"torch_sgmcmc::{_name}", _nothing_to_allocate)


@torch.library.register_fake("torch_sgmcmc::sum_of_squares")
def _(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].new_empty((), dtype=torch.float64)


@torch.library.register_fake("torch_sgmcmc::gauge_sums")
def _(
    grads: list[torch.Tensor], *args: object, kind: int, **numbers: object
) -> torch.Tensor:
    count = (2, 2, 3, 3, 1, 1)[kind]
    return grads[0].new_empty((len(grads), count), dtype=torch.float64)


@torch.library.register_fake("torch_sgmcmc::count_nonfinite")
def _(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].new_empty((len(tensors), 2), dtype=torch.int64)


@torch.library.register_fake("torch_sgmcmc::step_or_nothing")
def _(
    counts: torch.Tensor, *, step: int, device_step: torch.Tensor | None = None
) -> torch.Tensor:
    return counts.new_empty(())


@torch.library.register_fake("torch_sgmcmc::ewsg_log_ratio")
def _(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    proposals: list[torch.Tensor],
    momenta: list[torch.Tensor],
    *,
    num_chains: int,
    **hyperparameters: object,
) -> torch.Tensor:
    return params[0].new_empty((num_chains,), dtype=torch.float64)


@torch.library.register_fake("torch_sgmcmc::metropolis_decide")
def _(log_ratios: torch.Tensor, **counter: object) -> torch.Tensor:
    return torch.empty_like(log_ratios, dtype=torch.bool)


@torch.library.register_fake("torch_sgmcmc::hmc_energy")
def _(
    params: list[torch.Tensor],
    momenta: list[torch.Tensor],
    masses: list[torch.Tensor],
    *,
    num_chains: int,
    **prior: object,
) -> torch.Tensor:
    return params[0].new_empty((num_chains,), dtype=torch.float64)


def _sums(tensors: list[torch.Tensor], count: int) -> torch.Tensor:
    return tensors[0].new_empty((count,), dtype=torch.float64)


@torch.library.register_fake("torch_sgmcmc::sbps_reflect_sums_")
def _(params: list[torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
    return _sums(params, 2)


@torch.library.register_fake("torch_sgmcmc::sbps_precondition_sums_")
def _(
    square_averages: list[torch.Tensor], *args: object, **kwargs: object
) -> torch.Tensor:
    return _sums(square_averages, 2)


@torch.library.register_fake("torch_sgmcmc::sbps_line_sums")
def _(
    origins: list[torch.Tensor], directions: list[torch.Tensor], **prior: object
) -> torch.Tensor:
    return _sums(origins, 2)


@torch.library.register_fake("torch_sgmcmc::sbps_reflection_sums")
def _(params: list[torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
    return _sums(params, 3)


@torch.library.register_fake("torch_sgmcmc::sbps_preconditioner_sum")
def _(square_averages: list[torch.Tensor], **kwargs: object) -> torch.Tensor:
    return _sums(square_averages, 1)


@torch.library.register_fake("torch_sgmcmc::ecs_estimate")
def _(
    values: torch.Tensor,
    theta: torch.Tensor,
    anchor: torch.Tensor,
    expansions: torch.Tensor,
    slopes: torch.Tensor,
    scales: torch.Tensor | None,
    hessians: torch.Tensor | None,
    **sizes: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bends = values.new_empty(0)
    if scales is not None:
        bends = torch.empty_like(scales)
    elif hessians is not None:
        bends = values.new_empty(len(values), len(theta))
    return torch.empty_like(values), bends, values.new_empty(5)


@torch.library.register_fake("torch_sgmcmc::ecs_density")
def _(
    estimate: torch.Tensor, pull: torch.Tensor, *args: object, **numbers: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return estimate.new_empty(2), torch.empty_like(pull)


@torch.library.register_fake("torch_sgmcmc::ecs_leapfrog_")
def _(x: torch.Tensor, *args: object, **steps: object) -> torch.Tensor:
    return torch.empty_like(x)
