"""sample(restart=True): all is deleted, or nothing, or the next call says so."""

import os
import pathlib
import shutil
import sys

import pytest
from driver_problem import loader, loss, model, run, sghmc
from launch import fresh
from stored_files import contents

import torch_sgmcmc as sg
from torch_sgmcmc.posterior import store_files

driver = sys.modules["torch_sgmcmc.posterior.run"]


class Interrupts:
    """Lets a number of calls of some functions pass, and raises at the next."""

    def __init__(self, monkeypatch, passes):
        self.passes, self.raised = passes, False
        self.deletes = False
        for owner, name in (
            *((store_files, "sync_folder"), (store_files, "replace_file")),
            *((os, "unlink"), (pathlib.Path, "unlink"), (pathlib.Path, "rmdir")),
        ):
            monkeypatch.setattr(owner, name, self.around(getattr(owner, name)))
        monkeypatch.setattr(driver, "delete_all", self.delete_all)

    def delete_all(self, store):
        self.deletes = True
        store_files.delete_all(store)
        self.deletes = False

    def around(self, function):
        def called(*args, **kwargs):
            if self.deletes:
                self.passes -= 1
                if self.passes < 0:
                    self.raised = True
                    raise KeyboardInterrupt
            return function(*args, **kwargs)

        return called


def is_as_before(folder, expected):
    """Checks that a run can go on; else its store must say so."""
    try:
        return contents(folder) == expected
    except ValueError as error:
        assert "deletion" in str(error)
        return False


@pytest.mark.full
@pytest.mark.parametrize("chains", [2, 1])
def test_an_interrupted_deletion(chains, tmp_path):
    """A kill at each point: no later call resumes beside the earlier run's rest."""
    old = tmp_path / "old"
    run(old, steps=8, chains=2)
    fresh_run = tmp_path / "fresh"
    run(fresh_run, steps=8, chains=chains, seed=6)
    refused = unchanged = 0
    for passes in range(100):
        folder = tmp_path / f"at-{passes}"
        shutil.copytree(old, folder)
        with pytest.MonkeyPatch.context() as patch:
            interrupts = Interrupts(patch, passes)
            try:
                run(folder, steps=8, chains=chains, seed=6, restart=True)
            except KeyboardInterrupt:
                pass
        if not interrupts.raised:
            break
        if not (folder / "store.json").exists():
            pass  # all is deleted
        elif is_as_before(folder, contents(old)):
            unchanged += 1  # it goes on as it was
            run(folder, steps=8, chains=2)
            assert contents(folder) == contents(old)
        else:
            refused += 1
            with pytest.raises(
                ValueError, match=r"deletion of .* was interrupted \(restart"
            ):
                run(folder, steps=8, chains=chains, seed=6)
        run(folder, steps=8, chains=chains, seed=6, restart=True)
        assert contents(folder) == contents(fresh_run)
    assert contents(folder) == contents(fresh_run)
    # The mark. Then two checkpoints, two forms of the report; of each chain an index, a
    # lock, a file of draws, run.json and the folder; the store's folder, its file, and
    # the folder again.
    assert (unchanged, refused) == (1, 17)


def hold(folder, chain, held, done):
    network = model()
    sampler = sghmc(network.named_parameters(), seed=0)
    with sg.Collector(sampler, network, folder, chain=chain):
        held.set()
        done.wait()


@pytest.mark.parametrize("chain", [1, 2])
def test_a_chain_of_another_process(chain, tmp_path):
    """Refused callbacks, before the run or in it, delete nothing."""
    run(tmp_path, steps=8, chains=3)
    before = contents(tmp_path)
    held, done = fresh.Event(), fresh.Event()
    process = fresh.Process(target=hold, args=(tmp_path, chain, held, done))
    process.start()
    held.wait()
    try:
        with pytest.raises(RuntimeError, match=f"Cannot write to chain {chain} of"):
            run(tmp_path, steps=8, chains=2, seed=6, restart=True)
    finally:
        done.set()
        process.join()
    assert contents(tmp_path) == before
    assert len([*tmp_path.glob("checkpoint-*.pt")]) == 3
    run(tmp_path, steps=8, chains=2, seed=6, restart=True)
    assert sg.SampleStore(tmp_path).chains == [0, 1]


def test_draws_of_others_are_not_gone_on_with(tmp_path):
    """Twice, since the first call must not leave a checkpoint that has them."""
    run(tmp_path, steps=8)
    (tmp_path / "checkpoint-0.pt").unlink()
    before = contents(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has 2 draws and no checkpoint: they"):
            run(tmp_path, steps=8)
        assert contents(tmp_path) == before and not [*tmp_path.glob("*.pt")]
    run(tmp_path, steps=8, restart=True)
    assert contents(tmp_path) == before


def test_a_model_that_fails_is_no_reason_to_delete(tmp_path):
    run(tmp_path, steps=8, chains=2)
    before = contents(tmp_path)

    def fails():
        raise OSError("no weights")

    with pytest.raises(OSError, match="no weights"):
        sg.sample(
            *(fails, sghmc, loader(), loss, tmp_path),
            **{"steps": 8, "restart": True, "progress": False},
        )
    assert contents(tmp_path) == before
