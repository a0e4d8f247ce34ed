"""Every sampler's bias, beside what the gauges say: ours, not a paper's."""
