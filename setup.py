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
    TORCH_SGMCMC_DEV: 1 builds for development: each source alone, little optimised,
        with symbols. A repeated build_ext --inplace compiles what has changed.
"""

import os
import re
import subprocess
from pathlib import Path

import pybind11
import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import (
    CUDA_HOME,
    BuildExtension,
    CppExtension,
    CUDAExtension,
)

# Architectures that nvcc 12 and 13 both know, and PTX for what comes later. Code for
# 8.0 runs on 8.6 and 8.9.
DEFAULT_ARCHITECTURES = "7.5;8.0;9.0+PTX"
DEV = os.environ.get("TORCH_SGMCMC_DEV") == "1"
# Units of compilation: two processors have one each, but where headers, pybind11's,
# take most of the time.
UNITS = {"torch_sgmcmc._C": 1}
MOST_UNITS = 2
CSRC = Path("csrc")
# A tuple: torch's extensions put torch's headers into the list that they are given, and
# there is an own pybind11 among them.
INCLUDE_DIRS = (str(CSRC.resolve()),)


def flags(file: str) -> list[str]:
    """Compiler flags from a file that CMakeLists.txt reads as well."""
    lines = (CSRC / file).read_text().splitlines()
    return [f for line in lines if not line.startswith("#") for f in line.split()]


CXX_FLAGS = [*flags("cxx_flags.txt"), *(["-O1", "-g"] if DEV else ["-g0"])]
NVCC_FLAGS = flags("nvcc_flags.txt")


def sources(*patterns: str) -> list[str]:
    """Source files under csrc, in a fixed order."""
    return sorted(str(p) for pattern in patterns for p in CSRC.glob(pattern))


class Build(BuildExtension):
    """Compiles several sources as one: names are unique in a folder of csrc."""

    def build_extension(self, extension: Extension) -> None:
        """Replaces an extension's sources by files that include them."""
        folder = Path(self.build_temp).resolve() / "units" / extension.name
        folder.mkdir(parents=True, exist_ok=True)
        units = []
        most = UNITS.get(extension.name, MOST_UNITS)
        for suffix in sorted({Path(source).suffix for source in extension.sources}):
            alike = [s for s in extension.sources if Path(s).suffix == suffix]
            count = len(alike) if DEV else min(most, len(alike))
            for i in range(count):
                unit = folder / f"unit_{i}_{suffix[1:]}{suffix}"
                text = "".join(
                    f'#include "{Path(source).resolve()}"\n'
                    for source in alike[i::count]
                )
                if not unit.exists() or unit.read_text() != text:
                    unit.write_text(text)
                units.append(str(unit))
        # Without these a changed header would go unnoticed.
        extension.depends = [str(p) for p in CSRC.rglob("*") if p.is_file()]
        extension.sources = units
        super().build_extension(extension)


def wants_cuda() -> bool:
    """Whether to build the CUDA kernels."""
    switch = os.environ.get("TORCH_SGMCMC_CUDA", "")
    if switch not in ("", "0", "1"):
        raise ValueError(f"Invalid TORCH_SGMCMC_CUDA: {switch!r} (must be 0 or 1)")
    if switch == "0":
        return False
    obstacle = cuda_obstacle()
    if switch == "1" and obstacle:
        raise RuntimeError(f"TORCH_SGMCMC_CUDA=1, but {obstacle}")
    if obstacle:
        print(f"torch_sgmcmc: building without CUDA kernels: {obstacle}")
    return not obstacle


def cuda_obstacle() -> str:
    """Why the CUDA kernels cannot be built here; empty if they can."""
    if CUDA_HOME is None:
        return "no CUDA toolkit was found"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    major = nvcc_major()
    if major != torch.version.cuda.split(".")[0]:
        return f"nvcc is of CUDA {major} and torch of CUDA {torch.version.cuda}"
    return ""


def nvcc_major() -> str:
    """The first number of nvcc's release."""
    output = subprocess.check_output([f"{CUDA_HOME}/bin/nvcc", "--version"], text=True)
    match = re.search(r"release (\d+)\.", output)
    return match.group(1) if match else "unknown"


# Symbols for a debugger would be 90 % of the binaries.
STRIP = [] if DEV else ["-Wl,--strip-all"]
extensions = [
    CppExtension(
        "torch_sgmcmc._operators",
        sources("launch/*.cpp", "ops/*.cpp", "random/*.cpp"),
        include_dirs=[*INCLUDE_DIRS],
        extra_compile_args={"cxx": CXX_FLAGS},
        extra_link_args=STRIP,
        py_limited_api=True,  # no Python symbol is used
    ),
    Extension(
        "torch_sgmcmc._C",
        sources("bindings/*.cpp", "host/*.cpp", "random/*.cpp", "ops/specs.cpp"),
        include_dirs=[*INCLUDE_DIRS, pybind11.get_include()],
        extra_compile_args={"cxx": CXX_FLAGS},
        extra_link_args=STRIP,
        language="c++",
    ),
]
if wants_cuda():
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHITECTURES)
    if nvcc_major() != "12":  # whose oldest drivers could not read it
        NVCC_FLAGS.append("--compress-mode=size")
    extensions.append(
        CUDAExtension(
            "torch_sgmcmc._operators_cuda",
            sources("launch/*.cpp", "ops/specs.cpp", "ops/*.cu"),
            include_dirs=[*INCLUDE_DIRS],
            extra_compile_args={"cxx": [*CXX_FLAGS, "-DUSE_CUDA"], "nvcc": NVCC_FLAGS},
            extra_link_args=STRIP,
            py_limited_api=True,
        )
    )

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": Build.with_options(no_python_abi_suffix=True)},
)
