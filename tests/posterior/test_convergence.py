"""Convergence of predictions and parameters: ArviZ's numbers, and what they show."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torch_sgmcmc as sg
from torch_sgmcmc import convergence

pytestmark = pytest.mark.full

az = pytest.importorskip("arviz")


def noise(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def quiet(draws: Any) -> convergence.Convergence:
    return convergence.predictions(draws, progress=False)


def test_numbers_are_arviz_s() -> None:
    probs = noise(3, 51, 4, 2).cumsum(1).softmax(3)
    report = quiet(probs)
    for i in range(4):
        for c in range(2):
            draws = probs[:, :, i, c].numpy()
            for ours, theirs in (
                (report.rhat, az.rhat(draws, method="rank")),
                (report.ess_bulk, az.ess(draws, method="bulk")),
                (report.ess_tail, az.ess(draws, method="tail", prob=(0.05, 0.95))),
            ):
                assert ours.shape == (4, 2)
                assert float(ours[i, c]) == pytest.approx(float(theirs), rel=1e-10)
    assert (report.num_chains, report.num_draws) == (3, 51)


def test_chains_in_different_modes_are_flagged() -> None:
    """Two on U(θ) = 12 (θ² - 1)² that do not cross over, as coordinates of one."""
    theta = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    sampler = sg.SGLD([theta], lr=0.004, num_data=1, seed=2)
    running = convergence.RunningConvergence(2, 1)
    steps = []
    for _ in range(2000):
        sampler.zero_grad()
        (12 * (theta * theta - 1) ** 2).sum().backward()
        sampler.step()
        running.update(theta.detach()[:, None])
        steps.append(theta.detach().clone())
    draws = torch.stack(steps, 1)
    for chain in draws.numpy():  # each by itself is content
        assert az.ess(chain[None], method="bulk") > 100
    assert bool((running.chain_ess() > 100).all())
    for report in (convergence.parameters(draws, progress=False), running.report()):
        assert float(report.rhat) > 1.5
        assert "R-hat < 1.01: 0 of 1" in report.summary()
    assert float(running.report().ess_mean) < 0.1 * float(running.chain_ess().sum())
    # And what is the same in both modes has converged.
    assert float(quiet(draws.square()).rhat) < 1.02


def test_a_store_is_its_chains(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [
        [{"a": torch.randn(3, generator=generator)} for _ in range(8)] for _ in "01"
    ]
    for chain, of_chain in enumerate(draws):
        with sg.SampleWriter(tmp_path, of_chain[0], chain=chain) as writer:
            for step, draw in enumerate(of_chain):
                writer.append(draw, step=step)
    store = sg.SampleStore(tmp_path)
    found = convergence.parameters(store, progress=False)
    expected = convergence.parameters(draws, progress=False)
    assert torch.equal(found.rhat, expected.rhat)


def test_predictions_converge_where_weights_do_not() -> None:
    """Of four chains, each in its own copy of the one mode of a small network."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 60)
    y = torch.tanh(2 * x + 3) + torch.tanh(2 * x - 3) + 0.3 * torch.randn(60)
    signs = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    inner = (signs[..., None] * torch.rand(4, 2, 2)).requires_grad_()
    outer = signs.float().requires_grad_()

    def predict(x: Tensor) -> Tensor:
        hidden = torch.tanh(inner[..., :1] * x + inner[..., 1:])
        return (outer[..., None] * hidden).sum(1)

    target = {"num_data": 60, "prior_precision": 1.0}
    sampler = sg.SGHMC([inner, outer], 0.03, 0.9, **target, seed=0)
    predictions, weights = [], []
    for step in range(6000):
        sampler.zero_grad()
        ((predict(x) - y) / 0.3).square().div(2).mean(1).sum().backward()
        sampler.step()
        if step >= 1000 and step % 10 == 0:
            predictions.append(predict(x[::7]).detach())
            weights.append(torch.cat([inner.detach().flatten(1), outer.detach()], 1))
    assert float(quiet(torch.stack(predictions, 1)).rhat.max()) < 1.05
    stuck = convergence.parameters(torch.stack(weights, 1), progress=False)
    assert float(stuck.rhat.median()) > 1.3


def test_constants_are_counted_and_enter_no_quantile() -> None:
    probs = noise(2, 40, 3, 2).softmax(3)
    probs[:, :, 1, 0], probs[:, :, 1, 1] = 1.0, 0.0
    report, rest = quiet(probs), quiet(probs[:, :, [0, 2]])
    assert report.constant.tolist() == [[False] * 2, [True] * 2, [False] * 2]
    for values in (report.rhat, report.ess_bulk, report.ess_tail):
        assert values.isnan().tolist() == report.constant.tolist()
    for kind, values in report.quantiles(0, 0.5, 1).items():
        assert torch.equal(values, rest.quantiles(0, 0.5, 1)[kind])
    assert "constant in all draws: 2 of 6" in report.summary()
    assert "constant" not in rest.summary()
    nothing = quiet(torch.ones(2, 8, 3))
    assert "all 3 are constant" in nothing.summary()
    assert nothing.quantiles(0.5)["rhat"].isnan().all()
    with pytest.raises(ValueError, match="There is nothing to plot"):
        nothing.plot()


def test_chains_that_stand_still_apart() -> None:
    draws = torch.arange(4.0)[:, None, None].expand(4, 40, 1)
    draws = torch.cat([draws, noise(4, 40, 1)], 2)
    running = convergence.RunningConvergence(4, 2)
    for step in range(40):
        running.update(draws[:, step])
    for report in (quiet(draws), running.report()):
        assert report.rhat[0] == math.inf
        assert not report.constant.any()
        assert report.quantiles(1.0)["rhat"].item() == math.inf
        assert "R-hat infinite: 1 of 2" in report.summary()


def test_quantiles_go_from_best_to_worst() -> None:
    draws = noise(2, 100, 11)
    draws[0] += torch.arange(11.0)
    report = quiet(draws)
    found = report.quantiles(0, 0.5, 1)
    assert found["rhat"].tolist() == report.rhat.sort().values[[0, 5, 10]].tolist()
    few = report.ess_bulk.sort(descending=True).values
    assert found["bulk"].tolist() == few[[0, 5, 10]].tolist()
    lines = report.summary(rhat=1.2, ess_per_chain=1).splitlines()
    assert lines[0] == "Predictions: 2 chains of 100 draws, 11 quantities"
    assert [line[:8].strip() for line in lines[1:5]] == [
        "",
        "R-hat",
        "ESS bulk",
        "ESS tail",
    ]
    assert lines[5] == f"R-hat < 1.2: {int((report.rhat < 1.2).sum())} of 11"
    enough = (report.ess_bulk >= 2) & (report.ess_tail >= 2)
    assert lines[6].endswith(f": {int(enough.sum())} of 11")
    assert str(report) == report.summary()
    with pytest.raises(ValueError, match=r"Invalid level: 1\.5"):
        report.quantiles(1.5)
    with pytest.raises(ValueError, match="no effective draws for 'mean' here"):
        _ = report.ess_mean


def test_the_picture() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    draws = noise(2, 40, 5)
    draws[:, :, 0] = torch.tensor([[0.0], [1.0]])
    draws[:, :, 1] = 0.0
    with matplotlib.rc_context({"figure.constrained_layout.use": True}):
        figure = quiet(draws).plot()
    left, right = figure.axes
    assert "1 are infinite" in left.get_xlabel()
    assert len(left.lines[0].get_xdata()) == 3
    assert [len(line.get_xdata()) for line in right.lines[:2]] == [4, 4]
    matplotlib.pyplot.close(figure)


@pytest.mark.parametrize(
    "draws, error",
    [
        (torch.zeros(5), r"shape \[5\] \(must be \[chains, draws, \.\.\.\]\)"),
        (torch.zeros(1, 9, 2), "at least 2 chains: one cannot show"),
        (torch.zeros(2, 3, 2), "at least 4 draws of each chain"),
        (torch.zeros(2, 9, 0), "there is no quantity"),
    ],
)
def test_bad_shapes(draws: Tensor, error: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid probs: .*{error}"):
        convergence.predictions(draws)
    with pytest.raises(ValueError, match=f"Invalid draws: .*{error}"):
        convergence.parameters(draws)


def test_bad_numbers() -> None:
    probs = torch.rand(2, 9, 4, 3)
    probs[1, 5, 2, 0], probs[1, 7, 0, 1] = math.nan, math.inf
    message = (
        r"2 of 216 numbers are not finite, the first in chain 1, draw 5, at \[2, 0]"
    )
    with pytest.raises(ValueError, match=message):
        convergence.predictions(probs)
    with pytest.raises(TypeError, match=r"dtype torch\.int64 \(must be a floating"):
        convergence.predictions(torch.zeros(2, 9, dtype=torch.int64))
    with pytest.raises(TypeError, match="draws are a Tensor, which takes none"):
        convergence.parameters(torch.rand(2, 9), lambda draw: draw["a"])


def test_without_arviz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz", None)
    message = r"convergence\.predictions\(\) needs ArviZ, .*torch_sgmcmc\[diagnostics\]"
    with pytest.raises(ImportError, match=message):
        convergence.predictions(torch.rand(2, 9))
    running = convergence.RunningConvergence(2, 1)  # needs none
    for values in torch.rand(9, 2, 1):
        running.update(values)
    assert running.report().rhat.isfinite().all()


# ---- Parameters ---------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()


def test_coordinates() -> None:
    model = net()
    flat = {
        name + str(list(place)): float(p[place])
        for name, p in model.state_dict().items()
        for place in np.ndindex(*p.shape)
    }
    everything = convergence.Coordinates(model)
    assert everything.names == list(flat)
    assert everything(model).tolist() == list(flat.values())
    some = convergence.Coordinates(model, 6, seed=3)
    assert len(some) == len(set(some.names)) == 6
    assert some(model.state_dict()).tolist() == [flat[name] for name in some.names]
    assert some.names != convergence.Coordinates(model, 6, seed=4).names
    biases = convergence.Coordinates(model, where=lambda name, p: p.dim() == 1)
    assert biases.names == [name for name in flat if "bias" in name]
    scalar = convergence.Coordinates({"a": torch.tensor(2.0), "n": torch.tensor(3)})
    assert (scalar.names, scalar({"a": torch.tensor(5.0)}).tolist()) == (["a"], [5.0])


def test_projections_cover_all_coordinates_once() -> None:
    model = net()
    probe = convergence.Projections(model, 4, seed=5)
    values = [p.detach() for p in model.parameters()]
    rows = []
    for p in values:
        for place in np.ndindex(*p.shape):
            unit = {
                name: torch.zeros_like(other)
                for name, other in model.named_parameters()
            }
            next(u for u, v in zip(unit.values(), values, strict=True) if v is p)[
                place
            ] = 1.0
            rows.append(probe(unit))
    directions = torch.stack(rows)  # [coordinates, sums]
    assert (directions.abs().sum(1) == 1).all()
    sizes = directions.abs().sum(0)
    assert sizes.max() - sizes.min() <= 1
    assert {-1.0, 0.0, 1.0} == set(directions.flatten().tolist())
    flat = torch.cat([p.flatten() for p in values])
    torch.testing.assert_close(probe(model), flat @ directions)


def test_parameters_of_state_dicts() -> None:
    draws = [
        [{"a": noise(2, 3, seed=9 * i + j), "n": torch.tensor(j)} for j in range(9)]
        for i in range(2)
    ]
    stacked = torch.stack(
        [torch.stack([draw["a"].flatten() for draw in chain]) for chain in draws]
    )
    report = convergence.parameters(draws, progress=False)
    assert torch.equal(report.rhat, quiet(stacked).rhat)
    last = convergence.parameters(draws, lambda draw: draw["a"][1, 2], progress=False)
    assert last.rhat == report.rhat[5]
    with pytest.raises(ValueError, match=r"chains of \[9, 8\] draws"):
        convergence.parameters([draws[0], draws[1][:8]])


def test_bad_probes() -> None:
    with pytest.raises(ValueError, match=r"Invalid count: 24 \(there are 23 coord"):
        convergence.Coordinates(net(), 24)
    with pytest.raises(ValueError, match=r"Invalid count: 24 \(there are 23 coord"):
        convergence.Projections(net(), 24)
    with pytest.raises(ValueError, match=r"Invalid where: .* of 0\.weight, 0\.bias"):
        convergence.Coordinates(net(), where=lambda name, p: False)
    probe = convergence.Coordinates(net())
    with pytest.raises(ValueError, match=r"'0\.weight' is of shape \[3\], expected"):
        probe({"0.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"'0\.weight' is of shape none, expected"):
        probe({})


# ---- Chains that are one -------------------------------------------------------------


def test_identical_chains_are_called_so() -> None:
    draws = noise(3, 50, 4)
    # Copied at the end: torch's sigmoid rounds as a number's place in memory has it.
    probabilities = draws.sigmoid()
    draws[2], probabilities[2] = draws[0], probabilities[0]
    message = (
        "chains 0 and 2 are identical, number for number (were they run with one seed? "
        "R-hat and effective draws need independent chains: give each a seed of its "
        "own, with torch_sgmcmc.fold_in)"
    )
    for given, function in (
        (draws, convergence.parameters),
        (probabilities, convergence.predictions),
    ):
        with pytest.raises(ValueError) as error:
            function(given, progress=False)
        assert message in str(error.value)
    running = convergence.RunningConvergence(3, 4)
    for values in draws.unbind(1):
        running.update(values)
    for ask in (running.report, running.chain_ess):
        with pytest.raises(ValueError) as error:
            ask()
        assert message in str(error.value)


def test_a_draw_in_common_and_chains_at_rest_are_none() -> None:
    draws = noise(2, 50, 4)
    draws[:, -1] = 0
    quiet(draws)
    quiet(torch.ones(2, 50, 4))
