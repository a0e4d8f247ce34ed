"""Draws of a model's parameters on disk, and what collects them from a sampler."""

from torch_sgmcmc.posterior.store.collector import Collector
from torch_sgmcmc.posterior.store.draws import DamagedDraw, Draw, Draws
from torch_sgmcmc.posterior.store.sample_store import SampleStore
from torch_sgmcmc.posterior.store.writer import SampleWriter

__all__ = ["Collector", "DamagedDraw", "Draw", "Draws", "SampleStore", "SampleWriter"]
