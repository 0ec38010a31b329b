"""What `generate` and `chat` were given: one of them or a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import InvalidArgumentError

__all__ = ["check_conversation", "is_conversation", "is_prompt"]


def is_prompt(value: Any) -> bool:
    """One prompt, against a list of prompts. [] is an empty list of prompts."""
    if isinstance(value, str):
        return True
    if isinstance(value, Sequence):
        return (
            bool(value)
            and not isinstance(value[0], (str, Sequence))
            and not hasattr(value[0], "__iter__")
        )
    return True


def is_conversation(value: Any) -> bool:
    """One conversation, right or wrong, against a list of them. [] is an empty list of them."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        return True
    return bool(value) and not isinstance(value[0], Sequence)


def check_conversation(value: Any) -> None:
    """Raises InvalidArgumentError."""
    if (
        isinstance(value, (str, bytes))
        or not isinstance(value, Sequence)
        or not all(isinstance(one, Mapping) for one in value)
    ):
        raise InvalidArgumentError(
            f'[messages] expected a list of {{"role": ..., "content": ...}}, got {value!r}'
        )
