"""Proof that a sampler samples its law, made once for all samplers.

* ``statistics``: z-tests and other tests with stated false-alarm rates;
* ``targets``: what is sampled;
* ``methods``: the samplers under test, each with the exact law of its chain;
* ``chains``: many chains at once, checked against that law.

A package, because a bare ``statistics.py`` beside the tests would hide Python's own.
"""
