"""The samplers, each in a file of its name."""
