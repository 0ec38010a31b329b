"""The exceptions specrt raises. Each is also the builtin a caller would expect to catch."""

from __future__ import annotations

import queue

__all__ = [
    "CapacityError",
    "DeviceError",
    "InternalError",
    "InvalidArgumentError",
    "LoadError",
    "NumericError",
    "QueueFullError",
    "SpecrtError",
    "UnsupportedError",
]


class SpecrtError(Exception):
    """Base of every error that specrt raises on purpose."""


class InvalidArgumentError(SpecrtError, ValueError):
    """A value that a caller gave is out of range, of the wrong kind, or contradicts another."""


class LoadError(SpecrtError, ValueError):
    """A checkpoint or tokenizer is damaged, incomplete, or asks for what specrt does not do."""


class UnsupportedError(SpecrtError, NotImplementedError):
    """The request is meaningful, but this build, device or version does not serve it."""


class CapacityError(SpecrtError, MemoryError):
    """The request can never fit in the memory it was given, or a GPU has too little left for it."""


class QueueFullError(SpecrtError, queue.Full):
    """More requests would wait than `max_queued_requests`: try again later."""


class NumericError(SpecrtError, ArithmeticError):
    """A computation produced a value that no correct model produces, such as NaN logits."""


class DeviceError(SpecrtError, RuntimeError):
    """A GPU failed, and what was running on it is lost.

    The text says whether this process can use the GPU further.
    """


class InternalError(SpecrtError, RuntimeError):
    """An invariant of specrt itself does not hold: please report it."""
