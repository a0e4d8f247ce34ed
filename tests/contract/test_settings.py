"""Signatures of the samplers say what the table of hyperparameters does."""

import inspect
import math

import pytest
from short_chains import CLASSES

import torch_sgmcmc as sg

# What the table does not have: what is more than a number, a word or a flag.
ELSEWHERE = {"self", "params", "seed", "capturable", "nonfinite", "model"}
ELSEWHERE.add("process_group")


def default_of(row):
    if row.optional:
        return None
    if row.kind == "word":
        return row.words[0]
    if math.isnan(row.default):
        return inspect.Parameter.empty
    return {"real": float, "whole": int, "flag": bool}[row.kind](row.default)


@pytest.mark.parametrize("sampler", CLASSES)
def test_defaults(sampler):
    given = inspect.signature(sampler.__init__).parameters
    expected = {row.name: default_of(row) for row in sampler._SETTINGS}
    elsewhere = set(ELSEWHERE)
    if sampler is sg.HMCECS:
        expected["step_size"] = None  # of which trajectory_length decides
    found = {
        name: parameter.default
        for name, parameter in given.items()
        if name not in elsewhere
    }
    assert found == expected
    for name, default in expected.items():
        assert type(found[name]) is type(default)


def test_shared_settings_have_equal_ranges():
    """Ranges are equal; test_errors.py has the errors of three samplers."""
    hot = {sg.SGLRW, sg.EWSG, sg.HMC, sg.HMCECS, sg.SBPS}
    for sampler in CLASSES:
        expected = {
            "lr": ("real", 0, math.inf, False),
            "num_data": ("real", 0, math.inf, True),
            "prior_precision": ("real", 0, math.inf, False),
            "temperature": ("real", 0, math.inf, sampler in hot),
            "momentum": ("real", 0, 1, False),
            "step_size": ("real", 0, math.inf, True),
            "eps": ("real", 0, math.inf, True),
        }
        if sampler is sg.HMCECS:  # whose subsamples are counted
            expected["num_data"] = ("whole", 1, math.inf, False)
        rows = {row.name: row for row in sampler._SETTINGS}
        for name in rows.keys() & expected.keys():
            row = rows[name]
            assert (row.kind, row.low, row.high, row.low_open) == expected[name]
        assert {"num_data", "prior_precision", "temperature"} < rows.keys()


def test_there_is_no_table_of_others():
    with pytest.raises(IndexError, match="no sampler Adam"):
        sg._C.settings("Adam")
