"""HMC-ECS against its competitors: data, samplers, measures, figures and report."""
