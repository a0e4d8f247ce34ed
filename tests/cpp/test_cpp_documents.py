"""What the documents say of C++ compiles as it stands, and its example goes on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import cpp
from stored_files import files

import torch_sgmcmc as sg

pytestmark = pytest.mark.cpp

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(documents LANGUAGES CXX)
find_package(TorchSGMCMC CONFIG REQUIRED)
add_executable(documents documents.cpp)
target_link_libraries(documents PRIVATE TorchSGMCMC::torch_sgmcmc)
target_compile_options(documents PRIVATE -Wall -Wextra -Werror)
"""

# What a reader has before, and what calls the functions of the snippets.
MODEL = """
  torch::nn::Linear net(5, 3);
  torch_sgmcmc::SGHMC sampler(
      net->parameters(), torch_sgmcmc::SGHMCOptions(0.01).num_data(64));
  const auto x = torch::randn({64, 5});
  const auto y = torch::arange(64).remainder(3);
"""
CALLS = {
    "main": "  {}::program();",
    "save_chain": "  {}::save_chain(*net, sampler);",
    "load_chain": "  {}::load_chain(*net, sampler);",
    "collect": "  {}::collect(net, sampler, x, y);",
    "predict": "  if (!{}::predict(net, x).mean.defined()) return 1;",
}


def snippets() -> list[str]:
    texts = [(cpp.CHECKOUT / name).read_text() for name in ("README.md", "docs/cpp.md")]
    return re.findall(r"^```cpp\n(.*?)^```", "\n".join(texts), re.DOTALL | re.MULTILINE)


def test_snippets_compile_and_run(
    cpp_package: Path, bare_path: str, tmp_path: Path
) -> None:
    # Each as if it were a file, but as one: LibTorch's headers take the time.
    blocks = snippets()
    assert len(blocks) >= 5
    includes: dict[str, None] = {}
    body = ""
    for number, block in enumerate(blocks):
        lines = block.splitlines()
        own = [line for line in lines if line.startswith("#include")]
        assert "#include <torch_sgmcmc/torch_sgmcmc.h>" in own
        includes |= dict.fromkeys(own)
        rest = "\n".join(line for line in lines if line not in own)
        rest = rest.replace("int main()", "void program()")  # without a return
        body += f"namespace block{number} {{\n{rest}\n}}\n"
    calls = [
        CALLS[name].format(f"block{number}")
        for number, block in enumerate(blocks)
        for name in re.findall(r"^\w\S* (\w+)\(", block, re.MULTILINE)
    ]
    assert len(calls) >= len(blocks)
    main = "\n".join(["int main() {", MODEL, *calls, "}", ""])
    source = "\n".join([*includes, body, main])
    (tmp_path / "documents.cpp").write_text(source)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    project = cpp.Project(tmp_path, tmp_path / "build", bare_path)
    project.configure(cpp_package, torch.utils.cmake_prefix_path)
    assert cpp.run("env", "-C", tmp_path, project.program("documents")) == ""
    assert (tmp_path / "chain.pt").exists()
    assert len(sg.SampleStore(tmp_path / "draws")) > 1


def test_commands_are_those_of_presets() -> None:
    text = (cpp.CHECKOUT / "docs" / "cpp.md").read_text()
    presets = json.loads((cpp.CHECKOUT / "CMakePresets.json").read_text())
    assert "cmake --preset install -D" in text
    assert "cmake --build --preset install" in text
    (configure,) = (p for p in presets["configurePresets"] if p["name"] == "install")
    (build,) = (p for p in presets["buildPresets"] if p["name"] == "install")
    assert configure["cacheVariables"] == {"TORCH_SGMCMC_TESTS": "OFF"}
    assert build["targets"] == ["install"]
    (listed,) = (
        line
        for line in cpp.run(
            cpp.tool("cmake"), "-S", cpp.CHECKOUT, "--list-presets"
        ).splitlines()
        if '"install"' in line
    )
    assert "no tests" in listed


@pytest.mark.examples
def test_an_example_that_was_killed_goes_on(
    consumer_program: Callable[[str], Path], tmp_path: Path
) -> None:
    program = consumer_program("resumable")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    # It would not end by itself.
    endless = subprocess.Popen([program, killed, str(10**12)])
    while not (killed / "chain.pt").exists():
        assert endless.poll() is None
    endless.kill()
    assert endless.wait() == -signal.SIGKILL
    saved = torch.load(killed / "chain.pt")
    at = saved["sampler"]["param_groups"][0]["step"]
    steps = str(at + 350)
    again = cpp.run(program, killed, steps)
    assert again.startswith(f"goes on from step {at}\n")
    assert again.partition("\n")[2] == cpp.run(program, whole, steps)
    assert files(killed / "draws") == files(whole / "draws")
    assert " draws, mean squared error 0.0" in again
