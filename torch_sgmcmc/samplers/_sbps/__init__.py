"""The parts of the bouncy particle sampler."""
