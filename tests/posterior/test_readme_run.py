"""A new user's path: the README's loop, on MNIST and a ReLU network."""

import gzip
import re

import pytest
import torch
from harness import cpp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import torch_sgmcmc as sg


def read(root, part, name, skip):
    file = root / "MNIST" / "raw" / f"{part}-{name}-ubyte"
    packed = file.with_suffix(".gz")
    if not file.exists() and not packed.exists():
        pytest.skip(f"needs {file}")
    raw = file.read_bytes() if file.exists() else gzip.open(packed).read()
    return torch.frombuffer(bytearray(raw[skip:]), dtype=torch.uint8)


def images(root, part):
    pixels = read(root, part, "images-idx3", 16).view(-1, 784).float() / 255
    return pixels, read(root, part, "labels-idx1", 8).long()


@pytest.mark.nightly
def test_the_readme_on_mnist(data_root, tmp_path, monkeypatch, capsys):
    # The one before it is what the reader has.
    *_, program = re.findall(
        r"```python\n(.*?)```", (cpp.CHECKOUT / "README.md").read_text(), re.DOTALL
    )
    x, y = images(data_root, "train")
    train = TensorDataset(x, y)
    x_test, y_test = images(data_root, "t10k")
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "F": F,
        "train": train,
        "x": x[:500],
        "x_test": x_test,
        "network": lambda: nn.Sequential(
            nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)
        ),
        # A hundred at once, since a datum at a time takes longer than the rest.
        "loader": DataLoader(
            train,
            sampler=BatchSampler(RandomSampler(train), 100, False),
            batch_size=None,
        ),
    }
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), names)
    said = capsys.readouterr().out
    # Of the output's bias at a random start, and no issue.
    assert said.startswith("Remark: Minibatches raise") and "in 2.bias," in said
    error = float((names["posterior"].mean.argmax(1) != y_test).double().mean())
    assert error <= 0.026
    monitor = names["monitor"]
    heats = {name: monitor.tensor(name).kinetic.mean for name in monitor.names}
    hottest = max(heats, key=heats.__getitem__)
    assert heats[hottest] < 2
    assert f"highest in {hottest}: {heats[hottest]:.3g} T" in said
    found = sg.report(names["model"], names["store"], x_test[:100])
    (hot,) = (v for v in found.issues if v.kind == "above T")
    assert f"{heats[hottest]:.3g} T in {hottest}" in hot.message


@pytest.mark.full
def test_the_readme_runs_twice(tmp_path, monkeypatch, capsys):
    """Its 20 draws are few; a second run begins again."""
    readme = (cpp.CHECKOUT / "README.md").read_text()
    program = "".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[1:])
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        torch.manual_seed(0)
        names = {}
        exec(compile(program, "README.md", "exec"), names)
        said = capsys.readouterr().out
        assert "The report found no issue" not in said
        assert "20 draws of 2 chains are few" in said
        assert len(names["store"]) == 20
