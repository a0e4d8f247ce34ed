"""Options and fixtures that all tests share."""

import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

# Before torch: each of several test processes has one core, programs that tests start
# among them; and threads that wait leave it to others. Also with -n 0: a forked child
# waits for ever for OpenMP threads that its parent had.
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

#: The levels of tests, each of which includes those before it.
LEVELS = ("default", "full", "nightly")
#: Levels of the tests of whole folders, where neither a test nor its file says another.
FOLDERS = {"cpp": "full", "examples": "full", "papers": "nightly"}
#: What shows that a file is of a higher level, and that a test in it is default.
HIGHER = r"^pytestmark = \[?\s*pytest\.mark\.(full|nightly)"
DEFAULT = r"mark\.default|default=\["


def pytest_addoption(parser):
    parser.addoption(
        "--level",
        choices=LEVELS,
        default="default",
        help="which tests run: default (five minutes, the law of each sampler), full "
        "(what decides a change) or nightly (papers, long runs); each level "
        "includes those before it",
    )
    parser.addoption(
        "--only-level",
        action="store_true",
        help="run what --level adds to the level before it, and nothing else",
    )
    parser.addoption(
        "--data-root",
        default=os.environ.get("TORCH_SGMCMC_DATA"),
        help="folder with data sets as torchvision lays them out (MNIST/raw/...); "
        "default: the environment variable TORCH_SGMCMC_DATA. Tests that need data "
        "are skipped without it",
    )


def pytest_report_header(config):
    only = " alone" if config.getoption("only_level") else ""
    return f"level: {config.getoption('level')}{only} (of {', '.join(LEVELS)})"


def level_of(item):
    """Returns the level of a test.

    The closest marker counts: of the test, of its class, of its file. Of several there
    (a test's and its parameters'), the highest counts. Without a marker, the folder
    counts.
    """
    for node in reversed(item.listchain()):
        marked = [m.name for m in node.own_markers if m.name in LEVELS]
        if marked:
            return max(marked, key=LEVELS.index)
    return FOLDERS.get(item.path.parent.name, "default")


def pytest_ignore_collect(collection_path, config):
    """Leaves unread what has no test of the default level: imports take time."""
    if config.getoption("level") != "default":
        return None
    if collection_path.is_dir():
        return True if collection_path.name in FOLDERS else None
    if not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    is_higher = re.search(HIGHER, text, re.MULTILINE)
    has_default = re.search(DEFAULT, text)
    return True if is_higher and not has_default else None


def pytest_collection_modifyitems(config, items):
    """Selects the tests of the level that was asked for."""
    highest = LEVELS.index(config.getoption("level"))
    lowest = highest if config.getoption("only_level") else 0
    levels = LEVELS[lowest : highest + 1]
    left_out = [item for item in items if level_of(item) not in levels]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if level_of(item) in levels]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Limits a teardown, which may end programs of the whole session, to a minute.

    The timer of pytest-timeout, which limits test and fixtures together, is put back.
    """

    def stop(*_):
        pytest.fail(f"the teardown of {item.nodeid} took more than {TEARDOWN} s")

    handler = signal.signal(signal.SIGALRM, stop)
    former = signal.setitimer(signal.ITIMER_REAL, TEARDOWN)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *former)
        signal.signal(signal.SIGALRM, handler)


@pytest.fixture(scope="session")
def data_root(pytestconfig):
    """The folder given by --data-root; skips the test if there is none."""
    root = pytestconfig.getoption("--data-root")
    if not root:
        pytest.skip("needs data: give --data-root or set TORCH_SGMCMC_DATA")
    return Path(root)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that all test processes of this run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(folder, name, make):
    """Makes a folder's content once for all test processes."""
    made, done = folder / name, folder / f"{name}-done"
    with FileLock(folder / f"{name}-lock"):
        if not done.exists():
            make(made)
            done.touch()
    return made


@pytest.fixture(scope="session")
def cpp_package(shared_folder):
    """The prefix in which the C++ library is installed; skips without a compiler."""
    if not (cpp.CHECKOUT / "CMakeLists.txt").exists():
        pytest.skip("needs the sources beside the tests")
    if cpp.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return once(shared_folder, "package", cpp.install) / "prefix"


@pytest.fixture(scope="session")
def bare_path(shared_folder):
    """A PATH without Python and without a CUDA toolkit."""
    hidden = ("python", "pypy", "nvcc")
    return str(once(shared_folder, "path", lambda p: cpp.path_without(p, *hidden)))


@pytest.fixture(scope="session")
def consumer_program(cpp_package, bare_path, shared_folder):
    """Programs by name, built against the installed package and the torch of pip.

    They are those of tests/cpp/consumer and examples/cpp, and what documents say.
    """

    def build(name):
        if name in cpp.PROGRAMS_IN_ONE:
            link = build("programs").parent / name
            return once(link.parent, name, lambda link: link.symlink_to("programs"))
        for folder in ("tests/cpp/consumer", "examples/cpp"):
            source = cpp.CHECKOUT / folder
            if not (source / f"{name}.cpp").exists():
                continue

            def make(build, source=source):
                project = cpp.Project(source, build, bare_path)
                options = ()
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
def chain_program(consumer_program):
    """The consumer's program of chains, which does one job after another.

    It ends at the word "end" and not at the end of its input, whose pipe a forked
    process may hold; what does not end is killed.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    program = subprocess.Popen([consumer_program("chain")], **pipes)
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
def run_in_cpp(chain_program, tmp_path):
    """Does a job in C++; what is thrown there is a ValueError here."""

    def run(job):
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
def no_warnings():
    """A warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def set_threads():
    """Sets torch's number of threads, for this test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def set_default_device():
    """Sets torch's default device, as scripts do for a GPU, for this test alone."""
    yield torch.set_default_device
    torch.set_default_device(None)


@pytest.fixture
def one_thread(set_threads):
    """Matrix products may depend on the number of threads; updates do not."""
    set_threads(1)
