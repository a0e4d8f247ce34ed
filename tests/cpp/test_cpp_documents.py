"""The documents' C++ code compiles, and the example resumes."""

import json
import signal
import subprocess

import torch
from harness import cpp
from stored_files import contents

import torch_sgmcmc as sg


def test_snippets_run(consumer_program, tmp_path):
    """They compile, with other programs of harness/cpp.py's."""
    assert cpp.run("env", "-C", tmp_path, consumer_program("documents")) == ""
    assert (tmp_path / "chain.pt").exists()
    assert len(sg.SampleStore(tmp_path / "draws")) > 1


def test_commands_equal_those_of_presets():
    text = (cpp.CHECKOUT / "docs" / "cpp.md").read_text()
    presets = json.loads((cpp.CHECKOUT / "CMakePresets.json").read_text())
    assert "cmake --preset install -D" in text
    assert "cmake --build --preset install" in text
    (configure,) = (p for p in presets["configurePresets"] if p["name"] == "install")
    (build,) = (p for p in presets["buildPresets"] if p["name"] == "install")
    assert configure["cacheVariables"] == {"TORCH_SGMCMC_TESTS": "OFF"}
    assert build["targets"] == ["install"]
    listing = cpp.run(cpp.tool("cmake"), "-S", cpp.CHECKOUT, "--list-presets")
    (listed,) = (line for line in listing.splitlines() if '"install"' in line)
    assert "no tests" in listed


def test_an_example_that_was_killed_resumes(consumer_program, tmp_path):
    program = consumer_program("resumable")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    # It would not end by itself.
    endless = subprocess.Popen([program, killed, str(10**12)])
    while not (killed / "chain.pt").exists():
        assert endless.poll() is None
    endless.kill()
    assert endless.wait() == -signal.SIGKILL
    saved = torch.load(killed / "chain.pt")
    at = int(saved["sampler"]["param_groups"][0]["step"])
    steps = str(at + 350)
    again = cpp.run(program, killed, steps)
    assert again.startswith(f"goes on from step {at}\n")
    assert again.partition("\n")[2] == cpp.run(program, whole, steps)
    assert contents(killed / "draws") == contents(whole / "draws")
    assert " draws, mean squared error 0.0" in again
