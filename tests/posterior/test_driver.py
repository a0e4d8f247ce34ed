"""sample: the chains of a loop of one's own, kills that leave no trace, errors."""

import json
import random
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from driver_problem import (
    ROWS,
    KilledAt,
    cycles,
    data,
    forked,  # noqa: F401
    loader,
    loss,
    model,
    run,
    sghmc,
)
from launch import fresh
from stored_files import contents
from torch import nn
from torch.nn import functional as F

import torch_sgmcmc as sg
from torch_sgmcmc.core.random_state import fold_in


def test_a_loop_of_ones_own(tmp_path):
    """The docstring's rule of seeds, step by step."""
    run(tmp_path / "sample", chains=2, report=False)
    for chain in range(2):
        seed = fold_in(5, chain)
        torch.manual_seed(fold_in(seed, 0))
        network = model()
        sampler = sghmc(network.named_parameters(), seed=fold_in(seed, 1))
        if chain == 1:
            sampler.draw_from_prior()
        with sg.Collector(
            sampler, network, tmp_path / "loop", chain=chain, burn_in=3, every=2
        ) as collector:
            collector.start, collector.steps_per_pass = ("model", "prior")[chain], 6
            step = 0
            for epoch in range(9):
                torch.manual_seed(fold_in(fold_in(seed, 2), epoch))
                for batch in loader():
                    if step == 50:
                        break
                    sampler.zero_grad()
                    value = loss(network, batch)
                    value.backward()
                    collector.loss = value.detach()
                    sampler.step()
                    step += 1
    found = contents(tmp_path / "sample")
    assert found == contents(tmp_path / "loop")
    store = sg.SampleStore(tmp_path / "sample")
    assert store.chains == [0, 1] and len(store.chain(0)) == 23
    first, second = store.chain(0)[-1], store.chain(1)[-1]
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert first.step > 40 and first.loss == first.loss


def test_a_kill_leaves_no_trace(tmp_path):
    whole = tmp_path / "whole"
    run(whole, chains=2, schedule=cycles)
    for chain, step in ((0, 1), (0, 20), (1, 3), (1, 50)):
        options = {"chains": 2, "schedule": cycles}
        options["callbacks"] = [KilledAt(tmp_path, chain, step)]
        process = fresh.Process(target=run, args=(tmp_path / "killed",), kwargs=options)
        process.start()
        process.join()
        assert process.exitcode == -9
    run(tmp_path / "killed", chains=2, schedule=cycles)
    assert contents(tmp_path / "killed") == contents(whole)


@pytest.mark.usefixtures("forked")
def test_processes(tmp_path, set_threads):
    before = torch.get_num_threads()
    set_threads(1)
    one = run(tmp_path / "one", chains=2)
    set_threads(before)
    two = run(tmp_path / "two", chains=2, processes=2)
    assert len(one) == len(two) > 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.usefixtures("forked")
def test_an_error_in_a_process_is_raised(tmp_path):
    with pytest.raises(TypeError, match="must return the mean loss"):
        run(tmp_path, loss=print, chains=2, processes=2)
    with pytest.raises(TypeError, match="can be imported, or processes=1"):
        run(tmp_path, chains=2, processes=2, callbacks=[lambda state: None])


def test_more_steps(tmp_path):
    run(tmp_path / "once")
    part = run(tmp_path / "twice", steps=20)
    assert max(draw.step for draw in part) <= 20
    run(tmp_path / "twice", seed=None)  # keeps its own
    assert contents(tmp_path / "twice") == contents(tmp_path / "once")
    again = run(tmp_path / "twice")  # is done
    assert len(again) == 23
    with pytest.raises(ValueError, match="has made 50"):
        run(tmp_path / "twice", steps=49)
    with pytest.raises(ValueError, match=r"Invalid seed: 6 .* has 5"):
        run(tmp_path / "twice", seed=6)
    with pytest.raises(ValueError, match="Invalid every: 3"):
        run(tmp_path / "twice", every=3)
    assert contents(tmp_path / "twice") == contents(tmp_path / "once")
    anew = run(tmp_path / "twice", seed=6, restart=True)
    assert len(anew) == 23 and contents(tmp_path / "twice") != contents(
        tmp_path / "once"
    )


def faster(params, seed):
    return sg.SGHMC(params, 0.06, 0.9, num_data=ROWS, prior_precision=1.0, seed=seed)


def test_another_samplers_chain_does_not_resume(tmp_path):
    run(tmp_path, steps=20)
    before = contents(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"^Invalid sampler: group 0 has lr 0.06 \(chain 0 in .* was written with "
        r"0.05; restart=True starts a new run\)$",
    ):
        run(tmp_path, steps=20, sampler=faster)
    assert contents(tmp_path) == before
    # Neither a schedule nor a callback makes it another one.
    for _ in range(2):
        run(tmp_path / "cycles", schedule=cycles)


def test_restart_deletes_draws(tmp_path):
    run(tmp_path / "fresh", steps=10, seed=6)
    run(tmp_path / "store", steps=10, chains=3)
    before = contents(tmp_path / "store")
    for bad in ({"every": 0}, {"parameters": ["none"]}, {"sampler": lambda p, seed: p}):
        with pytest.raises((TypeError, ValueError)):
            run(tmp_path / "store", steps=10, restart=True, **bad)
    assert contents(tmp_path / "store") == before
    run(tmp_path / "store", steps=10, seed=6, restart=True)
    assert contents(tmp_path / "store") == contents(tmp_path / "fresh")
    assert not (tmp_path / "store" / "checkpoint-2.pt").exists()
    halves = run(tmp_path / "store", steps=10, restart=True, dtype=torch.bfloat16)
    assert halves[0]["0.weight"].dtype == torch.bfloat16


def test_a_chain_that_somebody_writes_is_not_deleted(tmp_path):
    run(tmp_path, steps=10, chains=2)
    before = contents(tmp_path)
    writing = model()
    sampler = sghmc(writing.named_parameters(), seed=0)
    for chains in (2, 1):  # nor is one beyond the run's
        with (
            sg.Collector(sampler, writing, tmp_path, chain=1),
            pytest.raises(RuntimeError, match="Cannot write to chain 1 of"),
        ):
            run(tmp_path, steps=10, chains=chains, seed=6, restart=True)
        assert contents(tmp_path) == before
        assert (tmp_path / "checkpoint-1.pt").exists()


def test_epochs(tmp_path):
    store = run(tmp_path, steps=None, epochs=3, burn_in=0, every=1)
    assert [draw.step for draw in store] == list(range(1, 19))


def test_cycles_are_collected_where_they_sample(tmp_path):
    store = run(tmp_path, schedule=cycles, burn_in=0, every=1)
    # Steps are counted from 1: of each cycle of 8 the last four.
    wanted = [step for step in range(1, 51) if (step - 1) % 8 >= 4]
    assert [draw.step for draw in store] == wanted
    assert {draw.temperature for draw in store} == {1.0}


def test_cycles_keep_temperatures_and_losses(tmp_path):
    """Draws of sampling phases, and every loss (docs/predict.md)."""
    run(tmp_path, schedule=cycles, burn_in=0, every=1, steps=400, report=True)
    kept = json.loads((tmp_path / "chain-0" / "run.json").read_text())
    assert kept["num_observed"] > 5
    assert set(kept["tensors"]) == {name for name, _ in model().named_parameters()}
    assert sum(len(kept[name]) for name in ("losses", "kinetic")) > 2
    assert kept["temperature"] == 1.0


def test_some_of_a_cycles_samples(tmp_path):
    steps = iter(range(1, 51))
    options = {"burn_in": 0, "every": 1, "when": lambda: next(steps) % 2 == 0}
    store = run(tmp_path, schedule=cycles, **options)  # asked in sampling phases alone
    wanted = [step for step in range(1, 51) if (step - 1) % 8 >= 4]
    assert [draw.step for draw in store] == wanted[1::2]


def test_decaying_steps_are_weights(tmp_path):
    def decays(sampler):
        return sg.PolynomialDecay(sampler, 10.0)

    store = run(tmp_path, schedule=decays)
    for draw in store:
        lr = 0.05 * (1 + (draw.step - 1) / 10) ** -0.55
        assert draw.weight == pytest.approx(lr) == draw.lr


def each_example(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


EWSG = partial(sg.EWSG, lr=0.01, momentum=0.9, num_data=ROWS, index_chain_length=2)
PSGLD = partial(sg.PSGLD, lr=1e-3, num_data=ROWS)
SBPS = partial(sg.SBPS, num_data=ROWS, sample_interval=0.01)


@pytest.mark.parametrize(
    ("sampler", "loss"), [(EWSG, loss), (PSGLD, loss), (SBPS, each_example)]
)
def test_closures_of_other_samplers(tmp_path, sampler, loss):
    def plain():
        return nn.Linear(4, 3)

    options = {"seed": 1, "progress": False}
    args = (plain, sampler, loader(), loss)
    store = sg.sample(*args, tmp_path / "whole", steps=30, **options)
    sg.sample(*args, tmp_path / "parts", steps=11, **options)
    sg.sample(*args, tmp_path / "parts", steps=30, **options)
    assert len(store) > 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    if not isinstance(sampler(plain().parameters()), sg.PSGLD):
        with pytest.raises(ValueError, match="give steps"):
            sg.sample(*args, tmp_path / "epochs", epochs=1, **options)


def test_hmc_of_all_data(tmp_path):
    sampler = partial(sg.HMC, step_size=0.01, num_steps=3, num_data=ROWS)
    options = {"steps": 5, "burn_in": 0, "every": 1, "check": True}
    store = run(tmp_path, partial(nn.Linear, 4, 3), sampler, [data()[:]], **options)
    assert [draw.step for draw in store] == [1, 2, 3, 4, 5]


def test_a_module_is_copied(tmp_path):
    torch.manual_seed(3)
    network = model()
    before = {name: t.clone() for name, t in network.state_dict().items()}
    random = torch.get_rng_state()
    seen = []
    look = lambda state: seen.append(state.model)  # noqa: E731
    run(tmp_path, network, steps=2, burn_in=0, check=True, callbacks=[look])
    assert torch.equal(torch.get_rng_state(), random)
    assert len(seen) == 2 and network not in seen
    after = network.state_dict()
    assert all(torch.equal(after[name], t) for name, t in before.items())


DRAWS = {
    "numpy": np.random.rand,
    "python": random.random,
    "torch": lambda: torch.rand(()),
}


class Augmented(torch.utils.data.Dataset):
    """Data with noise of one of the default generators."""

    def __init__(self, kind):
        self.draw, self.data = DRAWS[kind], data()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + float(self.draw()), y


@pytest.mark.parametrize("kind", DRAWS)
def test_data_sets_that_draw(tmp_path, kind):
    """One seed gives one chain, also resumed; the program's generators go on."""
    loader = torch.utils.data.DataLoader(Augmented(kind), 10, shuffle=True)
    args, options = (model, sghmc, loader, loss), {"seed": 1, "progress": False}

    def go(folder, *steps):
        for count in steps:
            for draw in DRAWS.values():
                draw()
            states = np.random.get_state()[1].tolist(), random.getstate()
            sg.sample(*args, tmp_path / folder, steps=count, **options)
            assert (np.random.get_state()[1].tolist(), random.getstate()) == states
        return contents(tmp_path / folder)

    whole = go("whole", 20)
    assert go("again", 20) == whole
    assert go("parts", 8, 20) == whole


@pytest.mark.parametrize(
    "kind", ["independent", "generator", "frozen", "workers", "batches", "rows"]
)
def test_what_a_loader_remembers(tmp_path, kind):
    """The same chain from a fresh loader and from one that was used."""
    if kind == "independent":
        batches = sg.IndependentBatchSampler(ROWS, 10, seed=1)
        used = torch.utils.data.DataLoader(data(), batch_sampler=batches)
    elif kind in ("batches", "rows"):
        rows = torch.utils.data.RandomSampler(
            data(), generator=torch.Generator().manual_seed(2)
        )
        batches = torch.utils.data.BatchSampler(rows, 10, drop_last=False)
        used = torch.utils.data.DataLoader(data(), batch_sampler=batches)
        if kind == "rows":  # the dataset returns whole minibatches
            used = torch.utils.data.DataLoader(data(), sampler=batches, batch_size=None)
    elif kind == "workers":
        used = torch.utils.data.DataLoader(
            data(), 10, shuffle=True, num_workers=1, persistent_workers=True
        )
    else:
        used = torch.utils.data.DataLoader(
            data(), 10, shuffle=True, generator=torch.Generator().manual_seed(2)
        )
    network = model()
    network[0].requires_grad_(kind != "frozen")
    args = (network, sghmc, used, loss)
    options = {"seed": 1, "progress": False}
    sg.sample(*args, tmp_path / "whole", steps=20, **options)
    next(iter(used))
    sg.sample(*args, tmp_path / "parts", steps=8, **options)
    sg.sample(*args, tmp_path / "parts", steps=20, **options)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    losses = [draw.loss for draw in sg.SampleStore(tmp_path / "whole")]
    assert len({*losses}) == 20


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="give steps or epochs, one of the two"):
        run(tmp_path, epochs=3)
    with pytest.raises(ValueError, match="Invalid chains: 0"):
        run(tmp_path, chains=0)
    with pytest.raises(TypeError, match="Invalid sampler: Tensor"):
        run(tmp_path, sampler=torch.zeros(1))
    with pytest.raises(TypeError, match=r"Invalid sampler: .* returned SGD"):
        run(tmp_path, sampler=lambda params, seed: torch.optim.SGD(params, 0.1))
    with pytest.raises(TypeError, match="HMCECS draws its own subsamples"):
        run(tmp_path, sampler=partial(sg.HMCECS, num_data=ROWS, subsample_size=5))
    with pytest.raises(ValueError, match="it has no minibatch"):
        sg.sample(model, sghmc, [], loss, tmp_path, steps=1, progress=False)
    with pytest.raises(TypeError, match="no length"):
        batches = (batch for batch in loader())
        sg.sample(model, sghmc, batches, loss, tmp_path, epochs=1)
    with pytest.raises(TypeError, match="numbers its chains from 0 on"):
        run(tmp_path, chain=3)
    with pytest.raises(TypeError, match="makes one for each chain"):
        run(tmp_path, monitor=None)
    with pytest.raises(TypeError, match="unexpected keyword"):
        run(tmp_path, bufers=False)


def test_a_damaged_checkpoint(tmp_path):
    run(tmp_path, steps=5)
    path = tmp_path / "checkpoint-0.pt"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RuntimeError, match=r"Cannot read .*checkpoint-0.pt: "):
        run(tmp_path, steps=6)
    run(tmp_path, steps=6, restart=True)


_WITHOUT_DOCSTRINGS = """
import sys, torch, torch_sgmcmc as sg
model, data = torch.nn.Linear(2, 1), [torch.ones(4, 2)]
make = lambda params, seed: sg.SGLD(params, 0.01, num_data=4, seed=seed)
loss, quiet = lambda m, x: m(x).square().mean(), {"progress": False, "check": False}
sg.sample(model, make, data, loss, steps=9, report=False, **quiet)
try:
    sg.sample(model, make, data, loss, sys.argv[1], steps=9, **quiet)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.full
def test_without_docstrings(tmp_path):
    """The report's libraries need docstrings, which is found before the run."""
    program = [sys.executable, "-OO", "-c", _WITHOUT_DOCSTRINGS, tmp_path / "store"]
    said = subprocess.check_output(program, text=True, cwd=tmp_path)
    assert said.startswith("Cannot report convergence under python -OO, ")
    assert not (tmp_path / "store").exists()


def test_files_that_differ_in_their_suffix(tmp_path):
    """Checkpoints of two ranks: neither uses the other's name."""
    other = tmp_path / "run.partial"
    other.write_text("kept")
    sg.save({"rank": 0}, tmp_path / "run.rank0")
    assert other.read_text() == "kept"
    assert sg.load(tmp_path / "run.rank0") == {"rank": 0}
    assert len([*tmp_path.iterdir()]) == 2


def layers(params, seed):
    params = [*params]
    groups = [
        [p for p in params if is_weight == (p[1].dim() > 1)]
        for is_weight in (True, False)
    ]
    groups = [{"params": group} for group in groups]
    return sg.SGHMC(groups, 0.05, num_data=ROWS, prior_precision=1.0, seed=seed)


def test_a_hyperprior_of_some_groups(tmp_path):
    gibbs = partial(sg.GammaPrecision, groups=[0])
    options = {"sampler": layers, "report": False}
    store = run(tmp_path / "whole", schedule=gibbs, **options)
    first, second = store[-1].prior_precision
    assert first != 1.0 and second == 1.0
    for steps in (20, 50):
        run(tmp_path / "parts", schedule=gibbs, steps=steps, **options)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    with pytest.raises(ValueError, match="GammaPrecision has groups"):
        run(tmp_path / "parts", schedule=partial(gibbs, groups=[1]), **options)


def test_draws_of_no_use_are_warned_of(tmp_path):
    """Without progress bars a report is read by nobody."""
    options = {"steps": 20, "check": False, "progress": False}
    for lr, words in ((1e-30, "All draws are the same"), (0.0, "No draw was stored")):
        still = partial(sg.SGHMC, lr=lr, num_data=ROWS)
        with pytest.warns(UserWarning, match=f"the report found issues:\n{words}"):
            folder = tmp_path / str(lr)
            sg.sample(lambda: nn.Linear(4, 3), still, loader(), loss, folder, **options)
