"""The style of names and docstrings: a docstring names a thing or says what is done."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("torch_sgmcmc", "tests", "examples", "benchmarks")
HEADLESS = re.compile(
    r"(What|Whether|Of|Those|That|How|Which|Where|When|Who|Whose|Why|As|If|In|For|With"
    r"|To|From|By|On|At)\b"
)
# In every file that git knows but this one. Glossary: docs/architecture.md.
RETIRED = re.compile(
    r"\b(Gauges|DamagedDraw|GatheredRows|ECSReport|compiled_steps|num_looks|adapt_always"
    r"|can_be_made_again|is_plain|Sameness|step_again_|Ledger|put_back|chain_of|work_of"
    r"|kByCode|kWarm|kHot|kCarried|kMemory|StepFilter|AfterDraw|WithoutDraw|Watched"
    r"|is_as_left|renumber|num_products|bends|[Ff]light)\b|\bsg\.(check|Check|Problem|Verdict)\b"
    r"|\bcsrc/(core|apply|methods|python)\b|\btorch_sgmcmc[./](chain|judge|bouncy)\b"
)
# An ordinary word in a test of second differences.
RETIRED_ALLOWED = {("torch_sgmcmc/diagnostics/convergence.py", "bends")}
# A path in a document or a comment: folders, and a name or several in braces.
PATH = re.compile(
    r"(?<![\w/.<{*$-])((?:[\w-]+/)+(?:[\w-]+|[\w-]*\{[\w,]+\}[\w-]*)"
    r"\.(?:py|pyi|h|cpp|cu|cuh|inl|md|txt|yml|cmake))\b"
)
# Files of a sampler X, of torch, and of a run.
NOT_HERE = re.compile(r"(.*/)?[xX]\.\w+|torch/.*|chain-0/.*")
OLD_ENGLISH = re.compile(r"\b(that|those) of\b")


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


def test_retired_names_stay_retired():
    endings = (".py", ".h", ".cpp", ".inl", ".cu", ".cuh", ".md", ".txt")
    here = Path(__file__).relative_to(ROOT).as_posix()
    found = [
        f"{name}: {match[0]}"
        for name in tracked(endings=endings)
        if name != here
        for match in RETIRED.finditer((ROOT / name).read_text())
        if (name, match[0]) not in RETIRED_ALLOWED
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


def test_things_are_named():
    """The product and documents use "that of" and "those of" at most 20 times."""
    where = ("torch_sgmcmc", "csrc", "docs", "README.md", "CONTRIBUTING.md")
    found = [
        name
        for name in tracked(*where, endings=(".py", ".h", ".cpp", ".inl", ".cu", ".md"))
        for _ in OLD_ENGLISH.finditer((ROOT / name).read_text())
    ]
    assert len(found) <= 20, "\n".join(found)
