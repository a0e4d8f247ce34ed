"""Stochastic-gradient MCMC as torch optimizers: a posterior instead of a point."""

from pathlib import Path as _Path

if not _Path(__path__[0], "_operators.so").exists():
    raise ImportError(
        f"torch_sgmcmc was imported from {__path__[0]}, which has no compiled parts. "
        "If it is installed, this is its source folder hiding it: run Python from "
        "another folder, or install with `pip install -e .`"
    )

from torch_sgmcmc import _C as _C
from torch_sgmcmc import calibration, losses, scoring
from torch_sgmcmc.control_variates import SVRG, ControlVariates
from torch_sgmcmc.core.distributed import check_replicas, check_replicas_every
from torch_sgmcmc.core.random_state import SharedNoiseWarning, fold_in
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.data import IndependentBatchSampler
from torch_sgmcmc.diagnostics.convergence import to_arviz
from torch_sgmcmc.diagnostics.learning_coefficient import (
    LearningCoefficient,
    local_learning_coefficient,
)
from torch_sgmcmc.diagnostics.report import Report, report
from torch_sgmcmc.diagnostics.setup_check import check_setup
from torch_sgmcmc.diagnostics.setup_issues import Issue, SetupReport
from torch_sgmcmc.diagnostics.temperatures import TemperatureMonitor
from torch_sgmcmc.draws.predict import Prediction, Predictive, predict
from torch_sgmcmc.draws.store import Draw, Draws, SampleStore, SampleWriter
from torch_sgmcmc.draws.store_files import CorruptDrawError
from torch_sgmcmc.io import load, save
from torch_sgmcmc.priors import prior_groups
from torch_sgmcmc.run.chain import ChainState
from torch_sgmcmc.run.collector import Collector
from torch_sgmcmc.run.compile import compile_steps
from torch_sgmcmc.run.sample import sample
from torch_sgmcmc.samplers._ecs.efficiency import ECSEfficiency
from torch_sgmcmc.samplers._ecs.likelihood import PredictorLogLikelihood, RowCache
from torch_sgmcmc.samplers._sbps.statistics import TimeAverage
from torch_sgmcmc.samplers.baoa import BAOA
from torch_sgmcmc.samplers.ewsg import EWSG
from torch_sgmcmc.samplers.hmc import HMC
from torch_sgmcmc.samplers.hmc_ecs import HMCECS
from torch_sgmcmc.samplers.mclmc import MCLMC
from torch_sgmcmc.samplers.psgld import PSGLD
from torch_sgmcmc.samplers.sbps import SBPS
from torch_sgmcmc.samplers.sghmc import SGHMC
from torch_sgmcmc.samplers.sgld import SGLD
from torch_sgmcmc.samplers.sglrw import SGLRW
from torch_sgmcmc.samplers.sgnht import SGNHT
from torch_sgmcmc.schedules import CyclicalSchedule, GammaPrecision, PolynomialDecay

__version__ = "0.1.0"

__all__ = [
    "BAOA",
    "EWSG",
    "HMC",
    "HMCECS",
    "MCLMC",
    "PSGLD",
    "SBPS",
    "SGHMC",
    "SGLD",
    "SGLRW",
    "SGNHT",
    "SVRG",
    "ChainState",
    "Collector",
    "ControlVariates",
    "CorruptDrawError",
    "CyclicalSchedule",
    "Draw",
    "Draws",
    "ECSEfficiency",
    "GammaPrecision",
    "IndependentBatchSampler",
    "Issue",
    "LearningCoefficient",
    "PolynomialDecay",
    "Prediction",
    "Predictive",
    "PredictorLogLikelihood",
    "Report",
    "RowCache",
    "SampleStore",
    "SampleWriter",
    "Sampler",
    "SetupReport",
    "SharedNoiseWarning",
    "TemperatureMonitor",
    "TimeAverage",
    "__version__",
    "calibration",
    "check_replicas",
    "check_replicas_every",
    "check_setup",
    "compile_steps",
    "fold_in",
    "load",
    "local_learning_coefficient",
    "losses",
    "predict",
    "prior_groups",
    "report",
    "sample",
    "save",
    "scoring",
    "to_arviz",
]
