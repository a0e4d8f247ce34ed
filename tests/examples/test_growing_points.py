"""examples/python/growing_points.py: a model that grows while it is sampled."""

from pathlib import Path

import growing_points
import pytest
from harness.examples import run_example

pytestmark = pytest.mark.examples


def test_it_shows_the_posterior(tmp_path: Path, one_thread: None) -> None:
    printed = run_example("growing_points", "--out", tmp_path, "--steps", 1000)
    assert " points; 90 draws. Means are off by " in printed
    assert (tmp_path / "growing_points.png").stat().st_size > 20_000


def test_once_points_rest_the_law_is_exact(one_thread: None) -> None:
    """As of a sampler that was built with them: about 60 effective draws.

    Of 28 weights, the rms of the means' errors is 0.13 sd, the mean of the logarithms
    of variances 0.04 off; a band of three times that.
    """
    curve, draws, sizes = growing_points.run(10_000)
    assert sizes[0] == 2 and max(sizes) == sizes[-1] == len(curve.points) > 15
    mean, covariance = growing_points.exact(curve.x, curve.y, curve.points)
    variance = covariance.diagonal()
    off = (draws.mean(0) - mean) / variance.sqrt()
    assert float(off.square().mean().sqrt()) < 0.4
    assert abs(float((draws.double().var(0) / variance).log().mean())) < 0.2
    offsets = curve.sampler.param_groups[0]["offsets"]
    assert offsets[0] > offsets[1] == 128  # the line's are as they were
