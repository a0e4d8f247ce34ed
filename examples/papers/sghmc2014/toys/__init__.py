"""The simulated scenarios of the SGHMC paper: figures 1, 2 and 3."""
