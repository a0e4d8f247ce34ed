"""The installed CMake package, as programs find, link and run it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from harness import cpp

import torch_sgmcmc

CONSUMER = cpp.CHECKOUT / "tests" / "cpp" / "consumer"
TORCH = Path(torch.__file__).parent


@pytest.fixture
def consumer(tmp_path, bare_path):
    return cpp.Project(CONSUMER, tmp_path / "consumer", bare_path)


def archive(folder):
    """A torch laid out as LibTorch's archive, with its CMake files to change."""
    (folder / "share").mkdir(parents=True)
    for part in ("include", "lib"):
        (folder / part).symlink_to(TORCH / part)
    shutil.copytree(TORCH / "share" / "cmake", folder / "share" / "cmake")
    return folder


def check_line(program):
    """The program's figures are those of the posterior that it prints first."""
    lines = cpp.run(program).splitlines()
    assert re.fullmatch(r"on (cpu|cuda:\d) +slope +intercept", lines[0])
    names, figures = [], []
    for line in lines[1:]:
        name, *words = line.split()
        names.append(name)
        figures.append([float(w) for w in words if w != "+-"])
    assert names == ["exact", "SGLD", "SGHMC"]
    exact, *samplers = figures
    assert len(exact) == 4
    for sampled in samplers:
        # The slope's standard deviation is 0.24, and SGLD has 90 effective draws of
        # it: a tenth is four standard errors.
        assert sampled == pytest.approx(exact, abs=0.1)


def check_loaded(program, cuda_kernels):
    has_cuda = torch.version.cuda is not None
    assert cpp.run(program).splitlines() == [
        "operators: true",
        f"torch with CUDA: {str(has_cuda).lower()}",
        f"operators with CUDA: {str(has_cuda and cuda_kernels).lower()}",
    ]


def test_its_version_is_python_s(cpp_package):
    (targets,) = cpp_package.rglob("TorchSGMCMCTargets.cmake")
    macro = f'TORCH_SGMCMC_VERSION=\\"{torch_sgmcmc.__version__}\\"'
    assert macro in targets.read_text()


@pytest.fixture(scope="module")
def line_object(consumer_program):
    (line,) = consumer_program("line").parent.rglob("programs.dir/**/*.o")
    return f"-DLINE_OBJECT={line}"


@pytest.fixture(scope="module")
def of_archive(cpp_package, bare_path, line_object, tmp_path_factory):
    """Compiles the short program with LibTorch's archive."""
    folder = tmp_path_factory.mktemp("archive")
    project = cpp.Project(CONSUMER, folder / "consumer", bare_path)
    project.configure(cpp_package, archive(folder / "libtorch"), options=(line_object,))
    return project


@pytest.fixture(scope="module")
def objects(line_object, of_archive):
    """Options for projects whose linking is in question: programs are compiled once."""
    (loaded,) = of_archive.program("loaded").parent.rglob("loaded.dir/**/*.o")
    return line_object, f"-DLOADED_OBJECT={loaded}"


@pytest.fixture
def has_cuda_kernels(cpp_package):
    return any(cpp_package.glob("lib*/libtorch_sgmcmc_operators_cuda.so"))


def test_the_path_of_consumers_has_no_python_and_no_toolkit(bare_path):
    for name in ("python", "python3", "nvcc"):
        assert shutil.which(name, path=bare_path) is None
    assert shutil.which(Path(cpp.compiler() or "").name, path=bare_path)


def test_torch_of_pip(
    cpp_package, consumer_program, consumer, objects, has_cuda_kernels
):
    check_line(consumer_program("line"))
    prefix = torch.utils.cmake_prefix_path
    consumer.configure(cpp_package, prefix, options=objects)
    check_loaded(consumer.program("loaded"), has_cuda_kernels)


def test_torch_of_the_archive(of_archive, has_cuda_kernels):
    check_line(of_archive.program("line"))
    check_loaded(of_archive.program("loaded"), has_cuda_kernels)


def project_of(folder, line):
    project = folder / "project"
    project.mkdir()
    head = "cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\n"
    (project / "CMakeLists.txt").write_text(f"{head}{line}\n")
    return project


def test_beside_the_package_of_torch(
    cpp_package, consumer, objects, tmp_path, has_cuda_kernels
):
    # Where torch's own package does not work, nobody can use it beside this one.
    alone = project_of(tmp_path, "find_package(Torch REQUIRED)")
    options = ("-DTORCH_CUDA_ARCH_LIST=8.0",)
    prefix = torch.utils.cmake_prefix_path
    try:
        project = cpp.Project(alone, alone / "build", cpp.PROGRAMS)
        project.configure(prefix, options=options)
    except AssertionError as error:
        pytest.skip(f"find_package(Torch) fails here: {str(error)[-500:]}")
    consumer.path = cpp.PROGRAMS
    options = (*options, "-DWITH_TORCH_PACKAGE=ON", *objects)
    consumer.configure(cpp_package, prefix, options=options)
    check_line(consumer.program("line"))
    check_loaded(consumer.program("loaded"), has_cuda_kernels)


def test_another_place(cpp_package, consumer, objects, tmp_path, has_cuda_kernels):
    moved = tmp_path / "moved"
    shutil.copytree(cpp_package, moved, symlinks=True)
    for file in moved.rglob("*.cmake"):
        assert str(cpp_package) not in file.read_text(), file
        assert str(cpp.CHECKOUT) not in file.read_text(), file
    prefix = torch.utils.cmake_prefix_path
    consumer.configure(moved, prefix, options=objects)
    program = consumer.program("loaded")
    check_loaded(program, has_cuda_kernels)
    loaded = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    ours = [line for line in loaded.splitlines() if "torch_sgmcmc" in line]
    assert ours and all(str(moved) in line for line in ours)


def test_headers_equal_those_of_the_source(cpp_package):
    def headers(root):
        return {p.name: p.read_text() for p in (root / "torch_sgmcmc").iterdir()}

    installed = headers(cpp_package / "include")
    assert installed == headers(cpp.CHECKOUT / "csrc" / "include")
    assert {"torch_sgmcmc.h", "sgld.h", "sghmc.h"} <= installed.keys()


def refusal(consumer, *prefixes):
    with pytest.raises(AssertionError) as error:
        consumer.configure(*prefixes)
    return " ".join(str(error.value).split())  # CMake wraps its messages


def test_a_torch_of_another_version_is_refused(cpp_package, consumer, tmp_path):
    major, minor = torch.__version__.split(".")[:2]
    another = f"{major}.{int(minor) + 1}.0"
    other = archive(tmp_path / "libtorch")
    file = other / "share" / "cmake" / "Torch" / "TorchConfigVersion.cmake"
    version = r'(?<=PACKAGE_VERSION ")\d+\.\d+\.\d+'
    text, changes = re.subn(version, another, file.read_text())
    assert changes == 1
    file.write_text(text)
    assert (
        f"This TorchSGMCMC was built with torch {major}.{minor}, and {other} is torch "
        f"{another}. Build TorchSGMCMC with that torch, or set "
        f"CMAKE_PREFIX_PATH to one of version {major}.{minor}."
    ) in refusal(consumer, cpp_package, other)


def test_a_missing_torch_is_named(cpp_package, consumer):
    assert (
        "LibTorch was not found. Set CMAKE_PREFIX_PATH to a LibTorch directory, or to "
        "what Python says is torch.utils.cmake_prefix_path."
    ) in refusal(consumer, cpp_package)


def test_a_component_is_refused(cpp_package, consumer, tmp_path):
    line = "find_package(TorchSGMCMC CONFIG REQUIRED COMPONENTS samplers)"
    consumer.source = project_of(tmp_path, line)
    found = refusal(consumer, cpp_package, torch.utils.cmake_prefix_path)
    assert "has no component samplers, nor any other. Leave COMPONENTS out." in found


def test_a_parent_project_keeps_its_settings(tmp_path):
    """Build type and kind of libraries; a list in the environment is read."""
    project = project_of(tmp_path, f"add_subdirectory({cpp.CHECKOUT} sampling)")
    prefixes = f"{tmp_path / 'nothing'};{torch.utils.cmake_prefix_path}"
    done = subprocess.run(
        [
            cpp.tool("cmake"),
            "-S",
            project,
            "-B",
            tmp_path / "build",
            "-DBUILD_SHARED_LIBS=OFF",
            "-DTORCH_SGMCMC_CUDA=OFF",
        ],
        env=os.environ | {"CMAKE_PREFIX_PATH": prefixes},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "BUILD_SHARED_LIBS=OFF has no effect on torch_sgmcmc" in done.stderr
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert re.search(r"^CMAKE_BUILD_TYPE:STRING=$", cache, re.MULTILINE)


@pytest.mark.nightly
def test_sources_within_another_project(consumer):
    """Builds with FetchContent, which adds the checkout as a subdirectory."""
    options = (f"-DTORCH_SGMCMC_SOURCES={cpp.CHECKOUT}", "-DTORCH_SGMCMC_CUDA=OFF")
    consumer.configure(torch.utils.cmake_prefix_path, options=options)
    check_line(consumer.program("line"))
    assert not [*consumer.build.rglob("*_test")]  # tests are not built there
