"""Figures 1 to 5 of the SBPS paper: one module a figure, and what they share."""
