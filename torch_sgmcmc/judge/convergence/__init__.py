"""Have several chains converged, in function space and in parameters?

The module can be called: ``convergence(model, store, inputs)`` is :func:`outputs`.
"""

import sys
import types
from typing import Any

from torch_sgmcmc.judge.convergence.export import to_arviz
from torch_sgmcmc.judge.convergence.probes import Coordinates, Projections
from torch_sgmcmc.judge.convergence.report import Convergence
from torch_sgmcmc.judge.convergence.running import RunningConvergence
from torch_sgmcmc.judge.convergence.stored import outputs, parameters, predictions

__all__ = [
    "Convergence",
    "Coordinates",
    "Projections",
    "RunningConvergence",
    "outputs",
    "parameters",
    "predictions",
    "to_arviz",
]


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Convergence:
        return outputs(*args, **options)


sys.modules[__name__].__class__ = _Callable
