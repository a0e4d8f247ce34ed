"""Draws of a chain: made, kept, and what they predict."""
