"""Checkpoints: on the disk and whole; of the examples also the run's own."""

import copy
import gc
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from errno import ENOSPC
from functools import partial
from pathlib import Path

import pytest
import torch
from children import outcome, start
from harness.examples import run_example
from reproduce import checkpoint

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

NOBODY = 65534


def content(seed, size=5000):
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(size, generator=generator), "b": {"c": [1, 2.5, "d"]}}


def same(one, other):
    return torch.equal(one["a"], other["a"]) and one["b"] == other["b"]


@pytest.fixture
def path(tmp_path):
    """A file with an older checkpoint, content(0)."""
    path = tmp_path / "run.pt"
    sg.save(content(0), path)
    return path


def test_the_file_is_synced_before_it_is_renamed_and_the_folder_after(
    path, monkeypatch
):
    done = []
    fsync, replace = os.fsync, os.replace

    def syncs(file):
        name = os.readlink(f"/proc/self/fd/{file}")
        if name.endswith(".partial"):  # all of it, none left in Python's own buffer
            assert same(torch.load(name), content(1))
            assert same(torch.load(path), content(0))
        done.append(("fsync", name))
        fsync(file)

    def replaces(old, new):
        done.append(("replace", str(old), str(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", replaces)
    sg.save(content(1), path)
    partial = done[0][1]
    assert partial.startswith(f"{path}.{os.getpid()}-")
    replaced = ("replace", partial, str(path))
    assert done == [("fsync", partial), replaced, ("fsync", str(path.parent))]
    assert same(sg.load(path), content(1))


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_leaves_the_older_checkpoint(path, monkeypatch, name):
    def fails(*arguments):
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        with pytest.raises(RuntimeError) as error:
            sg.save(content(1), path)
    assert str(error.value) == f"Cannot write {path}: No space left on device"
    assert same(sg.load(path), content(0))
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_may_not_grow(path):
    def save():
        # Python ignores the signal that would otherwise end the process.
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        sg.save(content(1), path)

    assert outcome(save) == f"RuntimeError: Cannot write {path}: File too large"
    assert same(sg.load(path), content(0))
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; skips where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    can_mount = shutil.which("mount")
    if not can_mount or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield disk
    gc.collect()  # files that are mapped by tensors in a traceback
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk):
    path = small_disk / "run.pt"
    sg.save(content(0), path)
    with pytest.raises(RuntimeError) as error:
        sg.save(content(1, 20_000), path)
    assert str(error.value) == f"Cannot write {path}: No space left on device"
    assert same(sg.load(path), content(0))
    assert list(small_disk.iterdir()) == [path]
    sg.save(content(1), path)  # there is room for as much as before
    assert same(sg.load(path), content(1))


@pytest.fixture
def read_only():
    """A folder with a checkpoint into which nobody but root can write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sg.save(content(0), folder / "run.pt")
        (folder / "run.pt").chmod(0o444)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


def unprivileged(call):
    """The call without the rights of root, if it has them: for a child."""

    def calls():
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return call()

    return calls


def test_a_read_only_folder(read_only):
    path = read_only / "run.pt"
    saved = outcome(unprivileged(lambda: sg.save(content(1), path)))
    assert saved == f"RuntimeError: Cannot write {path}: Permission denied"
    # It is found at the start of a run, not at the end of its first epoch.
    owned = outcome(unprivileged(lambda: checkpoint.owned(read_only).__enter__()))
    assert owned == f"SystemExit: Cannot write {read_only}/.lock: Permission denied"
    assert same(sg.load(path), content(0))
    assert list(read_only.iterdir()) == [path]


def refusal(path):
    """Returns why a file cannot be read; None if it can."""
    try:
        sg.load(path)
    except RuntimeError as error:
        text = str(error)
        assert text.startswith(f"Cannot read {path}: ")
        assert len(text) > len(f"Cannot read {path}: ")
        return text
    return None


def test_a_truncated_checkpoint(path):
    whole = path.read_bytes()
    lengths = {round(i * (len(whole) - 1) / 199) for i in range(200)}
    assert len(lengths) == 200
    for length in lengths:
        path.write_bytes(whole[:length])
        assert refusal(path), length
        assert path.read_bytes() == whole[:length]
    path.write_bytes(whole)
    assert refusal(path) is None


def test_a_flipped_bit_is_noticed_or_means_nothing(path):
    """Every 11th bit of a small file, or with TORCH_SGMCMC_FAULTS=full every one."""
    every = 1 if os.environ.get("TORCH_SGMCMC_FAULTS") == "full" else 11
    sg.save(content(2, 10), path)
    whole = path.read_bytes()
    noticed = 0
    for bit in range(0, 8 * len(whole), every):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if refusal(path) is None:
            # In what fills the space between parts.
            assert same(sg.load(path), content(2, 10)), bit
        else:
            noticed += 1
    assert noticed > 8 * len(whole) // every // 2


@pytest.mark.default
def test_a_flipped_bit_of_a_number(path):
    """torch.load itself does not notice it."""
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert not same(torch.load(path), content(0))
    assert refusal(path) == f"Cannot read {path}: archive/data/0 is damaged"


def test_a_checkpoint_that_is_not_there_or_no_archive(tmp_path):
    path = tmp_path / "run.pt"
    assert refusal(path) == f"Cannot read {path}: No such file or directory"
    path.write_text("text")
    assert refusal(path) == f"Cannot read {path}: File is not a zip file"


RUN = ("--digits", "--threads", "1", "--seeds", "1", "--epochs", "2", "--burn-in", "1")


example = partial(run_example, "sghmc2014.mnist", *RUN, "--out")


def test_a_checkpoint_of_another_run_or_sampler(tmp_path):
    example(tmp_path, "--method", "sgld", "sghmc")
    (tmp_path / "results.json").unlink()
    paths = {m: tmp_path / f"{m}-seed0.pt" for m in ("sgd", "sgld", "sghmc")}
    path, ours = paths["sghmc"], sg.load(paths["sghmc"])
    other = sg.load(paths["sgld"])

    def refused(state):
        sg.save(state, path)
        before = path.read_bytes()
        with pytest.raises(SystemExit) as error:
            example(tmp_path, "--method", "sgd", "sghmc", "--epochs", "3")
        assert path.read_bytes() == before
        assert not (tmp_path / "results.json").exists()
        *text, end = str(error.value).split("\n")
        assert end == "Delete it or choose another --out."
        return "\n".join(text)

    for state in ([1], {"a": 1}, {"config": 3}):
        assert refused(state) == f"{path} holds no run."
    wanted = ours["config"] | {"epochs": 3}
    for changes in (other["config"], {"seed": 1}, {"batch_size": 7}, {"dataset": "x"}):
        config = ours["config"] | changes
        text = f"{path} holds a run with other settings:\n  {config}\nnot\n  {wanted}"
        assert refused(ours | {"config": config}) == text
    # All of these are found before the first run begins.
    assert not paths["sgd"].exists()

    fits = f"{path} does not fit: "
    other_images = f"{fits}predictions for  images, not for labelled"
    assert refused(ours | {"predictions": {}}) == other_images
    for key in ("model", "optimizer", "precision", "predictions"):
        assert refused({k: v for k, v in ours.items() if k != key}) == f"{fits}'{key}'"
    assert "must be of SGHMC" in refused(ours | {"optimizer": other["optimizer"]})
    narrow = copy.deepcopy(ours)
    narrow["model"]["0.weight"] = torch.zeros(100, 3)
    assert "size mismatch for 0.weight" in refused(narrow)
    sg.save(ours, path)
    example(tmp_path, "--method", "sghmc", "--epochs", "3")


def test_a_folder_is_one_runs(tmp_path):
    message = f"Another run writes to {tmp_path}."
    message = f"{message}\nWait until it ends or choose another --out."
    with checkpoint.owned(tmp_path):
        for options in (("--method", "sgd"), ("--method", "sgd", "--tune")):
            with pytest.raises(SystemExit) as error:
                example(tmp_path, *options)
            assert str(error.value) == message
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]
        with checkpoint.owned(tmp_path / "another"):
            pass
    example(tmp_path, "--method", "sgd")
    example(tmp_path, "--method", "sgd", "--epochs", "3")  # its own is continued


def test_a_killed_run_leaves_its_folder(tmp_path):
    held = tmp_path / "held"

    def hold():
        with checkpoint.owned(tmp_path):
            held.touch()
            signal.pause()

    child, reader = start(hold)
    while not held.exists():
        time.sleep(0.001)
    with pytest.raises(SystemExit, match="Another run writes to"):
        checkpoint.owned(tmp_path).__enter__()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    with checkpoint.owned(tmp_path):
        pass
