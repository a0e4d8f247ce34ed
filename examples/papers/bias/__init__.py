"""The parts of ``bias_table.py``."""
