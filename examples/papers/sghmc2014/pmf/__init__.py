"""Bayesian probabilistic matrix factorisation: ratings, model, chains and report."""
