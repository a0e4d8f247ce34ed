"""Priors by layer, and chains that start at a draw from the prior."""

import copy

import pytest
import torch
from every_sampler import THREE, Chain, bits
from torch import nn
from torch.func import stack_module_state
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import torch_sgmcmc as sg


def precisions(groups):
    return {name: g["prior_precision"] for g in groups for name, _ in g["params"]}


def means(groups):
    return {name: g["prior_mean"] for g in groups for name, _ in g["params"]}


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 6, 3, groups=2)
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.ConvTranspose1d(6, 5, 2)
        self.head = nn.Linear(5, 3)
        self.tied = self.head
        self.log_noise = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, tokens, scale):
        x = self.norm(self.conv(self.embedding(tokens).transpose(1, 2)))
        return scale * self.head(self.up(F.dropout(F.relu(x))).mean(2))


def test_fan_in():
    model = Everything()
    found = precisions(sg.prior_groups(model, scale=0.5**0.5))
    assert found == {
        "log_noise": 1.0,
        "embedding.weight": 1.0,
        **dict.fromkeys(("conv.weight", "conv.bias"), 12.0),
        **dict.fromkeys(("norm.weight", "norm.bias"), 25.0),
        **dict.fromkeys(("up.weight", "up.bias"), 12.0),
        **dict.fromkeys(("head.weight", "head.bias"), 5.0),
    }
    assert means(sg.prior_groups(model)) == {
        **dict.fromkeys(found, 0),
        "norm.weight": 1,
    }


def test_shared_weights_have_the_largest_precision():
    model = nn.ModuleDict({"words": nn.Embedding(5, 64), "head": nn.Linear(64, 5)})
    model["head"].weight = model["words"].weight
    assert precisions(sg.prior_groups(model)) == {
        "words.weight": 32.0,
        "head.bias": 32.0,
    }


def test_a_minibatch_sets_the_first_layer_and_outputs_have_the_variance_2():
    torch.manual_seed(0)
    x = 0.3 * torch.rand(400, 200)
    model = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 2000))
    groups = sg.prior_groups(model, x)
    found = precisions(groups)
    exact = 200 * float(x.double().square().mean()) / 2
    assert found["0.weight"] == found["0.bias"] == float(f"{exact:.2g}")
    # Half of a normal's square passes a ReLU, and the bias adds 1 / λ. Ten draws.
    assert found["2.weight"] == pytest.approx(300 * (2 + 1 / exact) / 4, rel=0.05)
    sampler = sg.SGLD(groups, 0.1, num_data=400, seed=1)
    assert sampler.draw_from_prior() == []
    outputs = model(x).detach().double()
    assert float(outputs.square().mean()) == pytest.approx(2, rel=0.3)
    wide = precisions(sg.prior_groups(model, x, scale=2.0))
    assert wide["2.weight"] == pytest.approx(found["2.weight"] / 4, rel=0.06)


class Named(nn.Module):
    """Two layers, called by keyword, and a number beside a matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 1)
        self.rest = nn.Parameter(torch.ones(64, 1))
        self.log_noise = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.last(input=torch.tanh(self.first(input=x))) + x @ self.rest


def test_layers_called_by_keyword_and_numbers_beside_a_matrix():
    torch.manual_seed(0)
    x = 10 * torch.randn(300, 64)
    found = precisions(sg.prior_groups(Named(), x))
    assert found["first.weight"] == pytest.approx(3200, rel=0.05)
    assert found["log_noise"] == 1


def test_embeddings_of_bags():
    bags = nn.EmbeddingBag(50, 16)
    assert precisions(sg.prior_groups(bags)) == {"weight": 0.5}


@pytest.mark.parametrize(
    ("make", "weights"),
    [
        (lambda: weight_norm(nn.Linear(64, 32)), 64),
        (lambda: weight_norm(nn.Linear(64, 32), dim=None), 64 * 32),
        (lambda: weight_norm(nn.Linear(64, 32), dim=1), 32),
    ],
)
def test_outputs_of_weight_norm_have_the_variance_2(make, weights):
    torch.manual_seed(0)
    x = 3 * torch.randn(200, 64)
    model = nn.Sequential(make(), nn.Tanh(), nn.Linear(32, 1))
    groups = sg.prior_groups(model, x, lr={"0": 0.5})
    found = precisions(groups)
    square = float(x.square().mean())
    of_norms, of_rows = (
        found[f"0.parametrizations.weight.original{i}"] for i in range(2)
    )
    assert of_rows == found["0.bias"] == float(f"{32 * square:.2g}")
    assert of_norms == float(f"{32 * square / weights:.2g}")
    assert [g.get("lr") for g in groups] == [0.5, 0.5, None]
    outputs = []
    for seed in range(100):
        sg.SGLD(groups, 0.1, num_data=9, seed=seed).draw_from_prior()
        outputs.append(model[0](x).detach())
    assert float(torch.stack(outputs).square().mean()) == pytest.approx(2, rel=0.5)


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1, bias=False), [(8, 6, 6)]),
        (nn.ConvTranspose1d(8, 3, 3, stride=3, bias=False), [(8, 6)]),
        (nn.Bilinear(8, 6, 3, bias=False), [(8,), (6,)]),
    ],
)
def test_outputs_of_layers_of_other_kinds_have_the_variance_2(layer, shapes):
    torch.manual_seed(0)
    x = tuple(3 * torch.randn(200, *shape) for shape in shapes)
    groups = sg.prior_groups(layer, x)
    outputs = []
    for seed in range(60):
        sg.SGLD(groups, 0.1, num_data=9, seed=seed).draw_from_prior()
        outputs.append(layer(*x).detach())
    # At the borders of an image there are fewer inputs.
    assert 1.5 < float(torch.stack(outputs).square().mean()) < 2.4


def test_biases_that_outweigh_the_inputs_are_warned_of():
    x = 0.01 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="Inputs of '' are small .* Standardise"):
        sg.prior_groups(nn.Linear(4, 5), x)
    sg.prior_groups(nn.Linear(4, 5, bias=False), x)
    sg.prior_groups(nn.Linear(1, 5), torch.rand(50, 1))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_not_known_is_warned_of():
    for old in (nn.utils.weight_norm, nn.utils.spectral_norm):
        with pytest.warns(UserWarning, match=r"by \w+Norm in '0' is not known"):
            sg.prior_groups(nn.Sequential(old(nn.Linear(4, 3))))
    model = nn.Sequential(spectral_norm(nn.Linear(4, 3)), nn.Tanh())
    with pytest.warns(UserWarning, match=r"_SpectralNorm in '0\.parametrizations"):
        found = precisions(sg.prior_groups(model))
    assert found == {"0.bias": 2.0, "0.parametrizations.weight.original": 2.0}
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
    model.forward = lambda x: model["a"](x)
    with pytest.warns(UserWarning, match="No inputs of the layers 'b' were seen"):
        sg.prior_groups(model, torch.ones(5, 4))


def test_nothing_of_the_model_or_of_randomness_changes():
    torch.manual_seed(0)
    model = Everything()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    inputs = torch.arange(44).view(4, 11) % 11, torch.ones(())
    twice = [precisions(sg.prior_groups(model, inputs)) for _ in range(2)]
    named = {"tokens": inputs[0], "scale": inputs[1]}
    assert twice[0] == twice[1] == precisions(sg.prior_groups(model, named))
    assert bits(model.state_dict()) == bits(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError):
        sg.prior_groups(model, inputs[:1])
    assert bits(model.state_dict()) == bits(before)


def test_samplers_of_such_groups():
    """Names, steps by layer, stacked parameters, state dicts and Gibbs updates."""
    models = [nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)) for _ in range(3)]
    stacked, _ = stack_module_state(models)
    groups = sg.prior_groups(models[0], lr={"1": 0.02}, params=stacked.items())
    assert [g.get("lr") for g in groups] == [None, 0.02]
    sampler = sg.SGHMC(groups, 0.1, num_data=9, num_chains=3, seed=1)
    assert sampler.param_groups[0]["param_names"] == ["0.weight", "0.bias"]
    assert sampler.param_groups[1]["lr"] == 0.02
    assert sampler.param_groups[0]["params"][0].shape == (3, 5, 4)
    for p in stacked.values():
        p.grad = torch.ones_like(p)
    sampler.step()
    other = sg.SGHMC(
        sg.prior_groups(models[0], params=stacked.items()),
        0.1,
        num_data=9,
        num_chains=3,
    )
    other.load_state_dict(sampler.state_dict())
    assert bits(other.state_dict()) == bits(sampler.state_dict())


def test_precisions_of_layers_are_sampled_one_by_one():
    model = nn.Sequential(nn.Linear(400, 50), nn.Linear(50, 200))
    sampler = sg.SGLD(sg.prior_groups(model), 0.1, num_data=9, seed=1)
    sampler.draw_from_prior()
    sg.GammaPrecision(sampler).step()
    first, second = (group["prior_precision"] for group in sampler.param_groups)
    assert first == pytest.approx(200, rel=0.1) and second == pytest.approx(25, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, "Invalid scale: 0.0"),
        ({"lr": {"9": 0.1}}, "Invalid lr: the model has no layer '9'"),
        ({"params": []}, "Invalid params: '0.bias' is in the groups or in params"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        sg.prior_groups(nn.Sequential(nn.Linear(2, 2)), **arguments)


@pytest.mark.parametrize("kind", [*THREE, "HMC", "SBPS", "PSGLD"])
def test_draws_from_the_prior_follow_from_the_seed(kind):
    chain, twin = Chain(kind, sizes=(3, 13000, 4)), Chain(kind, sizes=(3, 13000, 4))
    with torch.no_grad():
        twin.params[1].fill_(7)
    for each in (chain, twin):
        for group in each.sampler.param_groups:
            group.update(prior_precision=4.0, temperature=0.25, prior_mean=2.0)
        assert each.sampler.draw_from_prior() == []
    for p, q in zip(chain.params, twin.params, strict=True):
        assert torch.equal(p, q)
    drawn = chain.params[1].detach().clone()
    assert float(drawn.mean()) == pytest.approx(2, abs=5 * 0.25 / 13000**0.5)
    assert float(drawn.std()) == pytest.approx(0.25, rel=5 / 26000**0.5)
    # Its noise is not the update's.
    assert chain.run(range(2))[1].isfinite().all()
    later = chain.sampler.param_groups[0]["step"]
    chain.sampler.draw_from_prior()
    assert not torch.equal(chain.params[1], drawn) and int(later) == 2


def test_groups_without_a_prior_stay_and_are_named():
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    groups = [{"params": [("a", p)]}, {"params": [("b", q)], "prior_precision": 2.0}]
    sampler = sg.SGLD(groups, 0.1, num_data=5, seed=1)
    assert sampler.draw_from_prior() == ["'a'"]
    assert torch.equal(p, torch.ones(3)) and not torch.equal(q, torch.ones(3))


def test_dtypes_means_and_chains():
    """float32's draw, rounded; a chain of several is a sampler's with its seed."""
    mean = torch.linspace(-1, 1, 12).view(3, 4)
    drawn = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        p = nn.Parameter(torch.zeros(3, 4, dtype=dtype))
        settings = {"num_data": 5, "prior_precision": 3.0, "prior_mean": [mean]}
        sampler = sg.SGHMC([p], 0.1, seed=1, **settings)
        sampler.draw_from_prior()
        drawn[dtype] = p.detach()
    assert torch.equal(drawn[torch.bfloat16], drawn[torch.float32].bfloat16())
    torch.testing.assert_close(drawn[torch.float64].float(), drawn[torch.float32])
    many = nn.Parameter(torch.zeros(2, 3, 4))
    sampler = sg.SGHMC([many], 0.1, num_data=5, num_chains=2, seed=1, prior_precision=3)
    sampler.draw_from_prior()
    for k in range(2):
        one = nn.Parameter(torch.zeros(3, 4))
        seed = sg.fold_in(1, k)
        sg.SGLD([one], 0.1, num_data=5, seed=seed, prior_precision=3).draw_from_prior()
        assert torch.equal(many[k], one)
