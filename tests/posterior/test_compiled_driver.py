"""sample(compile=True): the chain of single steps, in blocks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.inductor import graphs_alone  # noqa: F401
from torch import Tensor, nn

import torch_sgmcmc as sg
from torch_sgmcmc.run.compile import length_of_blocks

pytestmark = pytest.mark.full

DATA = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
LOADER = DATA.split(4)
SGHMC = partial(sg.SGHMC, lr=0.05, num_data=24)


class Point(nn.Module):
    """A vector, frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(5))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """A model of one vector, with the first row as its data."""
    return ((model.at - batch[0]) ** 2 / 2).sum()


def run(
    store: Path | None, loader: Any = LOADER, make: Any = SGHMC, **arguments: Any
) -> sg.SampleStore:
    given = {"steps": 24, "burn_in": 4, "every": 4, "seed": 3, "compile": True}
    settings = {"report": False, "progress": False, "check": False, **given}
    return sg.sample(Point, make, loader, loss, store, **{**settings, **arguments})


def draws_of(store: sg.SampleStore) -> list[Tensor]:
    return [draw["at"] for draw in store]


def assert_same_draws(store: Any, single: sg.SampleStore) -> None:
    """Compares draws, up to the rounding of updates."""
    for a, b in zip(store, single, strict=True):
        torch.testing.assert_close(a["at"], b["at"], rtol=1e-5, atol=1e-6)


def test_blocks_are_as_long_as_possible() -> None:
    assert length_of_blocks(100, 50, 10_000) == 10
    assert length_of_blocks(0, 60, 6000) == 20
    assert length_of_blocks(0, 7, 700) == 7
    assert length_of_blocks(30, 1, 60) == 1
    assert length_of_blocks(40, 20, 110, 200) == 10


@pytest.mark.usefixtures("graphs_alone")
@pytest.mark.parametrize("cls", [sg.SGHMC, sg.MCLMC])
def test_draws_equal_those_of_single_steps(cls: Any) -> None:
    """Blocks in a driver; inductor: tests/operators/test_compiled_steps.py."""
    make = partial(cls, lr=0.05, num_data=24)
    given = {"make": make, "loader": LOADER}
    if cls is sg.MCLMC:
        given = {"make": partial(make, tune_steps=44), "loader": [DATA]}
        given |= {"burn_in": 48, "steps": 68}
    single, store = run(None, compile=False, **given), run(None, **given)
    assert len(store) == len(single) == 5
    assert_same_draws(store, single)


@pytest.mark.usefixtures("graphs_alone")
def test_the_report_has_temperatures(tmp_path: Path) -> None:
    run(tmp_path / "s", steps=6000, every=1000, report=True)
    assert "T_conf" in (tmp_path / "s" / "report.md").read_text()


@pytest.mark.usefixtures("graphs_alone")
def test_callbacks_of_several_chains() -> None:
    """Callbacks are called at the ends of blocks."""
    seen: list[int] = []
    store = run(None, chains=2, callbacks=lambda state: seen.append(state.step))
    assert seen == [4, 8, 12, 16, 20, 24] * 2
    assert [len(store.chain(i)) for i in range(2)] == [5, 5]
    assert_same_draws(store.chain(0), run(None, compile=False))


@pytest.mark.usefixtures("graphs_alone")
def test_a_chain_resumes(tmp_path: Path) -> None:
    """Runs to step 12, then on with blocks of another length."""
    run(tmp_path / "b", steps=12)
    store = run(tmp_path / "b", steps=24)
    assert_same_draws(store, run(None, compile=False))
    # Of equal blocks, as after an interrupt: bitwise.
    assert all(
        torch.equal(a["at"], b["at"]) for a, b in zip(store, run(None), strict=True)
    )
    with pytest.raises(ValueError, match=r"Invalid compile: False .*with True"):
        run(tmp_path / "b", compile=False)


@pytest.mark.usefixtures("graphs_alone")
def test_capped_draws_equal_those_of_single_steps() -> None:
    """Resumes where thinning falls on numbers that are not draws."""
    cap = {"steps": 32, "burn_in": 0, "every": 2}
    single, store = run(None, compile=False, **cap), run(None, **cap)
    assert len(store) == len(single)
    assert_same_draws(store, single)
    steps = [[draw.step for draw in each] for each in (single, store)]
    assert steps[0] == steps[1]


@pytest.mark.usefixtures("graphs_alone")
def test_gradients_that_are_not_finite_end_it() -> None:
    bad = [*LOADER[:-1], torch.full((4, 5), torch.nan)]
    with pytest.raises(RuntimeError, match="chain 0, step 5: SGHMC got a"):
        run(None, bad)


def test_steps_that_would_be_skipped_are_refused() -> None:
    """They would move draws into the middle of a block."""
    skipping = partial(SGHMC, nonfinite="skip")
    options: dict[str, Any] = {"steps": 8, "compile": True, "progress": False}
    with pytest.raises(ValueError, match="Invalid compile: with nonfinite='skip'"):
        sg.sample(Point, skipping, LOADER, loss, **options, check=False)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda path: run(path, schedule=sg.CyclicalSchedule), TypeError, "missing"),
        (lambda path: run(path,
         schedule=lambda s: torch.optim.lr_scheduler.ConstantLR(s)),
         ValueError, r"Invalid compile: with a ConstantLR"),
        (lambda path: run(path, when=lambda: True),
         ValueError, r"Invalid when: with compile"),
        (lambda path: sg.sample(Point,
         partial(sg.HMC, step_size=0.1, num_steps=2, num_data=24), LOADER, loss,
         path, steps=4, compile=True, check=False, progress=False),
         ValueError, r"Invalid compile: HMC \(must be a sampler whose steps"),
    ],
)  # fmt: skip
def test_refusals(make: Any, kind: type[Exception], words: str, tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(kind, match=words):
        make(tmp_path / "store")
    assert not list(tmp_path.rglob("draws-*"))


def test_minibatches_of_one_kind() -> None:
    with pytest.raises(TypeError, match=r"Invalid loader: a minibatch is a list"):
        run(None, [["text"]] * 4)
    ragged = [DATA[:4], DATA[4:7], DATA[:4], DATA[:4]]
    with pytest.raises(ValueError, match=r"minibatches of shapes .*drop_last=True"):
        run(None, ragged)


@pytest.mark.usefixtures("graphs_alone")
def test_a_block_has_one_draw_at_most() -> None:
    """Returns draws of a collector in a user's loop."""
    model = Point()
    sampler = SGHMC([model.at], seed=0)
    block = sg.compile_steps(
        sampler, lambda p, x: ((p["at"] - x[0]) ** 2).sum(), {"at": model.at}, steps=4
    )
    rows = DATA[:16].reshape(4, 4, 5)
    with sg.Collector(sampler, model, sg.SampleStore(), every=2) as collector:
        with pytest.raises(ValueError, match=r"Invalid block: 4 steps .*every=2"):
            collector.run(block, rows)
        assert int(sampler.param_groups[0]["step"]) == 0
    store = sg.SampleStore()
    with sg.Collector(sampler, model, store, every=4) as collector:
        losses = collector.run(block, rows)
        # The next ones by itself, as the collector listens again.
        for _ in range(4):
            model.at.grad = torch.zeros(5)
            sampler.step()
    assert losses.shape == (4,)
    assert [draw.step for draw in store.refresh()] == [4, 8]


@pytest.mark.usefixtures("graphs_alone")
def test_the_loss_of_several_chains_is_their_mean() -> None:
    p = torch.nn.Parameter(torch.zeros(3, 5))
    sampler = SGHMC([p], seed=0, num_chains=3)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return ((params["p"] - x[0]) ** 2).sum()

    block = sg.compile_steps(sampler, loss, {"p": p}, steps=4)
    store = sg.SampleStore()
    with sg.Collector(sampler, {"p": p}, store, every=4) as collector:
        losses = collector.run(block, DATA[:16].reshape(4, 4, 5))
    assert losses.shape == (4, 3) and store[0]["p"].shape == (3, 5)
    assert store[0].loss == losses.mean(1)[-1].item()
