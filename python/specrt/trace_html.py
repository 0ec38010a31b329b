"""A trace as one HTML file that needs nothing else: `specrt trace FILE -o out.html`."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from .trace import Trace

__all__ = ["to_html"]


def to_html(trace: Trace) -> str:
    """The page: texts coloured by who proposed each token, what was rejected, and when."""
    page = (resources.files("specrt") / "data" / "trace.html").read_text(encoding="utf-8")
    data = json.dumps(_page_data(trace), ensure_ascii=False, separators=(",", ":"))
    # What UTF-8 has no bytes for stays escaped, and no text may end the script that it stands in.
    data = data.encode("utf-8", "backslashreplace").decode("utf-8")
    return page.replace("/*TRACE*/", data.replace("<", "\\u003c"))


def _page_data(trace: Trace) -> dict[str, Any]:
    rounds = trace.of("round")
    first = min((one["t"] for one in trace.events), default=0.0)
    sources = _sources(rounds)
    requests = _requests(trace, first)
    shown = [_round(one, sources, requests, first) for one in rounds]
    # The drafts of a round that a stop or a limit ended were never all looked at.
    last: dict[int, dict[str, Any]] = {}
    for one in shown:
        for share in one["shares"]:
            share["ended"] = False
            if share["emitted"] and share["request"] is not None:
                last[share["request"]] = share
    for number, share in last.items():
        share["ended"] = requests[number]["reason"] in ("stop", "length")
    end = max((one["t"] + one.get("seconds", 0.0) for one in trace.events), default=0.0) - first
    header = trace.header
    about = [str(header[one]) for one in ("dtype", "cpu_isa") if header.get(one)]
    about += [f"{header['threads']} threads"] if header.get("threads") else []
    about += [f"drafter {header.get('drafter') or 'none'}"]
    about += [f"{one} {header[one]}" for one in ("policy", "verification") if header.get(one)]
    return {
        "title": header.get("model", "specrt trace"),
        "about": about,
        "tiles": _tiles(trace, shown),
        "shares": _shares(rounds),
        "sources": list(sources),
        "requests": requests,
        "rounds": shown,
        "end": end,
    }


def _sources(rounds: list[dict[str, Any]]) -> dict[str, int]:
    """The drafters that proposed anything, numbered as they appear."""
    found: dict[str, int] = {}
    for one in rounds:
        for share in one["shares"]:
            for names in share["draft"]["sources"]:
                for name in names:
                    found.setdefault(name, len(found))
    return found


def _requests(trace: Trace, first: float) -> list[dict[str, Any]]:
    numbers = {one["request"] for one in trace.events if isinstance(one.get("request"), int)}
    requests: list[dict[str, Any]] = [
        {
            "prompt": "",
            "prompt_tokens": 0,
            "facts": [],
            "error": None,
            "reason": "",
            "tokens": 1 << 53,
            "rest": "",
            "queued": 0.0,
            "admitted": None,
        }
        for _ in range(max(numbers, default=-1) + 1)
    ]
    for event in trace.events:
        if event["event"] == "round":
            continue
        one = requests[event["request"]]
        at = event["t"] - first
        if event["event"] == "queued":
            one["queued"] = at
        elif event["event"] == "preempted":
            one["facts"].append(f"preempted at {at:.2f} s")
        elif event["event"] == "admitted":
            if "prompt" in event:
                one["prompt"], one["prompt_tokens"] = event["prompt_text"], len(event["prompt"])
            if one["admitted"] is None:
                one["admitted"] = at
        elif event["event"] == "finished":
            one["error"], one["tokens"] = event["error"], event["tokens"]
            one["reason"], one["rest"] = event["reason"], event["text"]
            one["facts"] += _facts(event)
    return requests


def _facts(event: dict[str, Any]) -> list[str]:
    metrics = event["metrics"]
    facts = [f"{event['tokens']} tokens"]
    if metrics and metrics["rounds"]:
        facts.append(f"{metrics['rounds']} rounds")
    if metrics and metrics["acceptance_length"]:
        facts.append(f"τ {metrics['acceptance_length']:.2f}")
    if metrics and metrics["drafted_tokens"]:
        facts.append(f"α {metrics['alpha']:.2f}")
    if metrics and metrics["tpot_seconds"]:
        facts.append(f"{1 / metrics['tpot_seconds']:.0f} tok/s")
    if metrics and metrics["ttft_seconds"]:
        facts.append(f"first token after {1e3 * metrics['ttft_seconds']:.0f} ms")
    return [*facts, *([event["reason"]] if event["reason"] else [])]


def _round(
    one: dict[str, Any], sources: dict[str, int], requests: list[dict[str, Any]], first: float
) -> dict[str, Any]:
    by_source = [0] * len(sources)
    shares = []
    chosen = wasted = 0
    for share in one["shares"]:
        draft = share["draft"]
        numbered = [[sources[name] for name in names] for names in draft["sources"]]
        for node in share["accepted"]:
            by_source[numbered[node][0]] += 1
        chosen += 1 if share["emitted"] else 0
        wasted += len(draft["tokens"]) - len(share["accepted"])
        known = share["request"] is not None and share["request"] < len(requests)
        shares.append(
            {
                **share,
                "request": share["request"] if known else None,
                "draft": {**draft, "sources": numbered},
            }
        )
    return {
        "t": one["t"] - first,
        "seconds": one["seconds"],
        "rows": one["rows"],
        "draft": one["draft_seconds"],
        "verify": one["verify_seconds"],
        "sample": one["sample_seconds"],
        "shares": shares,
        "by_source": by_source,
        "chosen": chosen,
        "wasted": wasted,
        "emitted": chosen + sum(by_source),
    }


def _shares(rounds: list[dict[str, Any]]) -> dict[str, float]:
    total = sum(one["seconds"] for one in rounds)
    parts = {
        kind: sum(one[f"{kind}_seconds"] for one in rounds) / total if total else 0.0
        for kind in ("draft", "verify", "sample")
    }
    return {**parts, "rest": max(0.0, 1.0 - sum(parts.values())) if total else 0.0}


def _tiles(trace: Trace, rounds: list[dict[str, Any]]) -> list[tuple[str, str]]:
    drafted = sum(len(share["draft"]["tokens"]) for one in rounds for share in one["shares"])
    accepted = sum(len(share["accepted"]) for one in rounds for share in one["shares"])
    tokens = sum(one["emitted"] for one in rounds)
    busy = sum(one["seconds"] for one in rounds)
    metrics = [one["metrics"] for one in trace.of("finished") if one["metrics"]]
    full = sum(one["rounds"] - one["truncated_rounds"] for one in metrics)
    kept = sum(
        one["acceptance_length"] * (one["rounds"] - one["truncated_rounds"]) for one in metrics
    )
    right = sum(sum(one["accepted_per_position"]) for one in metrics)
    failed = sum(sum(one["rejected_per_position"]) for one in metrics)
    return [
        (f"{len({one['request'] for one in trace.of('queued')}):,}", "requests"),
        (f"{len(rounds):,}", "rounds"),
        (f"{tokens:,}", "tokens"),
        (f"{tokens / busy:.1f}" if busy else "–", "tok/s in rounds"),
        (f"{kept / full:.2f}" if full else "–", "τ, tokens a round"),
        (f"{right / (right + failed):.2f}" if right + failed else "–", "α"),
        (f"{drafted:,}", "drafted"),
        (f"{1 - accepted / drafted:.0%}" if drafted else "–", "of these wasted"),
    ]
