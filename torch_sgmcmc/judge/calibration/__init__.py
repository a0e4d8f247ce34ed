"""Does a sampler sample the posterior? Calibration on data simulated from the prior."""

from torch_sgmcmc.judge.calibration.result import Calibration
from torch_sgmcmc.judge.calibration.simulations import sbc

__all__ = ["Calibration", "sbc"]
