"""An additive spline model of Covertype, as large as the paper's of bankruptcies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from ewsg2021.blr import data as covertype_data
from scipy.interpolate import CubicSpline

from .problem import Covariate, Problem
from .stored import Array

#: Basis functions of a covariate, as many as the paper's. They and the intercept make
#: d = 81 of eight covariates.
FUNCTIONS = 10
#: Columns of Covertype. Two of the three hillshades are left out, which aspect, slope
#: and the third nearly tell.
COLUMNS = {
    "elevation": 0,
    "aspect": 1,
    "slope": 2,
    "horizontal distance to water": 3,
    "vertical distance to water": 4,
    "distance to roads": 5,
    "hillshade at noon": 7,
    "distance to fire points": 9,
}
# Quantiles of the outermost knots: beyond them, few rows must not bend the curve.
_OUTER = 0.02


def knots(values: Array) -> Array:
    """One more knot than functions, at equally spaced quantiles from 2 to 98 %."""
    places = np.quantile(values, np.linspace(_OUTER, 1 - _OUTER, FUNCTIONS + 1))
    if np.any(np.diff(places) <= 0):
        raise ValueError(
            f"a covariate has the knots {np.array2string(places, precision=3)} "
            "(must increase; are too many of its values equal?)"
        )
    return places


def basis(values: Array, places: Array) -> Array:
    """[n, 10]: natural cubic splines that are 1 at one knot and 0 at all others.

    That of the middle knot is left out, and is the intercept's: a coefficient is the
    curve's height at its knot above that at the middle. Beyond the outermost knots all
    are lines.
    """
    others = np.delete(np.eye(len(places)), len(places) // 2, axis=1)
    inside = np.clip(values, places[0], places[-1])
    spline = CubicSpline(places, others, bc_type="natural")
    return spline(inside) + spline(inside, 1) * (values - inside)[:, None]


def spline_problem(data_root: Path) -> Problem:
    """Class 2 against the rest, the prior N(0, 10 I), with elevation to be shown."""
    split = covertype_data.load(data_root)
    train, test = split.train_x.double().numpy(), split.test_x.double().numpy()
    parts = [(np.ones((len(train), 1)), np.ones((len(test), 1)))]
    for column in COLUMNS.values():
        places = knots(train[:, column])
        parts.append(tuple(basis(x[:, column], places) for x in (train, test)))
    x, test_x = (
        torch.from_numpy(np.hstack(part)).float() for part in zip(*parts, strict=True)
    )
    y, test_y = ((s > 0).float() for s in (split.train_s, split.test_s))
    return Problem(
        "Covertype splines",
        x,
        y,
        test_x,
        test_y,
        prior_precision=0.1,
        covariate=Covariate("elevation, standardised", split.train_x[:, 0]),
    )
