"""Unusual arguments of stores, predictions and constructors: accepted or refused."""

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver_problem import ROWS, loader, loss, model, run, sghmc
from short_chains import CLASSES
from torch.utils.data import DataLoader, IterableDataset

import torch_sgmcmc as sg

SMALL = {"steps": 4, "burn_in": 0, "every": 1}


@pytest.mark.parametrize("kind", ["SGHMC", "BAOA", "SGNHT", "PSGLD", "MCLMC", "EWSG"])
def test_a_first_step_in_inference_mode(kind):
    """Its state can be changed outside of it."""
    ends = []
    for is_inside in (False, True):
        p = torch.ones(4, requires_grad=True)
        settings = {"gamma": False} if kind == "PSGLD" else {}
        sampler = getattr(sg, kind)([p], lr=0.01, num_data=10, seed=0, **settings)

        def closure(p=p):
            p.grad = p.detach().clone()
            return torch.zeros(())

        for step in range(3):
            with torch.inference_mode(is_inside and step == 0):
                sampler.step(closure)
        ends.append(p.tolist())
    assert ends[0] == ends[1]


def test_zero_is_not_none(tmp_path):
    run(tmp_path, **SMALL)
    with pytest.raises(ValueError, match=r"^Invalid burn_in: 1 \(the run .* has 0\)$"):
        run(tmp_path, **{**SMALL, "burn_in": 1})
    run(tmp_path, **{**SMALL, "burn_in": 1}, restart=True)
    with pytest.raises(ValueError, match=r"^Invalid burn_in: 0 \(the run .* has 1\)$"):
        run(tmp_path, **SMALL)


def test_a_relative_store_after_chdir(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    network = model()
    sampler = sghmc(network.parameters(), seed=0)
    store = sg.SampleStore("draws")
    with sg.Collector(sampler, network, "draws") as collector:
        monkeypatch.chdir("elsewhere")
        for _ in range(5):
            for p in network.parameters():
                p.grad = torch.ones_like(p)
            sampler.step()
        collector.flush()
    assert len(store.refresh()) == 5 and store[-1]["0.weight"].shape == (8, 4)
    with sg.SampleWriter("more", {"w": torch.zeros(2)}) as writer:
        monkeypatch.chdir(tmp_path)
        writer.append({"w": torch.ones(2)}, step=1)
    assert len(sg.SampleStore(tmp_path / "elsewhere" / "more")) == 1
    assert not (tmp_path / "more").exists()

    def leave(state):
        monkeypatch.chdir(tmp_path / "elsewhere" if state.step == 2 else tmp_path)

    assert len(run(Path("run"), **SMALL, callbacks=leave)) == 4
    assert len(sg.SampleStore(tmp_path / "run")) == 4


def test_arrays_of_draws(tmp_path):
    store = run(tmp_path, **SMALL)
    array = np.asarray(store["0.bias"])
    assert array.dtype == np.float32 and array.shape == (4, 8)
    assert np.array_equal(array[2], store[2]["0.bias"].numpy())
    assert np.asarray(store["0.bias"][1:3], dtype=np.float64).shape == (2, 8)
    with pytest.raises(TypeError, match=r"is of one tensor, and they have 9 \(draws"):
        np.asarray(store)
    halves = run(tmp_path / "16", **SMALL, dtype=torch.bfloat16)
    assert np.asarray(halves["0.bias"]).dtype == np.float32


def test_predictions_of_a_folder(tmp_path):
    store = run(tmp_path, **SMALL)
    x = torch.randn(3, 4)
    expected = sg.predict(model(), store, x).mean
    for path in (tmp_path, str(tmp_path)):
        assert torch.equal(sg.predict(model(), path, x).mean, expected)
    with pytest.raises(ValueError, match=r"Invalid draws: .*/none has none"):
        sg.predict(model(), tmp_path / "none", x)


@pytest.mark.parametrize("kind", CLASSES)
def test_arguments_of_other_optimizers(kind):
    params = [torch.zeros(2, requires_grad=True)]
    for key, words in (
        ("weight_decay", "prior_precision = weight_decay * num_data is that prior"),
        ("tempreature", "did you mean 'temperature'?"),
        ("nesterov", "it has "),
    ):
        with pytest.raises(TypeError) as caught:
            kind(params, **{key: 0.1})
        expected = f"{kind.__name__} has no argument {key!r} ({words}"
        assert str(caught.value).startswith(expected)
    assert "num_data" in inspect.signature(kind).parameters


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return iter([(torch.ones(4), torch.tensor(1))] * 10)


def test_a_stream_has_no_epochs(tmp_path):
    args = (model, sghmc, DataLoader(Stream(), 5), loss, tmp_path)
    message = r"it has no length \(give steps, not epochs, and no optimizer_epochs\)"
    with pytest.raises(TypeError, match=message):
        sg.sample(*args, epochs=2, progress=False)
    assert len(sg.sample(*args, steps=5, seed=1, progress=False)) == 5


def test_types_have_words(tmp_path):
    network = model()
    sampler = sghmc(network.parameters(), seed=0)
    make = partial(sg.Collector, sampler, network, tmp_path / "none")
    for options, words in (
        ({"weight": 2.0}, "Invalid weight: float .must be a function"),
        ({"when": True}, "Invalid when: bool .must be a function"),
    ):
        with pytest.raises(TypeError, match=words):
            make(**options)
    with pytest.raises(ValueError, match=r"Invalid dtype: 'bfloat16' \(must"):
        make(dtype="bfloat16")
    with pytest.raises(ValueError, match="Invalid parameters: 5 "):
        make(parameters=5)
    with pytest.raises(TypeError, match=r"store: of type NoneType .must be a path"):
        sg.Collector(sampler, network, None)
    with pytest.raises(TypeError, match="Invalid store: of type int"):
        sg.sample(model, sghmc, loader(), loss, 5, steps=1)
    with pytest.raises(TypeError, match="Invalid model: str"):
        sg.sample("net", sghmc, loader(), loss, tmp_path, steps=1)
    with pytest.raises(TypeError, match=r"Invalid callbacks: int .must be a function"):
        run(tmp_path / "none", callbacks=[5])
    assert not (tmp_path / "none").exists()
    assert len(run(tmp_path / "one", **SMALL, callbacks=lambda state: None)) == 4


class Lookahead:
    """A lookahead that treats the inner sampler as timm's does."""

    def __init__(self, base):
        self.param_groups = base.param_groups
        for group in self.param_groups:
            group["lookahead_alpha"] = 0.5


def test_a_lookahead_warns(tmp_path):
    network = model()
    sampler = sghmc(network.parameters(), seed=0)
    outside = Lookahead(sampler)
    with pytest.raises(ValueError, match="SGHMC is inside of a Lookahead, which pulls"):
        sampler.step()
    with pytest.raises(ValueError, match="inside of a Lookahead, whose averages"):
        sg.Collector(sampler, network, tmp_path)
    with pytest.raises(TypeError, match=r"sampler: got Lookahead .must be a torch"):
        sg.Collector(outside, network, tmp_path)
    with pytest.raises(TypeError, match="the function returned Lookahead"):
        run(tmp_path, sampler=lambda params, seed: Lookahead(sghmc(params, seed)))


def test_what_is_printed_is_short(tmp_path):
    pytest.importorskip("arviz")
    states = []
    store = run(tmp_path, **SMALL, callbacks=lambda state: states.append(repr(state)))
    network = model()
    sampler = sghmc(network.parameters(), seed=0)
    collector = sg.Collector(sampler, network, tmp_path / "c", burn_in=3, every=2)
    kept = f"Collector of SGHMC: 0 draws of chain 0 of {tmp_path / 'c'}"
    assert repr(collector) == f"{kept} (burn_in=3, every=2)"
    collector.close()
    options = {"weights": [1.0, 1.0, 1.0, 3.0]}
    options["functions"] = {"first": lambda out: out[:, 0]}
    prediction = sg.predict(network, store, torch.randn(5, 4), **options)
    start = "Prediction of 4 draws (3 effective): mean [5, 3], entropy "
    assert repr(prediction).startswith(start)

    assert repr(prediction).endswith(" of it epistemic, first [5]")
    assert repr(states[0]).startswith("'ChainState(chain=0, step=1, loss=")
    some = store[["0.bias", "0.weight"]]
    assert repr(some) == "4 draws of chains [0]: '0.bias', '0.weight'"
    assert repr(store[1:]).startswith("3 draws of chains [0]: ")
    assert repr(store[1:]).endswith("', ...")
    p = torch.zeros(2, requires_grad=True)
    estimate = sg.local_learning_coefficient(
        [p],
        lambda rows: (p * p).sum(),
        partial(sg.SGLD, lr=0.01),
        num_data=ROWS,
        localization=1.0,
        burn_in=1,
        draws=3,
        seed=0,
        progress=False,
    )
    assert repr(estimate) == str(estimate) == estimate.summary()
    for text in (repr(prediction), repr(estimate), repr(collector)):
        assert "tensor(" not in text
    copy.deepcopy(prediction)


@pytest.mark.parametrize("kind", [sg.SGLD, sg.SGHMC])
def test_parameters_are_swapped_after_a_step(kind):
    """Swaps as fully_shard and future versions of torch convert a module."""
    net = torch.nn.Linear(3, 2)
    sampler = kind(net.parameters(), 0.1, num_data=9, seed=1)
    p = net.weight

    def step():
        net(torch.ones(4, 3, dtype=p.dtype)).sum().backward()
        sampler.step()
        sampler.zero_grad()

    step()
    torch.utils.swap_tensors(p, torch.nn.Parameter(torch.zeros(2, 3)))
    step()
    try:
        torch.__future__.set_swap_module_params_on_conversion(True)
        net.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert net.weight is p and p.dtype is torch.float64
    sampler.load_state_dict(sampler.state_dict())
    step()
    assert int(sampler.param_groups[0]["step"]) == 3


def test_a_schedule_s_scale_of_lr():
    """The key of timm, whose schedulers multiply lr by it."""
    groups = [{"params": [torch.ones(2, requires_grad=True)], "lr_scale": 0.5}]
    sampler = sg.SGLD(groups, 0.1, num_data=9, seed=1)
    assert sampler.param_groups[0]["lr_scale"] == 0.5
