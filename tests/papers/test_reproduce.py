"""The shared parts of examples/papers' experiments, and their programs' errors."""

import subprocess
import sys

import pytest
from harness.examples import PAPERS, run_example
from reproduce.report import interval, markdown, spread, standard_error


@pytest.mark.full
def test_the_experiments_are_listed():
    done = subprocess.run([sys.executable, PAPERS], capture_output=True, text=True)
    assert done.returncode == 1
    for path in PAPERS.glob("*/*.py"):
        listed = f"\n  {path.parent.name}.{path.stem} " in done.stderr
        assert listed == ("Parser(__doc__, __name__)" in path.read_text())


def test_cells_of_several_seeds():
    # Student's t with two degrees of freedom: 4.3027 / √3 = 2.4841
    assert interval([1.0, 2.0, 3.0], 2) == "2.00 ± 2.48"
    assert spread([1.0, 2.0, 3.0], 2) == "2.00 ± 1.00"
    assert standard_error([1.0, 2.0, 3.0], 2) == "2.00 ± 0.58"
    assert interval([1.0], 2) == spread([1.0], 2) == standard_error([1.0], 2) == "1.00"
    assert markdown(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sghmc2014.figures", "--threads 0", "--threads must be at least 1"),
        ("sghmc2014.figures", "--tiny --paper", "not allowed with argument --tiny"),
        ("sghmc2014.mnist", "--burn-in 60", "--burn-in 60 must be in [0, --epochs 60)"),
        ("sghmc2014.mnist", "--method sbps --lr 1", "--lr is not for sbps: they have"),
        (
            "sghmc2014.mnist",
            "--start-epochs 11",
            "--start-epochs 11 must be in [0, --burn-in 10]",
        ),
        (
            "sghmc2014.mnist",
            "--precision 1 --draw-precision",
            "--precision and --draw-precision exclude each other",
        ),
        ("sghmc2014.mnist", "--precision -1", "--precision -1 must be finite and >= 0"),
        ("sghmc2014.bpmf", "--steps 100", "--steps must be a multiple of 2000"),
        ("sghmc2014.bpmf", "--lr-factor 0", "--lr-factor 0.0 must be > 0"),
        ("sghmc2014.mnist_heat", "--data-root x --observe 0", "--observe must be in"),
        ("sbps2017.figures", "--only figure6", "invalid choice: 'figure6'"),
        ("sbps2017.figure6", "--epochs 5 --burn-in 5", "--burn-in 5 must be in [0, "),
        ("sbps2017.figure6", "--batch-size 1", "--batch-size must be at least 2"),
        ("ewsg2021.figure1", "--smallest-step 8", "--smallest-step must be at least 9"),
        ("ewsg2021.figure1", "--chains 30", "--chains must be a multiple of 20"),
        ("ewsg2021.mnist", "--burn-in 11", "--burn-in 11 must be in [0, --passes 10]"),
        ("ewsg2021.mnist", "--burn-in 0.5", "must be a multiple of 1 / 1"),
        ("ewsg2021.mnist", "--burn-in 0", "leaves pSGLD no time to adapt"),
        ("ewsg2021.mnist", "--halved --batch-size 25", "must be a multiple of 2"),
        ("ewsg2021.covertype", "--chains 9", "are required: --data-root"),
        ("hmcecs2019.tables", "--only splines", "--only splines needs --data-root"),
        ("hmcecs2019.tables", "--only higgs", "--only higgs needs --higgs"),
        ("hmcecs2019.tables", "--rare 1", "--rare 1 must be in [0, 1)"),
    ],
)
def test_what_cannot_be_is_refused(name, options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_example(name, *options.split())
    assert message in capsys.readouterr().err
