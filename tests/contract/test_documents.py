"""What the documents tell a user to write runs as it stands there."""

import re
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
