"""Training data as users write it: JSON, one object a line, made into token ids.

A line is one of
    {"text": "..."}                                    a text as it is
    {"messages": [{"role": ..., "content": ...}, ...]} a conversation
    {"prompt": "...", "response": "..."}               a user's message and its answer
    {"prompt": "..."}                                  a message for the target to answer
Other keys are the user's own. What is learnt is a text's every token and a conversation's answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import InvalidArgumentError, LoadError
from ..text import Tokenizer

__all__ = ["BadLine", "OnBadLine", "Record", "read_records", "tokens_of"]

OnBadLine = Literal["error", "skip"]


@dataclass(frozen=True)
class BadLine:
    """A line that was left out, and why."""

    number: int
    """Counted from 1."""
    reason: str


@dataclass(frozen=True)
class Record:
    """One line: a text, or messages."""

    line: int
    text: str | None = None
    messages: tuple[dict[str, str], ...] = ()

    @property
    def question(self) -> tuple[dict[str, str], ...]:
        """The messages up to the last of the user, for the target to answer."""
        last = max(i for i, one in enumerate(self.messages) if one["role"] == "user")
        return self.messages[: last + 1]


@dataclass
class Records:
    """What a file holds."""

    records: list[Record] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)


def read_records(path: Path, *, answers: bool, on_bad_line: OnBadLine) -> Records:
    """Read a file of records; `answers` says that each has to hold what is to be learnt.

    A line that is no record raises LoadError with its number, or with "skip" is left out and told
    in `bad`. Raises LoadError where no record is left, or the file cannot be read.
    """
    if on_bad_line not in ("error", "skip"):
        raise InvalidArgumentError(f"[on_bad_line] expected 'error' or 'skip', got {on_bad_line!r}")
    found = Records()
    for number, line in _lines(path):
        try:
            if line.strip():
                found.records.append(_record(number, line, answers))
        except ValueError as error:
            if on_bad_line == "error":
                raise LoadError(f"[{path} line {number}] {error}") from error
            found.bad.append(BadLine(number, str(error)))
    if not found.records:
        raise LoadError(f"[{path}] expected at least one record, got {len(found.bad)} bad lines")
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise LoadError(f"[{path}] cannot be read: {error}") from error


def _record(number: int, line: bytes, answers: bool) -> Record:
    try:
        raw = json.loads(line.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"expected a JSON object in UTF-8, got {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"expected a JSON object, got {type(raw).__name__}")
    kinds = [one for one in ("text", "messages", "prompt") if one in raw]
    if len(kinds) != 1:
        raise ValueError(f"expected one of text, messages and prompt, got {kinds or 'none'}")
    if kinds == ["text"]:
        record = Record(number, text=_text(raw, "text"))
        if not answers:
            raise ValueError("expected messages or a prompt to answer, got a text")
        return record
    if kinds == ["prompt"]:
        messages = [{"role": "user", "content": _text(raw, "prompt")}]
        if raw.get("response") is not None:
            messages.append({"role": "assistant", "content": _text(raw, "response")})
    else:
        messages = _messages(raw["messages"])
    if not any(one["role"] == "user" for one in messages):
        raise ValueError("expected a message of the user, got none")
    if answers and messages[-1]["role"] != "assistant":
        raise ValueError("expected an answer at the end, got none (does the target answer these?)")
    return Record(number, messages=tuple(messages))


def _text(raw: dict[str, Any], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected {key} to be a text, got {_short(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"expected {key} to be valid Unicode: {error}") from error
    return value


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of messages, got {_short(value)}")
    messages = []
    for one in value:
        if not isinstance(one, dict) or set(one) != {"role", "content"}:
            raise ValueError(f"expected messages of role and content, got {_short(one)}")
        messages.append({"role": _text(one, "role"), "content": _text(one, "content")})
    return messages


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "..."


def tokens_of(record: Record, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of a record with answers, and for each whether it is to be learnt (1) or not.

    Raises ValueError where the chat template does not write a conversation turn by turn.
    """
    if record.text is not None:
        tokens = tokenizer.encode(record.text)
        return tokens, [1] * len(tokens)
    messages = list(record.messages)
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    learnt = [0] * len(tokens)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:turn])
        after = tokenizer.apply_chat_template(messages[: turn + 1], add_generation_prompt=False)
        if tokens[: len(before)] != before or tokens[: len(after)] != after:
            raise ValueError("expected a chat template that writes turn after turn, got another")
        learnt[len(before) : len(after)] = [1] * (len(after) - len(before))
    return tokens, learnt
