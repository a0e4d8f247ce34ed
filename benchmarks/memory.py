"""Peak memory of training steps whose sampler steps inside the backward pass.

    python benchmarks/memory.py [--layers 9] [--width 512] [--batch 1] [--steps 3]

A transformer with 30 million parameters in float32, and sequences of 64 tokens. Each
loop runs in a process of its own, one thread; the peak is the process's largest
resident size, less its size before the model. The last column is the chain's digest,
which is the same for both loops of a sampler.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_sgmcmc as sg
from torch_sgmcmc.core.distributed import digest

WORDS, LENGTH = 1000, 64
SAMPLERS = {"SGLD": sg.SGLD, "SGHMC": partial(sg.SGHMC, momentum=0.9)}


def resident() -> float:
    """Returns this process's largest resident size until now, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3  # of KiB


def step_in_backward(make: partial[sg.Sampler], model: nn.Module) -> None:
    """Lets each parameter step inside the backward pass (docs/performance.md)."""
    params = [*model.parameters()]
    saved = make(params).state_dict()["param_groups"][0]
    samplers = {}

    def step(p: Tensor) -> None:
        samplers[p].step()
        p.grad = None

    for i, p in enumerate(params):
        own = {key: saved[key][i : i + 1] for key in ("offsets", "sizes")}
        group = {**saved, **own, "params": [0]}
        samplers[p] = make([p])
        samplers[p].load_state_dict({"state": {}, "param_groups": [group]})
        p.register_post_accumulate_grad_hook(step)


def measure(name: str, inside: bool, arguments: argparse.Namespace) -> tuple[int, ...]:
    """Returns the number of parameters, the peak in MB, and the chain's digest."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (arguments.batch, LENGTH))
    before = resident()
    layer = nn.TransformerEncoderLayer(
        arguments.width, 8, 4 * arguments.width, dropout=0.0, batch_first=True
    )
    model = nn.Sequential(
        nn.Embedding(WORDS, arguments.width),
        nn.TransformerEncoder(layer, arguments.layers),
        nn.Linear(arguments.width, WORDS),
    )
    make = partial(SAMPLERS[name], lr=1e-3, num_data=1e5, nonfinite="ignore", seed=0)
    if inside:
        step_in_backward(make, model)
    else:
        sampler = make(model.parameters())
    for _ in range(arguments.steps):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        if not inside:
            sampler.step()
            sampler.zero_grad()
        gc.collect()
    count = sum(p.numel() for p in model.parameters())
    return count, round(resident() - before), digest(model.parameters())


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {"layers": 9, "width": 512, "batch": 1, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    print("| sampler | step | parameters | peak, MB | chain |\n|" + " --- |" * 5)
    # Freed tensors go back to the system, and so the peak does not count them.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    processes = multiprocessing.get_context("spawn")
    for name in SAMPLERS:
        for inside in (False, True):
            with processes.Pool(1) as pool:
                found = pool.apply(measure, (name, inside, arguments))
            where = "inside the backward pass" if inside else "after it"
            print(f"| {name} | {where} | {' | '.join(map(str, found))} |")


if __name__ == "__main__":
    main()
