"""Every sampler's bias, beside what the monitor say: ours, not a paper's."""
