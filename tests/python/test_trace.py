"""Traces of rounds: what is written, what is read, and the page that shows it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import Branching, Counting, HalfRight, fingerprint, greedy, known
from typer.testing import CliRunner

import specrt
from specrt import Engine, InvalidArgumentError, LoadError
from specrt.cli import app
from specrt.drafters import Merge, NGram
from specrt.trace import Trace, brief, read_trace
from specrt.trace_html import to_html

SMALL: dict[str, Any] = {"max_model_len": 256, "max_batch_size": 4, "threads": 1}
PROMPTS = ["One two three. One two", "Höhe €5 😀 and"]


@pytest.fixture(scope="module")
def traced(l2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[Any], Path]:
    """Two requests in one batch, drafted by trees that are right now and then."""
    path = tmp_path_factory.mktemp("trace") / "rounds.jsonl"
    with Engine(l2, **SMALL) as engine:
        plain = engine.generate(PROMPTS, greedy(40))
    drafter = Branching(known(plain), 264)
    with Engine(l2, drafter, num_speculative_tokens=6, trace=path, **SMALL) as engine:
        outputs = engine.generate(PROMPTS, greedy(40))
    assert [fingerprint(one) for one in outputs] == [fingerprint(one) for one in plain]
    return read_trace(path), outputs, path


def shares_of(trace: Trace, request: int) -> list[dict[str, Any]]:
    shares = [share for one in trace.of("round") for share in one["shares"]]
    return [share for share in shares if share["request"] == request]


def test_a_trace_tells_every_draft(traced: tuple[Trace, list[Any], Path]) -> None:
    trace, outputs, _ = traced
    assert trace.header["drafter"] == "Branching"
    assert [one["request"] for one in trace.of("queued")] == [0, 1]
    for number, output in enumerate(outputs):
        shares = shares_of(trace, number)
        assert [one for share in shares for one in share["emitted"]] == output.token_ids
        branched = 0
        for share in shares:
            draft, accepted = share["draft"], share["accepted"]
            assert len(draft["tokens"]) <= share["planned"] or not share["emitted"]
            assert all(names == ["Branching"] for names in draft["sources"])
            assert [draft["tokens"][node] for node in accepted] == share["emitted"][:-1]
            path = [-1, *accepted]
            assert [draft["parents"][node] for node in accepted] == path[:-1]
            branched += len(set(draft["parents"])) < len(draft["parents"])
        assert branched > 3
        metrics = output.metrics
        assert sum(len(share["draft"]["tokens"]) for share in shares) == metrics.drafted_tokens
        assert sum(len(share["accepted"]) for share in shares) == metrics.accepted_tokens > 0
        assert sum(share["prompt_tokens"] for share in shares) == len(output.prompt_token_ids)


def test_texts_of_a_trace_are_those_of_the_output(
    l2: Path, traced: tuple[Trace, list[Any], Path]
) -> None:
    trace, outputs, _ = traced
    tokenizer = specrt.Tokenizer.from_pretrained(l2)
    for number, output in enumerate(outputs):
        text = "".join(one for share in shares_of(trace, number) for one in share["text"])
        [finished] = [one for one in trace.of("finished") if one["request"] == number]
        # Special tokens show here.
        expected = tokenizer.decode(output.token_ids, skip_special_tokens=False)
        assert text + finished["text"] == expected
        assert finished["metrics"]["drafted_tokens"] == output.metrics.drafted_tokens
        [admitted] = [one for one in trace.of("admitted") if one["request"] == number]
        assert admitted["prompt_text"] == PROMPTS[number]


def test_times_of_rounds_follow_each_other(traced: tuple[Trace, list[Any], Path]) -> None:
    rounds = traced[0].of("round")
    for one, following in itertools.pairwise(rounds):
        assert one["t"] + one["seconds"] <= following["t"] + 1e-5
    for one in rounds:
        parts = one["draft_seconds"] + one["verify_seconds"] + one["sample_seconds"]
        assert 0 < parts <= one["seconds"] + 1e-5
        in_pass = sum(
            share["prompt_tokens"] or 1 + len(share["draft"]["tokens"]) for share in one["shares"]
        )
        assert one["rows"] == in_pass


def test_merged_drafts_name_their_sources(counter: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    merged = Merge([NGram(), Counting()])
    with Engine(counter, merged, trace=path, **SMALL) as engine:
        engine.generate([7, 8, 9, 10, 7], greedy(24))
    shares = shares_of(read_trace(path), 0)
    names = {name for share in shares for one in share["draft"]["sources"] for name in one}
    assert names == {"ngram", "Counting"}
    assert read_trace(path).header["drafter"] == "NGram + Counting"
    assert brief(NGram(prompt_lookup_max=7)) == "NGram(prompt_lookup_max=7)"
    assert brief(None) is None


def test_a_stop_text_and_a_cancelled_request(counter: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Engine(counter, Counting(), num_speculative_tokens=5, trace=path, **SMALL) as engine:
        output = engine.generate([65], greedy(30, stop="DE"))
        stream = engine.stream([65], greedy(30))
        next(stream)
        stream.close()
    trace = read_trace(path)
    stopped, left = trace.of("finished")
    emitted = [one for share in shares_of(trace, 0) for one in share["emitted"]]
    assert stopped["tokens"] == len(output.token_ids) < len(emitted)
    assert (stopped["reason"], left["reason"]) == ("stop", "abort")
    assert to_html(trace)


def test_preempted_requests(l2: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    tight = {"kv_cache_bytes": 180_000, "max_model_len": 256, "block_size": 4, "threads": 1}
    tight |= {"max_batch_size": 4, "max_num_batched_tokens": 24}
    with Engine(l2, trace=path, **tight) as engine:
        outputs = engine.generate([[1, 2], [3, 4], [5, 6], [7, 8]], greedy(200, ignore_eos=True))
        metrics = engine.metrics()
    trace = read_trace(path)
    told = [one["request"] for one in trace.of("preempted")]
    assert len(told) == metrics.preemptions == metrics.totals.preemptions > 0
    for number, output in enumerate(outputs):
        assert told.count(number) == output.metrics.preemptions
        emitted = [one for share in shares_of(trace, number) for one in share["emitted"]]
        assert emitted == output.token_ids
        [with_prompt] = [
            one for one in trace.of("admitted") if one["request"] == number and "prompt" in one
        ]
        assert with_prompt["prompt"] == output.prompt_token_ids
    assert "preempted at" in to_html(trace)


def test_tracing_without_a_tokenizer(make_bigram: Any, tmp_path: Path) -> None:
    import numpy as np

    table = np.eye(64, dtype=np.float32)[[*range(1, 64), 0]] * 8
    path = tmp_path / "t.jsonl"
    with Engine(make_bigram(table), trace=path, **SMALL) as engine:
        assert engine.tokenizer is None
        engine.generate([3], greedy(4))
    trace = read_trace(path)
    assert [share["emitted"] for share in shares_of(trace, 0)] == [[4], [5], [6], [7]]
    assert trace.of("admitted")[0]["prompt_text"] == ""
    assert to_html(trace)


@pytest.mark.parametrize("path", ["no/such/folder/t.jsonl", 7, "a\0b", "\ud800", ""])
def test_a_trace_that_cannot_be_written(counter: Path, path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[trace\]"):
        Engine(counter, trace=path, **SMALL)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "empty"),
        ("{}\n", "line 1"),
        ('{"event": "trace", "version": 2}\n', "line 1"),
        ('{"event": "trace", "version": 1}\nnonsense\n{"event": "queued"}\n', "line 2"),
        ('{"event": "trace", "version": 1}\n{"event": "queued", "t": 1}\n', "line 2"),
        ('{"event": "trace", "version": 1}\n{"event": "dance", "t": 1}\n', "line 2"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(LoadError, match=line):
        read_trace(path)
    result = CliRunner().invoke(app, ["trace", str(path), "-o", str(tmp_path / "o.html")])
    assert isinstance(result.exception, LoadError)
    assert not (tmp_path / "o.html").exists()


ROUND: dict[str, Any] = {
    "event": "round",
    **{"t": 1.0, "seconds": 0.1, "rows": 3},
    **{"draft_seconds": 0.0, "verify_seconds": 0.1, "sample_seconds": 0.0},
    "shares": [
        {
            **{"request": 0, "planned": 2, "prompt_tokens": 0, "emitted": [7], "text": ["x"]},
            "draft": {
                **{"tokens": [7, 8], "parents": [-1, 0], "log_probs": [0.0, None]},
                **{"sources": [["a"], ["a", "b"]], "text": ["x", "y"]},
            },
            "accepted": [0],
        }
    ],
}


def lines_of(*events: dict[str, Any]) -> str:
    header = {"event": "trace", "version": 1}
    return "".join(json.dumps(one) + "\n" for one in (header, *events))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *(((key,), "1") for key in ("t", "seconds", "rows", "sample_seconds", "shares")),
        *(((key,), float("inf")) for key in ("t", "seconds", "draft_seconds")),
        (("shares", 0), 5),
        (("shares", 0, "request"), 1),  # none was queued under this number
        (("shares", 0, "request"), -1),
        (("shares", 0, "request"), True),
        (("shares", 0, "draft"), []),
        (("shares", 0, "draft", "tokens"), [7]),
        (("shares", 0, "draft", "parents"), [-1, 1]),
        (("shares", 0, "draft", "sources"), [["a"], []]),
        (("shares", 0, "draft", "sources"), "ab"),
        (("shares", 0, "draft", "text"), [1, 2]),
        (("shares", 0, "accepted"), [2]),
        (("shares", 0, "accepted"), [-1]),
        (("shares", 0, "emitted"), None),
    ],
)
def test_a_line_of_the_wrong_kind_is_refused(tmp_path: Path, where: Any, value: Any) -> None:
    path = tmp_path / "t.jsonl"
    queued = {"event": "queued", "t": 0.5, "request": 0}
    path.write_text(lines_of(queued, ROUND))
    assert to_html(read_trace(path))
    wrong = json.loads(json.dumps(ROUND))
    at = wrong
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    path.write_text(lines_of(queued, wrong))
    with pytest.raises(LoadError, match="line 3"):
        read_trace(path)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"event": "queued", "t": 1e999, "request": 0}',
        b'{"event": "queued", "t": NaN, "request": 0}',
        b'{"event": "queued", "t": 0, "request": 1000000000}',
        b'{"event": "finished", "t": 0, "request": 0}',
        b'{"event": ["queued"], "t": 0, "request": 0}',
        b'{"event": "queued", "t": 0, "request": 0, "x": "\xff"}',
        b"",
    ],
)
def test_hostile_lines_are_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines_of().encode() + line + b"\n")
    with pytest.raises(LoadError, match="line 2"):
        read_trace(path)


def test_texts_with_what_looks_like_the_end_of_a_line(l2: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    text = "a\u2028b\u0085c\u2029d\x0ce\r\n"
    with Engine(l2, "ngram", trace=path, **SMALL) as engine:
        engine.generate(text, greedy(4))
    assert read_trace(path).of("admitted")[0]["prompt_text"] == text


def test_a_name_that_no_text_can_hold(l2: Path, tmp_path: Path) -> None:
    path, model = tmp_path / "t.jsonl", tmp_path / os.fsdecode(b"m\xff")
    model.symlink_to(l2)
    with Engine(model, tokenizer=str(l2), trace=path, **SMALL) as engine:
        engine.generate([3], greedy(4))
    trace = read_trace(path)
    assert trace.header["model"] == model.name
    result = CliRunner().invoke(app, ["trace", str(path), "-o", str(tmp_path / "o.html")])
    assert result.exit_code == 0, result.exception


@pytest.mark.parametrize("count", [1, 2, 20])
def test_a_last_line_cut_off_is_left_out(
    tmp_path: Path, traced: tuple[Trace, list[Any], Path], count: int
) -> None:
    trace, _, whole = traced
    path = tmp_path / "t.jsonl"
    path.write_bytes(whole.read_bytes() + '{"event": "finished", "text": "😀'.encode()[:-count])
    with pytest.warns(UserWarning, match="cut off"):
        cut = read_trace(path)
    assert cut.events == trace.events
    assert to_html(cut)


def test_the_page_is_whole_and_safe(tmp_path: Path, traced: tuple[Trace, list[Any], Path]) -> None:
    out = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["trace", str(traced[2]), "-o", str(out)])
    assert result.exit_code == 0, result.output
    page = out.read_text()
    assert (
        page.count("http") == page.count("http://www.w3.org/2000/svg") == 1
    )  # a name, not asked for
    evil = "</script><script>alert(1)</script>"
    header = {**traced[0].header, "model": evil}
    assert evil not in to_html(Trace(header, traced[0].events))
    data = page.split('type="application/json">')[1].split("</script>")[0]
    assert len(json.loads(data)["requests"]) == 2


def test_it_looks_right_in_a_browser(
    tmp_path: Path, counter: Path, traced: tuple[Trace, list[Any], Path]
) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here")
    trace = tmp_path / "t.jsonl"
    texts = [list(range(66, 200))]
    drafter = HalfRight(texts, 256)
    with Engine(counter, drafter, num_speculative_tokens=4, trace=trace, **SMALL) as engine:
        engine.generate([66], greedy(60))
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(to_html(read_trace(trace)), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=900,900"]
    command += ["--virtual-time-budget=2000", f"--screenshot={picture}"]
    done = subprocess.run(
        [*command, f"file://{page}#round-3"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert picture.exists(), done.stderr[-2000:]
    pixels = colours(picture)
    total = sum(pixels.values())
    # The page, its cards, what the drafter proposed, the passes, and what was rejected.
    for name, colour, share in (
        ("page", 0xF6F7F9, 0.05),
        ("card", 0xFFFFFF, 0.2),
        ("proposed", 0xBFE3C4, 0.003),
        ("verify", 0x4A7FD6, 0.002),
        ("rejected", 0xFDECEC, 0.0002),  # letters and the line through them hide most of it
    ):
        assert pixels.get(colour, 0) > share * total, (name, pixels.get(colour, 0) / total)
    assert not any(word in done.stderr for word in ("Uncaught", "SyntaxError", "ReferenceError"))


def colours(picture: Path) -> dict[int, int]:
    """How often each colour occurs, as 0xRRGGBB."""
    import numpy as np
    from matplotlib.image import imread

    image = np.rint(imread(picture)[..., :3] * 255).astype(np.int64)
    codes = (image[..., 0] << 16) | (image[..., 1] << 8) | image[..., 2]
    found, counts = np.unique(codes, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def test_specrt_generate_traces(tmp_path: Path, counter: Path) -> None:
    path = tmp_path / "t.jsonl"
    arguments = ["generate", str(counter), "A", "--max-tokens", "5", "--trace", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert [one["tokens"] for one in read_trace(path).of("finished")] == [5]
    assert specrt.__version__ == read_trace(path).header["specrt"]
