"""Have several chains converged, in function space and in parameters?"""

from torch_sgmcmc.convergence.export import to_arviz
from torch_sgmcmc.convergence.probes import Coordinates, Projections
from torch_sgmcmc.convergence.report import Convergence
from torch_sgmcmc.convergence.running import RunningConvergence
from torch_sgmcmc.convergence.stored import parameters, predictive

__all__ = [
    "Convergence",
    "Coordinates",
    "Projections",
    "RunningConvergence",
    "parameters",
    "predictive",
    "to_arviz",
]
