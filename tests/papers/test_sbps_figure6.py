"""SBPS's figure 6 as a user runs it: data, reference, budgets, scores, resuming."""

import pytest
import torch
from harness.examples import run_experiment
from sbps2017.mnist7.chains import ChainConfig, _Chain, run_chain
from sbps2017.mnist7.data import SmallImages, load_digits4, load_mnist7
from sbps2017.mnist7.model import PRIOR_PRECISION, Softmax, most_probable, potential
from sbps2017.mnist7.reference import Reference, make_reference, mean_prediction
from sbps2017.mnist7.report import score

IMAGES = 563  # training images of scikit-learn's digits 0 to 3
BATCH = 50


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Two step sizes, SBPS with two k, two seeds: what was printed and the runs."""
    out = tmp_path_factory.mktemp("everything")
    options = ("--digits", "--draws", 10, "--batch-size", BATCH)
    options += ("--epochs", 30, "--seeds", 2, "--lr", 0.1, 1, "--num_std", 3, 5)
    printed, found = run_experiment("sbps2017.figure6", out, *options)
    return out, printed, found["runs"]


def test_every_run_has_the_same_budget(everything):
    out, _, runs = everything
    methods = [r["config"]["method"] for r in runs]
    assert methods == ["sgld"] * 4 + ["sbps"] * 4
    budget = 30 * IMAGES
    for r in runs:
        config = r["config"]
        name = f"{config['method']}-{config['setting']:g}"
        if config["method"] == "sbps":
            name += f"-k{config['num_std']:g}"
        saved = torch.load(out / f"{name}-seed{config['seed']}.pt", weights_only=True)
        (group,) = saved["sampler"]["param_groups"]
        assert group["prior_precision"] == 0.002
        assert group["num_data"] == IMAGES
        if config["method"] == "sbps":
            assert group["num_std"] == config["num_std"]
            gradients = BATCH * group["num_bounces"]
            assert 0 <= group["num_derivatives"] + gradients - budget < 2 * BATCH
            assert len(saved["costs"]) == int(group["trajectory_time"] / 0.5)
        else:
            assert 0 <= saved["costs"][-1] - budget < BATCH
            assert len(saved["costs"]) == 30
        assert r["samples"] == sum(cost > budget / 2 for cost in saved["costs"])
    # Seeds differ, and so do step sizes.
    assert len({tuple(r["variance"]) for r in runs}) == len(runs)


def test_table_and_picture(everything):
    out, printed, _ = everything
    for name in ("SGLD, lr 0.1", "SGLD, lr 1", "SBPS, k = 5, rate 0"):
        assert printed.count(f"| {name} |") == 1
        assert printed.count(f"| {name}, widest |") == 1
    assert "digits 4x4, N 563, d 64, 30 epochs, 15 burn-in" in printed
    assert (out / "figure6.png").exists()


def test_an_interrupted_run_continues_to_the_same_bits(
    everything, tmp_path, monkeypatch
):
    images = load_digits4()
    advance, calls = _Chain.advance, []

    def advance_and_stop(self, epochs):
        calls.append(epochs)
        if len(calls) == 15:
            raise KeyboardInterrupt
        advance(self, epochs)

    config = ChainConfig("sbps", 0.0, 0, 30, BATCH, images.name)
    with monkeypatch.context() as patch:
        patch.setattr(_Chain, "advance", advance_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run_chain(config, images, tmp_path)
    resumed = run_chain(config, images, tmp_path)
    whole = torch.load(everything[0] / f"{config.name}.pt", weights_only=True)
    assert resumed["costs"] == whole["costs"]
    assert torch.equal(resumed["samples"], whole["samples"])
    # A shorter run is the beginning of it, and needs no more work.
    short = ChainConfig("sbps", 0.0, 0, 15, BATCH, images.name)
    half = run_chain(short, images, tmp_path)
    assert max(half["costs"]) < 15 * IMAGES + 2 * BATCH < max(whole["costs"])
    assert torch.equal(half["samples"], whole["samples"][: len(half["samples"])])
    other = ChainConfig("sbps", 0.0, 0, 30, 2 * BATCH, images.name)
    with pytest.raises(SystemExit, match="holds a run with other settings"):
        run_chain(other, images, tmp_path)


def test_sums_of_blocks_are_another_unit_and_a_weaker_prior(tmp_path):
    """Logits of w are those of ``added`` · w by means, whose prior is as much wider."""
    mean, total = load_digits4(), load_digits4(summed=True)
    assert total.added == 4 and torch.equal(total.test_x, 4 * mean.test_x)
    g = torch.Generator().manual_seed(0)
    w = torch.randn(3, 64, generator=g, dtype=torch.float64)
    found = potential(w, total.train_x.double(), total.train_y)
    expected = potential(4 * w, mean.train_x.double(), mean.train_y)
    expected -= (1 - 1 / 16) * PRIOR_PRECISION / 2 * (4 * w).square().sum(1)
    torch.testing.assert_close(found, expected)
    # The run has its own data, reference and samples: none of another is taken.
    options = ("--digits", "--draws", 10, "--batch-size", BATCH, "--epochs", 20)
    options += ("--seeds", 1, "--lr", 0.01, "--refresh-rate", 0.05, "--summed")
    printed, found = run_experiment("sbps2017.figure6", tmp_path, *options)
    assert "digits 4x4, summed, N 563, d 64, 20 epochs" in printed
    sampler = found["runs"][1]["config"]
    assert sampler["dataset"] == "digits 4x4, summed"
    assert sampler["sample_interval"] == 0.125


def test_mnist_has_the_papers_dimension(data_root):
    images = load_mnist7(data_root)
    assert images.train_x.shape == (8340, 48)  # times four digits: d = 192
    assert sorted(images.train_y.unique().tolist()) == [0, 1, 2, 3]
    assert len(images.test_x) == len(images.test_y) == 980 + 1135 + 1032 + 1010
    assert 0.9 < images.train_x.max() <= 1


def test_potential_equals_the_samplers():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 5, generator=generator)
    y = torch.randint(4, (30,), generator=generator)
    model = Softmax(5)
    w = torch.randn(3, 20, generator=generator)
    for row, value in zip(w, potential(w, x, y), strict=True):
        model.weight.data = row.view(5, 4)
        # The paper's: − Σ log p + c Σ w², c = 0.001
        expected = -model(x).log_softmax(1)[torch.arange(30), y].sum()
        expected = expected + 0.001 * row.square().sum()
        assert float(value) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert PRIOR_PRECISION == 2 * 0.001
    best = most_probable(x, y).requires_grad_()
    potential(best[None], x.double(), y).sum().backward()
    assert best.grad.abs().max() < 1e-3


def test_the_reference_of_a_known_posterior(tmp_path):
    """Images without pixels say nothing: the posterior is the prior, N(0, 500)."""
    x, y = torch.zeros(6, 2), torch.tensor([0, 1, 2, 3, 0, 1])
    images = SmallImages("none", x, y, x, y)
    reference = make_reference(images, 4, 200, tmp_path)
    # 8 directions, 800 draws that are hardly correlated: the mean square's relative
    # standard error is about √(2 / 6400) = 0.018, and its square root's half of that.
    scale = reference.deviations.square().mean().sqrt()
    assert scale == pytest.approx(500**0.5, rel=0.05)
    assert torch.allclose(reference.predictions, torch.full((6, 4), 0.25).double())
    assert reference.quality["largest_rhat"] < 1.1
    assert reference.quality["acceptance_rate"] > 0.5
    again = make_reference(images, 4, 200, tmp_path)
    assert torch.equal(again.mean, reference.mean)


def test_scores():
    generator = torch.Generator().manual_seed(1)
    d, draws = 8, 1500
    directions, _ = torch.linalg.qr(torch.randn(d, d, generator=generator).double())
    mean = torch.randn(d, generator=generator).double()
    deviations = torch.linspace(4, 0.1, d).double()
    z = torch.randn(draws, d, generator=generator).double()
    x, y = torch.rand(10, 2, generator=generator), torch.zeros(10, dtype=torch.long)
    images = SmallImages("none", x, y, x, y)
    exact = mean + (z * deviations) @ directions.T
    reference = Reference(mean, directions, deviations, mean_prediction(exact, x), {})
    assert torch.allclose(reference.standardised(exact), z)

    def scored(samples):
        # What is before burn-in must not count: epochs of 10 evaluations, 3 of them.
        rubbish = torch.full((5, d), 1e6).double()
        result = {
            "samples": torch.cat([rubbish, samples]),
            "costs": [30] * 5 + [31] * len(samples),
            "diagnostics": {},
        }
        config = ChainConfig("sbps", 0.0, 0, 4, 2, "none")
        return score(config, result, reference, images, burn_in=3)

    right = scored(exact)
    # Epochs 3.0 and 3.1 of 4 are in the last tenths but two, of 0.4 epochs each.
    assert right["squares"][:7] == [None] * 7 and right["squares"][8:] == [None] * 2
    assert right["squares"][7][0] > 1e6  # rubbish is seen here
    assert right["samples"] == draws
    assert right["variance"] == pytest.approx([1] * 4, abs=0.1)
    assert max(right["offset"]) < 0.06
    with pytest.raises(SystemExit, match="1 samples after burn-in: more --epochs"):
        scored(exact[:1])
    assert right["prediction"] == pytest.approx(0, abs=1e-12)
    shifted = scored(mean + (2 * z + 3) * deviations @ directions.T)
    assert shifted["variance"] == pytest.approx([4] * 4, rel=0.1)
    assert shifted["offset"] == pytest.approx([3] * 4, rel=0.05)
    only = {"costs": [31] * draws, "diagnostics": {}, "samples": exact}
    config = ChainConfig("sbps", 0.0, 0, 4, 2, "none")
    squares = score(config, only, reference, images, burn_in=3)["squares"][7]
    assert squares == pytest.approx([1] * 4, abs=0.1)
    assert shifted["prediction"] > 0.01
    # Only the narrowest quarter of the directions is too wide.
    z[:, 6:] *= 3
    narrow = scored(mean + (z * deviations) @ directions.T)
    assert narrow["variance"] == pytest.approx([1, 1, 1, 9], rel=0.1)
    assert narrow["narrowest_direction"] == pytest.approx(9, rel=0.1)
