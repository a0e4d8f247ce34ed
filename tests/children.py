"""Pieces of a test in processes of their own: to be killed, or with fewer rights."""

import os
import signal
import sys
import threading
import time


def start(call):
    """Forks, which costs no imports. The child's id, and a pipe to what it returns.

    The end of a child that fails is its exception, as text.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    try:
        os.close(reader)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # progress bars
        if "tqdm" in sys.modules:
            # All forks share its lock, and one that is killed may have it for ever.
            sys.modules["tqdm"].tqdm.set_lock(threading.RLock())
        try:
            text = call()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, (text or "").encode())
    finally:
        os._exit(0)


def outcome(call, kill_after=None):
    """Returns a child's result; None if it was killed before."""
    child, reader = start(call)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(status) else text
