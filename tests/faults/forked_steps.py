"""Steps after a fork, where intra-op threads have been at work before it.

OpenMP's threads are not forked: in a child, operators that need several threads wait
for them forever, torch's own among them. The child of a program that has used threads
therefore begins with ``torch.set_num_threads(1)``, as DataLoader's workers do.

    python forked_steps.py THREADS KIND ...

Each kind of sampler makes two steps with three threads, and two more in children, one
of ``os.fork`` and one of ``multiprocessing``, and in the parent. The children's number
of threads is THREADS, or what it was before if that is 0. Prints whether all end equal.
``SGD`` is torch's.
"""

import hashlib
import multiprocessing
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from every_sampler import Chain, bits
from torch import nn

SIZES = (3, 100_000, 4)  # for three threads in an update


class Descent:
    """torch's SGD, as a chain."""

    def __init__(self):
        self.params = [nn.Parameter(torch.linspace(-1, 1, n)) for n in SIZES]
        self.sampler = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)

    def run(self, steps):
        for step in steps:
            for p in self.params:
                p.grad = p.detach() + step
            self.sampler.step()
        return [p.detach() for p in self.params]


def end(chain):
    """A digest of where two more steps end."""
    params = chain.run(range(2, 4))
    result = bits([params, chain.sampler.state_dict()])
    return hashlib.sha256(repr(result).encode()).digest()


def end_in_child(chain, threads, fork):
    reader, writer = os.pipe()

    def child():
        if threads:
            torch.set_num_threads(threads)
        os.write(writer, end(chain))

    fork(child)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()


def by_os(child):
    process = os.fork()
    if process == 0:
        child()
        os._exit(0)
    os.waitpid(process, 0)


def by_multiprocessing(child):
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()


def main(threads, kinds):
    for kind in kinds:
        torch.set_num_threads(3)
        chain = Descent() if kind == "SGD" else Chain(kind, sizes=SIZES)
        chain.run(range(2))
        ends = [end_in_child(chain, threads, f) for f in (by_os, by_multiprocessing)]
        torch.set_num_threads(threads or 3)  # sums of torch depend on it
        equal = ends == 2 * [end(chain)]
        print(f"{kind}: {'equal' if equal else 'different'}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
