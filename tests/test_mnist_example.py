"""The main job as a user runs it: outputs, and survival of a kill at any moment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples

EXAMPLE = Path(__file__).parents[1] / "examples" / "python" / "mnist_bnn.py"


def command(out: Path, *options: str) -> list[str]:
    common = ("--threads", "1", "--seeds", "1", "--out", str(out))
    return [sys.executable, str(EXAMPLE), *common, *options]


def results(out: Path) -> list[dict]:
    return json.loads((out / "results.json").read_text())["runs"]


def test_all_methods_report_table_pictures_and_json(tmp_path: Path) -> None:
    output = subprocess.run(
        command(
            tmp_path, "--digits", "--epochs", "4", "--burn-in", "1", "--seeds", "2"
        ),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for label in ("SGD", "SGD with momentum", "SGLD", "SGHMC"):
        assert f"| {label} |" in output
    for picture in ("figure4.png", "uncertainty.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    runs = results(tmp_path)
    assert len(runs) == 4 * 2
    assert len({run["digest"] for run in runs}) == len(runs)
    for run in runs:
        assert len(run["history"]) == 4
        is_sampler = run["config"]["method"] in ("sgld", "sghmc")
        assert run["samples"] == (3 if is_sampler else 0)


@pytest.mark.parametrize("method", ["sgld", "sghmc"])
def test_a_killed_run_continues_to_the_same_bits(tmp_path: Path, method: str) -> None:
    options = ("--digits", "--method", method, "--epochs", "150", "--burn-in", "5")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole, *options), check=True, capture_output=True)

    process = subprocess.Popen(
        command(killed, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    checkpoint = killed / f"{method}-seed0.pt"
    while not checkpoint.exists():
        assert process.poll() is None, "the run ended before its first checkpoint"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "results.json").exists(), "killed too late to mean anything"

    subprocess.run(command(killed, *options), check=True, capture_output=True)
    (expected,), (resumed,) = results(whole), results(killed)
    assert resumed["digest"] == expected["digest"]
    assert resumed["history"] == expected["history"]
    assert resumed["samples"] == expected["samples"]


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    options = ("--digits", "--method", "sgld", "--epochs", "3", "--burn-in", "1")
    subprocess.run(command(tmp_path, *options), check=True, capture_output=True)
    again = subprocess.run(
        command(tmp_path, *options, "--lr", "0.01"), capture_output=True, text=True
    )
    assert again.returncode == 1
    assert "holds a run with other settings" in again.stderr


def test_mnist_figures(tmp_path: Path, data_root: Path) -> None:
    """Five epochs of real MNIST: far from converged, but learning and calibrated."""
    subprocess.run(
        command(
            tmp_path,
            "--data-root",
            str(data_root),
            "--method",
            "sghmc",
            "--epochs",
            "5",
            "--burn-in",
            "2",
        ),
        check=True,
        capture_output=True,
    )
    (run,) = results(tmp_path)
    assert run["config"]["dataset"] == "MNIST"
    assert run["final"]["error"] < 0.09
    assert run["final"]["nll"] < 0.35
    assert all(p > 0 for p in run["final"]["precisions"])
