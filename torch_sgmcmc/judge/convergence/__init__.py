"""Have several chains converged, in function space and in parameters?"""

from torch_sgmcmc.judge.convergence.export import to_arviz
from torch_sgmcmc.judge.convergence.probes import Coordinates, Projections
from torch_sgmcmc.judge.convergence.report import Convergence
from torch_sgmcmc.judge.convergence.running import RunningConvergence
from torch_sgmcmc.judge.convergence.stored import parameters, predictions

__all__ = [
    "Convergence",
    "Coordinates",
    "Projections",
    "RunningConvergence",
    "parameters",
    "predictions",
    "to_arviz",
]
