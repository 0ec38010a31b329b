"""A lock that a thread which takes it in a loop cannot keep from the others."""

from __future__ import annotations

import threading

__all__ = ["FairLock"]


class FairLock:
    """Reentrant. Whoever waits for it comes before whoever has just released it.

    Only the first in line contends for the lock itself; the others queue for that place. A thread
    that holds the lock takes it again without standing in line.
    """

    def __init__(self) -> None:
        self._line = threading.Lock()
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def held(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._lock.acquire()
        else:
            with self._line:
                self._lock.acquire()
        self._owner = me
        self._depth += 1

    def try_enter(self) -> bool:
        """Take it if nobody else has it, out of turn."""
        if not self._lock.acquire(blocking=False):
            return False
        self._owner = threading.get_ident()
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()
