"""Options and fixtures that all tests share."""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
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


# What a script begins in the background ignores Ctrl-C, and so would all that tests
# begin.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Seconds that a teardown may take.
TEARDOWN = 60

#: Markers of tests that take their time.
LONG = ("slow", "cpp", "examples")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data-root",
        default=os.environ.get("TORCH_SGMCMC_DATA"),
        help="folder with data sets as torchvision lays them out (MNIST/raw/...); "
        "default: the environment variable TORCH_SGMCMC_DATA. Tests that need data "
        "are skipped without it",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Marks as quick what daily work needs: no long tests, and no sampled laws.

    And leaves out what takes minutes, unless it is asked for by its marker.
    """
    for item in items:
        sampled = item.path.parent.name == "laws"
        if not sampled and not any(map(item.get_closest_marker, LONG)):
            item.add_marker("quick")
    if "exhaustive" not in config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Limits a teardown, which may end programs of the whole session, to a minute.

    The timer of pytest-timeout, which limits test and fixtures together, is put back.
    """

    def stop(*_: object) -> None:
        pytest.fail(f"the teardown of {item.nodeid} took more than {TEARDOWN} s")

    handler = signal.signal(signal.SIGALRM, stop)
    former = signal.setitimer(signal.ITIMER_REAL, TEARDOWN)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *former)
        signal.signal(signal.SIGALRM, handler)


@pytest.fixture(scope="session")
def data_root(pytestconfig: pytest.Config) -> Path:
    """The folder given by --data-root; skips the test if there is none."""
    root = pytestconfig.getoption("--data-root")
    if not root:
        pytest.skip("needs data: give --data-root or set TORCH_SGMCMC_DATA")
    return Path(root)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes of this run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """What is made once for all test processes, in a folder that may not exist yet."""
    made, done = folder / name, folder / f"{name}-done"
    with FileLock(folder / f"{name}-lock"):
        if not done.exists():
            make(made)
            done.touch()
    return made


@pytest.fixture(scope="session")
def cpp_package(shared_folder: Path) -> Path:
    """The prefix in which the C++ library is installed; skips without a compiler."""
    if not (cpp.CHECKOUT / "CMakeLists.txt").exists():
        pytest.skip("needs the sources beside the tests")
    if cpp.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return once(shared_folder, "package", cpp.install) / "prefix"


@pytest.fixture(scope="session")
def bare_path(shared_folder: Path) -> str:
    """A PATH without Python and without a CUDA toolkit."""
    hidden = ("python", "pypy", "nvcc")
    return str(once(shared_folder, "path", lambda p: cpp.path_without(p, *hidden)))


@pytest.fixture(scope="session")
def consumer_program(
    cpp_package: Path, bare_path: str, shared_folder: Path
) -> Callable[[str], Path]:
    """Programs by name, built against the installed package and the torch of pip.

    They are those of tests/cpp/consumer and examples/cpp, and what documents say.
    """

    def build(name: str) -> Path:
        if name in cpp.PROGRAMS_IN_ONE:
            link = build("programs").parent / name
            return once(link.parent, name, lambda link: link.symlink_to("programs"))
        for folder in ("tests/cpp/consumer", "examples/cpp"):
            source = cpp.CHECKOUT / folder
            if not (source / f"{name}.cpp").exists():
                continue

            def make(build: Path, source: Path = source) -> None:
                project = cpp.Project(source, build, bare_path)
                options: tuple[str, ...] = ()
                if name == "programs":
                    documents = shared_folder / "documents.cpp"
                    documents.write_text(cpp.documents())
                    options = (f"-DDOCUMENTS={documents}",)
                project.configure(
                    cpp_package, torch.utils.cmake_prefix_path, options=options
                )
                project.program(name)

            return once(shared_folder, f"program-{name}", make) / name
        raise ValueError(f"no program is named {name}")

    return build


@pytest.fixture(scope="session")
def chain_program(
    consumer_program: Callable[[str], Path],
) -> Iterator[subprocess.Popen[str]]:
    """The consumer's program of chains, which does one job after another.

    It ends at the word "end" and not at the end of its input, whose pipe a forked
    process may hold; what does not end is killed.
    """
    program = subprocess.Popen(
        [consumer_program("chain")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin and program.stdout
    try:
        yield program
        if program.poll() is None:
            program.stdin.write("end\n")
            program.stdin.flush()
        program.wait(timeout=30)
    finally:
        program.kill()
        program.wait()
        program.stdin.close()
        program.stdout.close()


@pytest.fixture
def run_in_cpp(
    chain_program: subprocess.Popen[str], tmp_path: Path
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Does a job in C++; what is thrown there is a ValueError here."""

    def run(job: dict[str, Any]) -> dict[str, Any]:
        torch.save(job, tmp_path / "job.pt")
        assert chain_program.stdin and chain_program.stdout
        names = f"{tmp_path / 'job.pt'}\n{tmp_path / 'result.pt'}\n"
        chain_program.stdin.write(names)
        chain_program.stdin.flush()
        answer = chain_program.stdout.readline()
        assert answer == "done\n", f"the program ended: {chain_program.wait()}"
        result = torch.load(tmp_path / "result.pt")
        if "error" in result:
            raise ValueError(result["error"].strip())
        return result

    return run


@pytest.fixture
def no_warnings() -> Iterator[None]:
    """A warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, for this test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(set_threads: Callable[[int], None]) -> None:
    """Matrix products may depend on the number of threads; updates do not."""
    set_threads(1)
