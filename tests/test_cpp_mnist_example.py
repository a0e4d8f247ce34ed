"""The main job as a LibTorch program: the Python example's figures, to the last bit.

The data are made up where they need not be MNIST: idx files of MNIST's size with ten
patterns under heavy noise, easy enough to be learnt in an epoch.
"""

from __future__ import annotations

import importlib
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness.examples import run_example
from stored_files import files

pytestmark = pytest.mark.full

METHODS = ["sgd", "sgdm", "sgld", "sghmc"]
FILES = {
    "train-images-idx3-ubyte": 16 + 60_000 * 784,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 784,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}

COUNT = "not an integer in [1, 2147483647]"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def program(consumer_program: Callable[[str], Path]) -> Path:
    """The example, built against the installed package."""
    return consumer_program("mnist_bnn")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with files like MNIST's and Fashion-MNIST's."""
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 256, (10, 784), dtype=np.uint8)
    for name in ("MNIST", "FashionMNIST"):
        folder = root / name / "raw"
        folder.mkdir(parents=True)
        for part, n in (("train", 60_000), ("t10k", 10_000)):
            labels = generator.integers(0, 10, n, dtype=np.uint8)
            dice = generator.integers(0, 16, (n, 784), dtype=np.uint8)
            pixels = np.where(dice < 3, patterns[labels], 0)
            noise = generator.integers(0, 256, (n, 784), dtype=np.uint8)
            pixels = np.where(dice > 13, noise, pixels)
            header = np.array([2051, n, 28, 28], dtype=">i4").tobytes()
            (folder / f"{part}-images-idx3-ubyte").write_bytes(
                header + pixels.tobytes()
            )
            header = np.array([2049, n], dtype=">i4").tobytes()
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(
                header + labels.tobytes()
            )
        patterns = patterns[::-1].copy()
    return root


def run(program: Path, *options: object) -> subprocess.CompletedProcess:
    # torch's idle threads would wait actively, for the one that the options allow.
    return subprocess.run(
        [program, *map(str, options)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def run_cpp(program: Path) -> Run:
    return lambda *options: run(program, *options)


def options(root: Path, out: Path, epochs: int, *more: object) -> list[object]:
    common = ("--threads", 1, "--seeds", 1, "--burn-in", 0, "--epochs", epochs)
    return [*common, "--data-root", root, "--out", out, *more]


def results(out: Path) -> list[dict]:
    return json.loads((out / "results.json").read_text())["runs"]


def assert_same_runs(ours: list[dict], theirs: list[dict]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for key in one:
            if key != "seconds_per_epoch":
                assert one[key] == other[key], (one["config"]["method"], key)
        assert list(one) == list(other)
        assert list(one["config"]) == list(other["config"])


@pytest.fixture(scope="session")
def whole(
    program: Path, images: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess]:
    """Two epochs of all methods in C++: the folder, and what was printed."""
    out = tmp_path_factory.mktemp("whole")
    done = run(program, *options(images, out, 2))
    assert done.returncode == 0, done.stderr
    return out, done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epohs", "3"], "unknown option --epohs"),
        (["-xyz"], "unknown option -xyz"),
        (["--paper=yes"], "unknown option --paper=yes"),
        (["3"], "unexpected argument '3'"),
        (["--method", "sgd", "--epochs", "3", "sgld"], "unexpected argument 'sgld'"),
        (["--", "3"], "unexpected argument '3'"),
        (["--epochs"], "no value for --epochs"),
        (["--method"], "no value for --method"),
        (["--epochs", "--paper"], f"argument --epochs: '--paper' is {COUNT}"),
        (["--epochs", "1.5"], f"argument --epochs: '1.5' is {COUNT}"),
        (["--epochs="], f"argument --epochs: '' is {COUNT}"),
        (["--epochs", "0"], f"argument --epochs: '0' is {COUNT}"),
        (["--seeds", "9" * 20], f"argument --seeds: '{'9' * 20}' is {COUNT}"),
        (["--batch-size", "-1"], f"argument --batch-size: '-1' is {COUNT}"),
        (
            ["--first-seed=-1"],
            "argument --first-seed: '-1' is not an integer in [0, 2147483647]",
        ),
        (["--threads", "0"], f"argument --threads: '0' is {COUNT}"),
        (["--burn-in", "60"], "--burn-in 60 must be in [0, --epochs 60)"),
        (["--burn-in", "800", "--paper"], "--burn-in 800 must be in [0, --epochs 800)"),
        (["--lr", "fast"], "argument --lr: 'fast' is not a finite number >= 0"),
        (["--lr", "-0.1"], "argument --lr: '-0.1' is not a finite number >= 0"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a finite number >= 0"),
        (["--lr", "inf"], "argument --lr: 'inf' is not a finite number >= 0"),
        (["--momentum", "1"], "argument --momentum: '1' is not a number in [0, 1)"),
        (
            ["--momentum", "0.5", "--method", "sgd", "sgld"],
            "--momentum is for sgdm and sghmc, not for sgd, sgld",
        ),
        (
            ["--method", "sgld", "adam"],
            "argument --method: 'adam' is not one of sgd, sgdm, sgld, sghmc",
        ),
        (
            ["--device", "abacus"],
            "argument --device: 'abacus' is not a device (cpu, cuda, cuda:1, ...)",
        ),
        (["--device", "cuda:99"], "argument --device: 'cuda:99' is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line(run_cpp: Run, arguments: list[str], message: str) -> None:
    done = run_cpp(*arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"mnist_bnn: error: {message}"
    assert done.stdout == ""


def test_help_names_the_python_examples_options(
    run_cpp: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_cpp("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    monkeypatch.setattr(sys, "argv", ["sghmc2014.mnist", "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module("sghmc2014.mnist").main()
    python = capsys.readouterr().out
    for option in (
        "--method",
        "--epochs",
        "--burn-in",
        "--seeds",
        "--first-seed",
        "--batch-size",
        "--lr",
        "--data-root",
        "--device",
        "--threads",
        "--out",
        "--paper",
    ):
        assert f"\n  {option} " in python
        assert f"\n  {option} " in done.stdout


def test_data_that_are_not_there(run_cpp: Run, images: Path, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"

    def problem() -> str:
        done = run_cpp("--data-root", tmp_path, "--out", tmp_path / "out")
        assert done.returncode == 1
        assert not (tmp_path / "out").exists()
        return done.stderr

    begin = f"mnist_bnn: error: No MNIST in --data-root {tmp_path}: {raw}/"
    assert problem() == f"{begin}train-images-idx3-ubyte is missing\n"

    shutil.copytree(images / "MNIST", tmp_path / "MNIST")
    labels = raw / "t10k-labels-idx1-ubyte"
    labels.rename(f"{labels}.gz")
    assert problem() == (
        f"{begin}t10k-labels-idx1-ubyte is missing; unpack it: gunzip -k {labels}.gz\n"
    )

    labels.write_bytes(bytes(10_007))
    assert problem() == (
        f"{begin}t10k-labels-idx1-ubyte has 10007 bytes, expected 10008\n"
    )

    labels.write_bytes(bytes(10_008))
    assert problem() == (
        f"mnist_bnn: error: Cannot read the images in {raw}: Expected to read number "
        "2049 but found 0 instead\n"
    )


def test_table_json_and_progress(
    whole: tuple[Path, subprocess.CompletedProcess],
) -> None:
    out, done = whole
    labels = {"sgd": "SGD", "sgdm": "SGD with momentum", "sgld": "SGLD"}
    runs = results(out)
    assert [run["config"]["method"] for run in runs] == METHODS
    assert len({run["digest"] for run in runs}) == len(runs)
    lines = done.stderr.splitlines()
    for run in runs:
        method, final = run["config"]["method"], run["final"]
        settings = ", ".join(f"{k} {v:g}" for k, v in run["config"]["settings"].items())
        assert (
            f"\n| {labels.get(method, 'SGHMC')} | {settings} | 1 "
            f"| {100 * final['error']:.2f} % | {final['nll']:.4f} "
            f"| {final['ece']:.4f} | "
        ) in done.stdout
        assert run["samples"] == (2 if method in ("sgld", "sghmc") else 0)
        assert ("precisions" in final) == (method in ("sgld", "sghmc"))
        assert len(run["history"]) == 2
        assert run["history"][-1] == final
        # It has learnt: nine errors in ten would be chance.
        assert final["error"] < 0.6
        for epoch, scores in enumerate(run["history"], 1):
            line = lines.pop(0)
            assert line.startswith(
                f"{method}-seed0: epoch {epoch} of 2, "
                f"error {100 * scores['error']:.2f} %, "
            )
            assert line.endswith(" left")
    assert not lines
    environment = json.loads((out / "results.json").read_text())["environment"]
    assert environment["threads"] == 1
    assert environment["dataset"] == "MNIST"


@pytest.mark.full
def test_the_python_examples_figures(
    whole: tuple[Path, subprocess.CompletedProcess], images: Path, tmp_path: Path
) -> None:
    """Of all methods tests/faults/test_cpp_checkpoints.py compares them.

    Each language goes on with the other's runs there, and with those that are killed in
    test_killed_runs.py.
    """
    out, done = whole
    methods = ("sgld", "sghmc")
    in_python = run_example(
        "sghmc2014.mnist", *options(images, tmp_path, 2, "--method", *methods)
    )
    expected = [r for r in results(out) if r["config"]["method"] in methods]
    assert_same_runs(expected, results(tmp_path))
    for method in methods:
        ours = files(tmp_path / f"{method}-seed0")
        assert files(out / f"{method}-seed0") == ours
        assert len(ours) == 3  # two draws and the index

    def table(text: str) -> list[str]:
        # All but the time, and but Python's comparisons of methods in pairs.
        text, *_ = text.split("\n| methods |")
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        return [row.rsplit("|", 2)[0] for row in rows]

    head, *rows = table(done.stdout)
    assert len(rows) == 1 + len(METHODS)
    assert {head, *rows} >= {*table(in_python)}
    assert len(table(in_python)) == 2 + len(methods)


def test_a_checkpoint_that_does_not_fit(
    run_cpp: Run,
    whole: tuple[Path, subprocess.CompletedProcess],
    images: Path,
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "sgdm-seed0.pt"
    shutil.copy(whole[0] / checkpoint.name, checkpoint)
    before = checkpoint.read_bytes()
    arguments = options(images, tmp_path, 2, "--method", "sgdm")

    done = run_cpp(*arguments, "--momentum", "0.5")
    assert done.returncode == 1
    assert done.stderr == (
        f"mnist_bnn: error: {checkpoint} holds a run with other settings:\n"
        '  {"method": "sgdm", "seed": 0, "settings": {"lr": 0.3, "momentum": 0.9, '
        '"precision": 3.0}, "epochs": 2, "burn_in": 0, "batch_size": 500, '
        '"dataset": "MNIST", "validate": false}\nnot\n'
        '  {"method": "sgdm", "seed": 0, "settings": {"lr": 0.3, "momentum": 0.5, '
        '"precision": 3.0}, "epochs": 2, "burn_in": 0, "batch_size": 500, '
        '"dataset": "MNIST", "validate": false}\n'
        "Delete it or choose another --out.\n"
    )

    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "MNIST").symlink_to(images / "MNIST")
    done = run_cpp(*options(alone, tmp_path, 2, "--method", "sgdm"))
    assert done.returncode == 1
    assert "holds predictions for labelled and other images, not for labelled" in (
        done.stderr
    )
    assert checkpoint.read_bytes() == before

    checkpoint.write_bytes(before[: len(before) // 2])
    done = run_cpp(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"mnist_bnn: error: Cannot read {checkpoint}: ")
    assert checkpoint.read_bytes() == before[: len(before) // 2]


def test_progress_on_a_terminal_is_one_line(
    program: Path, images: Path, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    arguments = options(images, tmp_path, 2, "--method", "sgld")
    done = subprocess.run(
        [program, *map(str, arguments)], stderr=theirs, stdout=subprocess.DEVNULL
    )
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert done.returncode == 0
    first, second = shown.split("\r\033[K")[1:]
    assert first.startswith("sgld-seed0: epoch 1 of 2, ")
    assert second.startswith("sgld-seed0: epoch 2 of 2, ")
    assert "\n" not in first
    assert second.endswith("\n")
