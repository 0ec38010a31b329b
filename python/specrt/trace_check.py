"""Whether a line of a trace is one: every field of the kind that `specrt.trace` says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["TraceChecker"]

Check = Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _count(value: Any) -> bool:
    return _whole(value) and value >= 0


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(one: Check) -> Check:
    return lambda value: isinstance(value, list) and all(one(each) for each in value)


def _or_null(one: Check) -> Check:
    return lambda value: value is None or one(value)


def _has(**fields: Check) -> Check:
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in fields.items())
    )


_METRICS = _has(
    rounds=_count,
    truncated_rounds=_count,
    drafted_tokens=_count,
    alpha=_number,
    acceptance_length=_number,
    ttft_seconds=_number,
    tpot_seconds=_number,
    accepted_per_position=_list_of(_count),
    rejected_per_position=_list_of(_count),
)
_DRAFT: dict[str, Check] = {
    "tokens": _list_of(_count),
    "parents": _list_of(_whole),
    "log_probs": _list_of(_or_null(_number)),
    "sources": _list_of(_list_of(_text)),
    "text": _list_of(_text),
}
_SHARE: dict[str, Check] = {
    "request": _or_null(_count),
    "planned": _count,
    "prompt_tokens": _count,
    "draft": _has(**_DRAFT),
    "accepted": _list_of(_count),
    "emitted": _list_of(_count),
    "text": _list_of(_text),
}
_EVENTS: dict[str, dict[str, Check]] = {
    "queued": {"t": _number, "request": _count},
    "admitted": {"t": _number, "request": _count},
    "preempted": {"t": _number, "request": _count},
    "finished": {
        "t": _number,
        "request": _count,
        "reason": _text,
        "error": _or_null(_text),
        "tokens": _count,
        "text": _text,
        "metrics": _or_null(_METRICS),
    },
    "round": {
        "t": _number,
        "seconds": _number,
        "rows": _count,
        "draft_seconds": _number,
        "verify_seconds": _number,
        "sample_seconds": _number,
        "shares": _list_of(lambda share: isinstance(share, dict)),
    },
}


class TraceChecker:
    """Takes the lines of one trace in order; what it raises is ValueError."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._header = False
        self._queued = 0

    def event(self, line: bytes) -> dict[str, Any]:
        """The line as an object, all of whose fields are there and of their kind."""
        try:
            event = json.loads(line.decode("utf-8"), parse_constant=_refuse)
        except RecursionError:
            raise ValueError("expected an object, got a deeper one than any trace has") from None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ValueError('expected an object with "event"')
        if not self._header:
            if event["event"] != "trace" or event.get("version") != self._version:
                raise ValueError(f'expected {{"event": "trace", "version": {self._version}}}')
            self._header = True
            return event
        kind = event["event"]
        if kind not in _EVENTS:
            raise ValueError(f"expected one of {', '.join(_EVENTS)}, got {kind}")
        _check(kind, event, _EVENTS[kind])
        if kind == "round":
            for share in event["shares"]:
                self._check_share(share)
        else:
            self._check_request(kind, event)
        return event

    def _check_request(self, kind: str, event: dict[str, Any]) -> None:
        number = event["request"]
        if kind == "queued":
            if number != self._queued:
                raise ValueError(f"expected request {self._queued} to be queued, got {number}")
            self._queued += 1
        elif number >= self._queued:
            raise ValueError(f"expected a request that was queued, got {number}")
        elif kind == "admitted" and "prompt" in event:
            _check(kind, event, {"prompt": _list_of(_count), "prompt_text": _text})

    def _check_share(self, share: dict[str, Any]) -> None:
        _check("a share of a round", share, _SHARE)
        number, draft = share["request"], share["draft"]
        if number is not None and number >= self._queued:
            raise ValueError(f"expected a request that was queued, got {number}")
        nodes = len(draft["tokens"])
        for name in ("parents", "log_probs", "sources", "text"):
            if len(draft[name]) != nodes and (name != "text" or draft[name]):
                raise ValueError(f"expected {nodes} {name} of a draft, got {len(draft[name])}")
        if any(not -1 <= parent < node for node, parent in enumerate(draft["parents"])):
            raise ValueError("expected parents before their children in a draft")
        if not all(draft["sources"]):
            raise ValueError("expected a source of each node of a draft")
        if any(node >= nodes for node in share["accepted"]):
            raise ValueError(f"expected accepted nodes of a draft of {nodes}")


def _check(what: str, event: dict[str, Any], fields: dict[str, Check]) -> None:
    missing = [name for name in fields if name not in event]
    if missing:
        raise ValueError(f"expected {', '.join(missing)} in {what}")
    for name, check in fields.items():
        if not check(event[name]):
            got = json.dumps(event[name])
            raise ValueError(f"expected another {name} in {what}, got {got[:80]}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"expected finite numbers, got {constant}")
