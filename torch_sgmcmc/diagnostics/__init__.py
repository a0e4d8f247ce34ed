"""Diagnostics: of a set-up before a run, of chains while they run, and of draws."""
