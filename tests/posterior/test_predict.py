"""Posterior predictive means and uncertainties against plain loops."""

import copy
import gc
import math
import weakref
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import torch_sgmcmc as sg


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4)
    ).train()


def with_batch_norm():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def draws_of(model, count, *, buffers=False):
    g = torch.Generator().manual_seed(2)
    draws = []
    for _ in range(count):
        made = {
            k: torch.randn(p.shape, generator=g) for k, p in model.named_parameters()
        }
        for name, b in model.named_buffers() if buffers else ():
            number = b.is_floating_point()
            made[name] = 0.5 + torch.rand(b.shape, generator=g) if number else b.clone()
        draws.append(made)
    return draws


def inputs(rows=23):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(3))


def outputs(model, draws, x):
    """[draws, inputs, classes] in the plainest way: copies of the model, in float64."""
    found = []
    for draw in draws:
        one = copy.deepcopy(model).eval()
        one.load_state_dict(draw, strict=False)
        with torch.no_grad():
            found.append(one.double()(x.double()))
    return torch.stack(found)


def close(actual, expected):
    """Compares to 1e-6 of the largest number, or of 1."""
    assert actual is not None
    size = max(1.0, float(expected.nan_to_num().abs().max()))
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6 * size)


def entropy(p):
    return -(p * p.log()).sum(-1)


def test_mean_and_entropies_of_classes():
    model, x = network(), inputs()
    draws = draws_of(model, 12)
    p = outputs(model, draws, x).softmax(-1)
    found = sg.predict(model, draws, x)
    raw = sg.predict(model, draws, x, functions={"raw": lambda out: out})
    close(raw.averages["raw"], outputs(model, draws, x).mean(0))
    close(raw.mean, p.mean(0))
    close(found.mean, p.mean(0))
    close(found.variance, p.var(0, correction=0))
    close(found.total, entropy(p.mean(0)))
    close(found.aleatoric, entropy(p).mean(0))
    close(found.epistemic, entropy(p.mean(0)) - entropy(p).mean(0))
    assert (found.num_draws, found.weight, found.effective_draws) == (12, 12, 12)
    assert found.quantiles is None and not found.averages
    assert found.mean.dtype == torch.float32


def test_sigmoid_and_classes_in_another_dimension():
    model, x = network(), inputs()
    draws = draws_of(model, 5)
    p = outputs(model, draws, x).sigmoid()
    found = sg.predict(model, draws, x, link="sigmoid")
    h = -(p * p.log() + (1 - p) * (1 - p).log())
    close(found.mean, p.mean(0))
    close(found.aleatoric, h.mean(0))
    q = p.mean(0)
    close(found.total, -(q * q.log() + (1 - q) * (1 - q).log()))

    def pixels(model, batch):
        return torch.stack([model(batch), model(-batch)], 2)  # [inputs, classes, 2]

    found = sg.predict(model, draws, x, forward=pixels, dim=1)
    p = outputs(model, draws, -x).softmax(-1)
    close(found.mean[:, :, 1], p.mean(0))
    close(found.aleatoric[:, 1], entropy(p).mean(0))
    # As in cross_entropy, unless a dimension is given.
    options = {"forward": pixels, "likelihood": sg.losses.categorical()}
    assert torch.equal(sg.predict(model, draws, x, **options).mean, found.mean)
    last = sg.predict(model, draws, x, dim=-1, **options).mean
    close(last.sum(-1), torch.ones(23, 4).double())


def test_mean_variance_and_quantiles_of_outputs_with_weights():
    model, x = network(), inputs()
    draws = draws_of(model, 9)
    w = [0.5, 2.0, 1.0, 0.0, 3.0, 0.25, 1.0, 1.5, 4.0]
    levels = (0.0, 0.05, 0.5, 0.9, 1.0)
    options = {"link": "identity", "quantiles": levels, "batch_size": 7}
    found = sg.predict(model, draws, x, weights=w, **options)
    out = outputs(model, draws, x)
    share = torch.tensor(w, dtype=torch.float64)
    share /= share.sum()
    mean = torch.einsum("d,dic->ic", share, out)
    close(found.mean, mean)
    close(found.variance, torch.einsum("d,dic->ic", share, (out - mean).square()))
    kept, weights = out[[i for i in range(9) if w[i]]].numpy(), [v for v in w if v]
    method = {"weights": weights, "method": "inverted_cdf"}
    expected = np.quantile(kept, levels, axis=0, **method)
    close(found.quantiles, torch.from_numpy(expected))
    assert found.levels == levels
    assert found.total is None and found.aleatoric is None and found.epistemic is None
    assert found.effective_draws == pytest.approx(sum(w) ** 2 / sum(v * v for v in w))


def test_variance_of_numbers_far_from_zero_keeps_its_digits():
    model, x = network().double(), inputs().double()
    draws = [{k: t.double() for k, t in d.items()} for d in draws_of(model, 6)]
    exact = outputs(model, draws, x).var(0, correction=0)
    found = sg.predict(model, draws, x, link=lambda out: out + 1e8)
    torch.testing.assert_close(found.variance, exact, rtol=1e-6, atol=0)


def test_signed_draws_give_ratios():
    model, x = network(), inputs()
    draws = draws_of(model, 8)
    signs = [1, 1, -1, 1, 1, 1, -1, 1]
    p = outputs(model, draws, x).softmax(-1)
    s = torch.tensor(signs, dtype=torch.float64)
    mean = torch.einsum("d,dic->ic", s, p) / 4
    found = sg.predict(model, draws, x, weights=signs)
    close(found.mean, mean)
    close(found.aleatoric, torch.einsum("d,di->i", s, entropy(p)) / 4)
    negative = (mean < 0).any(-1)
    assert 0 < int(negative.sum()) < len(x)  # both kinds are looked at
    assert found.total is not None
    assert bool(found.total[negative].isnan().all())
    close(found.total[~negative], entropy(mean[~negative]))
    assert found.effective_draws == 16 / 8
    with pytest.raises(ValueError, match="quantiles need weights >= 0"):
        sg.predict(model, draws, x, weights=signs, quantiles=[0.5])
    with pytest.raises(ValueError, match="they sum to 0"):
        sg.predict(model, draws[:2], x, weights=[1, -1])


class Weighted(dict):
    """Draws like a store's: mappings with a weight."""

    def __init__(self, draw, weight):
        super().__init__(draw)
        self.weight = weight


def test_weights_of_draws_and_of_the_argument():
    model, x = network(), inputs()
    draws = draws_of(model, 3)
    expected = sg.predict(model, draws, x, weights=[1, -0.5, 2]).mean
    weighted = [Weighted(d, w) for d, w in zip(draws, (1, -0.5, 2), strict=True)]
    assert torch.equal(sg.predict(model, weighted, x).mean, expected)
    # The argument goes before; and a module's weight is a parameter.
    again = sg.predict(model, weighted, x, weights=[1, 1, 1]).mean
    assert torch.equal(again, sg.predict(model, draws, x).mean)
    linear = nn.Linear(6, 4)
    assert sg.predict(linear, [nn.Linear(6, 4), nn.Linear(6, 4)], x).weight == 2


@pytest.mark.parametrize("batch_size", [1, 4, 23, 100])
def test_batches_and_their_order_do_not_matter(batch_size):
    model, x = network(), inputs()
    draws = draws_of(model, 7)
    options = {"functions": {"square": torch.square}}
    whole = sg.predict(model, draws, x, **options)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(4))
    data = TensorDataset(x[order], torch.arange(len(x)))
    for found in (
        sg.predict(model, reversed(draws), x, batch_size=batch_size, **options),
        sg.predict(model, draws, list(x.split(batch_size)), **options),
    ):
        close(found.mean, whole.mean.double())
        close(found.epistemic, whole.epistemic.double())
        close(found.averages["square"], whole.averages["square"].double())
    loader = DataLoader(data, batch_size=batch_size)
    found = sg.predict(model, draws, loader, **options)
    close(found.mean, whole.mean[order].double())
    close(found.total, whole.total[order].double())


@pytest.mark.parametrize("chunk_size", [2, 5, 100])
def test_many_at_once_are_as_one_by_one(chunk_size):
    for model in (network(), with_batch_norm()):
        draws = draws_of(model, 11, buffers=True)
        options = {"weights": range(11), "quantiles": [0.3]}
        one = sg.predict(model, draws, inputs(), **options)
        many = sg.predict(model, draws, inputs(), chunk_size=chunk_size, **options)
        for name in ("mean", "variance", "total", "aleatoric", "quantiles"):
            close(getattr(many, name), getattr(one, name).double())
    mixed = [draws[0], {"3.bias": draws[1]["3.bias"]}]
    with pytest.raises(ValueError, match="must have the same names"):
        sg.predict(model, mixed, inputs(), chunk_size=2)


def test_functions_of_outputs():
    model, x = network(), inputs()
    draws = draws_of(model, 6)
    functions = {
        "noise": lambda out: out[:, 1].exp(),
        "outer": lambda out: out**2,
        "is_2": lambda out: out.argmax(1) == 2,
    }
    found = sg.predict(model, draws, x, link=lambda out: out[:, 0], functions=functions)
    out = outputs(model, draws, x)
    close(found.mean, out[..., 0].mean(0))
    for name, expected in (("noise", out[..., 1].exp()), ("outer", out.square())):
        found_mean = found.averages[name].double()
        torch.testing.assert_close(found_mean, expected.mean(0), rtol=1e-6, atol=0)
    close(found.averages["is_2"], (out.argmax(-1) == 2).double().mean(0))
    votes = sg.predict(model, draws, x, link=lambda out: out.argmax(1))
    close(votes.mean, out.argmax(-1).double().mean(0))
    assert votes.mean.is_floating_point()


def test_draws_of_some_parameters_other_dtypes_and_modules():
    model, x = network(), inputs()
    last = [{k: t for k, t in d.items() if k[0] == "3"} for d in draws_of(model, 4)]
    expected = outputs(model, last, x).softmax(-1).mean(0)
    close(sg.predict(model, last, x).mean, expected)
    double = [{k: t.double() for k, t in d.items()} for d in last]
    close(sg.predict(model, double, x).mean, expected)
    modules = []
    for draw in last:
        modules.append(copy.deepcopy(model))
        modules[-1].load_state_dict(draw, strict=False)
    close(sg.predict(model, modules, x).mean, expected)


def test_tied_weights_with_both_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.outer(self.inner(x).relu())

    model, x = Tied(), inputs()
    draws = []
    for draw in draws_of(model, 3):
        one = Tied()
        one.load_state_dict({**draw, "outer.weight": draw["inner.weight"]})
        draws.append({k: t.clone() for k, t in one.state_dict().items()})
    assert "outer.weight" in draws[0] and "inner.weight" in draws[0]
    expected = outputs(model, draws, x).softmax(-1).mean(0)
    close(sg.predict(model, draws, x).mean, expected)


class Batch(NamedTuple):
    x: Tensor
    rest: tuple[Tensor, ...]


def test_named_tuples_and_extra_state():
    class Counts(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    torch.manual_seed(0)
    model, x = nn.Sequential(Counts(3, 2)), torch.randn(6, 3)
    draws = [copy.deepcopy(model.state_dict()) for _ in range(2)]
    assert "0._extra_state" in draws[0]
    batches = [Batch(part, (part,)) for part in x.split(4)]

    def forward(model, batch):
        assert isinstance(batch, Batch) and isinstance(batch.rest, tuple)
        return model(batch.x)

    found = sg.predict(model, draws, batches, forward=forward)
    close(found.mean, model(x).softmax(-1).detach().double())


def test_a_draw_that_is_not_a_number_shows():
    model, x = nn.Linear(1, 1, bias=False), torch.tensor([[0.0], [1.0]])
    draws = [{"weight": torch.tensor([[w]])} for w in (1.0, math.inf, 2.0, 3.0)]
    found = sg.predict(model, draws, x, link="identity", quantiles=[0.0, 0.5])
    assert found.quantiles is not None
    # 0 times infinity.
    assert bool(found.mean[0].isnan()) and bool(found.quantiles[:, 0].isnan().all())
    assert found.quantiles[:, 1, 0].tolist() == [1.0, 2.0]


def test_mappings_as_hugging_face_models_take_them():
    class Logits(dict):
        @property
        def logits(self):
            return self["logits"]

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, values, mask):
            return Logits(logits=self.layer(values * mask))

    model, x = Classifier(), inputs()
    draws = draws_of(model, 4)
    mask = (torch.arange(23) % 2).float()[:, None]
    plain = [{k.removeprefix("layer."): t for k, t in d.items()} for d in draws]
    expected = outputs(nn.Linear(6, 4), plain, x * mask).softmax(-1).mean(0)
    batch = {"values": x, "mask": mask}
    cut = [{k: t[i : i + 5] for k, t in batch.items()} for i in range(0, 23, 5)]
    for given in (batch, [batch], cut):
        close(sg.predict(model, draws, given, batch_size=4).mean, expected)


def test_the_model_and_random_numbers_are_unchanged():
    model, x = with_batch_norm(), inputs()
    model.add_module("4", nn.Dropout(0.5))
    model[1].eval()  # as some freeze it
    model[0].weight.grad = torch.ones(8, 6)
    before = copy.deepcopy(model.state_dict())
    pointers = [t.data_ptr() for t in model.state_dict().values()]
    flags = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    draws = draws_of(model, 3, buffers=True)
    loader = DataLoader(TensorDataset(x), batch_size=5)
    calls = iter(range(100))

    def fails(out):
        if next(calls) == 2:
            raise RuntimeError("half-way")
        return out

    sg.predict(model, draws, loader)
    sg.predict(model, draws, loader, refresh_batch_norm=loader)
    with pytest.raises(RuntimeError, match="half-way"):
        sg.predict(model, draws, loader, link=fails)
    sg.predict(model, draws, loader, chunk_size=3)
    assert [m.training for m in model.modules()] == flags
    assert [t.data_ptr() for t in model.state_dict().values()] == pointers
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(model[0].weight.grad, torch.ones(8, 6))
    assert model[1].momentum == 0.1
    assert torch.equal(torch.get_rng_state(), state)
    assert not sg.predict(model, draws, x).mean.requires_grad


def test_a_forward_that_writes_into_its_weights():
    """An Embedding with max_norm, whose draws and model stay as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2))
    draws, x = draws_of(model, 4), torch.arange(5)
    before = copy.deepcopy([*draws, model.state_dict()])
    expected = []
    for draw in draws:
        one = copy.deepcopy(model).eval()
        one.load_state_dict(draw)
        expected.append(one(x).detach())
    found = sg.predict(model, draws, [x[:2], x[2:]], link="identity")
    close(found.mean, torch.stack(expected).double().mean(0))
    predictive = sg.Predictive(model, x, link="identity")
    predictive.update()
    for after, was in zip([*draws, model.state_dict()], before, strict=True):
        assert all(torch.equal(after[name], was[name]) for name in was)


def test_cached_parametrizations_are_of_each_draw():
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    nn.utils.parametrizations.weight_norm(model)
    draws = draws_of(model, 5)
    alone = sg.predict(model, draws, inputs(), link="identity")
    with nn.utils.parametrize.cached():
        weight = model.weight
        together = sg.predict(model, draws, inputs(), link="identity")
        assert model.weight is weight
    assert torch.equal(together.mean, alone.mean)


def test_a_failed_update_adds_nothing():
    model, x = network(), inputs()
    draws = draws_of(model, 3)
    predictive = sg.Predictive(model, x, batch_size=5)
    predictive.update(draws[0])
    bad = {**draws[1], "3.bias": torch.zeros(5)}
    for wrong, error, match in (
        (bad, ValueError, r"'3.bias' has shape \[5\], in the model \[4\]"),
        ({"bias": torch.zeros(4)}, ValueError, "no parameter or buffer 'bias'"),
        ({"3.bias": 1.0}, TypeError, "'3.bias': of type float"),
        ({}, ValueError, "it has no tensor"),
        (torch.zeros(4), TypeError, "of type Tensor .must be a mapping"),
    ):
        with pytest.raises(error, match=match):
            predictive.update(wrong)
    for weight in (float("nan"), float("inf"), -float("inf"), "1"):
        with pytest.raises((ValueError, TypeError), match="Invalid weight"):
            predictive.update(draws[1], weight)
    # Only the third batch does not fit.
    calls = iter(range(100))
    predictive._evaluation._caller.function = lambda m, b: (
        m(b) if next(calls) != 2 else m(b)[:, :2]
    )
    with pytest.raises(ValueError, match=r"\[5, 2\] for a batch, and \[5, 4\]"):
        predictive.update(draws[1])
    predictive.update(draws[2])
    expected = sg.predict(model, [draws[0], draws[2]], x, batch_size=5)
    assert torch.equal(predictive.result().mean, expected.mean)


def test_while_a_chain_runs_and_after_a_checkpoint():
    model, x = network(), inputs()
    y = torch.arange(23) % 4
    sampler = sg.SGLD(model.parameters(), 0.1, num_data=23, seed=0)
    options = {"quantiles": [0.5], "functions": {"f": torch.square}}
    whole = sg.Predictive(model, x, **options)
    kept = []
    parts = sg.Predictive(model, x, **options)
    for step in range(9):
        sampler.zero_grad()
        F.cross_entropy(model(x), y).backward()
        sampler.step()
        whole.update(weight=1 + step)
        if step == 4:
            state = copy.deepcopy(parts.state_dict())
            parts = sg.Predictive(model, x, **options)
            parts.load_state_dict(state)
        parts.update(weight=1 + step)
        kept.append(copy.deepcopy(model.state_dict()))
    stored = sg.predict(model, kept, x, weights=range(1, 10), **options)
    for found in (whole.result(), parts.result()):
        for name in ("mean", "variance", "total", "aleatoric", "quantiles"):
            assert torch.equal(getattr(found, name), getattr(stored, name)), name
        assert torch.equal(found.averages["f"], stored.averages["f"])
    with pytest.raises(ValueError, match="other averages or quantiles"):
        sg.Predictive(model, x).load_state_dict(state)
    with pytest.raises(ValueError, match="must have weights and sums"):
        whole.load_state_dict({"other": []})


LINKS = [
    {},
    {"link": "sigmoid"},
    {"link": "identity"},
    {"likelihood": sg.losses.gaussian()},
    {"dim": -2, "forward": lambda m, x: m(x)[..., None].expand(-1, -1, 4)},
]


@pytest.mark.parametrize("saved", LINKS)
def test_sums_of_another_link_are_refused(saved):
    model, x = network(), inputs()
    source = sg.Predictive(model, x, **saved)
    for draw in draws_of(model, 2):
        source.update(draw)
    state = copy.deepcopy(source.state_dict())
    for options in LINKS:
        target = sg.Predictive(model, x, **options)
        if options is saved:
            target.load_state_dict(state)
            continue
        with pytest.raises(ValueError, match="Invalid state_dict"):
            target.load_state_dict(state)
        assert target.num_draws == 0 and target.state_dict()["sums"] is None


@pytest.mark.parametrize("loads", [False, True])
def test_updates_in_and_out_of_inference_mode(loads):
    model, x = network(), inputs()
    draws = draws_of(model, 3)
    predictive = sg.Predictive(model, x)
    with torch.inference_mode():
        predictive.update(draws[0])
        if loads:
            state, predictive = predictive.state_dict(), sg.Predictive(model, x)
            predictive.load_state_dict(state)
    predictive.update(draws[1])
    with torch.inference_mode():
        predictive.update(draws[2])
    expected = sg.predict(model, draws, x)
    assert torch.equal(predictive.result().variance, expected.variance)


def test_batch_norm_of_the_draw():
    model, x = with_batch_norm(), inputs()
    draws = draws_of(model, 5, buffers=True)
    p = outputs(model, draws, x).softmax(-1)
    close(sg.predict(model, draws, x).mean, p.mean(0))


class Merged(nn.Dropout):
    """A layer with a train() of its own, as adapters have."""

    def train(self, mode=True):
        return super().train(mode)


@pytest.mark.parametrize("kind", [nn.Dropout, Merged])
@pytest.mark.parametrize("buffers", [True, False])
def test_batch_norm_refreshed_for_each_draw(buffers, kind):
    model, x = with_batch_norm(), inputs()
    model.add_module("4", kind(0.5))  # must not act while refreshing
    draws = draws_of(model, 4, buffers=buffers)
    data = list(inputs(60).split(20))
    expected = []
    for draw in draws:
        one = copy.deepcopy(model)
        one.load_state_dict(draw, strict=False)
        one[4].p = 0.0
        torch.optim.swa_utils.update_bn(data, one)
        expected.append(one.eval()(x).softmax(-1).detach().double())
    for chunk_size in (1, 4):
        options = {"refresh_batch_norm": data, "chunk_size": chunk_size}
        close(
            sg.predict(model, draws, x, **options).mean, torch.stack(expected).mean(0)
        )


def test_a_shuffled_refresh_is_the_same_for_all_draws():
    model, x = with_batch_norm(), inputs()
    draws, found = draws_of(model, 3), []
    loader = DataLoader(inputs(60), 20, shuffle=True)
    for chunk_size in (1, 3):
        torch.manual_seed(1)
        options = {"refresh_batch_norm": loader, "chunk_size": chunk_size}
        found.append(sg.predict(model, draws, x, **options).mean)
    torch.testing.assert_close(*found)


def test_batch_norm_of_other_parameters_is_warned_of_once():
    model, x = with_batch_norm(), inputs()
    draws = draws_of(model, 3)
    with pytest.warns(UserWarning, match="1.running_mean") as found:
        sg.predict(model, draws, x)
    assert len(found) == 1
    # Nothing is stale where only what comes after it is drawn (warnings are errors).
    sg.predict(model, [{"3.weight": d["3.weight"]} for d in draws], x)
    sg.Predictive(model, x).update()


class Counted(Mapping):
    """A draw that is made when it is asked for, and knows how many are alive."""

    alive: ClassVar[set[int]] = set()
    most: ClassVar[int] = 0

    def __init__(self, draw):
        self._draw = {k: t.clone() for k, t in draw.items()}
        for t in self._draw.values():
            Counted.alive.add(id(t))
            weakref.finalize(t, Counted.alive.discard, id(t))
        Counted.most = max(Counted.most, len(Counted.alive))

    def __getitem__(self, name):
        return self._draw[name]

    def __iter__(self):
        return iter(self._draw)

    def __len__(self):
        return len(self._draw)


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_draws_are_let_go(chunk_size):
    model, x = network(), inputs()
    (draw,) = draws_of(model, 1)
    gc.collect()
    Counted.alive.clear()
    Counted.most = 0
    draws = (Counted(draw) for _ in range(12))
    sg.predict(model, draws, x, chunk_size=chunk_size)
    assert Counted.most == chunk_size * len(draw)


def test_inputs_that_change_are_refused():
    model, x = network(), inputs()
    draws = draws_of(model, 2)
    data = TensorDataset(x)
    for shuffled in (
        DataLoader(data, shuffle=True),
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, False)),
        DataLoader(data, None, sampler=BatchSampler(RandomSampler(data), 5, False)),
        DataLoader(data, batch_sampler=sg.IndependentBatchSampler(len(x), 5, seed=0)),
    ):
        with pytest.raises(ValueError, match="DataLoader that shuffles"):
            sg.predict(model, draws[:1], shuffled)
    with pytest.raises(TypeError, match="an iterator of type generator"):
        sg.predict(model, draws, (b for b in x.split(5)))
    with pytest.raises(TypeError, match="of type tuple"):
        sg.predict(model, draws, (x, x))
    with pytest.raises(ValueError, match="it has no batch"):
        sg.predict(model, draws, [])
    with pytest.raises(ValueError, match="there is no input"):
        sg.predict(model, draws, x[:0])

    class Changing:
        def __init__(self, *passes):
            self.passes = iter(passes)

        def __iter__(self):
            return iter(next(self.passes))

    batches = list(x.split(8))
    for second, match in (
        (batches[::-1], "batch 1 is another than before"),
        (batches[:2], "2 batches, and 3 before"),
        ([*batches, x], "batch 4, and 3 before"),
    ):
        predictive = sg.Predictive(model, Changing(batches, second, batches))
        predictive.update(draws[0])
        with pytest.raises(ValueError, match=match):
            predictive.update(draws[1])
        predictive.update(draws[1])
        whole = sg.predict(model, draws, x, batch_size=8)
        assert torch.equal(predictive.result().mean, whole.mean)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + torch.randn(())


def test_random_numbers_of_torch_are_noticed():
    """Each evaluation has others, and the program's own go on."""
    model, x = network(), inputs()
    draws, state = draws_of(model, 2), torch.get_rng_state()
    with pytest.raises(ValueError, match="batch 1 is another than before"):
        sg.predict(model, draws, DataLoader(Noisy(x), 8))
    with pytest.warns(UserWarning, match="draws random numbers in eval"):
        sg.predict(model, draws, x, forward=lambda m, x: m(x + torch.randn(())))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"link": "probit"}, ValueError, "Invalid link: 'probit'"),
        ({"link": lambda o: o * 1j}, TypeError, "returned torch.complex64 .*real"),
        ({"dim": 0}, ValueError, "Invalid dim: 0 is not the classes'"),
        ({"dim": 2}, ValueError, "Invalid dim: 2"),
        ({"dim": 1.0}, TypeError, "Invalid dim: 1.0"),
        ({"quantiles": [1.5]}, ValueError, "Invalid quantile: 1.5"),
        ({"batch_size": 0}, ValueError, "Invalid batch_size: 0"),
        ({"chunk_size": 0}, ValueError, "Invalid chunk_size: 0"),
        ({"functions": {"f": 1}}, TypeError, "'f' is not a function"),
        ({"functions": {"f": torch.sum}}, ValueError, r"f: it returned shape \[\]"),
        ({"link": lambda o: o[:2]}, ValueError, r"link: it returned shape \[2, 4\]"),
        ({"forward": lambda m, b: m(b).sum()}, TypeError, "Invalid outputs: a scalar"),
        ({"forward": lambda m, b: m(b)[:, :1]}, ValueError, "has one class"),
        ({"weights": [1.0]}, ValueError, "fewer than there are draws"),
        ({"weights": [1.0] * 3}, ValueError, "more than there are draws"),
    ],
)
def test_wrong_arguments(options, error, match):
    model = network()
    with pytest.raises(error, match=match):
        sg.predict(model, draws_of(model, 2), inputs(), **options)


def test_wrong_draws():
    model = network()
    with pytest.raises(ValueError, match="no draw was added"):
        sg.predict(model, [], inputs())
    (draw,) = draws_of(model, 1)
    for wrong in (draw, model, torch.zeros(3)):
        with pytest.raises(TypeError, match="must be an iterable of draws"):
            sg.predict(model, wrong, inputs())
    with pytest.raises(TypeError, match="Invalid model"):
        sg.predict(lambda x: x, [draw], inputs())
