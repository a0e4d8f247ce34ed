"""docs/architecture.md's table of a step, against a profile of steps."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys
import torch
import torch_sgmcmc as sg

FOLDER = os.path.dirname(sg.__file__)

model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
x = torch.rand(5, 8)
sampler = sg.SGHMC(
    model.parameters(), lr=0.03, num_data=100, prior_precision=1.0, seed=0
)

def files():
    sampler.zero_grad()
    model(x).square().mean().backward()
    found = []
    def note(frame, event, arg):
        code = frame.f_code  # Python 3.12 has no frames of comprehensions
        is_ours = code.co_filename.startswith(FOLDER + os.sep)
        if event == "call" and is_ours and not code.co_name.endswith("comp>"):
            found.append(os.path.relpath(code.co_filename, FOLDER))
    sys.setprofile(note)
    sampler.step()
    sys.setprofile(None)
    return found

first, other = files(), [files(), files()][1]
sampler.param_groups[0]["lr"] = 0.02
print(json.dumps([first, files(), other]))
"""


def profile():
    # -P: the installed package, and not the source folder without compiled parts.
    command = [sys.executable, "-P", "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [Counter(files) for files in json.loads(result.stdout)]


def table(counts):
    """Returns the rows of the page."""
    cells = lambda row: f"| {' | '.join(map(str, row))} |"  # noqa: E731
    rows = [
        cells([f"`{file}`", *(each[file] or "" for each in counts)])
        for file in counts[0]
    ]
    rows.append(cells(["files", *map(len, counts)]))
    return [*rows, cells(["calls", *(sum(each.values()) for each in counts)])]


def test_the_table_is_the_profile():
    counts = profile()
    assert [len(each) for each in counts] == [11, 11, 4]
    assert set(counts[2]) < set(counts[1]) <= set(counts[0])
    page = (ROOT / "docs" / "architecture.md").read_text()
    found = re.search(r"\| file \| first step .*\n.*\n((?:\|.*\n)+)", page)
    assert found[1].splitlines() == table(counts)


if __name__ == "__main__":  # prints the table
    print("\n".join(table(profile())))
