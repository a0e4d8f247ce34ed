"""Cost of a training step that stores draws, relative to one that does not.

    python benchmarks/store.py [--threads 2] [--size 32] [--every 20] [--rounds 15]

ResNet-18 of torchvision, minibatches of 32 images of size x size pixels, SGHMC, on the
CPU; a draw is all parameters and buffers, 45 MB, in the folder --out. Two networks make
as many steps in turns as there are from one draw to the next; the draw comes at the
first of these, and the time is taken when it is on the disk. The medians of the rounds'
ratios are reported, with quartiles: of the time, and of the processor's time in all
threads, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torchvision.models import resnet18

import torch_sgmcmc as sg


def training(
    size: int, seed: int
) -> tuple[torch.nn.Module, sg.SGHMC, Callable[[], None]]:
    """A network, its sampler, and a training step."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    sampler = sg.SGHMC(model.parameters(), 1e-4, 0.9, num_data=50_000, seed=seed)
    x, y = torch.randn(32, 3, size, size), torch.arange(32) % 10

    def step() -> None:
        sampler.zero_grad()
        F.cross_entropy(model(x), y).backward()
        sampler.step()

    return model, sampler, step


def main() -> None:
    """Prints the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help="folder of the store; default: a temporary one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    every = arguments.every
    _, _, plain = training(arguments.size, 0)
    model, sampler, storing = training(arguments.size, 1)
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
        collector = sg.Collector(sampler, model, folder, burn_in=1, every=every)
        spent: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(arguments.rounds + 1):
            for stores, step in ((False, plain), (True, storing)):
                started = time.perf_counter(), time.process_time()
                for _ in range(every):
                    step()
                if stores:
                    collector.flush()
                ended = time.perf_counter(), time.process_time()
                spent[stores].append((ended[0] - started[0], ended[1] - started[1]))
        collector.close()
    for kind, name in enumerate(("time", "processor's time")):
        # The first has to find memory, and has no draw.
        without, stored = ([t[kind] for t in spent[s][1:]] for s in (False, True))
        ratios = [b / a for a, b in zip(without, stored, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        step = 1000 * statistics.median(without) / every
        print(
            f"{name}: {step:.0f} ms a step; with a draw every {every} steps "
            f"{middle:.3f} times that ({low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
