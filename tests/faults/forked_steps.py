"""Steps after a fork, where intra-op threads have been at work before it.

OpenMP's threads are not forked: in a child, operators that need several threads wait
for them forever, torch's own among them. The child of a program that has used threads
therefore begins with ``torch.set_num_threads(1)``, as DataLoader's workers do.

    python forked_steps.py THREADS METHOD KIND ...

Each kind of sampler makes two steps with three threads, forks by METHOD (``os`` or
``multiprocessing``), and makes two more in parent and child; the child's number of
threads is THREADS, or what it was before if that is 0. Prints whether they end equal.
``SGD`` is torch's.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from every_sampler import Chain, bits
from torch import Tensor, nn

SIZES = (3, 100_000, 4)  # for three threads in an update


class Descent:
    """torch's SGD, as a chain."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.linspace(-1, 1, n)) for n in SIZES]
        self.sampler = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)

    def run(self, steps: range) -> list[Tensor]:
        for step in steps:
            for p in self.params:
                p.grad = p.detach() + step
            self.sampler.step()
        return [p.detach() for p in self.params]


def end(chain: Any) -> bytes:
    """A digest of where two more steps end."""
    params = chain.run(range(2, 4))
    result = bits([params, chain.sampler.state_dict()])
    return hashlib.sha256(repr(result).encode()).digest()


def child(chain: Any, threads: int, writer: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    os.write(writer, end(chain))


def end_in_child(chain: Any, threads: int, method: str) -> bytes:
    reader, writer = os.pipe()
    if method == "os":
        process = os.fork()
        if process == 0:
            child(chain, threads, writer)
            os._exit(0)
        os.waitpid(process, 0)
    else:
        context = multiprocessing.get_context("fork")
        other = context.Process(target=child, args=(chain, threads, writer))
        other.start()
        other.join()
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()


def main(threads: int, method: str, kinds: list[str]) -> None:
    for kind in kinds:
        torch.set_num_threads(3)
        chain = Descent() if kind == "SGD" else Chain(kind, sizes=SIZES)
        chain.run(range(2))
        theirs = end_in_child(chain, threads, method)
        torch.set_num_threads(threads or 3)  # sums of torch depend on it
        print(f"{kind}: {'equal' if theirs == end(chain) else 'different'}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
