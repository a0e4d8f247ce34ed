"""Every sampler is complete, and known by its tables, not by its name."""

import ast
import inspect
import re
from itertools import product
from pathlib import Path

import pytest

import torch_sgmcmc as sg
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import UNKNOWN, Takes, traits_of

ROOT = Path(__file__).parents[2]
PACKAGE = Path(inspect.getfile(sg)).parent
SAMPLERS = {
    name: cls
    for name, cls in vars(sg).items()
    if inspect.isclass(cls) and issubclass(cls, Sampler) and cls is not Sampler
}
# What a step takes, the equations of temperatures, pull(0.5), and other traits.
TRAITS = {
    "SGLD": ("GRADIENT", "LANGEVIN", 1.0, {"has_known_heat"}),
    "SGLRW": ("GRADIENT", "LATTICE", 1.0, set()),
    "SGHMC": ("GRADIENT", "MOMENTUM", 1.0, {"has_known_heat"}),
    "BAOA": ("GRADIENT", "HALF_DRIFTS", 0.75, {"has_known_heat"}),
    "MCLMC": ("GRADIENT", "NONE", 0.75, set()),
    "PSGLD": ("GRADIENT", "LANGEVIN", None, set()),
    "SGNHT": ("GRADIENT", "THERMOSTAT", 1.0, set()),
    "EWSG": ("GRADIENTS", "MOMENTUM", 1.0, {"is_biased"}),
    "HMC": ("POTENTIAL", None, None, {"accepts"}),
    "HMCECS": ("SUBSAMPLES", None, None, {"accepts"}),
    "SBPS": ("EXAMPLES", None, None, {"is_path"}),
}
FLAGS = ("has_known_heat", "is_biased", "accepts", "is_path")


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
    assert traits_of(name) is traits
    found = (
        traits.takes.name,
        traits.motion if traits.motion is None else traits.motion.name,
        traits.pull if traits.pull is None else traits.pull(0.5),
        {flag for flag in FLAGS if getattr(traits, flag)},
    )
    assert found == TRAITS[name]
    for adapt, gamma in product((True, False), repeat=2):
        needs = traits.needs_graph({"adapt": adapt, "gamma": gamma})
        assert needs == (name == "PSGLD" and adapt and gamma)
    # What shows instead of temperatures whether the sampler works.
    assert (traits.instead == UNKNOWN.instead) == (traits.motion is not None)


def test_an_unknown_sampler_has_no_answers():
    traits = traits_of("unknown")
    assert traits is UNKNOWN and traits.takes is Takes.GRADIENT  # assumed
    assert traits.motion is None and traits.pull is None
    assert not any(getattr(traits, flag) for flag in FLAGS)
    assert not traits.needs_graph({"adapt": True, "gamma": True})


def test_no_sampler_is_known_by_its_name():
    """Only files of its own stem name it, and the lists of public names."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "__init__.py":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            keys = ("id", "attr", "value", "name")  # the last of imports
            words = [getattr(node, key, None) for key in keys]
            found += [
                f"{path.relative_to(PACKAGE)}:{node.lineno}: {word}"
                for word in words
                if isinstance(word, str) and word in SAMPLERS
                if path.stem != stem_of(word) and not isinstance(node, ast.ClassDef)
            ]
    assert not found
