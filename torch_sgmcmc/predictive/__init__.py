"""What the draws of a posterior predict together, and how good that is."""

from torch_sgmcmc.predictive.plots import plot_entropies, plot_reliability
from torch_sgmcmc.predictive.predict import predict
from torch_sgmcmc.predictive.prediction import Prediction
from torch_sgmcmc.predictive.scores import Scores, ood_auroc, scores
from torch_sgmcmc.predictive.streaming import Predictive

__all__ = [
    "Prediction",
    "Predictive",
    "Scores",
    "ood_auroc",
    "plot_entropies",
    "plot_reliability",
    "predict",
    "scores",
]
