"""sample: where chains begin, passes of an optimizer, priors by layer."""

import warnings
from functools import partial

import pytest
import torch
from driver_problem import ROWS, data, model, run
from stored_files import contents
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

import torch_sgmcmc as sg
from torch_sgmcmc.core.random_state import fold_in
from torch_sgmcmc.diagnostics.run_record import read_run_record

FLAT = partial(sg.SGHMC, lr=0.05, num_data=ROWS)
ONE = {"steps": 1, "every": 1, "burn_in": 0, "report": False}


def starts(given, chains, **options):
    """Each chain's first weights at the end of a step that moves nothing far."""
    found = []

    def look(state):
        found.append(state.model.state_dict()["0.weight"].clone())

    tiny = partial(sg.SGLD, lr=1e-20, num_data=ROWS, prior_precision=400.0)
    given = {} if given is None else {"start": given}
    run(
        None,
        chains=chains,
        callbacks=look,
        **ONE,
        **{"sampler": tiny, **given, **options},
    )
    return found


def initial(chain):
    torch.manual_seed(fold_in(fold_in(5, chain), 0))
    return model().state_dict()["0.weight"]


def test_chains_begin_at_different_places():
    """The model, a draw from the prior, the next model; of a module other values."""
    first, second, third = starts(None, 3)
    assert torch.equal(first, initial(0)) and torch.equal(third, initial(2))
    assert float(second.std()) == pytest.approx(0.05, rel=0.6)
    network = model()
    own = network.state_dict()["0.weight"].clone()
    found = starts(None, 3, model=network)
    assert torch.equal(found[0], own) and not torch.equal(found[2], own)
    assert float(found[2].abs().max()) <= 0.5  # of torch's initial values
    assert torch.equal(network.state_dict()["0.weight"], own)
    # Without a prior there is no draw from it.
    given = partial(sg.SGLD, lr=1e-20, num_data=9)
    flat = starts(None, 2, model=network, sampler=given)
    assert not torch.equal(flat[1], own) and float(flat[1].abs().max()) <= 0.5


def fill(network):
    with torch.no_grad():
        network[0].weight.fill_(3)


def test_given_starts_take_turns():
    found = starts([fill, "model"], 3)
    assert [bool((each == 3).all()) for each in found] == [True, False, True]
    alike = starts("model", 2, model=model())
    assert torch.equal(*alike)


def test_frozen_parameters_and_buffers_stay():
    network = model()
    network[0].requires_grad_(False)
    network[1].running_mean.fill_(7)
    kept = {}

    def look(state):
        kept.update({k: v.clone() for k, v in state.model.state_dict().items()})

    before = network.state_dict()["4.weight"].clone()
    run(None, network.eval(), start="reset", callbacks=look, **ONE)
    assert torch.equal(kept["0.weight"], network[0].weight)
    assert torch.equal(kept["1.running_mean"], torch.full((8,), 7.0))
    assert not torch.allclose(kept["4.weight"], before, atol=0.05)


class Square(nn.Module):
    """A parametrization without an inverse."""

    def forward(self, x):
        return x**2


class Parts(nn.Module):
    """Layers whose parameters are reset, in three ways or not at all."""

    def __init__(self):
        super().__init__()
        self.norm = weight_norm(nn.Linear(4, 6))
        self.square = register_parametrization(nn.Linear(6, 6), "weight", Square())
        self.scale = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.shift = nn.Parameter(torch.full((6,), 2.0))

    def forward(self, x):
        h = self.scale(self.square(self.norm(x))) + self.shift
        return self.attention(h, h, h, need_weights=False)[0]


def test_parameters_that_are_not_reset_are_named():
    """Parameters behind parametrizations are reset if there is an inverse."""
    network, kept = Parts(), {}
    with torch.no_grad():
        network.scale.weight.fill_(3)

    def look(state):
        kept.update({k: v.clone() for k, v in state.model.named_parameters()})

    named = r"stay as they are: 'shift', 'square.parametrizations.weight.original'$"
    still = partial(sg.SGLD, lr=1e-20, num_data=5)
    mean = lambda net, x: net(x).square().mean()  # noqa: E731
    with pytest.warns(UserWarning, match=named):
        given = (network, still, [torch.ones(5, 4)], mean)
        run(None, *given, start="reset", callbacks=look, **ONE)
    same = {k for k, p in network.named_parameters() if torch.equal(p, kept[k])}
    constant = {"scale.bias", "attention.in_proj_bias", "attention.out_proj.bias"}
    assert same - constant == {"shift", "square.parametrizations.weight.original"}
    assert torch.equal(kept["scale.weight"], torch.ones(6))
    assert float(kept["attention.in_proj_weight"].abs().max()) < 1


def test_parameters_without_a_prior_are_named():
    with pytest.warns(UserWarning, match="stay as they are: '0.weight', "):
        run(None, steps=5, start="prior", sampler=FLAT, report=False)


def test_a_reset_of_nothing_is_the_model(tmp_path):
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x @ self.w[:, None]

    given = (Raw(), FLAT, [torch.ones(2, 4)], lambda net, x: net(x).sum())
    with pytest.warns(UserWarning, match=r"without reset_parameters\(\) stay .*: 'w'"):
        store = run(tmp_path, *given, chains=2, steps=5, report=False)
    records = [read_run_record(store.chain(i)[0]) for i in range(2)]
    assert [record.start for record in records] == ["model", "model"]


def prior_mode(network):
    """Begins as "prior", but is no draw from it."""


def test_the_start_of_a_function_is_no_draw_from_the_prior():
    weak = partial(sg.SGHMC, lr=1e-4, num_data=ROWS, prior_precision=1.0)
    given = {"sampler": weak, "steps": 40, "report": False, "check": True}
    for start, warns in (("prior", False), (prior_mode, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(None, start=start, **given)
        texts = [str(each.message) for each in caught]
        assert any("forgets its start" in text for text in texts) == warns


def test_an_optimizer_makes_the_first_passes(tmp_path):
    """Once, however often a chain resumes."""
    adam = partial(torch.optim.Adam, lr=0.05)
    options = {"optimizer": adam, "optimizer_epochs": 20, "chains": 2}
    losses = []

    def look(state):
        if state.step == 1:
            losses.append(float(state.loss))

    run(tmp_path / "cold", chains=2, callbacks=[look])
    run(tmp_path / "once", callbacks=[look], **options)
    assert max(losses[2:]) < 0.6 * min(losses[:2])
    run(tmp_path / "twice", steps=20, **options)
    run(tmp_path / "twice", **options)
    assert contents(tmp_path / "once") == contents(tmp_path / "twice")
    with pytest.raises(ValueError, match=r"Invalid start: model .*20 epochs of Adam"):
        run(tmp_path / "once", chains=2, steps=60)
    with_closure = partial(torch.optim.LBFGS, lr=0.01)
    run(tmp_path / "closure", optimizer=with_closure, optimizer_epochs=1)


def test_priors_by_layer(tmp_path):
    groups = sg.prior_groups(model(), data().tensors[0])
    assert len(groups) > 1
    settings = []

    def look(state):
        settings.append([g["prior_precision"] for g in state.sampler.param_groups])

    sampler = partial(sg.SGHMC, lr=0.05, num_data=ROWS)
    given = {"sampler": sampler, "groups": groups, "callbacks": [look], "steps": 9}
    run(tmp_path, chains=2, **given)
    expected = [group["prior_precision"] for group in groups]
    assert settings[0] == settings[-1] == expected


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"start": "he"}, ValueError, "Invalid start: 'he'"),
        ({"start": []}, ValueError, "Invalid start: an empty list"),
        ({"optimizer_epochs": 3}, ValueError, "Invalid optimizer_epochs: 3"),
        ({"optimizer": torch.optim.Adam}, ValueError, "Invalid optimizer_epochs: 0"),
        ({"groups": [{"params": [nn.Parameter(torch.ones(2))]}]}, TypeError, "names"),
        ({"groups": sg.prior_groups(nn.Linear(2, 2))}, ValueError, "'0.bias' is in"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        run(None, **options)


def test_a_loops_chains_have_starts(tmp_path):
    starts, saved = [], ({}, {})
    for chain, resumes in ((0, False), (1, False), (1, True)):
        p = nn.Parameter(torch.zeros(3))
        settings = {"num_data": 1, "prior_precision": 1.0, "seed": chain}
        sampler = sg.SGLD([("p", p)], 0.1, **settings)
        if resumes:
            sampler.load_state_dict(saved[0])
        elif chain == 1:
            sampler.draw_from_prior()
        with sg.Collector(sampler, {"p": p}, tmp_path, chain=chain) as collector:
            if resumes:
                collector.load_state_dict(saved[1])
            p.grad = torch.zeros(3)
            sampler.step()
            saved = sampler.state_dict(), collector.state_dict()
        draws = sg.SampleStore(tmp_path).chain(chain)
        assert len(draws) == 1 + resumes
        starts.append(read_run_record(draws[0]).start)
    assert starts == ["model", "prior", "prior"]


def test_a_report_names_the_starts_of_chains_that_agree():
    sampler = partial(sg.SGHMC, lr=0.1, momentum=0.5, num_data=ROWS, prior_precision=30)
    given = {"sampler": sampler, "steps": 1500, "burn_in": 300, "every": 3, "chains": 2}
    texts = []
    for start in (None, "reset"):
        store = run(None, start=start, report=True, **given)
        texts.append(str(sg.report(model(), store, data().tensors[0][:5])))
    assert "from different starts agree: model (chain 0), prior (chain 1)" in texts[0]
    assert "whether chains from other starts agree (all: reset)" in texts[1]
    store = run(None, report=True, **given | {"chains": 4, "steps": 345})
    text = str(sg.report(model(), store, data().tensors[0][:5]))
    assert "whether chains agree (each has 15 draws)" in text
    assert "starts agree:" not in text
