"""Checkpoints that a C++ program writes, as test_checkpoints.py has it in Python.

The program is examples/cpp/resumable.cpp. What becomes of damaged files is tested in
tests/cpp/state_dict_test.cpp, bit by bit.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import cpp

pytestmark = pytest.mark.full

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(consumer_program):
    program = consumer_program("resumable")

    def run(out, steps, **more):
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        options = {"env": env, "capture_output": True, "text": True} | more
        return subprocess.run([program, out, str(steps)], **options)

    return run


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    library = tmp_path_factory.mktemp("shim") / "libwrite_shim.so"
    source = Path(__file__).parent / "write_shim.cpp"
    compiler = cpp.compiler()
    assert compiler
    cpp.run(compiler, "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl")
    return library


def calls_in(log):
    return re.sub(r"\.\d+-\d+\.partial", ".partial", log.read_text()).splitlines()


def test_the_file_is_synced_before_it_is_renamed_and_the_folder_after(
    run, shim, tmp_path
):
    """And a failure of any of these calls leaves the older checkpoint."""
    out, log = tmp_path / "out", tmp_path / "log"
    assert run(out, 100).returncode == 0
    path = out / "chain.pt"
    older = path.read_bytes()
    partial = f"{path}.partial"  # between these the process and a number
    written = [f"write {partial}", f"fsync {partial}", f"rename {partial}"]
    written += [f"fsync {out}"]
    environment = os.environ | {"LD_PRELOAD": str(shim), "SHIM_LOG": str(log)}
    for fails_at in (1, 2, 3):
        failing = environment | {"SHIM_FAIL": str(fails_at)}
        done = run(out, 200, env=failing)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            f"Cannot write {path}: No space left on device"
        )
        assert calls_in(log) == written[:fails_at]
        assert path.read_bytes() == older
        assert sorted(p.name for p in out.glob("*.pt*")) == [path.name]
        log.unlink()
    assert run(out, 200, env=environment).returncode == 0
    assert calls_in(log) == written


def test_a_file_that_may_not_grow(run, tmp_path):
    """And a full disk, where one can be mounted."""
    run(tmp_path, 100)
    path = tmp_path / "chain.pt"
    older = path.read_bytes()

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    done = run(tmp_path, 200, preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"Cannot write {path}: File too large"
    assert path.read_bytes() == older

    disk = tmp_path / "disk"
    disk.mkdir()
    pages = sum(
        -(-p.stat().st_size // 4096) for p in tmp_path.rglob("*") if p.is_file()
    )
    size = f"size={4096 * pages + len(older) // 2}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        return
    try:
        shutil.copytree(tmp_path, disk, dirs_exist_ok=True, ignore=lambda *_: ["disk"])
        done = run(disk, 200)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            f"Cannot write {disk / path.name}: No space left on device"
        )
        assert (disk / path.name).read_bytes() == older
    finally:
        subprocess.run(["umount", str(disk)], check=True)
