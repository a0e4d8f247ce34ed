"""Stores on full disks and in folders that are not ours to write."""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from children import outcome, start
from stored_files import contents
from test_checkpoints import small_disk, unprivileged
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.draws import store as writers

__all__ = ["small_disk"]


def make(folder, inputs=10):
    torch.manual_seed(0)
    model = nn.Linear(inputs, 20)
    sampler = sg.SGLD(model.parameters(), 0.1, num_data=10, seed=1)
    return model, sampler, sg.Collector(sampler, model, folder)


def step(model, sampler):
    for p in model.parameters():
        p.grad = p.detach().clone()
    sampler.step()


SAFE = (
    r"^Cannot write (.*): (.*)\. chain 0 of .* has (\d+) draws; (\d+) more wait in "
    r"memory, and the next step or close\(\) tries again$"
)


def go_on_after_errors(folder, steps, room, inputs=10):
    """Steps; at an error makes room and steps again. What was written to, and why."""
    model, sampler, collector = make(folder, inputs)
    errors = []
    while sampler.param_groups[0]["step"] < steps:
        before = [p.detach().clone() for p in model.parameters()]
        made = int(sampler.param_groups[0]["step"])
        try:
            step(model, sampler)
        except RuntimeError as error:
            found = re.match(SAFE, str(error))
            assert found, error
            path, reason, safe, waiting = found.groups()
            errors.append(f"{Path(path).name.split('-')[0]}: {reason}")
            assert int(safe) + int(waiting) == made
            store = sg.SampleStore(folder)
            assert len(store.intact()) == int(safe)
            assert sampler.param_groups[0]["step"] == made
            for p, value in zip(model.parameters(), before, strict=True):
                assert torch.equal(p, value)
            room()
    collector.close()
    return errors


def unbroken(folder, steps, inputs=10):
    """Returns the content of a run's store."""
    model, sampler, collector = make(folder, inputs)
    for _ in range(steps):
        step(model, sampler)
    collector.close()
    return contents(folder)


@pytest.fixture
def draws_at_once(monkeypatch):
    """A file for each draw."""
    monkeypatch.setattr(writers, "_DRAWS", 1)


@pytest.mark.usefixtures("draws_at_once")
def test_a_full_disk(small_disk, tmp_path):
    """A disk of 64 KiB: a few blocks are free, and a draw takes four."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes(24 << 10))

    def room():
        filler.write_bytes(b"")

    errors = go_on_after_errors(small_disk / "store", 9, room)
    assert {error.split(": ")[1] for error in errors} == {"No space left on device"}
    assert len(errors) == 1
    assert contents(small_disk / "store") == unbroken(tmp_path / "unbroken", 9)


# The first limit stops a file of draws, the second an index.
@pytest.mark.parametrize(
    ("steps", "limit", "name"), [(30, 1000, "draws"), (30, 3000, "index.jsonl")]
)
@pytest.mark.usefixtures("draws_at_once")
def test_files_that_may_not_grow(tmp_path, steps, limit, name):
    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        def room():
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))

        return ", ".join(go_on_after_errors(tmp_path / "store", steps, room))

    assert outcome(run) == f"{name}: File too large"
    assert contents(tmp_path / "store") == unbroken(tmp_path / "unbroken", steps)


@pytest.mark.parametrize("limit", [0, 1, 4096, 1 << 20, 2_000_000])
def test_a_large_draw_that_does_not_fit(tmp_path, limit):
    """However much was written, the next try is the whole draw."""
    one = {"weights": torch.randn(1 << 19)}

    def run():
        writer = sg.SampleWriter(tmp_path, one)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer.append(one, step=1)
        with pytest.raises(RuntimeError, match=r"^Cannot write .*File too large"):
            writer.flush()
        assert not [*tmp_path.rglob("*.safetensors*")]
        assert len(sg.SampleStore(tmp_path)) == 0 and len(writer._rows) == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        writer.close()
        (stored,) = sg.SampleStore(tmp_path).intact()
        return str(torch.equal(stored["weights"], one["weights"]))

    assert outcome(run) == "True"


@pytest.mark.usefixtures("draws_at_once")
def test_a_failed_close_loses_no_draw(small_disk):
    model, sampler, collector = make(small_disk / "store", inputs=100)
    step(model, sampler)
    collector.flush()
    with open(small_disk / "filler", "wb", 0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    step(model, sampler)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=SAFE):
            collector.close()
    assert [draw.step for draw in sg.SampleStore(small_disk / "store").intact()] == [1]
    with pytest.raises(RuntimeError, match=SAFE):
        step(model, sampler)
    (small_disk / "filler").unlink()
    step(model, sampler)
    collector.close()
    store = sg.SampleStore(small_disk / "store")
    assert [draw.step for draw in store.intact()] == [1, 2, 3]


def test_an_error_on_a_full_disk_releases_the_chain(small_disk):
    model, sampler, collector = make(small_disk / "store", inputs=100)
    with pytest.raises(RuntimeError, match=SAFE), collector:
        with open(small_disk / "filler", "wb", 0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(4096))
        step(model, sampler)
        raise KeyboardInterrupt
    (small_disk / "filler").unlink()
    make(small_disk / "store", inputs=100)[2].close()


@pytest.fixture
def read_only():
    """A store into which nobody but root can write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, sampler, collector = make(folder / "store")
        step(model, sampler)
        collector.close()
        places = [folder, folder / "store", folder / "store" / "chain-0"]
        for place in places:
            place.chmod(0o555)
        for file in places[-1].iterdir():
            file.chmod(0o444)
        yield folder
        for place in places:
            place.chmod(0o755)


def test_a_read_only_folder(read_only):
    """It is found when the collector is made, and reading needs no right to write."""
    for name, place in (("store", "chain-0/lock"), ("other", "")):
        found = outcome(unprivileged(lambda name=name: make(read_only / name)))
        path = read_only / name / place
        assert found == f"RuntimeError: Cannot write {path}: Permission denied"
    read = outcome(unprivileged(lambda: str(len(sg.SampleStore(read_only / "store")))))
    assert read == "1"


def test_a_second_writer_is_refused(tmp_path):
    def hold():
        kept = make(tmp_path)  # what is let go of has no lock
        (tmp_path / "held").touch()
        time.sleep(60)
        return str(len(kept))

    child, reader = start(hold)
    try:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        words = f"^Cannot write to chain 0 of {tmp_path}: process {child} writes to it$"
        with pytest.raises(RuntimeError, match=words):
            make(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
    _, _, collector = make(tmp_path)  # whose writer was killed
    with pytest.raises(RuntimeError, match=r": this process writes to it already$"):
        make(tmp_path)
    # Neither that attempt nor a child's end gives the lock away.
    assert outcome(lambda: None) == ""
    found = outcome(lambda: make(tmp_path) and None)
    assert found is not None and "writes to it" in found
    collector.close()
    make(tmp_path)[2].close()


FORGETFUL = """
import sys, torch, torch_sgmcmc as sg
model = torch.nn.Linear(10, 20)
sampler = sg.SGLD(model.parameters(), 0.1, num_data=10, seed=1)
collector = sg.Collector(sampler, model, sys.argv[1])
for _ in range(30):
    for p in model.parameters():
        p.grad = p.detach().clone()
    sampler.step()
"""


@pytest.mark.full
def test_a_program_that_does_not_close(tmp_path):
    command = [sys.executable, "-c", FORGETFUL, "store"]
    subprocess.run(command, check=True, cwd=tmp_path)  # there are no sources
    assert len(sg.SampleStore(tmp_path / "store").intact()) == 30
