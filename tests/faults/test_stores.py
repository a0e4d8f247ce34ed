"""Stores on full disks and in folders that are not ours to write."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from children import outcome, start
from test_checkpoints import small_disk, unprivileged
from torch import nn

import torch_sgmcmc as sg

__all__ = ["small_disk"]


def make(
    folder: Path, every: int = 1, inputs: int = 10
) -> tuple[nn.Linear, sg.SGLD, sg.Collector]:
    torch.manual_seed(0)
    model = nn.Linear(inputs, 20)
    sampler = sg.SGLD(model.parameters(), 0.1, num_data=10, seed=1)
    return model, sampler, sg.Collector(sampler, model, folder, every=every)


def step(model: nn.Linear, sampler: sg.SGLD) -> None:
    for p in model.parameters():
        p.grad = p.detach().clone()
    sampler.step()


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / "chain-0").iterdir()}


def unbroken(folder: Path, steps: int, inputs: int = 10) -> dict[str, bytes]:
    """The store of a run."""
    model, sampler, collector = make(folder, inputs=inputs)
    for _ in range(steps):
        step(model, sampler)
    collector.close()
    return files(folder)


SAFE = (
    r"^Cannot write (.*): (.*)\. (\d+) draws of chain 0 of .*, up to step (\d+), are "
    r"safe; ([123]) more wait in memory, and the next step tries again$"
)


def go_on_after_errors(
    folder: Path, steps: int, room: object, inputs: int = 10
) -> list[str]:
    """Steps; at an error makes room and steps again. What was written to, and why."""
    model, sampler, collector = make(folder, inputs=inputs)
    errors = []
    while sampler.param_groups[0]["step"] < steps:
        before = [p.detach().clone() for p in model.parameters()]
        made = sampler.param_groups[0]["step"]
        try:
            step(model, sampler)
        except RuntimeError as error:
            found = re.match(SAFE, str(error))
            assert found, error
            path, reason, safe, last, waiting = found.groups()
            errors.append(f"{Path(path).suffix or Path(path).name}: {reason}")
            assert safe == last and int(safe) + int(waiting) >= made
            store = sg.SampleStore(folder)
            assert len(store.intact()) == int(safe)
            assert sampler.param_groups[0]["step"] == made
            for p, value in zip(model.parameters(), before, strict=True):
                assert torch.equal(p, value)
            room()  # type: ignore[operator]
    collector.close()
    return errors


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    """Of 64 KiB: twelve are free, and a draw takes one."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes(40 << 10))
    sizes = iter((20 << 10, 0))

    def room() -> None:
        filler.write_bytes(bytes(next(sizes)))

    errors = go_on_after_errors(small_disk / "store", 30, room)
    assert set(errors) == {".draws: No space left on device"}
    assert 1 <= len(errors) <= 2
    assert files(small_disk / "store") == unbroken(tmp_path / "unbroken", 30)


# With the sizes of draws, and of a file: of many of them, or an index.
@pytest.mark.parametrize(
    ("inputs", "steps", "limit", "name"),
    [(10, 30, 1400, ".draws"), (205, 200, 17_000, "index")],
)
def test_files_that_may_not_grow(
    tmp_path: Path, inputs: int, steps: int, limit: int, name: str
) -> None:
    def run() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        def room() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))

        return ", ".join(go_on_after_errors(tmp_path / "store", steps, room, inputs))

    assert outcome(run) == f"{name}: File too large"
    whole = unbroken(tmp_path / "unbroken", steps, inputs)
    assert files(tmp_path / "store") == whole
    assert len(whole["index"]) > limit


@pytest.mark.parametrize("limit", [0, 1, 4096, 1 << 20, (1 << 20) + 1, 2_000_000])
def test_a_large_draw_that_does_not_fit(tmp_path: Path, limit: int) -> None:
    """However much of a block was written, the next try is the whole draw."""
    one = {"weights": torch.randn(1 << 19)}

    def run() -> str:
        writer = sg.SampleWriter(tmp_path, one)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(RuntimeError, match=r"^Cannot write .*: File too large$"):
            writer.append(one, step=1)
        assert not [*tmp_path.rglob("*.safetensors*")]
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        writer.append(one, step=1)
        writer.close()
        (stored,) = sg.SampleStore(tmp_path).intact()
        return str(torch.equal(stored["weights"], one["weights"]))

    assert outcome(run) == "True"


def test_a_close_that_fails_says_what_is_safe(
    small_disk: Path,
) -> None:
    model, sampler, collector = make(small_disk / "store", inputs=205)
    step(model, sampler)
    collector.flush()
    (small_disk / "filler").write_bytes(bytes(36 << 10))
    step(model, sampler)
    with pytest.raises(RuntimeError, match=SAFE):
        collector.close()
    step(model, sampler)  # of which the collector knows nothing any more
    assert [draw.step for draw in sg.SampleStore(small_disk / "store").intact()] == [1]
    # Closed is closed: somebody else may write.
    make(small_disk / "store", inputs=205)[2].close()


@pytest.fixture
def read_only() -> Iterator[Path]:
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


def test_a_read_only_folder(read_only: Path) -> None:
    """It is found when the collector is made, and reading needs no right to write."""
    for name, place in (("store", "chain-0/lock"), ("other", "")):
        found = outcome(unprivileged(lambda name=name: make(read_only / name)))
        path = read_only / name / place
        assert found == f"RuntimeError: Cannot write {path}: Permission denied"
    read = outcome(unprivileged(lambda: str(len(sg.SampleStore(read_only / "store")))))
    assert read == "1"


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    def hold() -> str:
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
collector = sg.Collector(sampler, model, sys.argv[1], queue_size=30)
for _ in range(30):
    for p in model.parameters():
        p.grad = p.detach().clone()
    sampler.step()
"""


@pytest.mark.full
def test_a_program_that_forgets_to_close(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORGETFUL, "store"]
    subprocess.run(command, check=True, cwd=tmp_path)  # there are no sources
    assert len(sg.SampleStore(tmp_path / "store").intact()) == 30
