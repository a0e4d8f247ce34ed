"""Bayesian logistic regression: data, chains, reference and report."""
