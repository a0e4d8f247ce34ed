"""Runs scripts as `python script.py` would, each in a process forked from this one.

    python forked_scripts.py script.py [thread:script.py ...]

This one has imported torch, which takes most of a script's time. What a script leaves
at module level is there when its interpreter ends. Its standard error goes to
script.py.err, its exit status to script.py.rc; each has a working folder of its own.
"""

import gc
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path

import torch


def run(path):
    code = compile(path.read_text(), str(path), "exec")
    exec(code, sys.modules["__main__"].__dict__)


def in_child(name):
    """Runs a child's program; returns only if it has ended well."""
    threaded, path = name.startswith("thread:"), Path(name.removeprefix("thread:"))
    errors = os.open(f"{path}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    folder = Path(f"{path}.folder")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    warnings.simplefilter("error")
    if not threaded:
        run(path)
        return
    failed = []

    def target():
        try:
            run(path)
        except BaseException:
            traceback.print_exc()
            failed.append(True)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # As a torch for the CPU: Triton's bindings tell of what is frozen as of leaks.
    sys.modules["triton"] = None
    torch.optim.SGD([torch.zeros(1)])  # which imports a thousand modules
    gc.freeze()  # that collections at each child's end need not go through
    for each in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            in_child(each)
            break  # and ends as an interpreter does
        _, status = os.waitpid(child, 0)
        script = each.removeprefix("thread:")
        Path(f"{script}.rc").write_text(str(os.waitstatus_to_exitcode(status)))
