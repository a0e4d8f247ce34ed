"""Stores whose writer ends, is interrupted or finds the disk full at each of its calls.

A random run appends, flushes, makes checkpoints and goes back to them. At a call of the
system the writer is given up, before the call or after it, as by a crash; or the call
is interrupted (Ctrl-C) or fails, as on a full disk, and the run goes on. After a crash
the store must open, have a prefix of the run's draws with nothing before the last
checkpoint lost, and be continued to the same end. Calls that were not synced are kept:
what a power cut loses is not tried.
"""

import errno
import os
import random

import pytest
import torch

import torch_sgmcmc as sg
from torch_sgmcmc.draws import store as writers

CALLS = ("fsync", "replace", "write", "ftruncate", "unlink")
STEPS = 30
KINDS = ("before", "after", "full", "interrupted")
SURVIVED = ("full", "interrupted")


class Crash(BaseException):
    """The end of a process."""


class Calls:
    """Ends or fails the k-th call of the system."""

    def __init__(self, patch, at, how):
        self.left, self.how, self.happened = at, how, False
        for name in CALLS:
            patch.setattr(os, name, self.around(getattr(os, name)))

    def around(self, function):
        def call(*arguments):
            self.left -= 1
            if self.left != 0:
                return function(*arguments)
            self.happened = True
            if self.how == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.how in ("after", "interrupted"):
                function(*arguments)
            raise KeyboardInterrupt if self.how == "interrupted" else Crash

        return call


def draw(step):
    return {"w": torch.full((3,), float(step)), "n": torch.tensor(step)}


class Run:
    """A chain whose steps are its draws, with checkpoints in memory."""

    def __init__(self, folder, seed):
        self.folder, self.random = folder, random.Random(seed)
        self.saved = None
        self.step = 0

    def open(self):
        self.writer = sg.SampleWriter(self.folder, draw(0))
        if self.saved is None:
            self.writer.restart()
            self.step = 0
        else:
            self.step, position = self.saved
            self.writer.cut_back(position)

    def go_on(self, patience=0):
        """Writes to the end, up to a limit of full-disk errors."""
        while self.step < STEPS or self.writer._rows:
            try:
                choice = self.random.random()
                if self.step == STEPS:
                    self.writer.flush()
                elif choice < 0.7:
                    self.writer.check()
                    self.writer.append(draw(self.step), step=self.step)
                    self.step += 1
                elif choice < 0.85:
                    self.writer.flush()
                else:
                    self.saved = self.step, self.writer.checkpoint()
            except (RuntimeError, KeyboardInterrupt) as error:
                assert "No space left" in str(error) or not str(error)
                patience -= 1
                assert patience >= 0
                self.check_prefix()
        self.writer.close()

    def check_prefix(self):
        """Checks that the draws on the disk are the first ones; returns how many."""
        store = sg.SampleStore(self.folder)
        for i, one in enumerate(store):
            assert one.step == i and int(one["n"]) == i
            assert torch.equal(one["w"], draw(i)["w"])
        return len(store)

    def abandon(self):
        """Closes the files, as the system does for an ended process."""
        self.writer.files.close()


@pytest.fixture
def files_of_three(monkeypatch):
    """Files of three draws at most."""
    monkeypatch.setattr(writers, "_DRAWS", 3)


def crashes(tmp_path, seeds, how):
    count = 0
    for seed in seeds:
        for at in range(1, 1000):
            folder = tmp_path / f"{seed}-{at}"
            run = Run(folder, seed)
            run.open()
            with pytest.MonkeyPatch.context() as patch:
                calls = Calls(patch, at, how)
                try:
                    run.go_on(patience=1 if how in SURVIVED else 0)
                except Crash:
                    pass
            if not calls.happened:
                break
            count += 1
            if how not in SURVIVED:
                found = run.check_prefix()
                assert found >= (run.saved[0] if run.saved else 0)
                run.abandon()
                run.open()
                run.go_on()
            assert run.check_prefix() == STEPS
            names = {p.name for p in (folder / "chain-0").iterdir()}
            num_files = len({one.path for one in sg.SampleStore(folder)})
            assert len(names) == 2 + num_files, names
    return count


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.usefixtures("files_of_three")
def test_a_few(tmp_path, how):
    assert crashes(tmp_path, range(1), how) > 20


@pytest.mark.nightly
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.usefixtures("files_of_three")
def test_many(tmp_path, how):
    assert crashes(tmp_path, range(1, 13), how) > 500
