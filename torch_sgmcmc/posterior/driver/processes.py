"""Chains side by side, each in a process of its own.

Processes are torch.multiprocessing's: the first error ends all, and none outlives its
parent, which Linux tells them by a SIGTERM (torch by a SIGINT, which is ignored where a
script has begun the program in the background). What ends a process has its chain
saved.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from torch_sgmcmc.posterior.driver.chain import Settings, run_chain

__all__ = ["check_processes", "side_by_side"]

# Of Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1

# Seconds for processes that are ended to save their chains.
_GRACE = 30.0

_GUARD = (
    "functions belong into a file that can be imported, and the call of sample() under "
    'if __name__ == "__main__":'
)


def check_processes(settings: Settings, processes: int) -> None:
    """Raises if there cannot be any, before something is changed.

    Raises:
        RuntimeError: this is one of them, which reads the script that has begun it.
        TypeError: what is given cannot be sent to them.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"sample(processes={processes}) was called by a process that it has begun "
            f"itself, and which reads this script: {_GUARD}"
        )
    try:
        content = pickle.dumps(settings)
    except Exception as error:
        raise TypeError(
            f"Invalid processes: {processes}, and what is given cannot be sent to them "
            f"({error}): give functions that can be imported, or processes=1"
        ) from error
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    is_lost = spec is None and file is not None and not os.path.exists(file)
    if is_lost or (file is None and b"__main__" in content):
        raise TypeError(
            f"Invalid processes: {processes}, and what is defined in a notebook or on "
            "standard input cannot be imported by them (put the functions into a file "
            "and import them, or processes=1)"
        )


def side_by_side(settings: Settings, processes: int) -> None:
    """Runs all chains, so many at a time.

    Raises:
        Exception: what a chain has raised, its own with the process's traceback as its
            cause; then all others have been ended.
        RuntimeError: a process has ended otherwise.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // processes)
    others = {*multiprocessing.active_children()}
    running = None
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder)
        work = (settings, context.Value("q", 0), threads, errors, os.getpid())
        try:
            running = start_processes(_work, work, processes, join=False)
            while not running.join():  # for the first that ends
                pass
        except ProcessException as error:
            own, said = _told(errors, error)
            raise own from RuntimeError(said)
        finally:
            if running is None:  # it was interrupted
                _end({*multiprocessing.active_children()} - others)
            else:
                _end(running.processes)


def _work(
    index: int,
    settings: Settings,
    begun: Any,
    threads: int,
    errors: Path,
    parent: int,
) -> None:
    """What a process does: chains, until all have been begun."""
    chain = None
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        torch.set_num_threads(threads)
        while os.getppid() == parent:
            with begun.get_lock():
                chain = begun.value
                begun.value += 1
            if chain >= settings.chains:
                return
            (errors / f"chain-{index}").write_text(str(chain))
            run_chain(settings, chain)
    except BaseException as error:
        _tell(error, errors / f"error-{index}")
        sys.exit(1)


def _tell(error: BaseException, path: Path) -> None:
    """Writes an exception into a file, and how it came about."""
    said = traceback.format_exc()
    try:
        content = pickle.dumps((error, said))
        pickle.loads(content)  # some cannot be made again
    except Exception:
        content = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), said))
    path.write_bytes(content)


def _told(errors: Path, ended: ProcessException) -> tuple[BaseException, str]:
    """What a process has told, or what can be said of one that has not."""
    index = ended.error_index
    told = errors / f"error-{index}"
    if told.exists():
        error, said = pickle.loads(told.read_bytes())
        return error, f"\n{said}"
    chain = errors / f"chain-{index}"
    if not chain.exists():
        words = f"A process for chains could not begin (see what it printed): {_GUARD}"
    else:
        words = (
            f"The process of chain {chain.read_text()} has ended (was there too little "
            "memory?): sample() goes on from its last checkpoint when called again"
        )
    return RuntimeError(words), str(ended)


def _end(processes: Iterable[BaseProcess]) -> None:
    """Ends processes, once they have saved their chains or time is over."""
    try:
        for process in processes:
            process.terminate()
        end = time.monotonic() + _GRACE
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()
