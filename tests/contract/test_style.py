"""The style of names and docstrings: a docstring names a thing or says what is done."""

import ast
import re
import subprocess
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("torch_sgmcmc", "tests", "examples", "benchmarks")
HEADLESS = re.compile(
    r"(What|Whether|Of|Those|That|How|Which|Where|When|Who|Whose|Why|As|If|In|For|With"
    r"|To|From|By|On|At)\b"
)
# A path in a document or a comment: folders, and a name or several in braces.
PATH = re.compile(
    r"(?<![\w/.<{*$-])((?:[\w-]+/)+(?:[\w-]+|[\w-]*\{[\w,]+\}[\w-]*)"
    r"\.(?:py|pyi|h|cpp|cu|cuh|inl|md|txt|yml|cmake))\b"
)
# Files of a sampler X, of torch, and of a run.
NOT_HERE = re.compile(r"(.*/)?[xX]\.\w+|torch/.*|chain-0/.*")


def tracked(*folders, endings):
    command = ["git", "ls-files", *folders]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    if not any(names):
        pytest.skip("not a git checkout")
    return [n for n in names if n.endswith(endings) and (ROOT / n).exists()]


def docstrings(name):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text:
            yield getattr(node, "lineno", 1), text.split("\n")[0]


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = [
        f"{name}:{line}: {first}"
        for name in tracked(*FOLDERS, endings=(".py",))
        for line, first in docstrings(name)
        if HEADLESS.match(first)
    ]
    assert not found, "\n".join(found)


def paths_in(text):
    for match in PATH.finditer(text):
        before, _, rest = match[1].partition("{")
        names, _, after = rest.partition("}")
        yield from (before + name + after for name in names.split(","))


def test_paths_lead_to_files():
    """A path may lack the folders before it."""
    endings = (".py", ".h", ".cpp", ".inl", ".cu", ".cuh", ".md", ".txt", ".cmake")
    known = tracked(endings=("",))
    found = [
        f"{name}: {path}"
        for name in tracked(endings=endings)
        for path in paths_in((ROOT / name).read_text())
        if not NOT_HERE.fullmatch(path)
        and not any(each == path or each.endswith(f"/{path}") for each in known)
    ]
    assert not found, "\n".join(found)


def test_programs_hide_no_package(request):
    """The tests import programs by their names, before what is installed."""
    folders = [ROOT / folder for folder in request.config.getini("pythonpath")]
    names = {path.stem for folder in folders for path in folder.iterdir()}
    assert not names & {*packages_distributions()}


def test_hooks_have_the_versions_of_developers():
    tracked(endings=("",))
    texts = [
        (ROOT / f).read_text() for f in ("pyproject.toml", ".pre-commit-config.yaml")
    ]
    pinned, hooks = ({*re.findall(r"\b[\w-]+==[\d.]+\d", text)} for text in texts)
    assert len(hooks) == 2 and hooks <= pinned
