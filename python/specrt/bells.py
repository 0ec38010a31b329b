"""How a thread wakes tasks of an event loop without handing the interpreter over to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable

from ._core import ring

__all__ = ["Bell", "Waker", "bell_of", "wake"]


class Bell:
    """Wakes the tasks of one event loop.

    `loop.call_soon_threadsafe` would do, but what it sends through releases the interpreter's lock:
    the loop takes it at once and works through all that it has to do before the caller goes on,
    which is about to begin a round. A bell is heard as soon as that round has begun.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._rung: deque[asyncio.Future[None]] = deque()
        self._far, self._near = os.pipe()
        for end in (self._far, self._near):
            os.set_blocking(end, False)
            # Not at exit: rounds may still run, and ring.
            weakref.finalize(self, os.close, end).atexit = False
        self._loop = weakref.ref(loop)
        self._threadsafe = False
        try:
            loop.add_reader(self._far, _hear, self._far, self._rung)
        except NotImplementedError:  # a loop that waits for no pipes
            self._threadsafe = True

    def ring(self, futures: Iterable[asyncio.Future[None]]) -> None:
        """Resolve them, in the loop's thread. From any thread; nobody hears it in a closed loop."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            self._rung.clear()
            return
        self._rung.extend(futures)
        if not self._threadsafe:
            ring(self._near)
            return
        with contextlib.suppress(RuntimeError):  # it has been closed meanwhile
            loop.call_soon_threadsafe(_resolve, self._rung)


def _hear(pipe: int, rung: deque[asyncio.Future[None]]) -> None:
    with contextlib.suppress(BlockingIOError):  # it has been heard already
        os.read(pipe, 4096)
    _resolve(rung)


def _resolve(rung: deque[asyncio.Future[None]]) -> None:
    while rung:
        future = rung.popleft()
        if not future.done():
            future.set_result(None)


_BELLS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bell] = weakref.WeakKeyDictionary()
_HANGING = threading.Lock()


def bell_of(loop: asyncio.AbstractEventLoop) -> Bell:
    """The one of a loop, which is the running one."""
    bell = _BELLS.get(loop)
    if bell is None:
        with _HANGING:
            # What was rung in a loop that closed is never heard, and would keep the loop.
            for other in [one for one in _BELLS if one.is_closed()]:
                del _BELLS[other]
            bell = _BELLS[loop] = Bell(loop)
    return bell


Waker = tuple[Bell, "asyncio.Future[None]"]


def wake(woken: Iterable[Waker]) -> None:
    """Each loop's bell rings once, however many of its tasks it is for."""
    by_bell: dict[Bell, list[asyncio.Future[None]]] = {}
    for bell, future in woken:
        by_bell.setdefault(bell, []).append(future)
    for bell, futures in by_bell.items():
        bell.ring(futures)
