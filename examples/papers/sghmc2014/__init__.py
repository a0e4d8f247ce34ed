"""Chen, Fox and Guestrin: Stochastic Gradient Hamiltonian Monte Carlo (2014)."""
