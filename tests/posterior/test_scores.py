"""Scores against torchmetrics' classes and plain formulas; pictures."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_sgmcmc as sg
from torch_sgmcmc import scoring

torchmetrics = pytest.importorskip("torchmetrics")


def problem(rows: int = 400, classes: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(rows, classes, generator=g)
    y = torch.multinomial((0.6 * logits).softmax(1), 1, generator=g)[:, 0]
    return logits.softmax(1), y


def test_scores_are_those_of_plain_formulas_and_torchmetrics() -> None:
    p, y = problem()
    found = scoring.scores(p, y, resamples=1)
    rows = range(len(y))
    wrong = sum(int(p[i].argmax()) != int(y[i]) for i in rows)
    nll = -sum(float(p[i, y[i]].double().log()) for i in rows) / len(y)
    brier = 0.0
    for i in rows:
        for c in range(5):
            brier += (float(p[i, c]) - (c == int(y[i]))) ** 2 / len(y)
    metric = torchmetrics.CalibrationError(
        task="multiclass", num_classes=5, n_bins=15, norm="l1"
    )
    assert found.error == pytest.approx(wrong / len(y), abs=1e-6)
    assert found.nll == pytest.approx(nll, abs=1e-6)
    assert found.brier == pytest.approx(brier, abs=1e-6)
    assert found.ece == pytest.approx(float(metric(p, y)), abs=1e-6)
    assert found.ece == pytest.approx(plain_ece(p, y, 15), abs=1e-6)
    assert found.num_inputs == 400
    assert f"error {found.error:.2%}" in str(found)


def plain_ece(p: Tensor, y: Tensor, bins: int) -> float:
    confidence, label = p.double().max(1)
    total = 0.0
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if bool(inside.any()):
            accuracy = (label == y)[inside].double().mean()
            total += float((accuracy - confidence[inside].mean()).abs() * inside.sum())
    return total / len(y)


def test_the_order_of_inputs_does_not_matter() -> None:
    p, y = problem()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    one = scoring.scores(p, y, resamples=1)
    two = scoring.scores(p[order], y[order], resamples=1)
    for name in ("error", "nll", "brier", "ece"):
        assert getattr(one, name) == pytest.approx(getattr(two, name), abs=1e-6)


def test_interval_is_the_bootstrap_s() -> None:
    p, y = problem(200)
    found = scoring.scores(p, y, bins=10, level=0.8, resamples=60, seed=3)
    g = torch.Generator().manual_seed(3)
    values = []
    for _ in range(60):
        rows = torch.randint(200, (200,), generator=g)
        values.append(plain_ece(p[rows], y[rows], 10))
    expected = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.1, 0.9], dtype=torch.float64)
    )
    assert found.ece_interval == pytest.approx(expected.tolist(), abs=1e-6)
    assert found.level == 0.8
    assert scoring.scores(p, y, bins=10, level=0.8, resamples=60, seed=3) == found


def test_two_classes_by_one_number() -> None:
    p, y = problem(classes=2)
    one = scoring.scores(p[:, 1], y, resamples=3)
    two = scoring.scores(p, y, resamples=3)
    for name in ("error", "nll", "brier", "ece"):
        assert getattr(one, name) == pytest.approx(getattr(two, name), abs=1e-6)


def test_a_probability_that_rounds_above_one_is_no_logit() -> None:
    p = torch.tensor([[1 + 1e-6, 0.0], [0.25, 0.75]])
    y = torch.tensor([0, 1])
    assert scoring.scores(p, y, resamples=1).ece == pytest.approx(0.125, abs=1e-6)
    p = torch.tensor([[1.0, 0.0]])
    assert scoring.scores(p, torch.tensor([1]), resamples=1).nll == float("inf")


def test_auroc_is_the_part_of_pairs() -> None:
    g = torch.Generator().manual_seed(0)
    inside = 3 * torch.rand(70, generator=g)  # above 1 too
    outside = 3 * torch.rand(50, generator=g).sqrt()
    outside[:20] = inside[:20]  # ties
    larger = (outside[:, None] > inside).double().mean()
    equal = (outside[:, None] == inside).double().mean()
    assert scoring.ood_auroc(inside, outside) == pytest.approx(
        float(larger + equal / 2), abs=1e-6
    )
    # Entropies that torchmetrics' own sigmoid would round to one number.
    big = 40 + torch.arange(10, dtype=torch.float64)
    assert scoring.ood_auroc(big, big + 10) == 1.0
    assert scoring.ood_auroc(torch.ones(3), torch.ones(4)) == 0.5


def test_wrong_arguments() -> None:
    p, y = problem(10)
    for arguments, error, match in (
        ((p.log(), y), ValueError, "Invalid probabilities: row 0 is"),
        ((2 * p, y), ValueError, "must be >= 0 and sum to 1"),
        ((p / float("nan"), y), ValueError, "row 0"),
        ((p[:, :1], y), ValueError, r"shape \[10, 1\]"),
        ((p, y[:9]), ValueError, r"Invalid targets: shape \[9\] .must be \[10\]"),
        ((p, y + 5), ValueError, r"must be in \[0, 4\]"),
        ((p, y.float()), TypeError, "Tensor of integers"),
        ((p.long(), y), TypeError, "floating dtype"),
    ):
        with pytest.raises(error, match=match):
            scoring.scores(*arguments)
    for options, match in (
        ({"bins": 0}, "bins"),
        ({"level": 1.0}, "level"),
        ({"resamples": 0}, "resamples"),
    ):
        with pytest.raises(ValueError, match=f"Invalid {match}"):
            scoring.scores(p, y, **options)
    with pytest.raises(ValueError, match="Invalid outside: 1 of 10 are NaN"):
        scoring.ood_auroc(p[:, 0], torch.where(p[:, 0] == p[3, 0], torch.nan, p[:, 0]))
    with pytest.raises(ValueError, match=r"Invalid inside: shape \[0\]"):
        scoring.ood_auroc(p[:0, 0], p[:, 0])
    with pytest.raises(ValueError, match="'a' has no numbers, or some that are not"):
        scoring.plot_entropies({"a": torch.tensor([float("nan")])})


def test_pictures() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    p, y = problem(2000)
    figure = scoring.plot_reliability({"a": p, "b": p**2 / (p**2).sum(1, True)}, y)
    (axes,) = figure.axes
    _, first, second = axes.lines
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["a", "b"]
    # From the points the calibration error again, but for what was left out.
    confidence, label = p.max(1)
    for x, accuracy in zip(first.get_xdata(), first.get_ydata(), strict=True):
        b = -(-x * 15 // 1) - 1
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        assert int(inside.sum()) >= 20
        assert float((label == y)[inside].double().mean()) == pytest.approx(accuracy)
    assert len(second.get_xdata()) > 5
    entropies = torch.special.entr(p).sum(1)
    figure = scoring.plot_entropies({"in": entropies, "out": entropies + 1})
    assert len(figure.axes[0].patches) == 2
    figure, axes = matplotlib.pyplot.subplots()
    assert scoring.plot_reliability(p, y, axes=axes) is figure
    matplotlib.pyplot.close("all")


def test_without_torchmetrics_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, y = problem(10)
    for name in [n for n in sys.modules if n.startswith("torchmetrics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    calls: list[Any] = [lambda: scoring.scores(p, y)]
    calls.append(lambda: scoring.ood_auroc(p[:, 0], p[:, 1]))
    for call in calls:
        with pytest.raises(ImportError, match=r"'torch_sgmcmc\[posterior\]'"):
            call()
    assert sg.predict  # needs torch alone
