"""Checkpoints of the C++ example: as tests/faults/test_checkpoints.py has it in Python.

What becomes of damaged files is tested in tests/cpp/state_dict_test.cpp, bit by bit.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import cpp
from harness.examples import run_example
from stored_files import files

pytestmark = pytest.mark.full

METHODS = ("sgd", "sgdm", "sgld", "sghmc")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits, unpacked."""
    datasets = Path(importlib.import_module("sklearn.datasets").__file__ or "").parent
    csv = tmp_path_factory.mktemp("digits") / "digits.csv"
    packed = (datasets / "data" / "digits.csv.gz").read_bytes()
    csv.write_bytes(gzip.decompress(packed))
    return csv


@pytest.fixture(scope="module")
def run(consumer_program: Callable[[str], Path], digits: Path) -> Run:
    """The example, on the digits."""
    program = consumer_program("mnist_bnn")
    common = ["--digits", digits, "--threads", "1", "--seeds", "1", "--burn-in", "1"]

    def run(out: Path, *options: object, **more: object) -> subprocess.CompletedProcess:
        command = [program, *common, "--out", out, *options]
        return subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            **{"env": os.environ | {"OMP_NUM_THREADS": "1"}} | more,
        )

    return run


def results(out: Path) -> list[dict]:
    return json.loads((out / "results.json").read_text())["runs"]


def assert_same_runs(ours: list[dict], theirs: list[dict]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for key in ("config", "digest", "samples", "history"):
            assert one[key] == other[key]
        assert one["config"]["batch_size"] == 100


def test_the_digits_are_pythons(run: Run, tmp_path: Path, one_thread: None) -> None:
    """Four methods, half of them begun in one language and continued in the other."""
    cpp, to_python, to_cpp = (tmp_path / name for name in ("cpp", "python", "again"))
    store, half = "sghmc-seed0", ("--method", "sgdm", "sghmc")
    options = ["--digits", "--threads", 1, "--seeds", 1, "--burn-in", 1]
    in_python = partial(run_example, "sghmc2014.mnist", *options, "--epochs")
    assert run(cpp, "--epochs", 3).returncode == 0
    ours = results(cpp)
    assert [r["config"]["method"] for r in ours] == list(METHODS)

    # Draws of a run that was killed before its first checkpoint.
    shutil.copytree(cpp / store, to_python / store)
    assert run(to_python, "--epochs", 2, *half).returncode == 0
    in_python(3, "--out", to_python)
    assert_same_runs(ours, results(to_python))

    in_python(2, "--out", to_cpp, *half)
    done = run(to_cpp, "--epochs", 3, *half)
    assert done.returncode == 0, done.stderr
    assert re.match(r"sgdm-seed0: epoch [23] of 3, ", done.stderr)  # not anew
    expected = [r for r in ours if r["config"]["method"] in half]
    assert_same_runs(expected, results(to_cpp))
    assert files(to_python / store) == files(to_cpp / store) == files(cpp / store)


def test_digits_that_are_not_there(run: Run, digits: Path, tmp_path: Path) -> None:
    text = digits.read_text()
    for content, count in (
        ("", 0),
        (text[: text.index("\n")], 65),
        (text.replace("16", "17"), None),
    ):
        csv = tmp_path / "digits.csv"
        csv.write_text(content)
        done = run(tmp_path / "out", "--digits", csv)
        assert done.returncode == 1
        message = f"mnist_bnn: error: No digits in --digits {csv}: it has "
        assert done.stderr.startswith(message + ("" if count is None else f"{count} "))
        assert done.stderr.endswith(
            "integers in [0, 16], expected 116805 (unpack scikit-learn's "
            "datasets/data/digits.csv.gz)\n"
        )
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "libwrite_shim.so"
    source = Path(__file__).parent / "write_shim.cpp"
    compiler = cpp.compiler()
    assert compiler
    cpp.run(compiler, "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl")
    return library


def test_the_file_is_synced_before_it_is_renamed_and_the_folder_after(
    run: Run, shim: Path, tmp_path: Path
) -> None:
    """And a failure of any of these calls leaves the older checkpoint."""
    sgd = ("--method", "sgd", "--epochs")
    out, log = tmp_path / "out", tmp_path / "log"
    assert run(out, *sgd, 2).returncode == 0
    path = out / "sgd-seed0.pt"
    older = path.read_bytes()
    unfinished = f"{path}.unfinished"
    written = [f"write {unfinished}", f"fsync {unfinished}", f"rename {unfinished}"]
    written += [f"fsync {out}"]
    environment = os.environ | {"LD_PRELOAD": str(shim), "SHIM_LOG": str(log)}
    for fails_at in (1, 2, 3):
        failing = environment | {"SHIM_FAIL": str(fails_at)}
        done = run(out, *sgd, 3, env=failing)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            f"mnist_bnn: error: Cannot write {path}: No space left on device"
        )
        assert log.read_text().splitlines() == written[:fails_at]
        assert path.read_bytes() == older
        assert sorted(p.name for p in out.glob("*.pt*")) == [path.name]
        log.unlink()
    assert run(out, *sgd, 4, env=environment).returncode == 0
    assert log.read_text().splitlines() == written * 2


def test_a_file_that_may_not_grow(run: Run, tmp_path: Path) -> None:
    """And a full disk, where one can be mounted."""
    sgd = ("--method", "sgd", "--epochs")
    assert run(tmp_path, *sgd, 2).returncode == 0
    path = tmp_path / "sgd-seed0.pt"
    older = path.read_bytes()

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    done = run(tmp_path, *sgd, 3, preexec_fn=limit)
    assert done.returncode == 1
    error = f"mnist_bnn: error: Cannot write {path}: "
    assert done.stderr.splitlines()[-1] == f"{error}File too large"
    assert path.read_bytes() == older

    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={len(older) * 3 // 2}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        return
    try:
        shutil.copy(path, disk)
        done = run(disk, *sgd, 3)
        assert done.returncode == 1
        error = f"mnist_bnn: error: Cannot write {disk / path.name}: "
        assert done.stderr.splitlines()[-1] == f"{error}No space left on device"
        assert (disk / path.name).read_bytes() == older
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_is_another_runs(run: Run, tmp_path: Path) -> None:
    checkpoint = importlib.import_module("reproduce.checkpoint")
    with checkpoint.owned(tmp_path):  # a run in Python
        done = run(tmp_path, "--method", "sgd", "--epochs", 2)
    assert done.returncode == 1
    assert done.stderr == (
        f"mnist_bnn: error: Another run writes to {tmp_path}.\n"
        "Wait until it ends or choose another --out.\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    # A file where the folder should be.
    done = run(tmp_path / ".lock", "--method", "sgd", "--epochs", 2)
    assert done.returncode == 1
    assert done.stderr == (
        f"mnist_bnn: error: Cannot write {tmp_path}/.lock/.lock: Not a directory\n"
    )


def test_a_checkpoint_of_another_run_or_sampler(run: Run, tmp_path: Path) -> None:
    sampled = ("--epochs", 2, "--method", "sgld", "sghmc")
    assert run(tmp_path, *sampled).returncode == 0
    (tmp_path / "results.json").unlink()
    path = tmp_path / "sghmc-seed0.pt"
    ours, other = torch.load(path), torch.load(tmp_path / "sgld-seed0.pt")

    def refused(state: object) -> str:
        torch.save(state, path)
        before = path.read_bytes()
        done = run(tmp_path, "--epochs", 3, "--method", "sgd", "sghmc")
        assert done.returncode == 1
        assert path.read_bytes() == before
        assert not (tmp_path / "results.json").exists()
        # It was found before the first run began.
        assert not (tmp_path / "sgd-seed0.pt").exists()
        return done.stderr.removeprefix("mnist_bnn: error: ")

    end = "\nDelete it or choose another --out.\n"
    fits = f"{path} does not fit: "
    config = ours["config"] | {"method": "sgld"}
    assert f"{path} holds a run with other settings:\n" in refused(
        ours | {"config": config}
    )
    assert refused({"a": 1}) == (
        f"{fits}Invalid state dict: it has no key 'config'{end}"
    )
    text = refused(ours | {"optimizer": other["optimizer"]})
    assert text.startswith(fits) and "not one of SGHMC" in text and text.endswith(end)
    text = refused(ours | {"model": ours["model"] | {"0.weight": torch.zeros(100, 3)}})
    assert text == (
        f"{fits}Invalid state dict: 0.weight has shape [100, 3], expected [100, 64]"
        f"{end}"
    )
    text = refused(ours | {"history": 3})
    assert text.startswith(fits) and text.endswith(end)


def test_a_read_only_folder(run: Run, tmp_path: Path) -> None:
    """Found at the start of a run, not at the end of its first epoch."""
    folder = tmp_path / "folder"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
        reason = "Permission denied"
    else:  # which may write into that
        with_rights = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(with_rights).returncode:
            pytest.skip("needs a user other than root, or the right to mount")
        reason = "Read-only file system"
    try:
        done = run(folder, "--method", "sgd", "--epochs", 2)
    finally:
        if os.geteuid():
            folder.chmod(0o755)
        else:
            subprocess.run(["umount", str(folder)], check=True)
    assert done.returncode == 1
    assert done.stderr == (f"mnist_bnn: error: Cannot write {folder}/.lock: {reason}\n")
