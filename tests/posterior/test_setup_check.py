"""A look before a run names what is commonly done wrong, and is silent otherwise."""

import copy
import random
import re
import warnings
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from stored_files import contents
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import torch_sgmcmc as sg

N, BATCH = 600, 50
Pair = namedtuple("Pair", "x y")


def classes():
    x = torch.randn(N, 8)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def numbers(outputs=1):
    x = torch.randn(N, 8)
    return TensorDataset(x, x[:, :outputs] + 0.1 * torch.randn(N, outputs))


def labels():
    x = torch.randn(N, 8)
    return TensorDataset(x, (x[:, :1] > 0).float())


def mlp(outputs=3, *last):
    return nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, outputs), *last)


def loader_of(data, **options):
    return DataLoader(data, **{"batch_size": BATCH, "shuffle": True, **options})


def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def scaled(model, batch, loss=F.cross_entropy, by=1.0, **options):
    return by * loss(model(batch[0]), batch[1], **options)


SGHMC = partial(sg.SGHMC, lr=0.003, momentum=0.9, num_data=N, prior_precision=1.0)
SGLD = partial(sg.SGLD, lr=0.01, num_data=N, prior_precision=1.0)
SBPS = partial(sg.SBPS, num_data=N, prior_precision=1.0)


def each(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def independent(data):
    draws = sg.IndependentBatchSampler(len(data), BATCH)
    return DataLoader(data, batch_sampler=draws)


def setup(
    model=None, loss=mean, data=classes, loader=loader_of, sampler=SGHMC, other=None
):
    """Returns the arguments of ``check_setup``."""
    torch.manual_seed(0)
    model = mlp() if model is None else model()
    sampled = model if other is None else other(model)
    return model, loss, loader(data()), sampler(sampled.named_parameters(), seed=0)


def frozen(model):
    return model.requires_grad_(False)


def with_dropout():
    return nn.Sequential(nn.Linear(8, 20), nn.Dropout(0.3), nn.ReLU(), nn.Linear(20, 3))


def with_batch_norm():
    return nn.Sequential(
        nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3)
    )


def standardised(model, batch):
    out = model(batch[0])
    return F.cross_entropy((out - out.mean(0)) / out.std(0) ** 2, batch[1])


def all_pairs(model, batch):
    return (model(batch[0]) - batch[1]).square().mean() / 2


def row_of_numbers():
    x, y = numbers().tensors
    return TensorDataset(x, y[:, 0])


def several_labels():
    x = torch.randn(N, 8)
    return TensorDataset(x, (x[:, :3] > 0).float())


def shares():
    x = torch.randn(N, 8)
    return TensorDataset(x, (x[:, :3] / 2).softmax(1))


def divergence(model, batch, reduction="mean"):
    logs = model(batch[0]).log_softmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own of this mean
        return F.kl_div(logs, batch[1], reduction=reduction)


class Ordinal(nn.Module):
    """Ordered classes: probabilities are differences at ordered thresholds."""

    def __init__(self):
        super().__init__()
        self.score, self.at = mlp(1), nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x):
        below = (self.at - self.score(x)).sigmoid()
        ones = torch.ones_like(below[:, :1])
        edges = torch.cat([0 * ones, below, ones], 1)
        return edges.diff(dim=1).clamp_min(1e-6).log()


def half_weighted(data):
    weights = (torch.arange(N) % 2).double()
    return DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights, N // 2))


def with_another_head(model):
    return nn.Sequential(model[0], nn.ReLU(), nn.Linear(20, 3))


# At the start squared residuals are a hundred times the noise's variance.
SMALL_NOISE = {
    "model": lambda: mlp(1),
    "data": numbers,
    "loss": sg.losses.gaussian(noise=0.1),
}
MISUSES = {
    "a sum": ({"loss": partial(scaled, reduction="sum")}, "sum"),
    "times N": ({"loss": partial(scaled, by=N)}, "scaled loss"),
    "N of a batch": ({"sampler": partial(SGHMC, num_data=BATCH)}, "num_data"),
    "softmax in the model": ({"model": lambda: mlp(3, nn.Softmax(1))}, "probabilities"),
    "logits into nll_loss": ({"loss": partial(scaled, loss=F.nll_loss)},
     "probabilities"),
    "mean squared error": ({"model": lambda: mlp(1), "data": numbers,
     "loss": partial(scaled, loss=F.mse_loss)}, "squared error"),
    "dropout": ({"model": with_dropout}, "random loss"),
    "batch norm": ({"model": with_batch_norm}, "batch norm"),
    "standardised by the minibatch": ({"loss": standardised,
     "loader": partial(loader_of, batch_size=6)}, "minibatch"),
    "all pairs": ({"model": lambda: mlp(1), "data": row_of_numbers, "loss": all_pairs},
     "broadcast"),
    "weights of classes": ({"loss": partial(scaled,
     weight=torch.tensor([1.0, 2.0, 3.0]))}, "not a likelihood"),
    "smoothed labels": ({"loss": partial(scaled, label_smoothing=0.1)},
     "not a likelihood"),
    "a mean over classes": ({"data": shares, "loss": divergence}, "scaled loss"),
    "a head that was replaced": ({"other": with_another_head}, "other model"),
    "the loss of each example": ({"loss": each}, "shape"),
    "one loss for SBPS": ({"sampler": SBPS, "loader": lambda d: independent(d)},
     "shape"),
    "too hot where residuals are large": ({**SMALL_NOISE,
     "sampler": partial(SGHMC, lr=3e-4, momentum=0.99)}, "above T"),
    "unstable": ({"sampler": partial(SGLD, lr=30.0)}, "unstable"),
    "a shuffled epoch for SBPS": ({"sampler": SBPS, "loss": each},
     "dependent minibatches"),
    "frozen": ({"other": frozen}, "frozen"),
    "another model": ({"other": copy.deepcopy}, "other model"),
    "not finite": ({"loss": lambda m, b: mean(m, b) + m(b[0]).sum().sub(1e9).sqrt()},
     "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_names_misuse(name):
    options, kind = MISUSES[name]
    found = sg.check_setup(*setup(**options))
    assert found.issues[0].kind == kind, found
    assert found.issues[0].message in str(found)
    assert found.gradients <= 80


def shared_head():
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Words(nn.Module):
    """A small language model, whose outputs are a mapping."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)
        return {"logits": logits, "loss": loss}


def sentences():
    ids = torch.randint(11, (N, 6))
    nexts = ids.roll(-1, 1)
    nexts[torch.rand(N, 6) < 0.2] = -100  # of sentences that are shorter
    return [{"ids": i, "labels": n} for i, n in zip(ids, nexts, strict=True)]


def layered(named):
    """The last layer's biases with a large lr, which is not beyond what is stable."""
    first, last = [], []
    for name, p in named:
        (last if name == "2.bias" else first).append(p)
    groups = [{"params": first, "lr": 0.0003}, {"params": last, "lr": 0.003}]
    return SGHMC(groups, seed=0)


def evaluated():
    return with_batch_norm().eval()


# Of "sentences" the data are the words that are not -100.
RIGHT = {
    "SGHMC": {},
    "SGLD": {"sampler": SGLD},
    "batches that differ in size": {"loader": partial(loader_of, batch_size=70)},
    "independent minibatches": {"sampler": SBPS, "loss": each, "loader": independent},
    "logits and labels": {"model": lambda: mlp(1), "data": labels,
     "loss": partial(scaled, loss=F.binary_cross_entropy_with_logits)},
    "log-probabilities": {"model": lambda: mlp(3, nn.LogSoftmax(1)),
     "loss": partial(scaled, loss=F.nll_loss)},
    "half the squared error": {"model": lambda: mlp(1), "data": numbers,
     "loss": partial(scaled, loss=F.mse_loss, by=0.5)},
    "a sum over labels": {"data": several_labels,
     "loss": partial(scaled, loss=F.binary_cross_entropy_with_logits, by=3.0)},
    "one datum at a time": {
     "loader": partial(loader_of, batch_size=1), "sampler": partial(SGHMC, lr=1e-4)},
    "a part of the data in batches": {"loader": lambda data: DataLoader(data,
     batch_sampler=BatchSampler(SubsetRandomSampler(range(300)), BATCH, False)),
     "sampler": partial(SGHMC, num_data=300)},
    "a flat layer with a large lr": {"sampler": lambda named, seed: layered(named)},
    "a known Gaussian noise": {"model": lambda: mlp(2), "data": partial(numbers, 2),
     "loss": sg.losses.gaussian(noise=0.5**0.5)},
    "a small noise": {**SMALL_NOISE, "sampler": partial(SGHMC, lr=3e-5, momentum=0.99)},
    "batch norm that is over": {"model": evaluated},
    "shares of classes": {"data": shares, "loss": partial(divergence,
     reduction="batchmean")},
    "ordered classes": {"model": Ordinal, "loss": partial(scaled, loss=F.nll_loss)},
    "weights of 0 and 1": {"loader": half_weighted,
     "sampler": partial(SGHMC, num_data=N // 2)},
    "a potential of all data": {"loss": partial(scaled, reduction="sum"),
     "loader": partial(loader_of, batch_size=N),
     "sampler": partial(sg.HMC, step_size=1e-3, num_steps=5, num_data=1.0)},
    "a frozen layer": {"model": shared_head},
    "sentences": {"model": Words, "data": sentences, "loss": lambda model,
     batch: model(**batch)["loss"], "sampler": partial(SGHMC, num_data=0.8 * 6 * N)},
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_is_silent_where_all_is_right(name):
    found = sg.check_setup(*setup(**RIGHT[name]))
    assert not found.issues, found
    assert found.gradients <= 80


@pytest.mark.parametrize("of_batches", [False, True])
def test_leaves_no_trace(of_batches):
    model, loss, _, _ = setup(model=with_batch_norm)
    data, order = classes(), torch.Generator().manual_seed(1)
    batches = BatchSampler(RandomSampler(data, generator=order), BATCH, False)
    loader = DataLoader(data, BATCH, shuffle=True, generator=order)
    loader = DataLoader(data, batch_sampler=batches) if of_batches else loader
    sampler = SGHMC(model.named_parameters(), seed=0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads]
    states = torch.get_rng_state(), order.get_state()
    sg.check_setup(model, loss, loader, sampler)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]), name
    for p, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert p.grad is grad and torch.equal(grad, value)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(order.get_state(), states[1])
    assert not sampler.state and model.training and model[1].training


class Written(nn.Module):
    """Writes wherever a call may write."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, max_norm=0.1)
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(1).expand(5))
        self.register_buffer("last", None)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, ids):
        self.calls[:1].add_(1)
        self.total = self.total + 1
        self.last = ids.float()
        random.random(), np.random.rand()
        self.train(not self.training)
        return self.head(self.embed(ids).mean(1))


def test_leaves_no_trace_of_what_the_model_writes():
    torch.manual_seed(0)
    model, ids = Written(), torch.randint(11, (N, 6))
    loader = loader_of(TensorDataset(ids, ids[:, 0] % 3))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].tolist()
    hooks = len(module._global_forward_hooks)
    found = sg.check_setup(model, mean, loader, SGHMC(model.named_parameters(), seed=0))
    assert "embed.weight" in found.issues[0].message
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]), name
    assert model.last is None and model.calls.stride() == (0,) and model.training
    assert states == (random.getstate(), np.random.get_state()[1].tolist())
    assert len(module._global_forward_hooks) == hooks
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}


def test_leaves_no_trace_when_the_loss_raises():
    model, _, loader, sampler = setup(model=with_batch_norm)
    before = [p.clone() for p in model.parameters()]
    calls = []

    def loss(model, batch):
        calls.append(len(batch[0]))
        if len(calls) >= 20:
            raise OSError("no more")
        return mean(model, batch)

    with pytest.raises(OSError, match="no more"):
        sg.check_setup(model, loss, loader, sampler)
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value) and p.grad is None
    assert model.training and model[1].training


def test_numbers_in_words():
    model, loss, loader, sampler = setup(model=shared_head)
    found = sg.check_setup(model, loss, loader, sampler)
    assert found.num_data == N
    assert found.num_sampled == 63
    assert found.not_sampled == ("0.weight", "0.bias")
    assert "Sampled: 63 numbers. Not sampled: 0.weight, 0.bias." in str(found)
    assert sampler.target_summary() in str(found)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": 3}, TypeError, "Invalid model"),
        ({"loss": 3}, TypeError, "Invalid loss"),
        ({"sampler": 3}, TypeError, "Invalid sampler"),
        ({"loader": []}, ValueError, "no minibatch"),
        ({"loader": iter([])}, TypeError, "an iterator"),
        ({"loss": lambda m, b: 0.0}, TypeError, "must return the mean loss"),
    ],
)
def test_arguments(change, error, words):
    names = ("model", "loss", "loader", "sampler")
    given = dict(zip(names, setup(), strict=True))
    with pytest.raises(error, match=words):
        sg.check_setup(**{**given, **change})


def in_folder(folder, loss=mean, **options):
    return sg.sample(
        mlp,
        SGHMC,
        loader_of(classes()),
        loss,
        folder,
        **{"steps": 20, "every": 5, "seed": 0, "progress": False, **options},
        start="prior",  # which so short a run would not leave
    )


def test_sample_checks_first(tmp_path):
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="a sum over the minibatch"):
        in_folder(tmp_path, partial(scaled, reduction="sum"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it goes on
        in_folder(tmp_path, partial(scaled, reduction="sum"), steps=30)
        in_folder(tmp_path / "right")
        in_folder(tmp_path / "unseen", partial(scaled, reduction="sum"), check=False)


def test_a_check_changes_no_draw(tmp_path):
    for name in (True, False):
        torch.manual_seed(0)
        in_folder(tmp_path / str(name), check=name)
    assert contents(tmp_path / "True") == contents(tmp_path / "False")


def test_any_default_device(set_default_device):
    model, loss, loader, sampler = setup(sampler=partial(SGHMC, lr=0.03))
    batches = [*loader]
    expected = sg.check_setup(model, loss, batches, sampler)
    set_default_device("meta")
    found = sg.check_setup(model, loss, batches, sampler)
    assert [p.kind for p in found.issues] == [p.kind for p in expected.issues]
    assert found.curvature == pytest.approx(expected.curvature, rel=1e-6)
    assert found.heating == pytest.approx(expected.heating, rel=1e-6)


class Graph(nn.Module):
    """A graph network: nodes take the mean of their neighbours."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x, edges):
        out = self.layer(x)
        return out.index_add(0, edges[1], out[edges[0]])


def of_graph(model, batch):
    x, edges, y, known = batch
    return F.cross_entropy(model(x, edges)[known], y[known])


def test_a_batch_that_cannot_be_cut_is_not_known(tmp_path):
    """One batch is the whole graph, whose edges name nodes; no half has them all."""
    torch.manual_seed(0)
    x, y = classes().tensors
    known = torch.arange(N) < 100
    loader = [(x, torch.randint(N, (2, 900)), y, known)]
    sampler = partial(SGHMC, num_data=100)
    options = {"steps": 4, "seed": 0, "progress": False, "start": "prior"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sg.sample(Graph, sampler, loader, of_graph, tmp_path, report=False, **options)
    model = Graph()
    of = model, of_graph, loader, sampler(model.named_parameters(), seed=0)
    found = sg.check_setup(*of)
    assert not found.issues and "whether the loss is a mean" in str(found), found


def fixed_size(model, batch):
    x = batch[0].view(BATCH, 8)
    return F.cross_entropy(model(x), batch[1])


def test_a_fixed_batch_size_is_not_known():
    found = sg.check_setup(*setup(loss=fixed_size))
    assert not found.issues and found.num_data == N
    assert "whether the loss is a mean" in str(found)


def cox(model, batch):
    """Minus Cox's partial log-likelihood: each event is compared with who is left."""
    x, times, events = batch
    risk = model(x)[:, 0]
    order = times.argsort(descending=True)
    risk, events = risk[order], events[order]
    return -((risk - risk.logcumsumexp(0)) * events).mean()


def test_examples_of_one_batch_may_depend_on_each_other():
    """Each step has all data; of minibatches it is still an issue."""
    torch.manual_seed(0)
    x, times = torch.randn(N, 8), torch.rand(N)
    data = TensorDataset(x, times, (torch.rand(N) < 0.01).float())
    model = nn.Linear(8, 1, bias=False)
    sampler = SGHMC(model.named_parameters(), seed=0)
    found = sg.check_setup(model, cox, [data.tensors], sampler)
    assert not found.issues and "whether the loss is a mean" in str(found), found
    found = sg.check_setup(model, cox, loader_of(data, batch_size=60), sampler)
    assert "minibatch" in [issue.kind for issue in found.issues]


class Rows(dict):
    """Such as a TensorDict: a mapping with checked lengths that can be cut."""

    def __init__(self, source):
        super().__init__(source)
        self.batch_size = torch.Size([])

    def auto_batch_size_(self, dims):
        self.batch_size = torch.Size({len(t) for t in self.values()})
        return self

    def __setitem__(self, key, value):
        raise RuntimeError(f"batch_size is {self.batch_size}, not {len(value)}")


class Moved:
    """Such as a batch of graphs, which can be moved and not cut."""

    def __init__(self, x, y, moves):
        self.x, self.y, self.moves = x, y, moves

    def to(self, device, non_blocking=False):
        self.moves.append(device)
        return self


def test_batches_of_other_libraries():
    model, _, loader, sampler = setup()
    sizes = []

    def of_rows(model, batch):
        sizes.append(batch.batch_size[0])
        return F.cross_entropy(model(batch["x"]), batch["y"])

    batches = [Rows({"x": x, "y": y}).auto_batch_size_(1) for x, y in loader]
    assert not sg.check_setup(model, of_rows, batches, sampler).issues
    assert {*sizes} == {BATCH, BATCH // 2} and batches[0]["x"].dtype == torch.float32
    moves = []
    batches = [Moved(x, y, moves) for x, y in loader]
    loss = lambda model, batch: F.cross_entropy(model(batch.x), batch.y)  # noqa: E731
    found = sg.check_setup(model, loss, batches, sampler)
    assert not found.issues and "no rows to cut" in str(found) and moves


def test_targets_that_a_mask_leaves_are_not_counted():
    """Their number may be num_data, if the loss is their mean: nobody can tell."""
    ids = torch.randint(11, (60, 5))
    mask = (torch.rand(60, 5) < 0.8).float()
    data = TensorDataset(ids, ids % 4, mask)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4))

    def loss(model, batch):
        ids, labels, mask = batch
        each = F.cross_entropy(model(ids).mT, labels, reduction="none")
        return (each * mask).sum() / mask.sum()

    not_known = "whether num_data is the number of unmasked targets"
    for number, is_judged in ((int(mask.sum()), False), (60, True), (400, True)):
        sampler = sg.SGHMC(model.named_parameters(), 1e-3, num_data=number, seed=0)
        loader = DataLoader(data, 20, shuffle=True)
        found = sg.check_setup(model, loss, loader, sampler)
        assert (not_known in found.unknown) != is_judged
        has = any(each.kind == "num_data" for each in found.issues)
        assert has == (number == 400)


def test_losses_of_several_rows():
    def centred(model, batch):  # batch norm by hand
        outputs = model(batch[0])
        return F.cross_entropy(outputs - outputs.mean(0), batch[1])

    for loss, known in ((mean, True), (centred, False)):
        found = sg.check_setup(*setup(loss=loss))
        assert not found.issues
        assert any("losses of several rows" in text for text in found.unknown) != known


@pytest.mark.parametrize("kind", ["PSGLD", "HMC", "SBPS"])
def test_a_limit_without_closed_form_is_not_known(kind):
    own = {"PSGLD": {"lr": 1e-3}, "HMC": {"step_size": 1e-3, "num_steps": 3}}
    sampler = partial(getattr(sg, kind), **own.get(kind, {}), num_data=N)
    loss = each if kind == "SBPS" else mean
    found = sg.check_setup(*setup(loss=loss, sampler=sampler))
    assert found.curvature > 0 and "nan" not in str(found), found
    assert f"Not known: the largest stable lr of a {kind} with" in str(found)
    assert ("TemperatureMonitor" in str(found)) == (kind == "PSGLD")


def words(lengths):
    ids = torch.randint(11, (N, 8))
    nexts = ids.roll(-1, 1)
    nexts[torch.arange(8) >= lengths[:, None]] = -100
    return [{"ids": i, "labels": n} for i, n in zip(ids, nexts, strict=True)]


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_number_of_targets_by_few_minibatches_is_a_guess(is_equal):
    torch.manual_seed(0)
    lengths = torch.full((N,), 5) if is_equal else torch.randint(1, 9, (N,))
    model, loader = Words(), loader_of(words(lengths))
    loss = lambda model, batch: model(**batch)["loss"]  # noqa: E731
    sampler = SGHMC(model.named_parameters(), seed=0)
    (issue,) = sg.check_setup(model, loss, loader, sampler).issues
    number = re.search(r"num_data to (about )?(\d+), the number", issue.message)
    assert bool(number[1]) != is_equal
    assert abs(int(number[2]) - int(lengths.sum())) <= 0.1 * 8 * N * (not is_equal)


class Latent(nn.Module):
    """Random in each call, like a variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.mean, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.mean(x)
        random.random(), np.random.rand()
        return self.head(x + 0.3 * torch.randn_like(x))


def mixed(model, batch):
    x, y = batch
    part = np.random.beta(1, 1) * random.random()
    order = torch.randperm(len(x))
    logits = model(part * x + (1 - part) * x[order])
    return part * F.cross_entropy(logits, y) + (1 - part) * F.cross_entropy(
        logits, y[order]
    )


def penalised_mixed(model, batch):
    return mixed(model, batch) + 1e-2 * model[0].weight.square().sum()


WRONG = {"sampler": partial(SGHMC, num_data=BATCH, lr=30.0)}


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"model": Latent}, {"random loss"}),
        ({"loss": mixed}, {"random loss"}),
        ({"model": Latent, **WRONG}, {"random loss", "num_data", "unstable"}),
        ({"loss": penalised_mixed}, {"random loss", "penalty"}),
    ],
)
def test_a_random_loss_stops_no_other_check(options, kinds):
    found = sg.check_setup(*setup(**options))
    assert kinds <= {issue.kind for issue in found.issues}, found
    assert len(kinds) > 1 or len(found.issues) == 1, found
    assert found.curvature > 0 and found.heating and found.gradients <= 80
