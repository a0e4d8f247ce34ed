"""Prints what a report of an error needs: ``python -m torch_sgmcmc``."""

import os
import platform
from importlib.metadata import version

import torch

import torch_sgmcmc
from torch_sgmcmc import _C
from torch_sgmcmc.core.ops import HAS_CUDA

#: Dependencies whose versions matter.
PACKAGES = ("numpy", "scipy", "safetensors", "arviz-stats")
#: Variables of the environment that change what is used.
VARIABLES = ("TORCH_SGMCMC_ISA", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def describe_environment() -> dict[str, str]:
    """Returns versions, hardware and the build, by name."""
    folder = torch_sgmcmc.__path__[0]
    if HAS_CUDA:
        kernels = "loaded"
    elif os.path.exists(f"{folder}/_operators_cuda.so"):
        kernels = "built, not loaded"
    else:
        kernels = "not built"
    devices = range(torch.cuda.device_count())
    gpus = [
        f"{torch.cuda.get_device_name(i)} ({torch.cuda.get_device_capability(i)})"
        for i in devices
    ]
    return {
        "torch_sgmcmc": torch_sgmcmc.__version__,
        "folder": folder,
        "compiler": _C.compiler(),
        "CUDA kernels": kernels,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "GPUs": ", ".join(gpus) or "none",
        "instruction set": _C.isa(),
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} processors",
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "packages": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        "variables": ", ".join(
            f"{v}={os.environ[v]}" for v in VARIABLES if v in os.environ
        ),
    }


if __name__ == "__main__":
    for name, value in describe_environment().items():
        print(f"{name:16} {value}")
