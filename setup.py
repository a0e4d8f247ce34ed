"""Builds the operator libraries and the host-side module.

Three shared objects, all beside the Python files:

* ``_operators.so``: the operators on the CPU, on torch's stable ABI.
* ``_operators_cuda.so``: their CUDA kernels, where a CUDA toolkit is found.
* ``_C``: host-side algorithms without any torch type, bound by pybind11.

Environment variables:
    TORCH_SGMCMC_CUDA: 1 builds the CUDA kernels or fails, 0 leaves them out;
        unset, they are built if nvcc is found (CUDA_HOME, then PATH).
    TORCH_CUDA_ARCH_LIST: GPU architectures, as for every torch extension.
    MAX_JOBS: number of parallel compilations.
"""

import os
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from torch.utils.cpp_extension import (
    CUDA_HOME,
    BuildExtension,
    CppExtension,
    CUDAExtension,
)

# Architectures that nvcc 12 and 13 both know, and PTX for what comes later.
DEFAULT_ARCHITECTURES = "7.5;8.0;8.6;8.9;9.0+PTX"
# The oldest torch whose stable ABI is used: 2.11.
TARGET_VERSION = "0x020b000000000000"

INCLUDE_DIRS = [str(Path(__file__).parent.resolve() / "csrc")]
# No contraction: fused operations are spelled out, so that every instruction
# set gives the same bits.
CXX_FLAGS = [
    "-O3",
    "-std=c++20",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    # gcc 12 warns about its own <immintrin.h>.
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-pragmas",
    f"-DTORCH_TARGET_VERSION={TARGET_VERSION}",
]
NVCC_FLAGS = [
    "-O3",
    "-std=c++20",
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "-DUSE_CUDA",
    f"-DTORCH_TARGET_VERSION={TARGET_VERSION}",
    "-Xcompiler",
    "-fvisibility=hidden",
]


def sources(*patterns: str) -> list[str]:
    """Source files under csrc, in a fixed order."""
    return sorted(str(p) for pattern in patterns for p in Path("csrc").glob(pattern))


def wants_cuda() -> bool:
    """Whether to build the CUDA kernels."""
    switch = os.environ.get("TORCH_SGMCMC_CUDA", "")
    if switch not in ("", "0", "1"):
        raise ValueError(f"Invalid TORCH_SGMCMC_CUDA: {switch!r} (must be 0 or 1)")
    if switch == "1" and CUDA_HOME is None:
        raise RuntimeError("TORCH_SGMCMC_CUDA=1, but no CUDA toolkit was found")
    return switch != "0" and CUDA_HOME is not None


extensions = [
    CppExtension(
        "torch_sgmcmc._operators",
        sources("*.cpp", "apply/*.cpp", "core/*.cpp", "samplers/*.cpp"),
        include_dirs=INCLUDE_DIRS,
        extra_compile_args={"cxx": CXX_FLAGS},
        py_limited_api=True,  # no Python symbol is used
    ),
    Extension(
        "torch_sgmcmc._C",
        sources("python/*.cpp", "host/*.cpp", "core/*.cpp"),
        include_dirs=[*INCLUDE_DIRS, pybind11.get_include()],
        extra_compile_args={"cxx": CXX_FLAGS},
        language="c++",
    ),
]
if wants_cuda():
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHITECTURES)
    extensions.append(
        CUDAExtension(
            "torch_sgmcmc._operators_cuda",
            sources("apply/*.cpp", "samplers/*.cu"),
            include_dirs=INCLUDE_DIRS,
            extra_compile_args={"cxx": [*CXX_FLAGS, "-DUSE_CUDA"], "nvcc": NVCC_FLAGS},
            py_limited_api=True,
        )
    )

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
