"""Convergence without keeping draws: as exact as it says, in constant memory."""

import copy
import math
from typing import Any

import pytest
import torch
from reference import same_bits
from torch import Tensor

from torch_sgmcmc.judge.convergence import RunningConvergence

pytestmark = pytest.mark.full


def noise(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def autoregressive(rho: float, draws: int, chains: int, quantities: int) -> Tensor:
    """[draws, chains, quantities] of variance 1, with autocorrelations rho**t."""
    kicks = math.sqrt(1 - rho * rho) * noise(draws, chains, quantities)
    kicks[0] /= math.sqrt(1 - rho * rho)
    for t in range(1, draws):
        kicks[t] += rho * kicks[t - 1]
    return kicks


def followed(draws: Tensor, **options: Any) -> RunningConvergence:
    """Of draws [draws, chains, ...]."""
    running = RunningConvergence(draws.shape[1], draws.shape[2:], **options)
    for values in draws:
        running.update(values)
    return running


@pytest.mark.parametrize(
    "draws, used",
    [(4, 4), (5, 4), (62, 62), (64, 64), (66, 64), (68, 68), (128, 128), (1000, 992)],
)
def test_rhat_is_arviz_s_of_the_draws_that_fill_batches(draws: int, used: int) -> None:
    arviz = pytest.importorskip("arviz")
    values = 3 + 0.1 * noise(draws, 3, 4).cumsum(0) + torch.tensor([0, 1e3, 0, -1e2])
    report = followed(values).report()
    assert report.num_draws == used
    for i in range(4):
        expected = arviz.rhat(values[:used, :, i].T.numpy(), method="split")
        assert float(report.rhat[i]) == pytest.approx(float(expected), rel=1e-10)


def test_rhat_sees_a_drift_that_all_chains_share() -> None:
    values = noise(640, 4, 1)
    assert float(followed(values).report().rhat) < 1.02
    assert (
        float(followed(values + torch.linspace(0, 3, 640)[:, None, None]).report().rhat)
        > 1.1
    )


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.9])
def test_effective_draws_of_autoregressive_chains(rho: float) -> None:
    """All 100 quantities' long-run variances together are known to a percent.

    Batch means give σ² (1 - k / 2E) on average and have a relative variance of
    2 / mk: m = 4 chains, k = 64 batches of 128, E effective draws a chain.
    """
    chains, draws, quantities, batches = 4, 8192, 100, 64
    report = followed(autoregressive(rho, draws, chains, quantities)).report()
    each = draws * (1 - rho) / (1 + rho)
    assert not report.at_most.any()
    ratio = chains * each / report.ess_mean
    # Exactly 2 Σ t ρ_t / b (1 + 2 Σ ρ_t), which is k / 2E where ρ is near 1.
    short = 2 * rho / (1 - rho * rho) / (draws / batches)
    error = math.sqrt(2 / (chains * batches) / quantities)
    assert abs(float(ratio.mean()) - (1 - short)) < 4 * error  # 6e-5 to be wrong
    assert 0.7 < float(ratio.std()) / math.sqrt(2 / (chains * batches)) < 1.4


def test_effective_draws_are_the_formula_s() -> None:
    values = noise(4096, 2, 3)  # in 64 batches of 64
    batches = values.reshape(64, 64, 2, 3).mean(1)
    off = batches - batches.mean((0, 1))
    long_run = 64 / (2 * 64 - 1) * off.square().sum((0, 1))
    expected = 2 * 4096 * values.flatten(0, 1).var(0) / long_run
    found = followed(values).report().ess_mean
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_the_spread_of_many_chains_is_counted() -> None:
    """A chain each in one of two modes: all their draws are worth few."""
    values = noise(1024, 4, 1)
    values[:, 2:] += 10
    running = followed(values)
    assert float(running.report().rhat) > 5
    assert bool((running.chain_ess() > 500).all())
    assert bool(running.report().at_most.all())
    assert float(running.report().ess_mean) <= 4 * 8 * 1.1


def test_short_chains_say_at_most() -> None:
    slow = followed(autoregressive(0.99, 1024, 2, 20)).report()  # 5 a chain
    assert bool(slow.at_most.all())
    assert "at most as many as said: 20 of 20" in slow.summary()
    assert "effective draws a chain: 0 of 20" in slow.summary(ess_per_chain=1)
    few = followed(noise(16, 2, 5)).report()
    assert bool(few.at_most.all())


def test_memory_does_not_grow() -> None:
    running = RunningConvergence(2, 3, batches=16)
    sizes = set()
    for values in noise(5000, 2, 3):
        running.update(values)
        state = running.state_dict()
        sizes.add(state["means"].numel() + state["squares"].numel())
    assert sizes == {2 * 2 * 16 * 3}


def test_chains_one_after_another_and_of_different_lengths() -> None:
    values = noise(300, 2, 3)
    together = followed(values[:256])
    apart = RunningConvergence(2, 3)
    for step in range(300):
        apart.update(values[step, 0], chain=0)
    for step in range(256):
        apart.update(values[step, 1], chain=1)
    assert apart.num_draws == [300, 256]
    # Batches of 8 against 4: the same draws go in, but for rounding.
    assert apart.report().num_draws == together.report().num_draws == 256
    torch.testing.assert_close(apart.report().rhat, together.report().rhat)


def test_it_goes_on_after_a_checkpoint(tmp_path: Any) -> None:
    values = noise(700, 2, 3)
    whole = followed(values)
    first = followed(values[:333])
    torch.save(first.state_dict(), tmp_path / "running.pt")
    second = RunningConvergence(2, 3)
    second.load_state_dict(torch.load(tmp_path / "running.pt"))
    for step in range(333, 700):
        second.update(values[step])
    assert second.num_draws == [700, 700]
    for name in ("means", "squares"):
        assert same_bits(second.state_dict()[name], whole.state_dict()[name])
    assert same_bits(second.report().rhat, whole.report().rhat)
    # What was loaded from is not what goes on.
    assert first.num_draws == [333, 333]
    assert not same_bits(first.report().rhat, second.report().rhat)


def test_constants() -> None:
    values = noise(200, 2, 3)
    values[:, :, 1] = 0.1  # its sums round
    report = followed(values).report()
    assert report.constant.tolist() == [False, True, False]
    assert report.rhat.isnan().tolist() == [False, True, False]
    assert report.ess_mean.isnan().tolist() == [False, True, False]
    assert not report.at_most[1]
    assert followed(values).chain_ess()[:, 1].isnan().all()


def test_bad_values_change_nothing() -> None:
    running = followed(noise(10, 2, 3))
    before = copy.deepcopy(running.state_dict())
    with pytest.raises(ValueError, match=r"shape \[3\] \(must be \[2, 3\]\)"):
        running.update(torch.zeros(3))
    with pytest.raises(ValueError, match=r"shape \[2, 3\] \(must be \[3\]\)"):
        running.update(torch.zeros(2, 3), chain=0)
    with pytest.raises(ValueError, match=r"Invalid chain: 2 \(must be in \[0, 2\)\)"):
        running.update(torch.zeros(3), chain=2)
    values = torch.zeros(2, 3)
    values[1, 2] = math.nan
    with pytest.raises(ValueError, match="1 of 6 are not finite"):
        running.update(values)
    after = running.state_dict()
    assert after["draws"] == before["draws"]
    assert same_bits(after["means"], before["means"])


def test_bad_arguments() -> None:
    for arguments, error in (
        ((1, 3), "Invalid num_chains: 1"),
        ((2, 0), "Invalid shape: 0"),
    ):
        with pytest.raises(ValueError, match=error):
            RunningConvergence(*arguments)
    with pytest.raises(ValueError, match=r"Invalid batches: 17 \(must be even\)"):
        RunningConvergence(2, 3, batches=17)
    with pytest.raises(ValueError, match="Invalid batches: 8"):
        RunningConvergence(2, 3, batches=8)
    with pytest.raises(ValueError, match=r"Too few draws: \[3, 3\].* at least 4"):
        followed(noise(3, 2, 1)).report()
    running = followed(noise(600, 2, 1))
    running.load_state_dict({**running.state_dict(), "draws": [600, 31]})
    with pytest.raises(ValueError, match=r"\[600, 31\].* at least 32 of each"):
        running.report()


@pytest.mark.parametrize(
    "change, error",
    [
        ({"means": torch.zeros(2, 64, 2, dtype=torch.float64)}, "means has shape"),
        ({"squares": torch.zeros(2, 64, 3)}, "squares is of torch.float32"),
        ({"draws": [1, 2, 3]}, "draws of 3 chains, expected 2"),
        ({"draws": [1, -2]}, "Invalid draws: -2"),
        ({"lengths": [3, 1]}, "10 draws in batches of 3"),
        ({"draws": [65, 10]}, "65 draws in batches of 1"),
        ({"more": 1}, "it has keys"),
    ],
)
def test_bad_state_dicts_change_nothing(change: dict[str, Any], error: str) -> None:
    running = followed(noise(10, 2, 3))
    before = running.report().rhat
    with pytest.raises(ValueError, match=error):
        running.load_state_dict({**running.state_dict(), **change})
    assert same_bits(running.report().rhat, before)
