"""Draws of a model's parameters on disk, and what collects them from a sampler."""

from torch_sgmcmc.store.collector import Collector
from torch_sgmcmc.store.draws import DamagedDraw, Draw, Draws
from torch_sgmcmc.store.sample_store import SampleStore
from torch_sgmcmc.store.writer import SampleWriter

__all__ = ["Collector", "DamagedDraw", "Draw", "Draws", "SampleStore", "SampleWriter"]
