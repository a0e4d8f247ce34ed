"""Every sampler is complete, and known by its tables, not by its name."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import torch_sgmcmc as sg
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import UNKNOWN, Takes, Traits, traits_of

ROOT = Path(__file__).parents[2]
PACKAGE = Path(inspect.getfile(sg)).parent
SAMPLERS = {
    name: cls
    for name, cls in vars(sg).items()
    if inspect.isclass(cls) and issubclass(cls, Sampler) and cls is not Sampler
}
# Samplers without a closed form, by trait.
NOT_KNOWN = {
    "motion": {"HMC", "HMCECS", "SBPS"},
    "pull": {"PSGLD", "HMC", "HMCECS", "SBPS"},
    "has_known_heat": {
        *("SGLRW", "SGNHT", "PSGLD", "EWSG", "HMC", "HMCECS", "SBPS"),
    },
}


def stem_of(name):
    return inspect.getmodule(SAMPLERS[name]).__name__.rpartition(".")[2]


def texts(folder, pattern):
    return "\n".join(path.read_text() for path in (ROOT / folder).rglob(pattern))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_complete(name):
    stem, word = stem_of(name), re.compile(rf"\b{name}\b")
    assert word.search((ROOT / "docs" / "samplers" / f"{stem}.md").read_text())
    assert word.search((ROOT / "docs" / "samplers" / "index.md").read_text())
    assert [*(ROOT / "tests" / "golden").glob(f"{stem}*.pt")]
    assert word.search(texts("tests/laws", "test_*.py"))
    header = ROOT / "csrc" / "include" / "torch_sgmcmc" / f"{stem}.h"
    missing = next(
        line
        for line in (ROOT / "docs" / "cpp.md").read_text().splitlines()
        if "gradient-only" in line
    ).split("|")[2]
    assert header.exists() != bool(re.search(rf"`{name}`", missing))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_has_its_traits(name):
    traits = SAMPLERS[name]._SPEC.traits
    assert traits is not UNKNOWN and traits_of(name) is traits
    for trait, names in NOT_KNOWN.items():
        value = getattr(traits, trait)
        assert (value is None or value is False) == (name in names), trait
    # What shows instead of temperatures whether the sampler works.
    assert (traits.instead == UNKNOWN.instead) == (traits.motion is not None)


def test_an_unknown_sampler_has_no_answers():
    assert traits_of("unknown") is UNKNOWN == Traits(takes=Takes.GRADIENT)


def test_no_sampler_is_known_by_its_name():
    """Only files of its own stem name it, and the lists of public names."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "__init__.py":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            words = [getattr(node, key, None) for key in ("id", "attr", "value")]
            found += [
                f"{path.relative_to(PACKAGE)}:{node.lineno}: {word}"
                for word in words
                if isinstance(word, str) and word in SAMPLERS
                if path.stem != stem_of(word)
            ]
    assert not found
