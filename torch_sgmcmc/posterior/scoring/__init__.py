"""How good predictions are: scores of regressions, and pictures."""

from torch_sgmcmc.posterior.scoring.plots import plot_entropies, plot_reliability
from torch_sgmcmc.posterior.scoring.regression import (
    RegressionScores,
    regression_scores,
)

__all__ = [
    "RegressionScores",
    "plot_entropies",
    "plot_reliability",
    "regression_scores",
]
