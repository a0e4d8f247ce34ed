"""The parts of SBPS's figure 6: data, posterior, reference, trajectories, report."""
