"""A run is resumed only as the same run; restart=True deletes all of it or nothing."""

import copy
import os
import pathlib
import shutil
import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
from driver_problem import data, loader, loss, model, run, sghmc
from launch import fresh
from stored_files import contents
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Subset

import torch_sgmcmc as sg
from torch_sgmcmc.draws import store_files

driver = sys.modules["torch_sgmcmc.run.sample"]


class Interrupts:
    """Lets a number of calls of some functions pass, and raises at the next."""

    def __init__(self, monkeypatch, passes):
        self.passes, self.raised = passes, False
        self.deletes = False
        for owner, name in (
            (store_files, "sync_folder"),
            (store_files, "replace_file"),
            (os, "unlink"),
            (pathlib.Path, "unlink"),
            (pathlib.Path, "rmdir"),
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
        try:
            run(folder, steps=8, chains=2)
        except ValueError as error:  # never beside a rest of the earlier run
            assert "and no checkpoint" in str(error) and "restart=True" in str(error)
            refused += 1
        else:
            assert contents(folder) == contents(old)
            unchanged += 1
        run(folder, steps=8, chains=chains, seed=6, restart=True)
        assert contents(folder) == contents(fresh_run)
    assert contents(folder) == contents(fresh_run)
    # Before the first checkpoint is deleted, and after the last index is.
    assert unchanged > 1 and refused > 5


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


@pytest.mark.parametrize("name", ["checkpoint-0.pt", "checkpoint-7.pt", "report.md"])
@pytest.mark.parametrize("has_store", [False, True])
def test_files_of_others_stay(name, has_store, tmp_path):
    """A file with a name of this library's is refused, and never deleted."""
    if has_store:
        run(tmp_path, steps=5)
    path = tmp_path / name
    sg.save({"epoch": 3, "model": model().state_dict()}, path)
    before = path.read_bytes()
    for _ in range(2):
        for restart in (False, True):
            with pytest.raises(ValueError, match=f"Invalid store: {path} was not writ"):
                run(tmp_path, steps=8, restart=restart)
    assert path.read_bytes() == before
    path.unlink()
    run(tmp_path, steps=8, restart=True)
    assert len(sg.SampleStore(tmp_path).intact()) == 2
    assert (tmp_path / "report.md").exists()


def test_a_model_that_fails_is_no_reason_to_delete(tmp_path):
    run(tmp_path, steps=8, chains=2)
    before = contents(tmp_path)

    def fails():
        raise OSError("no weights")

    with pytest.raises(OSError, match="no weights"):
        run(tmp_path, fails, steps=8, restart=True)
    assert contents(tmp_path) == before


CYCLES = partial(sg.CyclicalSchedule, steps_per_cycle=8, exploration=0.5)
DECAY = partial(sg.PolynomialDecay, b=10.0)
COSINE = partial(lr_scheduler.CosineAnnealingLR, T_max=20)
STEPS = partial(lr_scheduler.MultiStepLR, milestones=[3, 5])


@pytest.mark.parametrize(
    ("begun", "given", "words"),
    [
        (CYCLES, None, "none (W was written with CyclicalSchedule"),
        (None, CYCLES, "CyclicalSchedule (W was written with none"),
        (CYCLES, DECAY, "PolynomialDecay (W was written with CyclicalSchedule"),
        (partial(CYCLES, steps_per_cycle=7), CYCLES,
         "CyclicalSchedule has steps_per_cycle 8 (W was written with 7"),
        (partial(CYCLES, exploration=0.25), CYCLES,
         "CyclicalSchedule has exploration 0.5 (W was written with 0.25"),
        (partial(DECAY, b=9.0), DECAY,
         "PolynomialDecay has b 10.0 (W was written with 9"),
        (partial(DECAY, gamma=0.6), DECAY,
         "PolynomialDecay has gamma 0.55 (W was written with 0.6"),
        (partial(COSINE, T_max=10), COSINE,
         "CosineAnnealingLR has T_max 20 (W was written with 10"),
        (partial(STEPS, milestones=[3, 6]), STEPS,
         "MultiStepLR has milestones {3: 1, 5: 1} (W was written with {3: 1, 6: 1}"),
        ([CYCLES, sg.GammaPrecision], CYCLES,
         "CyclicalSchedule (W was written with CyclicalSchedule and GammaPrecision"),
        ([CYCLES, partial(sg.GammaPrecision, rate=2.0)], [CYCLES, sg.GammaPrecision],
         "GammaPrecision has rate 1.0 (W was written with 2.0"),
    ],
)  # fmt: skip
def test_another_schedule(begun, given, words, tmp_path):
    run(tmp_path, steps=14, schedule=begun)
    before = contents(tmp_path)
    saved = (tmp_path / "checkpoint-0.pt").read_bytes()
    with pytest.raises(ValueError) as caught:
        run(tmp_path, steps=20, schedule=given)
    said = words.replace("W", f"chain 0 in {tmp_path}")
    assert str(caught.value).startswith(f"Invalid schedule: {said}")
    assert str(caught.value).endswith("; restart=True starts a new run)")
    assert contents(tmp_path) == before
    assert (tmp_path / "checkpoint-0.pt").read_bytes() == saved
    run(tmp_path, steps=20, schedule=begun)
    run(tmp_path, steps=20, schedule=given, restart=True)


class WithoutState:
    def __init__(self, sampler):
        pass

    def step(self):
        pass


def test_what_is_no_schedule(tmp_path):
    with pytest.raises(TypeError, match=r"returned WithoutState .* no state_dict"):
        run(tmp_path, schedule=WithoutState)
    with pytest.raises(TypeError, match=r"Invalid schedule: float .* function"):
        run(tmp_path, schedule=0.5)
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau, whose lr follows a loss"):
        run(tmp_path, schedule=lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(TypeError, match=r"Invalid schedule: CyclicalSchedule .* func"):
        run(tmp_path, schedule=CYCLES(sghmc(model().parameters(), seed=0)))


def test_gibbs_draws_beside_cycles(tmp_path):
    """Cycles resume: sampling phases alone; either order; after a kill."""
    seen = []

    def look(state):
        assert isinstance(state.schedule, tuple) and len(state.schedule) == 2
        group = state.sampler.param_groups[0]
        seen.append((group["temperature"], group["prior_precision"]))

    schedule = [CYCLES, sg.GammaPrecision]
    run(tmp_path / "whole", steps=20, schedule=schedule, callbacks=[look])
    # After step 8, say, the next is one that explores: as many steps as cycles have.
    changes = [one[1] != other[1] for one, other in pairwise(seen)]
    assert changes == [t > 0 for t, _ in seen[1:]] and any(changes)
    run(tmp_path / "parts", steps=13, schedule=schedule)
    run(tmp_path / "parts", steps=20, schedule=schedule)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    run(tmp_path / "other", steps=20, schedule=schedule[::-1])


def test_another_loader(tmp_path):
    run(tmp_path, steps=9)
    before = contents(tmp_path)
    where = rf"\(chain 0 in {tmp_path} was written with"
    for other, words in (
        (DataLoader(data(), 12), rf"number of minibatches 5 {where} 6; restart"),
        (DataLoader(data(), 11), rf"batch_size 11 {where} 10; restart"),
        (DataLoader(Subset(data(), range(59)), 10), rf"number of data 59 {where} 60;"),
        ([*loader()][:5], rf"number of minibatches 5 {where} 6; restart"),
    ):
        with pytest.raises(ValueError, match=f"^Invalid loader: {words}"):
            run(tmp_path, batches=other, steps=9)
        assert contents(tmp_path) == before
    run(tmp_path, batches=[*loader()], steps=10)  # of which the rest is not known


def another_loss(model, batch):
    return loss(model, batch)


class Another(nn.Sequential):
    pass


def test_another_loss_or_model(tmp_path):
    torch.manual_seed(0)
    network = model()
    other = Another(*copy.deepcopy(network))

    run(tmp_path, network, loss=partial(loss), steps=5)
    run(tmp_path, network, steps=6)
    with pytest.warns(UserWarning, match=r"written with loss loss; now it is another"):
        run(tmp_path, network, loss=another_loss, steps=7)
    with pytest.warns(UserWarning, match=r"written with model Sequential; now it is A"):
        run(tmp_path, other, loss=another_loss, steps=8)


def test_a_checkpoint_that_lacks_a_key(tmp_path):
    run(tmp_path, steps=5)
    path = tmp_path / "checkpoint-0.pt"
    whole = sg.load(path)
    for key in whole:
        sg.save({name: value for name, value in whole.items() if name != key}, path)
        before = contents(tmp_path)
        with pytest.raises(ValueError) as error:
            run(tmp_path, steps=8)
        assert str(error.value) == (
            f"Invalid checkpoint: chain 0 in {tmp_path} lacks {key} "
            "(restart=True starts a new run)"
        )
        assert contents(tmp_path) == before
