"""Draws of a chain: kept, read, and what they predict."""
