"""Signals that end a program: put off until a chain has been saved."""

from __future__ import annotations

import signal
import threading
from multiprocessing import parent_process
from typing import Any

__all__ = ["Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """SIGINT (Ctrl-C) and SIGTERM within it are noted, and come about at its end.

    A second SIGINT does so at once, but not in a process that another one sees to: the
    end of a parent's threads may send it several. Elsewhere than in the main thread,
    where Python would not call handlers, nothing is put off; nor are signals that are
    ignored, or have a handler that is not Python's.
    """

    def __init__(self) -> None:
        self.pending: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                former = signal.getsignal(number)
                if former not in (signal.SIG_IGN, None):
                    self._former[number] = former
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        if self.pending is not None:
            signal.raise_signal(self.pending)

    def _note(self, number: int, frame: Any) -> None:
        if self.pending == number == signal.SIGINT and parent_process() is None:
            self.pending = None
            self._restore()
            signal.raise_signal(number)
        elif self.pending is None:
            self.pending = number

    def _restore(self) -> None:
        while self._former:
            signal.signal(*self._former.popitem())
