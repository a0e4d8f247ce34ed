"""Draws and models that were wrapped, shared, or are parts of others."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import torch_sgmcmc as sg
from torch_sgmcmc.core.utils import plain_names, unwrapped

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


class Nested(nn.Module):
    """A model with a layer that its author calls ``module``."""

    def __init__(self, inner=lambda m: m):
        super().__init__()
        self.module = nn.Linear(3, 4)
        self.body = inner(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))

    def forward(self, x):
        return self.body(self.module(x))


def made(inner=lambda m: m):
    torch.manual_seed(0)
    return Nested(inner)


def compiled(module):
    return torch.compile(module, backend="eager")


def of_fabric(module):
    fabric = pytest.importorskip("lightning.fabric").Fabric
    return fabric(accelerator="cpu", devices=1).setup_module(module)


WRAPPERS = {
    "plain": lambda: made(),
    "compiled": lambda: compiled(made()),
    "inside": lambda: made(compiled),
    "twice": lambda: compiled(made(compiled)),
    "parallel": lambda: DataParallel(made()),
    "both": lambda: DataParallel(compiled(made())),
    "fabric": lambda: of_fabric(made()),
}


def stored(model, folder, **options):
    sampler = sg.SGLD(model.parameters(), 0.1, num_data=6, seed=0)
    with sg.Collector(sampler, model, folder, **options):
        for _ in range(3):
            sampler.zero_grad()
            F.cross_entropy(model(X), torch.arange(6) % 2).backward()
            sampler.step()
    return sg.SampleStore(folder)


@pytest.mark.parametrize("name", WRAPPERS)
def test_names_equal_those_of_the_model(name, tmp_path):
    plain = stored(made(), tmp_path / "plain")
    model = WRAPPERS[name]()
    store = stored(model, tmp_path / "wrapped")
    assert sorted(store.names) == sorted(made().state_dict())
    for one, other in zip(store, plain, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in plain.names)
    expected = sg.predict(made(), plain, X).mean
    # Either model predicts, from either's draws, stored ones and state dicts.
    states = [copy.deepcopy(model.state_dict())]
    assert torch.equal(sg.predict(model, plain, X).mean, expected)
    assert torch.equal(sg.predict(made(), store, X).mean, expected)
    network = made()
    network.load_state_dict(dict(plain[-1]))
    last = sg.predict(made(), [network], X).mean
    for network in (model, made()):
        assert torch.equal(sg.predict(network, states, X).mean, last)
        assert torch.equal(sg.predict(network, [model], X).mean, last)


def test_distributed_data_parallel(tmp_path):
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(made())
        store = stored(model, tmp_path / "run")
        assert sorted(store.names) == sorted(made().state_dict())
        expected = sg.predict(made(), store, X).mean
        assert torch.equal(sg.predict(model, store, X).mean, expected)
        assert unwrapped(compiled(model)) is model.module
    finally:
        dist.destroy_process_group()


def test_a_layer_that_is_called_module():
    names = ["module.module.weight", "module.body._orig_mod.1.bias"]
    model = DataParallel(made(compiled))
    assert list(plain_names(model, names).values()) == ["module.weight", "body.1.bias"]


def test_live_tensors_warn():
    model = made().eval()
    live = []
    for _ in range(3):
        live.append(model.state_dict())
    with pytest.warns(UserWarning, match="All draws share storage, as with"):
        sg.predict(model, live, X)
    with pytest.warns(UserWarning, match="All draws share storage"):
        sg.predict(model, [model] * 3, X)
    sg.predict(model, [copy.deepcopy(state) for state in live], X)
    sg.predict(model, [model.state_dict()], X)
    # Heads of one trunk, and a generator whose model goes on, are as they should be.
    trunk = dict(model.state_dict())
    heads = [{**trunk, "body.1.bias": torch.full((2,), float(i))} for i in range(3)]
    sg.predict(model, heads, X)
    sg.predict(model, (model.state_dict() for _ in range(3)), X)


def test_probabilities_warn():
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
    draws = [copy.deepcopy(model.state_dict())]
    with pytest.warns(UserWarning, match="outputs are probabilities already, and link"):
        sg.predict(model, draws, X)
    expected = model(X)
    logs = sg.predict(model, draws, X, forward=lambda model, x: model(x).log())
    assert torch.allclose(logs.mean, expected)
    sg.predict(model, draws, X, link="identity")
    sg.predict(nn.Sequential(model[0], nn.LogSoftmax(-1)), draws, X)


def test_a_part_belongs_to_the_rest(tmp_path):
    """A last layer, stored with its sampler's parameters alone; of two chains."""
    model = made()
    sampler = sg.SGLD(model.body[1].parameters(), 0.1, num_data=6, seed=0)
    options = {"parameters": "sampled", "buffers": False}
    for chain in range(2):
        with sg.Collector(sampler, model, tmp_path, chain=chain, **options):
            F.cross_entropy(model(X), torch.arange(6) % 2).backward()
            sampler.step()
    store = sg.SampleStore(tmp_path)
    sg.predict(model, store, X)
    sg.predict(compiled(model), store, X)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.module.weight[0, 0] += 1e-3
    words = r"^Draws of chain 0 of .* 1 of its other parameters, 'module.weight' among"
    with pytest.warns(UserWarning, match=words):
        sg.predict(other, store.chain(0), X)
    with pytest.warns(UserWarning) as heard:
        sg.predict(other, store, X)
    assert len(heard) == 1  # once a store
    other.module.weight.data.copy_(model.module.weight)
    other.body[1].weight.data.zero_()  # which a draw has
    sg.predict(other, store, X)
    # Nor does a chain go on with another.
    sampler = sg.SGLD(other.body[1].parameters(), 0.1, num_data=6, seed=0)
    sg.Collector(sampler, other, tmp_path, **options).close()
    other.module.bias.data += 1
    with pytest.warns(UserWarning, match=r"since: 1, among them 'module.bias'"):
        collector = sg.Collector(sampler, other, tmp_path, **options)
    collector.restart()
    collector.close()
    with pytest.warns(UserWarning, match=r"since: 1, among them 'module.bias'"):
        collector = sg.Collector(sampler, other, tmp_path, chain=1, **options)
    collector.restart()  # no draw is left
    collector.close()
    sg.Collector(sampler, other, tmp_path, **options).close()


def test_a_part_of_what_was_sampled_is_no_prediction(tmp_path):
    """Parameters that are lost cannot be loaded, even into the sampled model."""
    model = made()
    sampler = sg.SGLD(model.parameters(), 0.1, num_data=6, seed=0)
    with sg.Collector(sampler, model, tmp_path, parameters=["body.1.*"]):
        F.cross_entropy(model(X), torch.arange(6) % 2).backward()
        sampler.step()
    [draw] = sg.SampleStore(tmp_path)
    assert set(draw.not_sampled.values()) == {None}
    words = r"not those .* \(what was sampled must be stored\)$"
    with pytest.warns(UserWarning, match=words):
        sg.predict(model, [draw], X)
    sg.Collector(sampler, model, tmp_path, parameters=["body.1.*"]).close()


def test_a_whole_has_no_rest(tmp_path):
    stored(made(), tmp_path)
    assert sg.SampleStore(tmp_path)[0].not_sampled == {}


def test_frozen_tensors_that_consist_of_others(tmp_path):
    """Quantized weights, for example: they are named, and can be left out."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    pair = TwoTensor(torch.ones(4, 3), torch.ones(4, 3))
    model[0].weight = nn.Parameter(pair, requires_grad=False)
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    sampler = sg.SGLD([*trained.items()], 0.1, num_data=5, seed=1)
    with pytest.raises(ValueError, match=r"'0.weight' is a .* TwoTensor"):
        sg.Collector(sampler, model, tmp_path)
    with sg.Collector(sampler, model, tmp_path, parameters="sampled"):
        for p in trained.values():
            p.grad = torch.ones_like(p)
        sampler.step()
    assert list(sg.SampleStore(tmp_path)[0]) == [*trained]
