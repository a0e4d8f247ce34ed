"""Options and fixtures that all tests share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch: each of several test processes has one core, programs that tests start
# among them; and threads that wait leave it to others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from filelock import FileLock
from harness import cpp

# `python -m pytest` puts the checkout first on the path. Test what is installed: the
# checkout has no binaries unless the install is an editable one, which is found anyway.
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != CHECKOUT]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data-root",
        default=os.environ.get("TORCH_SGMCMC_DATA"),
        help="folder with data sets as torchvision lays them out (MNIST/raw/...); "
        "default: the environment variable TORCH_SGMCMC_DATA. Tests that need data "
        "are skipped without it",
    )


@pytest.fixture(scope="session")
def data_root(pytestconfig: pytest.Config) -> Path:
    """The folder given by --data-root; skips the test if there is none."""
    root = pytestconfig.getoption("--data-root")
    if not root:
        pytest.skip("needs data: give --data-root or set TORCH_SGMCMC_DATA")
    return Path(root)


@pytest.fixture(scope="session")
def cpp_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix in which the C++ library is installed; skips without a compiler."""
    if not (cpp.CHECKOUT / "CMakeLists.txt").exists():
        pytest.skip("needs the sources beside the tests")
    if cpp.compiler() is None:
        pytest.skip("needs a C++ compiler")
    # Built once for all test processes, whose folders are side by side.
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    work, done = base / "package", base / "package-done"
    with FileLock(base / "package-lock"):
        if not done.exists():
            work.mkdir()
            cpp.install(work)
            done.touch()
    return work / "prefix"


@pytest.fixture(scope="session")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH without Python and without a CUDA toolkit."""
    return cpp.path_without(
        tmp_path_factory.mktemp("path") / "bin", "python", "pypy", "nvcc"
    )


@pytest.fixture(scope="session")
def consumer_program(
    cpp_package: Path, bare_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Programs by name, built against the installed package and the torch of pip.

    They are those of tests/cpp/consumer and examples/cpp.
    """
    projects: dict[str, cpp.Project] = {}

    def build(name: str) -> Path:
        for folder in ("tests/cpp/consumer", "examples/cpp"):
            source = cpp.CHECKOUT / folder
            if not (source / f"{name}.cpp").exists():
                continue
            if folder not in projects:
                project = cpp.Project(
                    source, tmp_path_factory.mktemp("consumer"), bare_path
                )
                project.configure(cpp_package, torch.utils.cmake_prefix_path)
                projects[folder] = project
            return projects[folder].program(name)
        raise ValueError(f"no program is named {name}")

    return build


@pytest.fixture
def run_in_cpp(
    consumer_program: Callable[[str], Path], tmp_path: Path
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    program = consumer_program("chain")

    def run(job: dict[str, Any]) -> dict[str, Any]:
        torch.save(job, tmp_path / "job.pt")
        done = subprocess.run(
            [program, tmp_path / "job.pt", tmp_path / "result.pt"],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise ValueError(done.stderr.strip())
        return torch.load(tmp_path / "result.pt")

    return run


@pytest.fixture
def one_thread() -> Any:
    """Matrix products may depend on the number of threads; updates do not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
