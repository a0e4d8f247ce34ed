"""Pictures of calibration and of uncertainty."""

import pytest
import torch

from torch_sgmcmc import scoring


def issue(rows=400, classes=5):
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(rows, classes, generator=g)
    y = torch.multinomial((0.6 * logits).softmax(1), 1, generator=g)[:, 0]
    return logits.softmax(1), y


def test_wrong_arguments():
    p, y = issue(10)
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
            scoring.plot_reliability(*arguments)
    with pytest.raises(ValueError, match="Invalid bins"):
        scoring.plot_reliability(p, y, bins=0)
    with pytest.raises(ValueError, match="'a' has no numbers, or some that are not"):
        scoring.plot_entropies({"a": torch.tensor([float("nan")])})


def test_pictures():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    p, y = issue(2000)
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
    # Of two classes one number is enough.
    one, both = (
        scoring.plot_reliability(of, (y == 1).long()).axes[0].lines[1]
        for of in (p[:, 1], torch.stack([1 - p[:, 1], p[:, 1]], 1))
    )
    assert one.get_ydata().tolist() == both.get_ydata().tolist()
    figure, axes = matplotlib.pyplot.subplots()
    assert scoring.plot_reliability(p, y, axes=axes) is figure
    matplotlib.pyplot.close("all")
