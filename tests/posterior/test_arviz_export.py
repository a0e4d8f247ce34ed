"""Draws in ArviZ, before and after its version 1."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

az = pytest.importorskip("arviz")


class Draw(dict):
    """Draws like a store's."""

    def __init__(self, tensors, **about):
        super().__init__(tensors)
        vars(self).update(about)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def chains(count=2, length=5):
    g = torch.Generator().manual_seed(1)

    def draw():
        named = network().named_parameters()
        return {n: torch.randn(p.shape, generator=g) for n, p in named}

    return [[draw() for _ in range(length)] for _ in range(count)]


def test_all_of_a_small_model():
    draws = chains()
    data = sg.to_arviz(draws)
    posterior = data["posterior"]
    assert set(posterior.data_vars) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for c in range(2):
        for d in range(5):
            for name, tensor in draws[c][d].items():
                found = posterior[name].sel(chain=c, draw=d).values
                assert np.array_equal(found, tensor.numpy())
    assert "sample_stats" not in data
    # What ArviZ makes of it.
    found = az.rhat(data, var_names=["0.bias"])
    found = found["posterior"] if "posterior" in found else found
    for i in range(2):
        values = np.array([[d["0.bias"][i].item() for d in c] for c in draws])
        assert float(found["0.bias"][i]) == pytest.approx(float(az.rhat(values)))
    assert len(az.summary(data, var_names=["0.bias"])) == 2


def test_names_and_probes_of_a_network():
    class Some:
        names = ("0.weight[0, 1]", "1.bias[0]")

        def __call__(self, draw):
            return torch.stack([draw["0.weight"][0, 1], draw["1.bias"][0]])

    def sums(draw):
        return torch.stack([draw[name].sum() for name in sorted(draw)])

    draws, some = chains(), Some()
    data = sg.to_arviz(draws, names=["1.bias"], probes={"some": some, "sums": sums})
    posterior = data["posterior"]
    assert set(posterior.data_vars) == {"1.bias", "some", "sums"}
    assert posterior["some"].coords["some_of"].values.tolist() == list(some.names)
    for c in range(2):
        for d in range(5):
            at = posterior.sel(chain=c, draw=d)
            assert np.array_equal(at["some"].values, some(draws[c][d]).numpy())
            assert np.array_equal(at["sums"].values, sums(draws[c][d]).numpy())
    only = sg.to_arviz(draws, probes={"sums": sums})["posterior"]
    assert set(only.data_vars) == {"sums"}
    kinds = {"float": lambda d: float(sums(d)[0]), "array": lambda d: sums(d).numpy()}
    others = sg.to_arviz(draws, probes=kinds)["posterior"]
    assert np.array_equal(others["float"], only["sums"][..., 0])
    assert np.array_equal(others["array"], only["sums"])


def test_draws_one_after_the_other_with_their_chains_weights_and_steps():
    compare_chains = chains()
    rows = [(c, d) for d in range(5) for c in (1, 0)]
    stored = (
        Draw(compare_chains[c][d], chain=10 * c, weight=0.5 - d, step=7 * d + c)
        for c, d in rows
    )
    data = sg.to_arviz(stored)
    for c in range(2):
        for d in range(5):
            at = data["posterior"].sel(chain=c, draw=d)
            assert np.array_equal(at["0.bias"].values, compare_chains[c][d]["0.bias"])
            stats = data["sample_stats"].sel(chain=c, draw=d)
            assert (float(stats["weight"]), int(stats["step"])) == (0.5 - d, 7 * d + c)
    one = sg.to_arviz(compare_chains[0])["posterior"]
    assert one["0.bias"].shape == (1, 5, 2)


def test_modules_and_low_precision_and_a_draw_that_is_written_again():
    model = network().bfloat16()

    def live():
        for i in range(4):
            with torch.no_grad():
                model[1].bias.fill_(i)
            yield model

    found = sg.to_arviz(live(), names=["1.bias"])
    assert found["posterior"]["1.bias"].values.ravel().tolist() == [0, 1, 2, 3]
    assert "sample_stats" not in found


def test_wrong_arguments():
    draws = chains()
    unequal = [{"a": torch.zeros(3)}, {"a": torch.zeros(2)}]
    large = [{"a": torch.zeros(10_001)}]
    for given, error, match in (
        ([], ValueError, r"chains of \[\] draws"),
        ([draws[0], draws[1][:3]], ValueError, r"chains of \[5, 3\] draws"),
        ([torch.zeros(3)], TypeError, "Invalid draw: of type Tensor"),
        (unequal, ValueError, r"\[2\] and \[3\]"),
        (large, ValueError, "10,001 numbers each, of which some"),
    ):
        with pytest.raises(error, match=match):
            sg.to_arviz(given)
    with pytest.raises(ValueError, match=r"a draw has no tensor '2\.bias'"):
        sg.to_arviz(draws, names=["2.bias"])


def test_without_arviz_the_error_shows_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"'torch_sgmcmc\[posterior\]'"):
        sg.to_arviz(chains())


def test_leave_one_out_equals_that_of_a_normal_mean():
    """Exact draws: leave-one-out equals predictive densities without each datum."""
    g = torch.Generator().manual_seed(2)
    y = torch.randn(20, generator=g, dtype=torch.float64)

    def draw():
        return {"mean": y.mean() + torch.randn((), generator=g) / 20**0.5}

    draws = [[draw() for _ in range(1000)] for _ in range(2)]
    normal = torch.distributions.Normal
    data = sg.to_arviz(
        draws,
        log_likelihood={"y": lambda d: normal(d["mean"], 1).log_prob(y)},
        posterior_predictive={"y": lambda d: d["mean"] + torch.randn(20, generator=g)},
    )
    assert data["posterior_predictive"]["y"].shape == (2, 1000, 20)
    found = az.loo(data)
    elpd = float(getattr(found, "elpd_loo", getattr(found, "elpd", None)))
    without = (y.sum() - y) / 19
    exact = normal(without, (1 + 1 / 19) ** 0.5).log_prob(y).sum()
    # Of 2,000 draws of a sum of 20 terms that vary by about 0.1 each.
    assert abs(elpd - float(exact)) < 0.1
    plain = data["log_likelihood"]["y"].mean()
    assert abs(20 * float(plain) - float(exact)) > 0.2  # which is another number


def test_identical_chains_are_called_so():
    draws = chains(3)
    draws[2] = draws[0]
    with pytest.raises(ValueError, match=r"chains 0 and 2 are identical, .*fold_in"):
        sg.to_arviz(draws)
    still = {"a": torch.zeros(2)}
    sg.to_arviz([[still] * 5] * 2)
