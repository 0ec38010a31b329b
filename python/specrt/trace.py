"""A trace of rounds: lines of JSON, written while an engine runs and read by `specrt trace`.

The first line is the header, `{"event": "trace", "version": 1, ...}`. Each further line has an
`event` and `t`, seconds since the trace began:

- `queued`, `preempted`: `request`, a number from 0.
- `admitted`: `request`, and when it runs for the first time `prompt` (token ids) and `prompt_text`.
- `round`: `seconds` (wall time, from `t` on), `rows` of the pass, `draft_seconds`,
  `verify_seconds`, `sample_seconds`, and `shares`, one for each request in it: `request`,
  `planned` (draft nodes or prompt tokens at most), `prompt_tokens` processed, `draft` (`tokens`,
  `parents`, `log_probs`, `sources` of each node, `text`), `accepted` (nodes of the draft, root
  first), `emitted` (token ids) and their `text`.
- `finished`: `request`, `reason`, `error` or null, `tokens` (the output's; a stop text may have cut
  off some that were emitted), `text` that only the end made certain, and `metrics`, the fields of
  `specrt.Metrics`, null with an error.

Texts are "" where the engine has no tokenizer. A token's text is what its output gains by it, so a
character of several tokens belongs to the last of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ._core import __version__
from .errors import InvalidArgumentError, LoadError
from .observer import Observer
from .trace_check import TraceChecker

if TYPE_CHECKING:
    from ._core import Decoder
    from .request import Request
    from .text import Detokenizer, Tokenizer

__all__ = ["Trace", "TraceWriter", "brief", "read_trace"]

VERSION = 1


class TraceWriter(Observer):
    """Writes what an engine does to a file. One engine's; see the module for the format."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Begins the file anew. Raises InvalidArgumentError where it cannot be written."""
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidArgumentError(f"[trace] expected a path, got {path!r}")
        try:
            # What UTF-8 has no bytes for, as in names of files, is written as JSON escapes it.
            self._file: IO[str] = open(  # noqa: SIM115
                path, "w", encoding="utf-8", errors="backslashreplace"
            )
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"[trace] cannot write to {os.fspath(path)!r}: {error}"
            ) from error
        # Requests queue up from any thread; reentrant as in MetricsObserver.
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._decoder: Decoder | None = None
        self._texts: _Texts | None = None
        self._numbers: dict[int, int] = {}  # of requests, by identity, while they live
        self._next = 0
        self._told: dict[int, Detokenizer | None] = {}  # by number, of those that ran
        self._sequences: dict[int, int] = {}  # the core's ids

    def begin(self, decoder: Decoder, tokenizer: Tokenizer | None, **header: Any) -> None:
        """The engine stands; `header` says what it is."""
        self._decoder = decoder
        self._texts = _Texts(tokenizer) if tokenizer is not None else None
        with self._lock:
            first = {"event": "trace", "version": VERSION, "specrt": __version__}
            self._file.write(_line({**first, **header}))
            self._file.flush()

    def close(self) -> None:
        """Ends the file. May be called twice."""
        self._decoder = None
        self._file.close()

    def queued(self, request: Request) -> None:
        with self._lock:
            self._numbers[id(request)] = self._next
            self._next += 1
            self._write("queued", request=self._numbers[id(request)])

    def admitted(self, request: Request) -> None:
        number = self._numbers[id(request)]
        if request.id is not None:
            self._sequences[request.id] = number
        prompt: dict[str, Any] = {}
        if number not in self._told:
            self._told[number] = None if self._texts is None else self._texts.output()
            text = "" if self._texts is None else self._texts.whole(request.prompt)
            prompt = {"prompt": request.prompt, "prompt_text": text}
        with self._lock:
            self._write("admitted", request=number, **prompt)

    def round(
        self, plan: Sequence[tuple[int, int]], results: Sequence[tuple[Any, ...]], seconds: float
    ) -> None:
        if self._decoder is None:
            return
        started = time.monotonic() - self._began - seconds
        rows, draft, verify, sample = self._decoder.last_times
        planned = dict(plan)
        with self._lock:
            shares = [self._share(planned, *one) for one in self._decoder.last_round()]
            self._write(
                "round",
                t=started,
                seconds=_short(seconds),
                rows=rows,
                draft_seconds=_short(draft),
                verify_seconds=_short(verify),
                sample_seconds=_short(sample),
                shares=shares,
            )

    def preempted(self, request: Request) -> None:
        with self._lock:
            self._write("preempted", request=self._numbers[id(request)])

    def finished(self, request: Request) -> None:
        with self._lock:
            number = self._numbers.pop(id(request))
            output = self._told.pop(number, None)
            if request.id is not None:
                self._sequences.pop(request.id, None)
            error = None if request.error is None else str(request.error)
            metrics = None
            if request.error is None:
                metrics = dataclasses.asdict(request.metrics())
            self._write(
                "finished",
                request=number,
                reason=request.finish_reason,
                error=error,
                tokens=request.token_count,
                text="" if output is None else output.flush(),
                metrics=metrics,
            )

    def _share(
        self,
        planned: dict[int, int],
        sequence: int,
        prompt_tokens: int,
        tokens: list[int],
        parents: list[int],
        log_probs: list[float],
        sources: list[list[str]],
        accepted: list[int],
        emitted: list[int],
    ) -> dict[str, Any]:
        number = self._sequences.get(sequence)
        output = self._told.get(number) if number is not None else None
        text = [] if output is None else [output.feed(one) for one in emitted]
        node_text = [] if self._texts is None else [self._texts.token(one) for one in tokens]
        return {
            "request": number,
            "planned": planned.get(sequence, 0),
            "prompt_tokens": prompt_tokens,
            "draft": {
                "tokens": tokens,
                "parents": parents,
                # Infinity is no JSON: a node of no chance has none.
                "log_probs": [_short(one) if math.isfinite(one) else None for one in log_probs],
                "sources": sources,
                "text": node_text,
            },
            "accepted": accepted,
            "emitted": emitted,
            "text": text,
        }

    def _write(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        at = time.monotonic() - self._began if t is None else t
        self._file.write(_line({"event": event, "t": _short(at), **fields}))
        self._file.flush()  # nothing is lost with the process, nor written again by a fork of it


class _Texts:
    """What tokens look like."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def output(self) -> Detokenizer:
        return self._tokenizer.detokenizer(skip_special_tokens=False)

    def whole(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def token(self, token: int) -> str:
        return self._tokenizer.token_text(token)


def brief(drafter: Any) -> str | None:
    """A drafter in few words: what differs from its defaults."""
    if drafter is None:
        return None
    if not dataclasses.is_dataclass(drafter):
        return type(drafter).__name__
    parts = getattr(drafter, "parts", None)
    if parts is not None:
        return " + ".join(str(brief(one)) for one in parts)
    told = []
    for one in dataclasses.fields(drafter):
        value = getattr(drafter, one.name)
        if one.default is dataclasses.MISSING or value != one.default:
            told.append(f"{one.name}={value if isinstance(value, (int, float)) else str(value)!r}")
    return f"{type(drafter).__name__}({', '.join(told)})" if told else type(drafter).__name__


def _line(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def _short(value: float) -> float:
    return round(value, 6)


@dataclass(frozen=True)
class Trace:
    """A trace as it was read: the header, and the other lines in order."""

    header: dict[str, Any]
    events: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """The lines of one event."""
        return [one for one in self.events if one["event"] == event]


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """A file that `Engine(trace=path)` wrote. Raises LoadError, with the line's number."""
    try:
        whole = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise LoadError(f"[trace] cannot read {path}: {error}") from error
    # Texts may hold what Python takes for the end of a line, as U+2028.
    lines = whole.split(b"\n")
    cut_off = lines.pop()
    checker = TraceChecker(VERSION)
    events = []
    for number, line in enumerate([*lines, cut_off] if cut_off else lines, 1):
        try:
            events.append(checker.event(line))
        except ValueError as error:
            if number > max(1, len(lines)):
                warnings.warn(f"[trace] the last line of {path} was cut off", stacklevel=2)
                break
            raise LoadError(
                f"[trace] line {number} of {path} is no line of a trace: {error}"
            ) from error
    if not events:
        raise LoadError(f"[trace] expected a header in {path}, got an empty file")
    return Trace(events[0], events[1:])
