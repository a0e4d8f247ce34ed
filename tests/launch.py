"""Runs a program on several ranks: one_rank.py is what such programs are made of.

Each rank is a process of its own, forked from one that has imported torch and nothing
else: to import it takes longer than most of what ranks do.
"""

import multiprocessing
import os
import runpy
import sys

import pytest
import torch
import torch.distributed as dist

fresh = multiprocessing.get_context("forkserver")
# What DistributedDataParallel imports when there is one, and so torch. Not this
# library: from the folder of the sources, it would be theirs, without binaries.
fresh.set_forkserver_preload(["torch._dynamo.convert_frame"])


def become(program, arguments, environment, output):
    """Runs ``python PROGRAM ARGUMENTS`` in an environment with one thread.

    It prints to OUTPUT.out and OUTPUT.err.
    """
    for descriptor, suffix in (1, ".out"), (2, ".err"):
        with open(output.with_suffix(suffix), "w") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")


def run_ranks(program, ranks, output):
    """Returns the output of each rank, in processes as torchrun begins them.

    An AssertionError with their last words if one fails.

    Args:
        program: The script.
        ranks: The arguments of each rank.
        output: A folder for what they print.
    """
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not have one
        "WORLD_SIZE": str(len(ranks)),
    }
    processes = []
    for rank, arguments in enumerate(ranks):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        rest = (arguments, own, output / f"rank-{rank}")
        processes.append(fresh.Process(target=become, args=(program, *rest)))
        processes[-1].start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    errors = [output / f"rank-{rank}.err" for rank in range(len(ranks))]
    said = "\n".join(path.read_text() for path in errors)
    assert not any(codes), f"ranks exited with {codes}\n{said}"
    return [path.with_suffix(".out").read_text() for path in errors]


def launch(program, ranks, folder):
    """Returns what each rank has saved as FOLDER/RANK.pt."""
    arguments = [[str(rank), str(ranks), str(folder)] for rank in range(ranks)]
    run_ranks(program, arguments, folder)
    return [
        torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)
    ]


def on_ranks(program):
    """A fixture: what a program has found on each of two ranks, or of four."""

    @pytest.fixture(
        scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)]
    )
    def ranks(request, tmp_path_factory):
        return launch(program, request.param, tmp_path_factory.mktemp("ranks"))

    return ranks
