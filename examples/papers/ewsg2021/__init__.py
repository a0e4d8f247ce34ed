"""Improving Sampling Accuracy of Stochastic Gradient MCMC Methods (EWSG, 2021)."""
