"""Parameters of tests, each with its level (conftest.py)."""

import pytest


def at_levels(cases, *, default=(), full=(), otherwise="nightly"):
    """Returns the cases as parameters: some default, some full, all others otherwise.

    Raises:
        ValueError: a case that is named is not there.
    """
    cases = list(cases)
    for case in (*default, *full):
        if case not in cases:
            raise ValueError(f"Invalid case: got {case!r} (must be one of {cases})")
    found = []
    for case in cases:
        level = "default" if case in default else "full" if case in full else otherwise
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=getattr(pytest.mark, level)))
    return found
