"""The short programs for several ranks under torchrun, and after a rank was killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.examples import FOLDER, run_example
from launch import run_ranks
from stored_files import contents

import torch_sgmcmc as sg

DYING = Path(__file__).with_name("dying_rank.py")


def torchrun(*command):
    """Runs a program on two ranks."""
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*run, "--nproc-per-node", "2", *map(str, command)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def on_two_ranks(name, arguments, folder):
    """Returns the first rank's output; the other has none."""
    ranks = [list(map(str, arguments))] * 2
    first, second = run_ranks(FOLDER / f"{name}.py", ranks, folder)
    assert second == ""
    return first


@pytest.fixture
def one_rank(monkeypatch, one_thread):
    """The environment that torchrun gives a job of one rank."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    torch.set_default_dtype(torch.float32)


def test_ranks_sample_the_posterior_of_one_process(tmp_path, monkeypatch, one_rank):
    # The steps compare what ranks do, not how long: num_data or a minibatch divided by
    # the number of ranks, and gradients that are summed, make another chain at once.
    arguments = ["--out", tmp_path / "two", "--epochs", "60"]
    printed = on_two_ranks("distributed_ddp", arguments, tmp_path)
    assert printed.startswith("10 draws; error of their mean ")
    run_example("distributed_ddp", "--out", tmp_path / "one", *arguments[2:])
    one, two = (sg.SampleStore(tmp_path / name / "draws") for name in ("one", "two"))
    assert [draw.step for draw in one] == [draw.step for draw in two]
    assert one[0].step == 510 and one[-1].step == 600
    for mine, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(dict(mine), dict(theirs), rtol=1e-9, atol=1e-11)


def test_another_number_of_ranks_resumes_the_chain(tmp_path, monkeypatch, one_rank):
    arguments = ["--out", tmp_path / "parts", "--epochs", "54"]
    printed = on_two_ranks("distributed_fsdp", arguments, tmp_path)
    assert printed.startswith("4 draws; error of their mean ")
    for out in ("parts", "whole"):
        run_example("distributed_fsdp", "--out", tmp_path / out, "--epochs", 60)
    parts, whole = (
        sg.load(tmp_path / name / "predictive.pt") for name in ("parts", "whole")
    )
    assert len(whole["weights"]) == 10
    for name in ("origin", "distances", "squares"):
        mine, theirs = parts["sums"][name], whole["sums"][name]
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.nightly
def test_a_rank_that_dies_is_named_and_a_restart_continues_all_chains(tmp_path):
    program = FOLDER / "distributed_chains.py"

    def run(out):
        arguments = ["--out", tmp_path / out, "--steps", "200"]
        return on_two_ranks("distributed_chains", arguments, tmp_path)

    whole = run("whole")
    assert "32 draws of 2 chains have too few draws" in whole
    assert "32 draws of chains [0, 1]" in whole
    store = sg.SampleStore(tmp_path / "whole" / "draws")
    for mine, theirs in zip(store.chain(0), store.chain(1), strict=True):
        assert not any((mine[name] == theirs[name]).any() for name in mine)

    killed = torchrun(DYING, program, "--out", tmp_path / "killed", "--steps", "200")
    assert killed.returncode != 0
    cause = killed.stderr.partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in cause and "(SIGKILL)" in cause
    begun = sg.load(tmp_path / "killed" / "chain-1.pt")["batches"]["num_drawn"]
    assert begun == 40  # two checkpoints

    resumed = run("killed")
    assert contents(tmp_path / "killed" / "draws") == contents(
        tmp_path / "whole" / "draws"
    )
    # The draws and the index of each chain.
    assert len(contents(tmp_path / "whole" / "draws")) == 4
    assert resumed.replace("killed", "whole") == whole
