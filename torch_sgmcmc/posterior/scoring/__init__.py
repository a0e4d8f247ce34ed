"""How good predictions are: scores, and pictures of calibration and uncertainty."""

from torch_sgmcmc.posterior.scoring.plots import plot_entropies, plot_reliability
from torch_sgmcmc.posterior.scoring.regression import (
    RegressionScores,
    regression_scores,
)
from torch_sgmcmc.posterior.scoring.scores import Scores, ood_auroc, scores

__all__ = [
    "RegressionScores",
    "Scores",
    "ood_auroc",
    "plot_entropies",
    "plot_reliability",
    "regression_scores",
    "scores",
]
