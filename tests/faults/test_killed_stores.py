"""Runs that store draws, killed at random moments and resumed.

Twenty kills in Python, half of them with draws that share a file, and five in C++, or
as many of each as the environment variable TORCH_SGMCMC_KILLS says (pytest -s shows how
far it is). After each the store must open, without a torn or a missing draw, and have
those of the unbroken run; a run that ends must have its bytes. The moments are uniform
over the time that the whole run takes.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from children import outcome
from torch import Tensor, nn

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

KILLS = os.environ.get("TORCH_SGMCMC_KILLS")
STEPS = 200
#: Of the weights, where draws share a file; with 500 each has its own.
SHARES = 30

#: Begins or resumes a run in a folder. Whether it has ended; if not it was killed after
#: so many seconds.
Go = Callable[[Path, "float | None"], bool]


def files(folder: Path) -> dict[str, bytes]:
    """All of a store."""
    paths = (folder / "store").rglob("*")
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.is_file()}


def save(content: object, path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    os.replace(partial, path)


class Net(nn.Module):
    """The model of tests/cpp/consumer/store.cpp."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 20))
        self.bias = nn.Parameter(torch.zeros(20))
        self.register_buffer("seen", torch.zeros([], dtype=torch.long))


def run(folder: Path, rows: int, max_samples: int | None = 20) -> None:
    """What tests/cpp/consumer/store.cpp does."""
    torch.set_num_threads(1)
    net = Net(rows)
    sampler = sg.SGLD(net.parameters(), 0.1, num_data=10, seed=7)
    collector = sg.Collector(
        *(sampler, net, folder / "store"),
        burn_in=5,
        every=2,
        max_samples=max_samples,
        dtype=torch.bfloat16,
    )
    data = torch.Generator().manual_seed(3)
    first, path = 0, folder / "run.pt"
    if path.exists():
        saved = torch.load(path)
        net.load_state_dict(saved["model"])
        sampler.load_state_dict(saved["sampler"])
        collector.load_state_dict(saved["collector"])
        data.set_state(saved["data"])
        first = saved["step"]
    else:
        collector.restart()
    for step in range(first, STEPS):
        for p in net.parameters():
            p.grad = p.detach() + torch.randn(p.shape, generator=data)
        net.seen += 1
        collector.loss = step / 7
        sampler.step()
        if step % 10 == 9:
            parts = {"model": net, "sampler": sampler, "collector": collector}
            states = {name: part.state_dict() for name, part in parts.items()}
            save(states | {"data": data.get_state(), "step": step + 1}, path)
    collector.close()


def in_python(rows: int) -> Go:
    def go(folder: Path, kill_after: float | None) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        end = outcome(lambda: run(folder, rows), kill_after)
        assert end in (None, ""), end
        return end is not None

    return go


@pytest.fixture
def in_cpp(consumer_program: Callable[[str], Path]) -> Go:
    program = consumer_program("store")

    def go(folder: Path, kill_after: float | None) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen([program, folder], stderr=subprocess.PIPE, text=True)
        if kill_after is not None:
            time.sleep(kill_after)
            process.kill()
        _, errors = process.communicate()
        assert process.returncode in (0, -9), errors
        return process.returncode == 0

    return go


def every_draw(folder: Path, rows: int) -> dict[int, dict[str, Tensor]]:
    """Those of the unbroken run, before any is dropped."""
    folder.mkdir()
    run(folder, rows, None)  # here, for what it imports to be there in all children
    store = sg.SampleStore(folder / "store")
    assert len(store) == 97
    return {draw.number: dict(draw) for draw in store}


def kill(go: Go, kills: int, tmp_path: Path, rows: int = SHARES) -> None:
    draws = every_draw(tmp_path / "every", rows)
    generator = random.Random(0)
    for name in ("first", "whole"):  # the first has to read files
        start = time.perf_counter()
        assert go(tmp_path / name, None)
        seconds = time.perf_counter() - start
    whole = files(tmp_path / "whole")
    assert len(sg.SampleStore(tmp_path / "whole" / "store")) == 12
    killed = runs = unnamed = thinned = 0
    opened = [0] * 21
    while killed < kills:
        folder = tmp_path / "killed"
        while not go(folder, generator.uniform(0, seconds)):
            killed += 1
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                store = sg.SampleStore(folder / "store")
                assert len(store.intact()) == len(store) <= 20
            for draw in store:
                expected = draws[draw.number]
                assert draw.keys() == expected.keys()
                assert all(torch.equal(draw[name], expected[name]) for name in draw)
                assert draw.step == 2 * draw.number + 5
            opened[len(store)] += 1
            names = {draw.path.name for draw in store}
            left = {p.name for p in (folder / "store").rglob("0*")} - names
            unnamed += any(name.endswith(".unfinished") for name in left)
            thinned += any(not name.endswith(".unfinished") for name in left)
        assert files(folder) == whole
        shutil.rmtree(folder)
        runs += 1
        print(
            f"{killed} kills of {runs} runs, {unnamed} in the middle of a file, "
            f"{thinned} with files that the index did not name; {sum(opened[1:])} "
            "stores with draws"
        )


@pytest.mark.parametrize("rows", [SHARES, 500])
def test_in_python(tmp_path: Path, one_thread: None, rows: int) -> None:
    kill(in_python(rows), int(KILLS or 10), tmp_path, rows)


def test_in_cpp(in_cpp: Go, tmp_path: Path, one_thread: None) -> None:
    kill(in_cpp, int(KILLS or 5), tmp_path)


def test_both_languages_write_the_same_bytes(
    in_cpp: Go, consumer_program: Callable[[str], Path], tmp_path: Path
) -> None:
    """And go on with each other's stores and checkpoints, and read them."""
    assert in_python(SHARES)(tmp_path / "python", None)
    assert in_cpp(tmp_path / "cpp", None)
    expected = files(tmp_path / "python")
    # What ran beside the draws, which C++ does not write.
    expected = {k: v for k, v in expected.items() if Path(k).name != "ran-0.json"}
    names = {Path(name).name for name in expected}
    assert names == {"index", "lock", "0000000001.draws"}
    assert files(tmp_path / "cpp") == expected
    program = str(consumer_program("store"))
    told = subprocess.check_output([program, "read", tmp_path / "python"], text=True)
    for line, draw in zip(
        told.splitlines(), sg.SampleStore(tmp_path / "cpp" / "store"), strict=True
    ):
        number, step, weight, loss, total = map(float, line.split())
        assert (number, step, weight) == (draw.number, draw.step, draw.weight)
        assert loss == draw.loss
        assert total == pytest.approx(
            sum(float(t.double().sum()) for t in draw.values())
        )
