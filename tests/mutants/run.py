"""Builds bugs into the sources and demands that the tests see each.

    python tests/mutants/run.py [--build N ...] [--built]

By hand and nightly: a build takes minutes. Works on a copy of the checkout in a
temporary folder, whose binaries are imported in place of what is installed. First the
tests must pass without a bug. A mutant is caught if pytest finds a failing test by each
of its arguments, at the level that they name; an error before a test runs is not that.
docs/faults.md has the list and its result.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import BUILDS

CHECKOUT = Path(__file__).resolve().parents[2]
FAILED = 1  # pytest's exit status, if tests ran and some failed


class Copy:
    """A copy of the checkout, and what is imported from it."""

    def __init__(self, folder):
        self.root, imported = folder / "copy", folder / "imported"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (CHECKOUT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CHECKOUT / name, self.root / name)
        imported.mkdir()
        # conftest.py takes the checkout itself off the path.
        (imported / "torch_sgmcmc").symlink_to(self.root / "torch_sgmcmc")
        own = {"PYTHONPATH": str(imported), "TORCH_SGMCMC_CUDA": "0"}
        self.environment = {**os.environ, **own}

    def run(self, command):
        options = {"cwd": self.root, "env": self.environment, "capture_output": True}
        return subprocess.run(command, shell=True, text=True, **options)

    def take_binaries(self):
        for path in (CHECKOUT / "torch_sgmcmc").glob("*.so"):
            shutil.copy2(path, self.root / "torch_sgmcmc")

    def build(self):
        done = self.run(f"{sys.executable} setup.py build_ext --inplace")
        if done.returncode:
            raise RuntimeError(f"It does not build:\n{done.stderr[-2000:]}")

    def patch(self, mutant, *, back=False):
        """Puts a bug in, or takes it out again.

        Raises:
            ValueError: the text that it changes is not there, or more than once.
        """
        path = self.root / mutant.path
        text = path.read_text()
        if not back and text.count(mutant.old) != 1:
            raise ValueError(
                f"{mutant.name}: {mutant.file} has {mutant.old!r} "
                f"{text.count(mutant.old)} times"
            )
        original = CHECKOUT / mutant.path
        wrong = text.replace(mutant.old, mutant.new)
        path.write_text(original.read_text() if back else wrong)

    def pytest(self, arguments):
        """Its exit status, and the first test that failed."""
        done = self.run(
            f"{sys.executable} -m pytest -x -q -n 0 -p no:cacheprovider {arguments}"
        )

        def name(line):
            return line.removeprefix("FAILED ").split(" - ")[0]

        lines = done.stdout.splitlines()
        failed = [line for line in lines if line.startswith("FAILED ")]
        last = (lines or [done.stderr[-300:]])[-1]
        return done.returncode, name(failed[0]) if failed else last


def in_words(mutant, copy):
    """Returns whether a mutant is caught, and a row of the table."""
    found = [copy.pytest(arguments) for arguments in mutant.tests]
    caught = all(status == FAILED for status, _ in found)
    what = "; ".join(said for _, said in found)
    return caught, f"| {mutant.name} | {'caught' if caught else 'MISSED'} | {what} |"


def passes(mutants, copy):
    """Returns whether the named tests pass without a bug."""
    right = True
    for arguments in dict.fromkeys(a for m in mutants for a in m.tests):
        status, said = copy.pytest(arguments)
        if status:
            right = False
            print(f"without a bug: {arguments}: {said}", flush=True)
    return right


def main():
    """Builds the mutants of all builds, or of some, and runs their tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=int, nargs="*", default=range(len(BUILDS)))
    parser.add_argument(
        "--built",
        action="store_true",
        help="without a bug, the checkout's binaries are tested: they are its sources'",
    )
    options = parser.parse_args()
    chosen = [BUILDS[i] for i in options.build]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for mutants in chosen:  # all of them, before the first build
            for mutant in mutants:
                copy.patch(mutant)
            for mutant in mutants:
                copy.patch(mutant, back=True)
        if options.built:
            copy.take_binaries()
        else:
            copy.build()
        right = passes((m for mutants in chosen for m in mutants), copy)
        caught, is_clean = [], True
        for mutants in chosen:
            begin = time.monotonic()
            for mutant in mutants:
                copy.patch(mutant)
            has_cpp = any(mutant.path.startswith("csrc") for mutant in mutants)
            if has_cpp or not is_clean:
                copy.build()
            is_clean = not has_cpp
            print(f"built in {time.monotonic() - begin:.0f} s", flush=True)
            for mutant in mutants:
                is_caught, row = in_words(mutant, copy)
                caught.append(is_caught)
                print(row, flush=True)
            for mutant in mutants:
                copy.patch(mutant, back=True)
    print(f"{sum(caught)} of {len(caught)} mutants are caught")
    mutants = [mutant for build in chosen for mutant in build]
    pairs = zip(mutants, caught, strict=True)
    number = sum(is_caught and mutant.is_default for mutant, is_caught in pairs)
    print(f"{number} of them by the default level of tests")
    sys.exit(not right or not all(caught))


if __name__ == "__main__":
    main()
