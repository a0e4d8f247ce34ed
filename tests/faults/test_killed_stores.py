"""Runs that store draws, killed at random moments and resumed.

Twenty kills in Python and five in C++, or as many of each as the environment variable
TORCH_SGMCMC_KILLS says (pytest -s shows how far it is). After each the checkpoint must
be readable, and the store must open, without a torn draw, with the draws of the
unbroken run, none before the checkpoint lost; a run that ends must have all of them,
bitwise. The moments are uniform over the time that the whole run takes.
"""

import os
import random
import shutil
import subprocess
import time
import warnings

import pytest
import torch
from children import outcome
from stored_files import columns, contents
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.draws.store_files import DTYPES

pytestmark = pytest.mark.full

KILLS = os.environ.get("TORCH_SGMCMC_KILLS")
STEPS = 200


class Net(nn.Module):
    """The model of tests/cpp/consumer/store.cpp."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(30, 20))
        self.bias = nn.Parameter(torch.zeros(20))
        self.register_buffer("seen", torch.zeros([], dtype=torch.long))


def run(folder):
    """The sequence of tests/cpp/consumer/store.cpp."""
    torch.set_num_threads(1)
    net = Net()
    sampler = sg.SGLD(net.parameters(), 0.1, num_data=10, seed=7)
    collector = sg.Collector(sampler, net, folder / "store", burn_in=5, every=2)
    data = torch.Generator().manual_seed(3)
    first, path = 0, folder / "run.pt"
    if path.exists():
        saved = sg.load(path)
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
            # dict: C++ reads no OrderedDict.
            states = {name: dict(part.state_dict()) for name, part in parts.items()}
            sg.save(states | {"data": data.get_state(), "step": step + 1}, path)
    collector.close()


def in_python(folder, kill_after):
    folder.mkdir(parents=True, exist_ok=True)
    end = outcome(lambda: run(folder), kill_after)
    assert end in (None, ""), end
    return end is not None


@pytest.fixture
def in_cpp(consumer_program):
    program = consumer_program("store")

    def go(folder, kill_after):
        folder.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen([program, folder], stderr=subprocess.PIPE, text=True)
        if kill_after is not None:
            time.sleep(kill_after)
            process.kill()
        _, errors = process.communicate()
        assert process.returncode in (0, -9), errors
        return process.returncode == 0

    return go


def kill(go, kills, tmp_path):
    """``go`` begins or resumes a run in a folder: whether it has ended, not killed."""
    whole = tmp_path / "whole"
    for name in ("first", "whole"):  # the first has to read files
        start = time.perf_counter()
        assert go(tmp_path / name, None)
        seconds = time.perf_counter() - start
    draws = {draw.step: (columns(draw), dict(draw)) for draw in opened(whole)}
    assert len(draws) == 97
    generator = random.Random(0)
    killed = runs = partial = unnamed = with_draws = 0
    while killed < kills:
        folder = tmp_path / "killed"
        attempts = 0
        # Later and later, since a busy machine may need longer than for the whole run,
        # and earlier after a run that no kill has hit.
        while not go(folder, generator.uniform(0, seconds * (1 + attempts / 10))):
            attempts += 1
            killed += 1
            store = opened(folder)
            for draw in store:
                numbers, tensors = draws[draw.step]
                assert columns(draw) == numbers and draw.keys() == tensors.keys()
                assert all(torch.equal(draw[name], tensors[name]) for name in draw)
            assert [draw.step for draw in store] == [*range(7, 7 + 2 * len(store), 2)]
            with_draws += len(store) > 0
            if (folder / "run.pt").exists():  # nothing before it is lost
                safe = sg.load(folder / "run.pt")["step"]
                assert len(store) >= (safe - 5) // 2
            left = {p.name for p in (folder / "store").rglob("draws-*")}
            left -= {draw.path.name for draw in store if draw.path}
            partial += any(name.endswith(".partial") for name in left)
            unnamed += any(not name.endswith(".partial") for name in left)
        found = contents(folder / "store")
        # A kill while store.json is written leaves its partial file. Nobody deletes it,
        # since it may be that of another chain's writer, which begins just then.
        for name in [name for name in found if name.startswith("store.json.")]:
            del found[name]
        assert found == contents(whole / "store")
        shutil.rmtree(folder)
        runs += 1
        seconds *= 0.8 if attempts == 0 else 1
        print(
            f"{killed} kills of {runs} runs, {partial} in the middle of a file, "
            f"{unnamed} with files that the index did not name; {with_draws} stores "
            "with draws"
        )
    assert with_draws >= kills // 10


def opened(folder):
    """Returns a store's draws, all of which are read."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = sg.SampleStore(folder / "store")
        assert len(store.intact()) == len(store)
    return store


def test_in_python(tmp_path, one_thread):
    folder = tmp_path / "here"
    folder.mkdir()
    run(folder)  # imports what each fork would spend seconds on
    kill(in_python, int(KILLS or 20), tmp_path)


def test_in_cpp(in_cpp, tmp_path, one_thread):
    kill(in_cpp, int(KILLS or 5), tmp_path)


def test_cpp_continues_runs_of_python(
    in_cpp, consumer_program, tmp_path, monkeypatch, one_thread
):
    """The draws are those of either language alone, and C++ reads them."""
    assert in_python(tmp_path / "python", None)
    assert in_cpp(tmp_path / "cpp", None)
    expected = contents(tmp_path / "python" / "store")["draws"]
    assert contents(tmp_path / "cpp" / "store")["draws"] == expected
    folder, seconds = tmp_path / "cpp second", 0.1
    while not (folder / "run.pt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        in_python(folder, seconds)
        seconds *= 1.3
    assert in_cpp(folder, None)
    assert contents(folder / "store")["draws"] == expected
    # From a checkpoint whose checksum 31 bits do not hold.
    folder = tmp_path / "large sum"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "STEPS", 100)
        run(folder)
    assert torch.load(folder / "run.pt")["collector"]["position"]["crc32"] < 0
    assert in_cpp(folder, None)
    assert contents(folder / "store")["draws"] == expected
    program = str(consumer_program("store"))
    for written_by in ("python", "cpp"):
        folder = tmp_path / written_by
        ran = sg.report(None, folder / "store").runs[0]
        assert (ran.sampler, ran.steps, ran.seed) == ("SGLD", 200, 7)
        names = {"cpp": ["weight", "bias"], "python": ["0.0 [30, 20]", "0.1 [20]"]}
        assert ran.names == (names[written_by],)
        assert ran.settings[0]["lr"] == 0.1 and ran.settings[0]["num_data"] == 10
        told = subprocess.check_output([program, "read", folder], text=True)
        draws = sg.SampleStore(folder / "store")
        for line, draw in zip(told.splitlines(), draws, strict=True):
            step, weight, loss, total = map(float, line.split())
            assert (step, weight, loss) == (draw.step, draw.weight, draw.loss)
            assert total == pytest.approx(
                sum(float(t.double().sum()) for t in draw.values())
            )


def test_cpp_reads_all_dtypes_and_names(consumer_program, tmp_path):
    """Also a store with headers that safetensors' own library has written."""
    tensors = {
        f"{i}.{name}": torch.arange(i + 1).to(dtype)
        for i, (name, dtype) in enumerate(DTYPES.items())
    }
    odd = ("a b", "é\u4e2d\U0001f600", 'q"\\/', "", "\\n", "\n", "format")
    tensors |= {name: torch.full((2,), float(i)) for i, name in enumerate(odd)}
    tensors |= {"empty": torch.ones(3, 0), "scalar": torch.tensor(2.5)}
    rest = {"format": torch.ones(2), "tensors": torch.ones(1)}
    likelihood = sg.losses.gaussian(0.3)
    with sg.SampleWriter(
        tmp_path / "store", tensors, not_sampled=rest, likelihood=likelihood
    ) as writer:
        for i in range(3):
            writer.append(tensors, step=i, loss=-1e-310)
    program = str(consumer_program("store"))
    told = subprocess.check_output([program, "read", tmp_path], text=True)
    total = sum(float(t.double().sum()) for t in tensors.values() if not t.is_complex())
    total += sum(float(t.real.sum()) for t in tensors.values() if t.is_complex())
    assert [[*map(float, line.split())] for line in told.splitlines()] == [
        [i, 1, -1e-310, total] for i in range(3)
    ]
