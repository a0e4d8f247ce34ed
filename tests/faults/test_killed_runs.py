"""Runs on the digits, killed at random moments: resumed to the bits of unbroken ones.

Ten kills, or as many as the environment variable TORCH_SGMCMC_KILLS says (pytest -s
shows how far it is). After each the checkpoint must be readable and one of the unbroken
run's; a run that ends must have its parameters, predictions and scores. The moments are
drawn uniformly over the time that the whole run takes.
"""

import collections
import importlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from children import outcome
from stored_files import contents

pytestmark = pytest.mark.full

KILLS = int(os.environ.get("TORCH_SGMCMC_KILLS", 10))
EPOCHS, BURN_IN = 12, 3

#: Begins or resumes a run in a folder. What it ends with; None if it was killed after
#: so many seconds.
Go = Callable[[Path, str, float | None], str | None]


@pytest.fixture
def bnn():
    """The Python example's modules."""
    names = ("run", "methods", "data")
    modules = {name: importlib.import_module(f"sghmc2014.bnn.{name}") for name in names}
    return SimpleNamespace(
        **modules, checkpoint=importlib.import_module("reproduce.checkpoint")
    )


def scores(history):
    return [{k: v for k, v in epoch.items() if k != "seconds"} for epoch in history]


def kill(go, bnn, methods, tmp_path):
    """Kills runs until there have been enough kills; prints what there was."""
    generator = random.Random(0)
    ends, times, saved, whole = {}, {}, {}, {}
    for method in methods:
        for name in ("first", "whole"):  # the first has to read files
            start = time.perf_counter()
            ends[method] = go(tmp_path / name / method, method, None)
            times[method] = time.perf_counter() - start
        path = tmp_path / "whole" / method / f"{method}-seed0.pt"
        whole[method] = path.with_suffix("")
        saved[method] = bnn.checkpoint.load(path)
        assert len(saved[method]["history"]) == EPOCHS
    kills = runs = unfinished = 0
    epochs = collections.Counter()
    while kills < KILLS:
        method = methods[runs % len(methods)]
        folder = tmp_path / "killed"
        path = folder / f"{method}-seed0.pt"
        while True:
            end = go(folder, method, generator.uniform(0, times[method]))
            if end is not None:
                break
            kills += 1
            unfinished += any(
                p.suffix in (".partial", ".unfinished") for p in folder.glob("*")
            )
            epoch = 0
            if path.exists():
                now = bnn.checkpoint.load(path)
                epoch = now["epoch"]
                expected = saved[method]["history"][:epoch]
                assert scores(now["history"]) == scores(expected)
            epochs[epoch] += 1
        assert end == ends[method]
        assert contents(path.with_suffix("")) == contents(whole[method])
        now = bnn.checkpoint.load(path)
        for name, tensor in saved[method]["model"].items():
            assert torch.equal(now["model"][name], tensor)
        shutil.rmtree(folder)
        runs += 1
        at = ", ".join(f"{n} after epoch {e}" for e, n in sorted(epochs.items()))
        print(f"{kills} kills of {runs} runs, {unfinished} while writing; {at}")


def test_in_python(bnn, tmp_path, one_thread):
    images = bnn.data.load_digits()

    def go(folder, method, kill_after):
        settings = tuple(bnn.methods.METHODS[method].items())
        if "start_epochs" in dict(settings):
            settings = tuple((dict(settings) | {"start_epochs": 1}).items())
        config = bnn.run.RunConfig(
            method, 0, settings, EPOCHS, BURN_IN, 100, images.name
        )

        def job():
            torch.set_num_threads(1)
            with bnn.checkpoint.owned(folder):
                state = bnn.run.run(config, images, folder)
            keys = ("digest", "samples", "history")
            return json.dumps({key: state[key] for key in keys})

        end = outcome(job, kill_after)
        assert end is None or end.startswith("{"), end
        return end

    methods = ("sgdm", "sgld", "sghmc", "psbps")
    kill(go, bnn, methods, tmp_path)
