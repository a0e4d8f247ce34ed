"""The parts of HMC with energy conserving subsampling."""
