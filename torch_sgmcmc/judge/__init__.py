"""Whether to believe a chain: gauges, convergence, calibration, tuning."""
