"""How good predictions are: scores, and pictures of calibration and uncertainty."""

from torch_sgmcmc.posterior.scoring.plots import plot_entropies, plot_reliability
from torch_sgmcmc.posterior.scoring.scores import Scores, ood_auroc, scores

__all__ = ["Scores", "ood_auroc", "plot_entropies", "plot_reliability", "scores"]
