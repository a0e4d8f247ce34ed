"""The figures of the SBPS paper, at a tiny size and against what is known."""

import numpy as np
import pytest
from harness.examples import run_experiment
from sbps2017.figures import FIGURES
from sbps2017.toys import figure1


def test_tables_and_pictures_are_made_once(tmp_path):
    printed, first = run_experiment("sbps2017.figures", tmp_path, "--tiny")
    for name in FIGURES:
        assert f"\n{name}\n\n| " in printed and (tmp_path / f"{name}.png").exists()
    # One seed, one result; and finished runs are not made again.
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*")}
    for file in list(made)[::4]:
        file.unlink()
    some = ("figure2", "figure4")
    again = run_experiment("sbps2017.figures", tmp_path, "--tiny", "--only", *some)[1]
    for document in (first, again):
        del document["figure4"]["cpu_seconds"]
    assert [again[name] for name in some] == [first[name] for name in some]
    for file in made.keys() - {*list(made)[::4]}:
        assert file.stat().st_mtime_ns == made[file]


@pytest.mark.full
def test_the_finding_of_figure_1():
    """Bounces are far more frequent with noise; times and samples are as asked for."""
    waits = {}
    for case in figure1.CASES:
        result = figure1.simulate(case, 40.0, seed=1)
        waits[case] = np.diff(result["bounces"]).mean()
        # The last event may be a little later than asked for.
        assert 0 <= len(result["samples"]) - 40.0 / figure1.INTERVAL < 10
        # The average of the trajectory and that of its samples.
        mean, square = result["moments"][:2]
        assert abs(mean - result["samples"][:, 0].mean()) < 0.1
        assert abs(square - (result["samples"][:, 0] ** 2).mean()) < 0.2
    assert waits["noisy gradient"] < 0.5 * waits["exact gradient"]
