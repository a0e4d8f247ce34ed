"""What the draws of a posterior predict together."""

from torch_sgmcmc.posterior.predictive.predict import predict
from torch_sgmcmc.posterior.predictive.prediction import Prediction
from torch_sgmcmc.posterior.predictive.streaming import Predictive

__all__ = [
    "Prediction",
    "Predictive",
    "predict",
]
