"""What the documents tell a user to write runs as it stands there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import cpp
from torch import nn
from torch.nn import functional as F

import torch_sgmcmc as sg

# None where the tests alone are, without the sources.
DOCUMENTS = sorted(
    [*cpp.CHECKOUT.glob("README.md"), *cpp.CHECKOUT.glob("docs/**/*.md")]
)
# Pages whose programs speak themselves, or wait for other processes; test_scripts.py
# has the others.
LOUD = ("frameworks.md", "distributed.md")


def blocks(file: Path, language: str) -> list[str]:
    fence = rf"^```{language}\n(.*?)^```$"
    return re.findall(fence, file.read_text(), re.MULTILINE | re.DOTALL)


def of_a_user() -> dict[str, Any]:
    """What a reader has before the first line: a model, data, a sampler."""
    torch.manual_seed(0)
    train = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.arange(64) % 3)
    model = nn.Linear(5, 3)

    @torch.no_grad()
    def predict(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).softmax(1)

    return {
        **{"F": F, "torch": torch, "nn": nn, "sg": sg},
        "train": train,
        "loader": torch.utils.data.DataLoader(train, batch_size=16, shuffle=True),
        "x_test": torch.randn(7, 5),
        "model": model,
        "predict": predict,
        "sampler": sg.SGHMC(model.parameters(), 0.1, 0.99, num_data=64),
    }


@pytest.mark.parametrize(
    "file",
    [file for file in DOCUMENTS if file.name in LOUD],
    ids=lambda file: str(file.relative_to(cpp.CHECKOUT)),
)
def test_python(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if file.name == "frameworks.md":
        pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    names = of_a_user()
    model, sampler = names["model"], names["sampler"]
    begun = {"model": model.state_dict(), "sampler": sampler.state_dict()}
    torch.save(begun, "chain.pt")
    if file.name == "distributed.md":  # as torchrun does, for one process
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    try:
        for block in blocks(file, "python"):
            exec(compile(block, str(file), "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


PROGRAM = """
{includes}
#include <torch/torch.h>
int main() {{
  torch::nn::Linear net(5, 3);
  const auto x = torch::randn({{64, 5}});
  const auto y = torch::arange(64).remainder(3);
  auto loader = std::make_unique<std::vector<torch::data::Example<>>>();
  for (int i = 0; i < 3; ++i) loader->emplace_back(x, y);
  {body}
}}
"""


@pytest.mark.cpp
def test_cpp(
    cpp_package: Path, bare_path: str, tmp_path: Path, one_thread: Callable[..., None]
) -> None:
    readme = blocks(cpp.CHECKOUT / "README.md", "cpp")
    page = blocks(cpp.CHECKOUT / "docs" / "cpp.md", "cpp")
    assert len(readme) == 1 and len(page) == 4
    scopes = "".join(f"{{\n{text}\n}}\n" for text in (*readme, "".join(page)))
    includes = set(re.findall(r"^#include .*$", scopes, re.MULTILINE))
    body = re.sub(r"^#include .*$", "", scopes, flags=re.MULTILINE)
    source = tmp_path / "snippets"
    source.mkdir()
    (source / "snippets.cpp").write_text(
        PROGRAM.format(includes="\n".join(includes), body=body)
    )
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\n"
        "project(app LANGUAGES CXX)\n"
        "find_package(TorchSGMCMC CONFIG REQUIRED)\n"
        "add_executable(app snippets.cpp)\n"
        "target_link_libraries(app PRIVATE TorchSGMCMC::torch_sgmcmc)\n"
    )
    project = cpp.Project(source, tmp_path / "build", bare_path)
    project.configure(cpp_package, torch.utils.cmake_prefix_path)
    cpp.run("env", "-C", tmp_path, project.program("app"))
    assert (tmp_path / "chain.pt").exists()
    assert len(sg.SampleStore(tmp_path / "draws")) == 2
