"""Work that is done beside training, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """A thread that does jobs in order, and a bounded queue of them.

    A job that fails stays the first. Its error is raised by whatever is called next,
    and by the call after that it is tried again.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        # From when a job fails until it is tried again.
        self._pauses = False
        self._ends = False
        # A daemon, or an interpreter that exits would wait for it forever.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """The jobs that are not done yet."""
        return len(self._jobs)

    def put(self, *jobs: Callable[[], None]) -> None:
        """Adds jobs, for which there is :meth:`wait_for_room`."""
        with self._changed:
            self._jobs.extend(jobs)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Waits until the queue is not full."""
        self._wait(lambda: len(self._jobs) < self._size)

    def flush(self) -> None:
        """Waits until all is done."""
        self._wait(lambda: not self._jobs)

    def check(self) -> None:
        """Raises the error of a job that has failed."""
        if self._pauses:
            self._wait(lambda: True)

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            if self._pauses and self._error is None:  # it was raised
                self._pauses = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or ready())
            error, self._error = self._error, None
            if error is not None:
                raise error

    def end(self) -> None:
        """Ends the thread, once the job that it is at is done; gives up the others."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ends or (self._jobs and not self._pauses)
                )
                if self._ends:
                    return
                job = self._jobs[0]
            try:
                job()
            except Exception as error:
                with self._changed:
                    self._error, self._pauses = error, True
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._jobs.popleft()
                    self._changed.notify_all()
