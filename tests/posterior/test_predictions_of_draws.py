"""Predictions are those of the draws: modes, caches, likelihoods, replaced layers."""

import copy
import json
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from driver_problem import loader, loss, model, sghmc
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torch_sgmcmc as sg
from torch_sgmcmc import losses


class Merging(nn.Linear):
    """A linear layer with an adapter that eval() merges into the weights."""

    def __init__(self):
        super().__init__(3, 2)
        self.a = nn.Parameter(torch.randn(2, 1))
        self.b = nn.Parameter(torch.randn(1, 3))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.a @ self.b).detach()
            self.merged = not mode
        return self

    def forward(self, x):
        y = super().forward(x)
        return y if self.merged else y + x @ (self.a @ self.b).T


class Caching(nn.Module):
    """A cache as of an exact Gaussian process: eval() keeps a first result."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.kept = None

    def train(self, mode=True):
        if mode:
            self.kept = None
        return super().train(mode)

    def forward(self, x):
        if self.training:
            return x[:, :2] * self.scale
        if self.kept is None:
            self.kept = self.scale.detach().clone()
        return x[:, :2] * self.kept


class Remembering(Caching):
    """The same without a train() that forgets."""

    def train(self, mode=True):
        nn.Module.train(self, mode)
        return self


def drawn(net, names):
    generator = torch.Generator().manual_seed(0)
    own = dict(net.named_parameters())
    return [
        {n: torch.randn(own[n].shape, generator=generator) for n in names}
        for _ in range(4)
    ]


@pytest.mark.parametrize("names", [("a", "b"), ("weight", "a", "b")])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_adapters_that_eval_merges(names, mode, chunk_size):
    net = Merging()
    x = torch.randn(5, 3)
    draws = drawn(net, names)
    expected = []
    for draw in draws:
        one = copy.deepcopy(net)
        one.load_state_dict(draw, strict=False)
        expected.append(one.eval()(x).detach())
    net.train(mode)
    before = copy.deepcopy(net.state_dict())
    kept = copy.deepcopy(draws)
    options = {"link": "identity", "keep_draws": True}
    found = sg.predict(net, draws, x, chunk_size=chunk_size, **options)
    torch.testing.assert_close(found.draws, torch.stack(expected))
    assert net.training is mode and net.merged is not mode
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    for draw, copied in zip(draws, kept, strict=True):
        assert all(torch.equal(draw[n], copied[n]) for n in draw)


@pytest.mark.parametrize("begins", [True, False])
def test_what_eval_mode_keeps_is_of_one_draw(begins):
    net, x = Caching(), torch.randn(5, 3)
    net.train(begins)
    net(x)
    draws = drawn(net, ("scale",))
    found = sg.predict(net, draws, x, link="identity", keep_draws=True).draws
    assert found is not None
    for one, draw in zip(found, draws, strict=True):
        assert torch.equal(one, x[:, :2] * draw["scale"])


def test_one_draw_with_a_weight_gives_its_outputs():
    """The others give outputs that are not looked at; no warning of equal ones."""
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    draws = drawn(net, ("weight", "bias"))
    options = {"weights": [0, 1, 0, 0], "link": "identity"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sg.predict(net, draws, x, **options)
    expected = torch.func.functional_call(net, draws[1], (x,))
    torch.testing.assert_close(found.mean, expected)


def test_layers_without_rules_are_evaluated_one_draw_at_a_time():
    net = nn.Sequential(nn.LSTM(3, 2))
    draws, x = drawn(net, [n for n, _ in net.named_parameters()]), torch.randn(5, 3)
    first = lambda model, x: model(x)[0]  # noqa: E731
    options = {"link": "identity", "forward": first}
    sg.predict(net, draws, x, **options)
    with pytest.raises(RuntimeError, match=r"\(of 2 draws at once.*set chunk_size=1"):
        sg.predict(net, draws, x, chunk_size=2, **options)


def test_a_model_that_remembers_is_warned_of():
    net, x = Remembering().eval(), torch.randn(5, 3)
    with pytest.warns(UserWarning, match="All 4 draws give the same outputs"):
        sg.predict(net, drawn(net, ("scale",)), x, link="identity")

    class Counting(Caching):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x[:, :2] * self.scale + self.calls

    net = Counting()
    with pytest.warns(UserWarning, match="first draw gives other outputs at the end"):
        sg.predict(net, drawn(net, ("scale",)), x, link="identity")


#: Means and log σ.
TwoHeads = partial(nn.Linear, 3, 2)


def test_a_store_remembers_its_likelihood(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    batches = [(x, x[:, :1])]
    options = {"steps": 8, "seed": 0, "progress": False}
    for folder in (tmp_path, None):
        given = (TwoHeads, sghmc, batches, losses.heteroscedastic(), folder)
        store = sg.sample(*given, **options)
        assert store.likelihood == {"name": "heteroscedastic"}
        found = sg.predict(TwoHeads(), store[2:], x)
        expected = sg.predict(TwoHeads(), [*store[2:]], x, link="gaussian")
        assert torch.equal(found.mean, expected.mean) and found.mean.shape == (20, 1)
        assert torch.equal(found.aleatoric, expected.aleatoric)
        one_by_one = sg.Predictive(TwoHeads(), x)
        for draw in store[2:]:
            one_by_one.update(draw)
        for found in (
            sg.predict(TwoHeads(), [*store[2:]], x),
            sg.predict(TwoHeads(), (draw for draw in store[2:]), x, chunk_size=3),
            one_by_one.result(),
        ):
            assert torch.equal(found.aleatoric, expected.aleatoric)
        assert sg.report(TwoHeads(), [*store], x).outputs.shape[2:] == (20, 1)
        plain = [dict(draw) for draw in store]
        assert sg.predict(TwoHeads(), plain, x).mean.shape == (20, 2)
        module = TwoHeads()
        module.likelihood = nn.Identity()  # as of a Gaussian process
        assert sg.predict(TwoHeads(), [module], x).mean.shape == (20, 2)
        # What is asked for goes before.
        assert sg.predict(TwoHeads(), store, x, link="identity").mean.shape == (20, 2)
    saved = json.loads((tmp_path / "store.json").read_text())
    assert saved["likelihood"] == {"name": "heteroscedastic"}
    assert sg.predict(TwoHeads(), tmp_path, x).mean.shape == (20, 1)


@pytest.mark.parametrize(
    "given",
    [
        losses.categorical(),
        losses.bernoulli(),
        losses.heteroscedastic(),
        losses.gaussian(0.3),
        losses.gaussian("log_noise"),
    ],
)
def test_likelihoods_of_settings(given):
    settings = json.loads(json.dumps(given.settings()))
    assert repr(losses.likelihood_of(settings)) == repr(given)

    class Own(losses.Likelihood):
        pass

    assert Own().settings() is None


def test_a_layer_replaced_after_the_sampler(tmp_path):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    sampler = sg.SGLD(net.parameters(), 0.1, num_data=4, seed=0)
    whole = sg.Collector(sampler, net, tmp_path / "whole")
    net[1] = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"lacks 2 of the sampler's.*\[2, 4\]"):
        sg.Collector(sampler, net, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    before = net[0].weight.detach().clone()
    for p in sampler.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"'1\.weight' is missing or another tensor"):
        sampler.step()
    assert torch.equal(net[0].weight, before)
    whole.close()


def test_a_name_goes_before_a_pattern(tmp_path):
    tensors = {name: torch.ones(2, requires_grad=True) for name in ("w[0]", "w0", "v")}
    sampler = sg.SGLD(tensors.values(), 0.1, num_data=4, seed=0)
    for choice, expected in (
        (["w[0]"], ["w[0]"]),
        (["w*"], ["w[0]", "w0"]),
        (["w[1]", "v"], None),
    ):
        make = lambda c=choice: sg.Collector(sampler, tensors, tmp_path, parameters=c)  # noqa: E731
        if expected is None:
            with pytest.raises(ValueError, match=r"no parameter is named 'w\[1\]'"):
                make()
        else:
            collector = make()
            assert [*collector._model.now()] == expected
            collector.close()


def test_buffers_that_cannot_be_stored(tmp_path):
    net = nn.Linear(3, 2)
    sampler = sg.SGLD(net.parameters(), 0.1, num_data=4, seed=0)
    net.register_buffer("graph", torch.ones(2, 2).to_sparse())
    with pytest.raises(ValueError, match=r"'graph' is a torch\.sparse_coo Tensor"):
        sg.Collector(sampler, net, tmp_path / "none")
    sg.Collector(sampler, net, tmp_path / "without", buffers=False).close()
    lazy = nn.Sequential(net, nn.LazyBatchNorm1d(affine=False))
    del net.graph
    with pytest.raises(ValueError, match=r"'1\.running_mean' has no shape yet"):
        sg.Collector(sampler, lazy, tmp_path / "none")
    net.register_buffer("seen", torch.ones(1))
    before = net.weight.detach().clone()
    with sg.Collector(sampler, net, tmp_path / "grown"):
        net.seen = torch.ones(2)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=r"shape \[2\] for 'seen' .must have the"):
            sampler.step()
        assert torch.equal(net.weight, before)  # found before the step
        net.seen = torch.ones(1)
        sampler.step()


class Frame:
    """A data frame with the methods that predict() needs."""

    def __init__(self, array):
        self._array = array

    def __array__(self):
        return self._array


def test_arrays_and_frames_are_inputs():
    x = torch.randn(7, 3)
    net = nn.Linear(3, 2)
    draws = drawn(net, ("weight", "bias"))
    expected = sg.predict(net, draws, x).mean
    array = x.double().numpy()
    for inputs in (array, array.astype("float32"), Frame(array)):
        assert torch.equal(sg.predict(net, draws, inputs).mean, expected)
    embedding = nn.Embedding(5, 2)
    some = drawn(embedding, ("weight",))
    assert sg.predict(embedding, some, np.arange(5)).mean.shape == (5, 2)
    with pytest.raises(TypeError, match="an array of dtype <U1"):
        sg.predict(net, draws, np.array(["a"]))


def test_averaged_models_have_plain_names():
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    draws = drawn(net, ("weight", "bias"))
    expected = sg.predict(net, draws, x).mean
    averaged = AveragedModel(net)
    assert torch.equal(sg.predict(averaged, draws, x).mean, expected)
    given = [averaged.module, copy.deepcopy(net)]
    expected = sg.predict(net, given[:1], x).mean
    assert torch.equal(sg.predict(net, [averaged], x).mean, expected)


def test_any_default_device(tmp_path, set_default_device):
    network, batches = model(), [*loader()]
    sampler = sghmc(network.named_parameters(), seed=0)
    x = batches[0][0]
    set_default_device("meta")
    with sg.Collector(sampler, network, tmp_path):
        for batch in batches * 3:
            sampler.zero_grad()
            loss(network, batch).backward()
            sampler.step()
    store = sg.SampleStore(tmp_path)
    found = sg.predict(network, store, x, quantiles=[0.1, 0.9])
    assert found.mean.device.type == "cpu" and found.quantiles.device.type == "cpu"
    sg.save({"a": found.mean}, tmp_path / "a.pt")
    assert torch.equal(sg.load(tmp_path / "a.pt")["a"], found.mean)


def test_home_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with sg.SampleWriter("~/draws", {"w": torch.ones(2)}) as writer:
        writer.append({"w": torch.ones(2)}, step=1)
    assert len(sg.SampleStore("~/draws")) == 1 and (tmp_path / "draws").exists()
    sg.save({"a": 1}, "~/run.pt")
    assert sg.load("~/run.pt") == {"a": 1} and (tmp_path / "run.pt").exists()
