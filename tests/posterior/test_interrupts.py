"""sample() that is interrupted: what was done is saved, and the signal goes on."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
from driver_problem import data, loss, model, run, sghmc
from launch import fresh
from stored_files import contents
from torch.utils.data import DataLoader

import torch_sgmcmc as sg
from torch_sgmcmc.run import chain as driver

OPTIONS = {"checkpoint_every": None, "steps": 20}


class Signals:
    """A callback and a loss that send this process a signal, in a step or after it."""

    def __init__(self, number, step, *, within, times=1):
        self.number, self.step, self.within = number, step, within
        self.count, self.times = 0, times

    def send(self):
        for _ in range(self.times):
            os.kill(os.getpid(), self.number)

    def loss(self, model, batch):
        self.count += 1
        if self.within and self.count == self.step:
            self.send()
        return loss(model, batch)

    def __call__(self, state):
        if not self.within and state.step == self.step:
            self.send()


def interrupted(folder, signals):
    """Writes what was raised into FOLDER/said, and whether handlers are as before."""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        go(folder / "run", signals)
    except BaseException as error:
        after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        said = f"{type(error).__name__} {after == before}"
        (folder / "said").write_text(said)
        raise


def go(folder, signals, loader=None):
    loader = loader or DataLoader(data(), 10, shuffle=True)
    options = {**OPTIONS, "burn_in": 3, "every": 2, "seed": 5, "progress": False}
    options |= {"check": False, "callbacks": signals}
    return sg.sample(model, sghmc, loader, signals.loss, folder, **options)


def in_a_process(function, *args):
    process = fresh.Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def nothing():
    return Signals(0, 0, within=True)


def goes_on_as_if_whole(folder, resume):
    for name in ("run", "whole"):
        resume(folder / name)
    return contents(folder / "run") == contents(folder / "whole")


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_what_was_done_is_saved(name, within, tmp_path):
    number = signal.Signals[name]
    signals = Signals(number, 12, within=within)
    code = in_a_process(interrupted, tmp_path, signals)
    if number == signal.SIGINT:
        assert (tmp_path / "said").read_text() == "KeyboardInterrupt True"
        assert code == 1
    else:  # as of a program without a handler
        assert code == -number and not (tmp_path / "said").exists()
    assert sg.load(tmp_path / "run" / "checkpoint-0.pt")["step"] == 12
    assert goes_on_as_if_whole(tmp_path, partial(go, signals=nothing()))


@pytest.mark.nightly
def test_a_second_ctrl_c_does_not_wait(tmp_path):
    """But where a parent ends its processes, two of them are one (torch's signal)."""
    signals = Signals(signal.SIGINT, 12, within=True, times=2)
    assert in_a_process(interrupted, tmp_path, signals) == 1
    assert sg.load(tmp_path / "run" / "checkpoint-0.pt")["step"] == 12
    code = (
        "import sys; from pathlib import Path; from test_interrupts import *\n"
        "signals = Signals(signal.SIGINT, 15, within=True, times=2)\n"
        "interrupted(Path(sys.argv[1]), signals)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "alone")],
        cwd=tmp_path,  # not that of the sources, which have no binaries
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")
    saved = sg.load(tmp_path / "alone" / "run" / "checkpoint-0.pt")
    assert saved["step"] == 0


def noted(folder):
    """A program that has a handler of its own, as for a batch system's signal."""
    seen = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    go(folder / "run", Signals(signal.SIGTERM, 12, within=True))
    (folder / "seen").write_text(str(seen))


def test_a_handler_of_one_s_own(tmp_path):
    assert in_a_process(noted, tmp_path) == 0
    assert (tmp_path / "seen").read_text() == f"[{int(signal.SIGTERM)}]"
    go(tmp_path / "whole", nothing())
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def with_workers(folder, steps):
    """Ctrl-C, which goes to all processes of a terminal, those of a loader too."""
    os.setsid()

    def interrupt(state):
        if state.step == steps:
            os.killpg(0, signal.SIGINT)

    loader = DataLoader(data(), 10, shuffle=True, num_workers=1)
    run_with(folder, loader, interrupt)


def run_with(folder, loader, callback=()):
    options = {**OPTIONS, "seed": 5, "progress": False, "check": False}
    sg.sample(model, sghmc, loader, loss, folder, callbacks=callback, **options)


def test_workers_of_a_loader(tmp_path):
    in_a_process(with_workers, tmp_path / "run", 9)
    assert sg.load(tmp_path / "run" / "checkpoint-0.pt")["step"] == 9
    loader = DataLoader(data(), 10, shuffle=True)
    assert goes_on_as_if_whole(tmp_path, partial(run_with, loader=loader))


class Fails(DataLoader[Any]):
    """A loader whose worker has ended with the signal: no minibatch, and an error."""

    def __iter__(self):
        for i, batch in enumerate(super().__iter__()):
            if i == 3:
                os.kill(os.getpid(), signal.SIGINT)
                raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
            yield batch


def with_a_dead_worker(folder):
    run_with(folder, Fails(data(), 10, shuffle=True))


def test_a_loader_whose_workers_have_ended(tmp_path):
    assert in_a_process(with_a_dead_worker, tmp_path / "run") == 1
    assert sg.load(tmp_path / "run" / "checkpoint-0.pt")["step"] == 3
    loader = DataLoader(data(), 10, shuffle=True)
    assert goes_on_as_if_whole(tmp_path, partial(run_with, loader=loader))


def test_a_callback_that_interrupts(tmp_path):
    def interrupt(state):
        if state.step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", **OPTIONS, callbacks=[interrupt])
    assert sg.load(tmp_path / "run" / "checkpoint-0.pt")["step"] == 9
    assert goes_on_as_if_whole(tmp_path, partial(run, **OPTIONS))


def test_a_thread(tmp_path):
    """Runs where Python cannot set a signal handler."""
    errors = []

    def work():
        try:
            run(tmp_path / "thread", **OPTIONS)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    run(tmp_path / "main", **OPTIONS)
    assert contents(tmp_path / "thread") == contents(tmp_path / "main")


def test_a_checkpoint_every_few_minutes(tmp_path, monkeypatch):
    """Checkpoints at each step; the draws are the same without them."""
    assert driver.CHECKPOINT_SECONDS == 300

    def steps_saved(seconds):
        monkeypatch.setattr(driver, "CHECKPOINT_SECONDS", seconds)
        saved, folder = [], tmp_path / str(seconds)
        look = partial(torch.load, folder / "checkpoint-0.pt")
        run(folder, **OPTIONS, callbacks=lambda state: saved.append(look()["step"]))
        return saved

    assert steps_saved(0.0) == [*range(20)]
    assert steps_saved(1e9) == [0] * 20
    assert contents(tmp_path / "0.0") == contents(tmp_path / "1000000000.0")
