"""A collector: which draws it takes of which sampler, and that they are the chain's."""

import copy
import math
import os

import pytest
import torch
from stored_files import contents
from torch import Tensor, nn
from torch.nn import functional as F

import torch_sgmcmc as sg
from torch_sgmcmc.draws import store as writer_module

State = dict[str, Tensor]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 3, generator=generator), torch.arange(8) % 2


def advance(model, sampler, steps):
    """The state dicts after each step."""
    states = []
    for i in steps:
        x, y = batch(i)
        sampler.zero_grad()
        F.cross_entropy(model(x), y).backward()
        sampler.step()
        states.append(copy.deepcopy(model.state_dict()))
    return states


def same(one, other):
    return dict(one).keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in other
    )


def sgld(model, **settings):
    return sg.SGLD(model.parameters(), 0.1, num_data=64, seed=3, **settings)


def test_chains_of_one_tensor_that_has_other_memory(tmp_path):
    p = torch.ones(3, 2, requires_grad=True)
    sampler = sg.SGHMC([p], 0.1, num_data=20, num_chains=3, seed=0)
    views = [{"p": p.detach()[k]} for k in range(3)]
    others = [sg.Collector(sampler, view, tmp_path, chain=k)
              for k, view in enumerate(views)]  # fmt: skip

    def step():
        p.grad = p.detach().clone()
        sampler.step()

    step()
    p.data = p.data.clone()  # as in torch.nn.utils.vector_to_parameters
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="'p' is not a view of a parameter of the"):
        step()
    assert torch.equal(p, before)
    for collector in others:
        collector.close()
    with sg.Collector(sampler, {"p": p.detach()[1]}, tmp_path / "again"):
        step()
    (draw,) = sg.SampleStore(tmp_path / "again")
    assert torch.equal(draw["p"], p.detach()[1])


def test_draws_are_the_model_after_the_step(tmp_path):
    """Updated parameters, copies of them, and the batch-norm buffers of that step."""
    model = net()
    sampler = sgld(model)
    with sg.Collector(sampler, model, tmp_path, burn_in=4, every=3) as collector:
        states = []
        for i in range(20):
            collector.loss = torch.tensor(i / 4, requires_grad=True)
            states += advance(model, sampler, range(i, i + 1))
    store = sg.SampleStore(tmp_path)
    assert [one.step for one in store] == [7, 10, 13, 16, 19]
    for one in store:
        assert same(one, states[one.step - 1])
        assert one.loss == (one.step - 1) / 4
        assert (one.lr, one.temperature, one.weight) == (0.1, 1.0, 1.0)
    # And all of these differ, in what batch norm keeps too.
    for name in ("0.weight", "1.running_mean", "1.num_batches_tracked"):
        assert len({one[name].sum().item() for one in store}) == len(store)


def test_a_loss_is_of_one_step(tmp_path):
    model = net()
    sampler = sgld(model)
    with sg.Collector(sampler, model, tmp_path) as collector:
        advance(model, sampler, range(1))
        collector.loss = 0.5
        advance(model, sampler, range(1, 3))
    losses = [one.loss for one in sg.SampleStore(tmp_path)]
    assert losses[1] == 0.5 and math.isnan(losses[0]) and math.isnan(losses[2])


def test_a_collector_changes_no_chain(tmp_path):
    ends = []
    for stores in (False, True):
        model = net()
        sampler = sgld(model)
        if stores:
            collector = sg.Collector(sampler, model, tmp_path, every=3)
        states = advance(model, sampler, range(9))
        ends.append((states[-1], sampler.state_dict()["param_groups"]))
    collector.close()
    assert same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


def test_what_is_stored_is_chosen(tmp_path):
    model = net()
    last = list(model[2].parameters())
    sampler = sg.SGLD(last, 0.1, num_data=64, seed=0)
    buffers = [n for n, _ in model.named_buffers()]
    for i, (choice, expected) in enumerate(
        [
            ({}, list(model.state_dict())),
            ({"parameters": "sampled"}, ["2.weight", "2.bias", *buffers]),
            ({"parameters": ["0.*", "2.bias"], "buffers": False},
             ["0.weight", "0.bias", "2.bias"]),
        ]
    ):  # fmt: skip
        folder = tmp_path / str(i)
        with sg.Collector(sampler, model, folder, **choice):
            advance(model, sampler, range(1))
        assert sorted(sg.SampleStore(folder).names) == sorted(expected)
    with sg.Collector(sampler, model, tmp_path / "bf16", dtype=torch.bfloat16):
        (state,) = advance(model, sampler, range(1))
    (one,) = sg.SampleStore(tmp_path / "bf16")
    assert torch.equal(one["2.weight"], state["2.weight"].bfloat16())
    assert one["1.num_batches_tracked"].dtype == torch.int64


def test_channels_last_and_shared_parameters(tmp_path):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[1].weight
    model = model.to(memory_format=torch.channels_last)
    sampler = sg.SGLD(model.parameters(), 0.1, num_data=4, seed=0)
    with sg.Collector(sampler, model, tmp_path):
        sum(p.square().sum() for p in model.parameters()).backward()
        sampler.step()
    (one,) = sg.SampleStore(tmp_path)
    assert "2.weight" not in one
    for name, p in model.named_parameters():
        assert torch.equal(one[name], p)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[1].weight.zero_()
    other.load_state_dict(dict(one), strict=False)
    assert torch.equal(other[2].weight, model[2].weight)


def test_a_draw_has_its_prior_precisions(tmp_path):
    """Records the settings of each param group in the step of a draw."""
    model = net()
    groups = [
        {"params": layer.parameters()} for layer in model if [*layer.parameters()]
    ]
    sampler = sg.SGLD(groups, 1e-3, num_data=8, prior_precision=3.0, seed=0)
    precision = sg.GammaPrecision(sampler)
    expected = []
    with sg.Collector(sampler, model, tmp_path, every=2):
        for i in range(6):
            expected.append(tuple(g["prior_precision"] for g in sampler.param_groups))
            advance(model, sampler, range(i, i + 1))
            precision.step()
    found = [one.prior_precision for one in sg.SampleStore(tmp_path)]
    assert found == expected[1::2] and len({*found}) == 3
    assert len(found[0]) == len(groups) > 1


def test_steps_that_were_skipped_are_no_draws(tmp_path):
    model = net()
    sampler = sgld(model, nonfinite="skip")
    with sg.Collector(sampler, model, tmp_path, every=2):
        for i in range(9):
            x, y = batch(i)
            sampler.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if i in (0, 3, 4):
                model[0].weight.grad.fill_(math.nan)
            sampler.step()
    assert [one.step for one in sg.SampleStore(tmp_path)] == [2, 4, 6]


def test_a_warm_up_is_not_stored(tmp_path):
    theta = torch.ones(3, requires_grad=True)
    sampler = sg.HMC([theta], step_size=0.3, num_steps=3, num_data=1, seed=0)

    def closure():
        sampler.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss

    with sg.Collector(sampler, {"theta": theta}, tmp_path, every=2):
        sampler.warmup(closure, 7, progress=False)
        for _ in range(5):
            sampler.step(closure)
        sampler.warmup(closure, 7, progress=False)  # another one
        for _ in range(3):
            sampler.step(closure)
    store = sg.SampleStore(tmp_path)
    assert [one.step for one in store] == [9, 11, 20, 22]
    assert store[-1].lr == sampler.param_groups[0]["step_size"]


def test_sbps_stores_points_of_the_trajectory(tmp_path):
    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    sampler = sg.SBPS([theta], num_data=20, sample_interval=0.3, seed=0)
    points = []
    sampler.register_sample_hook(lambda s, time: points.append(theta.detach().clone()))

    def closure():
        return theta.square().sum() * torch.ones(8, dtype=torch.float64)

    with sg.Collector(sampler, {"theta": theta}, tmp_path, burn_in=3, every=2):
        ends = []
        for _ in range(60):
            sampler.step(closure)
            ends.append(theta.detach().clone())
    store = sg.SampleStore(tmp_path)
    assert len(points) > 20
    assert len(store) == (len(points) - 3) // 2
    for i, one in enumerate(store):
        assert torch.equal(one["theta"], points[4 + 2 * i])
        assert not any(torch.equal(one["theta"], end) for end in ends)
        assert math.isnan(one.lr) and 1 <= one.step <= 60


def signed(theta):
    """A regression of which so little is seen that estimates become negative."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, dtype=torch.float64, generator=generator)
    y = (x @ torch.ones(2, dtype=torch.float64) > 0).double()

    def log_likelihood(indices):
        eta = x[indices] @ theta
        return -F.binary_cross_entropy_with_logits(eta, y[indices], reduction="none")

    sampler = sg.HMCECS(
        [theta],
        num_data=200,
        subsample_size=1,
        num_factors=3,
        num_blocks=1,
        estimator="signed",
        taylor_order=1,
        mass_matrix="identity",
        prior_precision=1.0,
        step_size=0.05,
        trajectory_length=0.1,
        max_variance=1e9,
        seed=1,
    )
    return sampler, log_likelihood


def test_signs_of_hmcecs_are_weights(tmp_path):
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    sampler, closure = signed(theta)
    signs, thetas = [], []
    with sg.Collector(sampler, {"theta": theta}, tmp_path):
        for _ in range(60):
            sampler.step(closure)
            signs.append(sampler.sign)
            thetas.append(theta.detach().clone())
    store = sg.SampleStore(tmp_path)
    assert [one.weight for one in store] == signs
    assert set(signs) == {-1, 1}
    assert all(
        torch.equal(one["theta"], t) for one, t in zip(store, thetas, strict=True)
    )


# ---- Resuming ------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 6, 9])
def test_a_resumed_store_equals_that_of_an_unbroken_run(tmp_path, at):
    def run(folder, upto, saved=None):
        """Checkpoints after every third step; the last one."""
        model = net()
        sampler = sgld(model)
        collector = sg.Collector(sampler, model, folder)
        first = 0
        if saved is not None:
            first = saved["step"]
            model.load_state_dict(saved["model"])
            sampler.load_state_dict(saved["sampler"])
            collector.load_state_dict(saved["collector"])
        checkpoints = {}
        for i in range(first, upto):
            advance(model, sampler, range(i, i + 1))
            if i % 3 == 2:
                parts = {"model": model, "sampler": sampler, "collector": collector}
                checkpoints[i + 1] = copy.deepcopy(
                    {name: part.state_dict() for name, part in parts.items()}
                ) | {"step": i + 1}
        collector.close()
        return checkpoints

    run(tmp_path / "whole", 14)
    saved = run(tmp_path / "broken", min(at + 2, 11))[at]
    run(tmp_path / "broken", 14, saved)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert len(sg.SampleStore(tmp_path / "broken")) == 14


def test_a_step_on_draws_of_an_earlier_run(tmp_path):
    model = net()
    for i in range(2):
        sampler = sgld(model)
        collector = sg.Collector(sampler, model, tmp_path)
        if i:
            before = copy.deepcopy(model.state_dict())
            with pytest.raises(ValueError, match="2 draws of an earlier run"):
                advance(model, sampler, range(2))
            assert sampler.param_groups[0]["step"] == 0
            for name, p in model.named_parameters():
                assert torch.equal(before[name], p)
            collector.restart()
        advance(model, sampler, range(2))
        collector.close()
    assert [one.step for one in sg.SampleStore(tmp_path)] == [1, 2]


def test_a_checkpoint_of_another_store_or_schedule(tmp_path):
    model = net()
    sampler = sgld(model)
    with sg.Collector(sampler, model, tmp_path / "a", every=2) as collector:
        advance(model, sampler, range(4))
        saved = collector.state_dict()
    with sg.Collector(sampler, model, tmp_path / "b", every=2) as other:
        with pytest.raises(
            ValueError, match="Invalid checkpoint: it is not of chain 0"
        ):
            other.load_state_dict(saved)
    with sg.Collector(sampler, model, tmp_path / "a", every=3) as other:
        with pytest.raises(ValueError, match=r"Invalid every: 3 \(the run .* has 2\)"):
            other.load_state_dict(saved)
    assert len(sg.SampleStore(tmp_path / "a")) == 2


@pytest.mark.parametrize("draws", [0, 3])
def test_a_run_of_cpp_is_continued(tmp_path, draws):
    """C++ keeps the position in the store alone; the next draw is `every` steps on."""
    model = net()
    sampler = sgld(model)
    with sg.Collector(sampler, model, tmp_path) as collector:
        advance(model, sampler, range(draws))
        saved = {"position": collector.state_dict()["position"]}
        advance(model, sampler, range(1))
    with sg.Collector(sampler, model, tmp_path, burn_in=3, every=2) as collector:
        collector.load_state_dict(saved)
        advance(model, sampler, range(8))
    steps = [draw.step for draw in sg.SampleStore(tmp_path)]
    assert steps == ([1, 2, 3, 6, 8, 10, 12] if draws else [6, 8])


def test_a_sampler_that_went_back_alone(tmp_path):
    model = net()
    sampler = sgld(model)
    with sg.Collector(sampler, model, tmp_path):
        advance(model, sampler, range(2))
        saved = copy.deepcopy(sampler.state_dict())
        advance(model, sampler, range(3))
        sampler.load_state_dict(saved)
        with pytest.raises(
            RuntimeError, match="went back to step 2, and its collector"
        ):
            advance(model, sampler, range(1))


# ---- Refusals, and the end -----------------------------------------------------------


def test_refusals(tmp_path):
    model = net()
    sampler = sgld(model)
    make = sg.Collector
    for settings, words in (
        ({"every": 0}, "every"),
        ({"burn_in": -1}, "burn_in"),
        ({"chain": -1}, "chain"),
        ({"dtype": torch.int64}, "dtype"),
        ({"parameters": "some"}, "parameters"),
        ({"parameters": ["no.*"]}, r"parameters: no parameter is named 'no.\*'"),
    ):
        with pytest.raises(ValueError, match=f"Invalid {words}"):
            make(sampler, model, tmp_path, **settings)
    with pytest.raises(TypeError, match="Invalid sampler: got SGD"):
        make(torch.optim.SGD(model.parameters(), 0.1), model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_draws_are_written(tmp_path, monkeypatch):
    """It comes before the update: the step is made again, and stored once."""
    model, interrupts, sync = net(), [7], os.fsync
    sampler = sgld(model)

    def interrupted(file):
        if [int(sampler.param_groups[0]["step"])] == interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        sync(file)

    monkeypatch.setattr(os, "fsync", interrupted)
    monkeypatch.setattr(writer_module, "_DRAWS", 1)
    with sg.Collector(sampler, model, tmp_path, every=3):
        advance(model, sampler, range(6))
        interrupts[:] = [6]
        with pytest.raises(KeyboardInterrupt):
            advance(model, sampler, [6])
        advance(model, sampler, range(6, 12))
    assert [one.step for one in sg.SampleStore(tmp_path)] == [3, 6, 9, 12]


def test_a_model_that_is_changed_before_the_collector_is_closed(tmp_path):
    model = net()
    with sg.Collector(sgld(model), model, tmp_path) as collector:
        advance(model, collector.sampler, range(12))
        model[0] = nn.Linear(3, 4)
    assert len(sg.SampleStore(tmp_path)) == 12


def test_views_among_the_tensors(tmp_path):
    theta, buffer = nn.Parameter(torch.ones(2)), torch.tensor([1 + 2j])
    model = {"theta": theta, "conj": buffer.conj(), "neg": buffer.conj().imag}
    model |= {"row": torch.arange(6)[::2], "one": torch.tensor(3.0).expand(4)}
    sampler = sg.SGLD([theta], 0.1, num_data=1, seed=0)
    with sg.Collector(sampler, model, tmp_path):
        theta.grad = torch.ones(2)
        sampler.step()
    (one,) = sg.SampleStore(tmp_path)
    assert (one["conj"].item(), one["neg"].item()) == (1 - 2j, -2)
    assert one["row"].tolist() == [0, 2, 4] and one["one"].tolist() == [3] * 4


@pytest.mark.filterwarnings("error:draws in")
def test_a_warning_that_is_an_error(tmp_path):
    model = net()
    sampler = sgld(model[0])
    with sg.Collector(sampler, model, tmp_path, parameters="sampled"):
        advance(model, sampler, range(3))
    with torch.no_grad():
        model[2].bias.add_(1)
    for _ in range(2):  # and the chain is not left locked
        with pytest.raises(UserWarning, match="are of a part of the model"):
            sg.Collector(sampler, model, tmp_path, parameters="sampled")


def test_capturable_samplers(tmp_path):
    model = net()
    sampler = sgld(model, capturable=True)
    with sg.Collector(sampler, model, tmp_path, every=2):
        states = advance(model, sampler, range(4))
    store = sg.SampleStore(tmp_path)
    assert [one.step for one in store] == [2, 4]
    assert all(same(one, states[one.step - 1]) for one in store)


def test_a_closed_collector_leaves_the_sampler(tmp_path):
    model = net()
    sampler = sgld(model)
    collector = sg.Collector(sampler, model, tmp_path)
    advance(model, sampler, range(2))
    collector.close()
    collector.close()
    advance(model, sampler, range(2))
    assert len(sg.SampleStore(tmp_path)) == 2
    sg.Collector(sampler, model, tmp_path).close()  # somebody else may write
