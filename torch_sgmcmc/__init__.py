"""Stochastic-gradient MCMC as torch optimizers: a posterior instead of a point."""

import sys as _sys

try:
    from torch_sgmcmc import _C as _C
except ImportError as error:
    raise ImportError(
        f"torch_sgmcmc was imported from {__path__[0]}, which has no compiled parts. "
        "If it is installed, this is its source folder hiding it: run Python from "
        "another folder, or install with `pip install -e .`"
    ) from error

from torch_sgmcmc import losses
from torch_sgmcmc._ecs.efficiency import ECSEfficiency
from torch_sgmcmc._ecs.likelihood import PredictorLogLikelihood, RowCache
from torch_sgmcmc._impl.io import load, save
from torch_sgmcmc.baoa import BAOA
from torch_sgmcmc.bouncy.time_average import TimeAverage
from torch_sgmcmc.compiled import compiled_steps
from torch_sgmcmc.control_variates import SVRG, ControlVariates
from torch_sgmcmc.diagnostics import calibration, convergence
from torch_sgmcmc.diagnostics.learning_coefficient import (
    LearningCoefficient,
    local_learning_coefficient,
)
from torch_sgmcmc.diagnostics.replicas import check_replicas, check_replicas_every
from torch_sgmcmc.diagnostics.report import Report, report
from torch_sgmcmc.diagnostics.run_findings import Verdict
from torch_sgmcmc.diagnostics.setup_check import check
from torch_sgmcmc.diagnostics.setup_findings import Check, Problem
from torch_sgmcmc.diagnostics.temperatures import Gauges
from torch_sgmcmc.ewsg import EWSG
from torch_sgmcmc.hmc import HMC
from torch_sgmcmc.hmcecs import HMCECS
from torch_sgmcmc.minibatch import (
    IndependentBatchSampler,
)
from torch_sgmcmc.posterior import scores as scoring
from torch_sgmcmc.posterior.chain import ChainState
from torch_sgmcmc.posterior.collector import Collector
from torch_sgmcmc.posterior.predict import Prediction, Predictive, predict
from torch_sgmcmc.posterior.run import sample
from torch_sgmcmc.posterior.store import CorruptDrawError, Draw, Draws, SampleStore
from torch_sgmcmc.posterior.writer import SampleWriter
from torch_sgmcmc.precision import GammaPrecision
from torch_sgmcmc.psgld import PSGLD
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sbps import SBPS
from torch_sgmcmc.schedules import CyclicalSchedule, PolynomialDecay
from torch_sgmcmc.seeds import SharedNoiseWarning, fold_in
from torch_sgmcmc.sghmc import SGHMC
from torch_sgmcmc.sgld import SGLD
from torch_sgmcmc.sglrw import SGLRW
from torch_sgmcmc.sgnht import SGNHT
from torch_sgmcmc.version import __version__

__all__ = [
    "BAOA",
    "EWSG",
    "HMC",
    "HMCECS",
    "PSGLD",
    "SBPS",
    "SGHMC",
    "SGLD",
    "SGLRW",
    "SGNHT",
    "SVRG",
    "ChainState",
    "Check",
    "Collector",
    "ControlVariates",
    "CorruptDrawError",
    "CyclicalSchedule",
    "Draw",
    "Draws",
    "ECSEfficiency",
    "GammaPrecision",
    "Gauges",
    "IndependentBatchSampler",
    "LearningCoefficient",
    "PolynomialDecay",
    "Prediction",
    "Predictive",
    "PredictorLogLikelihood",
    "Problem",
    "Report",
    "RowCache",
    "SampleStore",
    "SampleWriter",
    "Sampler",
    "SharedNoiseWarning",
    "TimeAverage",
    "Verdict",
    "__version__",
    "calibration",
    "check",
    "check_replicas",
    "check_replicas_every",
    "compiled_steps",
    "convergence",
    "fold_in",
    "load",
    "local_learning_coefficient",
    "losses",
    "predict",
    "report",
    "sample",
    "save",
    "scoring",
]

# Public modules, whatever folder they are in: ``import torch_sgmcmc.convergence``.
for _name in ("calibration", "convergence", "scoring"):
    _sys.modules[f"{__name__}.{_name}"] = globals()[_name]
