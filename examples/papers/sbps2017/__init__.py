"""Pakman, Gilboa, Carlson and Paninski: Stochastic Bouncy Particle Sampler (2017)."""
