"""Adapters alone: a frozen transformer, and the posterior of its LoRA matrices.

    python examples/python/transformer_lora.py [--out DIR]

Of 10,000 words a transformer of two layers learns which of six letters a word of twelve
has most often. It is frozen; then three letters count twice, 100 words are labelled,
and matrices of rank 2 are sampled that are added to each of its own. They alone are
stored. Printed are scores of the frozen network, of the most probable adapters as Adam
finds them, and of the posterior; the picture shows calibration, and how unsure the
posterior is where it is right and where it is wrong.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
)
from tqdm import tqdm

import torch_sgmcmc as sg
from torch_sgmcmc import scoring

LETTERS, LENGTH, WIDTH = 6, 12, 16
PRECISION = 10.0  # of the adapters' prior
LOSS = sg.losses.categorical()


def scored(probabilities: Tensor, labels: Tensor) -> str:
    """Error, negative log-likelihood and calibration error, in a line."""
    classes = probabilities.shape[1]
    p = probabilities.clamp_max(1)  # torchmetrics takes more for logits
    error = 1 - multiclass_accuracy(p, labels, classes, average="micro")
    nll = F.nll_loss(p.log(), labels)
    ece = multiclass_calibration_error(p, labels, classes)
    return f"error {error:.2%}, NLL {nll:.4f}, ECE {ece:.4f}"


class Transformer(nn.Module):
    """Words to logits of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, words: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.blocks(self.embed(words) + self.place).mean(1))


class LoRA(nn.Module):
    """A product of rank 2 that is added to a matrix: 0 at first."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.randn(2, columns) * PRECISION**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(rows, 2))

    def forward(self, matrix: Tensor) -> Tensor:
        """The sum."""
        return matrix + self.lora_b @ self.lora_a


def adapted(frozen: nn.Module) -> nn.Module:
    """A copy that is frozen but for adapters."""
    model = copy.deepcopy(frozen).requires_grad_(False)
    for module in [*model.blocks.modules()]:
        for name, p in [*module.named_parameters(recurse=False)]:
            if p.dim() == 2:
                parametrize.register_parametrization(module, name, LoRA(*p.shape))
    return model


def words(count: int, twice: int = 0) -> tuple[Tensor, Tensor]:
    """Words, and the letter that each has most often; the first ones count twice."""
    found = torch.randint(LETTERS, (count, LENGTH))
    counts = F.one_hot(found, LETTERS).sum(1) + 0.1 * torch.rand(count, LETTERS)
    counts[:, :twice] *= 2
    return found, counts.argmax(1)


def optimized(model: nn.Module, batches: Iterable[Any], decay: float = 0) -> nn.Module:
    """Fine-tunes with Adam, for comparison."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, 5e-3, weight_decay=decay)
    for batch in tqdm(batches, desc="Adam"):
        optimizer.zero_grad()
        LOSS(model, batch).backward()
        optimizer.step()
    return model


def main() -> None:
    """Trains, freezes, samples, prints, and writes ``lora.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--epochs", type=int, default=15, help="before it is frozen")
    parser.add_argument("--steps", type=int, default=4000, help="of each chain")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    x, y = words(10_000)
    rows = torch.cat([torch.randperm(len(x)) for _ in range(arguments.epochs)])
    batches = [(x[some], y[some]) for some in rows.split(100)]
    frozen = optimized(Transformer(), batches)
    model = partial(adapted, frozen)

    train, (test_x, test_y) = words(100, twice=3), words(2000, twice=3)
    sampler = partial(sg.SGHMC, lr=0.01, num_data=100, prior_precision=PRECISION)
    store = sg.sample(
        model,
        sampler,
        [train],
        LOSS,
        arguments.out / "draws",
        steps=arguments.steps,
        burn_in=arguments.steps // 4,
        every=20,
        chains=2,
        start="model",  # the pretrained network
        seed=0,
        restart=True,
        parameters="sampled",
    )
    point = optimized(model(), [train] * (arguments.steps // 4), PRECISION / 100)
    draw, whole = (
        sum(t.nbytes for t in tensors.values())
        for tensors in (store[0], frozen.state_dict())
    )
    print(f"\nA draw has {draw:,} bytes, the network {whole:,}.")
    methods = {"frozen": [model()], "point": [point], "posterior": store}
    found = {name: sg.predict(model(), some, test_x) for name, some in methods.items()}
    for name, prediction in found.items():
        print(f"{name:9}: {scored(prediction.mean, test_y)}")

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    known = {name: p.mean for name, p in found.items()}
    scoring.plot_reliability(known, test_y, axes=axes[0])
    right, unsure = known["posterior"].argmax(1) == test_y, found["posterior"].total
    entropies = {"right": unsure[right], "wrong": unsure[~right]}
    scoring.plot_entropies(entropies, axes=axes[1])
    axes[1].set_title("answers of the posterior", fontsize="medium")
    figure.savefig(arguments.out / "lora.png", dpi=100)


if __name__ == "__main__":
    main()
