"""Runs an example of which rank 1 is killed: ``dying_rank.py PROGRAM ARGUMENTS``.

In the middle of its third checkpoint.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import torch_sgmcmc as sg

saved = 0


def save(content, path):
    global saved
    saved += 1
    if saved == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    of_library(content, path)


of_library, sg.save = sg.save, save
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
