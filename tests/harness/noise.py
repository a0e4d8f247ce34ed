"""Gaussian quality of a stream of noise, as a battery that any stream can take.

A :class:`Battery` is fed chunk by chunk and keeps sums and counts only, so that 10⁸
draws need no memory. See Note [False alarms] in ``harness.statistics``: a battery
is one check.
"""

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from harness.statistics import Array, check_p, check_z, chi_square

_LAGS = (1, 2, 3, 4, 5, 8, 128, 1024)
_TAILS = (3.0, 4.0, 5.0)
_WORDS = 4  # one block of the generator makes four elements

# The histogram: bins of width 2⁻¹² (which a float32 hits exactly) over [-8, 8).
_WIDTH, _BINS = 2.0**-12, 2**16
_EDGES = (np.arange(_BINS + 1) - _BINS // 2) * _WIDTH
_PROBABILITIES = np.where(
    _EDGES[:-1] < 0,
    np.diff(stats.norm.cdf(_EDGES)),
    -np.diff(stats.norm.sf(_EDGES)),  # without cancellation in the upper tail
)
# About equally probable groups of bins, for pairs of neighbours.
_CELLS = 128
_CELL_OF_BIN = np.minimum(
    (np.cumsum(_PROBABILITIES) * _CELLS).astype(np.int64), _CELLS - 1
)
_CELL_PROBABILITIES = np.bincount(_CELL_OF_BIN, _PROBABILITIES, _CELLS)

# Functions of a draw whose correlations are looked at: (expectation, variance).
_MAGNITUDE = ((2 / np.pi) ** 0.5, 1 - 2 / np.pi)
_SQUARE = (1.0, 2.0)


class Battery:
    """Moments, distribution, tails and correlations of standard normals."""

    def __init__(self) -> None:
        self.count = 0
        self.power_sums = np.zeros((4, _WORDS))
        self.histogram = np.zeros(_BINS, dtype=np.int64)
        self.pairs = np.zeros((2, _CELLS**2), dtype=np.int64)
        self.tails = np.zeros((2, len(_TAILS)), dtype=np.int64)
        self.lagged = np.zeros((len(_LAGS), 3))
        self.lagged_counts = np.zeros((len(_LAGS), 1))
        self.across: dict[str, Array] = {}
        self._previous: list[Tensor] | None = None

    def add(self, x: Tensor, *, differs_in: str | None = None) -> None:
        """Takes a chunk of consecutive draws of one stream, a multiple of 4.

        Args:
            x: float32 draws.
            differs_in: what distinguishes this stream from that of the chunk before,
                which is then tested to be independent of it, element by element.
        """
        self.count += len(x)
        for i, tail in enumerate(_TAILS):
            self.tails[0, i] += int((x < -tail).sum())
            self.tails[1, i] += int((x > tail).sum())
        self._add_histograms(x)
        functions = self._add_powers(x.double())
        for i, lag in enumerate(_LAGS):
            self.lagged[i] += [float(f[lag:].dot(f[:-lag])) for f in functions]
            self.lagged_counts[i] += len(x) - lag
        if differs_in is not None:
            assert self._previous is not None
            products = [
                float(f.dot(g)) for f, g in zip(functions, self._previous, strict=True)
            ]
            self.across[differs_in] = np.array(products) / len(x) ** 0.5 / _deviations()
        self._previous = functions

    def _add_histograms(self, x: Tensor) -> None:
        bins = x.mul(1 / _WIDTH).floor_().to(torch.int64).add_(_BINS // 2)
        self.histogram += torch.bincount(bins, minlength=_BINS).numpy()
        cells = torch.from_numpy(_CELL_OF_BIN)[bins]
        for i in range(2):  # pairs made from one radius, and from two
            pair = cells[i : len(x) - i].view(-1, 2)
            index = pair[:, 0] * _CELLS + pair[:, 1]
            self.pairs[i] += torch.bincount(index, minlength=_CELLS**2).numpy()

    def _add_powers(self, x: Tensor) -> list[Tensor]:
        """Adds the powers' sums; returns x, |x| and x², centred."""
        square = x * x
        for i, power in enumerate((x, square, square * x, square * square)):
            self.power_sums[i] += power.view(-1, _WORDS).sum(dim=0).numpy()
        return [x, x.abs().sub_(_MAGNITUDE[0]), square.sub_(_SQUARE[0])]

    def check(self, label: str) -> None:
        """Raises StatisticalError unless all of it looks like independent N(0, 1)."""
        n = self.count
        expected = np.array([0.0, 1.0, 0.0, 3.0])[:, None]
        variance = np.array([1.0, 2.0, 15.0, 96.0])[:, None]
        excess = self.power_sums - expected * n / _WORDS
        scores = {
            "moments": excess.sum(axis=1) / np.sqrt(n * variance[:, 0]),
            "moments of each word": excess / np.sqrt(n / _WORDS * variance),
        }
        lagged = self.lagged / np.sqrt(self.lagged_counts) / _deviations()
        for lag, z in zip(_LAGS, lagged, strict=True):
            scores[f"lag {lag}: of x, |x|, x²"] = z
        for name, z in self.across.items():
            scores[f"across {name}: of x, |x|, x²"] = z

        both = np.outer(_CELL_PROBABILITIES, _CELL_PROBABILITIES).ravel()
        deviation = np.cumsum(self.histogram) / n - np.cumsum(_PROBABILITIES)
        p_values = {
            "Kolmogorov-Smirnov": stats.kstwobign.sf(
                np.sqrt(n) * np.abs(deviation).max()
            ),
            "chi-square": chi_square(self.histogram, _PROBABILITIES),
            "pairs in a word pair": chi_square(self.pairs[0], both),
            "pairs across word pairs": chi_square(self.pairs[1], both),
        }
        for i, tail in enumerate(_TAILS):
            below, above = (int(k) for k in self.tails[:, i])
            for side, k, width in (
                ("below -", below, 1),
                ("above ", above, 1),
                ("beyond ±", below + above, 2),
            ):
                law = stats.binom(n, width * stats.norm.sf(tail))
                p = 2 * min(law.cdf(k), law.sf(k - 1))
                p_values[f"tail {side}{tail:g}"] = min(p, 1.0)
        check_z(scores, label=label)
        check_p(p_values, label=label)


def _deviations() -> Array:
    """Standard deviations of products of two independent x, |x|, x²."""
    return np.array([1.0, _MAGNITUDE[1], _SQUARE[1]])
