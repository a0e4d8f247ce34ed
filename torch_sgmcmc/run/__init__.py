"""Runs of chains: sample(), collectors, compiled blocks of steps."""
