"""examples/openai_server.py, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tiny
import uvicorn

import specrt
from specrt import Engine, SamplingParams, StructuredOutputs

ROOT = Path(__file__).resolve().parents[2]
TEXT = "a\U0001f600你é"  # each of its bytes once, so that a bigram model can say it over and over
SMALL: dict[str, Any] = {"max_model_len": 512, "threads": 1, "max_batch_size": 4}


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("server", ROOT / "examples" / "openai_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Served:
    """An engine behind HTTP."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        config = uvicorn.Config(load_example().build(engine), port=self.port, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.options = {"base_url": f"http://127.0.0.1:{self.port}/v1", "api_key": "none"}
        self.client = openai.OpenAI(**self.options, max_retries=0, timeout=60)
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.engine._decoder is not None
        assert self.engine._decoder.idle
        self.engine.close()


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("server") / "random"
    model = tiny.byte_tokenizer(tiny.tiny_llama(path, vocab=264, eos_token_id=257))
    served = Served(Engine(model, "ngram", max_queued_requests=8, **SMALL))
    yield served
    served.close()


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Says TEXT for ever; each character but the first takes several tokens."""
    spelt = TEXT.encode()
    table = np.zeros((256, 256), np.float32)
    table[np.arange(256), spelt[0]] = 40.0
    for last, following in itertools.pairwise(spelt):
        table[last] = 0.0
        table[last, following] = 40.0
    path = tmp_path_factory.mktemp("server") / "speaker"
    served = Served(Engine(tiny.byte_tokenizer(tiny.bigram(path, table)), "ngram", **SMALL))
    yield served
    served.close()


def joined(stream: Any, text_of: Callable[[Any], str | None]) -> tuple[dict[int, str], Any]:
    """Texts by choice and the last finish reasons."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (text_of(choice) or "")
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons


def test_models(random: Served) -> None:
    assert [one.id for one in random.client.models.list()] == [random.engine.name]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 23, 60])
def test_characters_of_several_tokens(speaker: Served, count: int) -> None:
    asked: dict[str, Any] = {"model": speaker.engine.name, "prompt": "x", "max_tokens": count}
    whole = speaker.client.completions.create(**asked)
    text = (TEXT * 20).encode()[:count].decode(errors="replace")
    assert whole.choices[0].text == text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (1, count)
    texts, reasons = joined(
        speaker.client.completions.create(**asked, stream=True), lambda one: one.text
    )
    assert texts == {0: text}
    assert reasons == {0: "length"}


@pytest.mark.parametrize(
    "stop", ["你", "\U0001f600你", ["éa\U0001f600", "zz"], ["\U0001f600", "a"], "你éa\U0001f600你é"]
)
def test_stop_texts_across_rounds(speaker: Served, stop: Any) -> None:
    asked: dict[str, Any] = {
        "model": speaker.engine.name,
        "prompt": "speak",
        "max_tokens": 100,
        "stop": stop,
    }
    said = TEXT * 10
    ends = [said.find(one) for one in ([stop] if isinstance(stop, str) else stop)]
    text = said[: min(at for at in ends if at >= 0)]
    whole = speaker.client.completions.create(**asked)
    assert whole.choices[0].text == text
    assert whole.choices[0].finish_reason == "stop"
    texts, reasons = joined(
        speaker.client.completions.create(**asked, stream=True), lambda one: one.text
    )
    assert texts == {0: text}
    assert reasons == {0: "stop"}


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_and_whole_agree(random: Served, n: int) -> None:
    """Sampled, with a seed and log-probabilities, by completions and by chat."""
    params = SamplingParams(n=n, temperature=1.1, top_p=0.9, seed=11, max_tokens=40, logprobs=2)
    expected = random.engine.generate("hello", params)
    asked: dict[str, Any] = {
        "model": random.engine.name, "n": n, "temperature": 1.1, "top_p": 0.9, "seed": 11,
        "max_tokens": 40,
    }  # fmt: skip
    whole = random.client.completions.create(prompt="hello", logprobs=2, **asked)
    assert [one.text for one in whole.choices] == [one.text for one in expected.outputs]
    for choice, output in zip(whole.choices, expected.outputs, strict=True):
        assert choice.logprobs is not None
        assert output.logprobs is not None
        pairs = zip(output.logprobs, output.token_ids, strict=True)
        assert choice.logprobs.token_logprobs == [step[token].logprob for step, token in pairs]
    stream = random.client.completions.create(prompt="hello", logprobs=2, stream=True, **asked)
    texts: dict[int, str] = {}
    values: dict[int, list[float]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            values.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert choice.logprobs is not None
        assert values[choice.index] == choice.logprobs.token_logprobs

    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "\U0001f600 你好"}], **asked}
    talk |= {"logprobs": True, "top_logprobs": 2}
    chat = random.client.chat.completions.create(**talk)
    expected = random.engine.chat(talk["messages"], params)
    assert [one.message.content for one in chat.choices] == [one.text for one in expected.outputs]
    streamed: dict[int, str] = {}
    entries: dict[int, list[Any]] = {}
    roles: dict[int, list[Any]] = {}
    for chunk in random.client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **talk
    ):
        for choice in chunk.choices:
            roles.setdefault(choice.index, []).append(choice.delta.role)
            streamed[choice.index] = streamed.get(choice.index, "") + choice.delta.content
            entries.setdefault(choice.index, []).extend(choice.logprobs.content)
    assert chunk.usage == chat.usage
    for told in roles.values():  # once, with the first of it
        assert told == ["assistant"] + [None] * (len(told) - 1)
    for choice in chat.choices:
        assert streamed[choice.index] == choice.message.content
        assert choice.logprobs is not None
        assert entries[choice.index] == choice.logprobs.content
        output = expected.outputs[choice.index]
        assert output.logprobs is not None
        # Also of tokens that are a part of a character, whose text is U+FFFD.
        spelt = [bytes(entry.bytes) for entry in entries[choice.index]]
        for own, token in zip(spelt, output.token_ids, strict=True):
            assert token >= 256 or own == bytes([token])
        assert "\ufffd" in {entry.token for entry in entries[choice.index]}
        for entry, step in zip(entries[choice.index], output.logprobs, strict=True):
            best = sorted(step.values(), key=lambda one: one.rank)[:2]
            assert [one.logprob for one in entry.top_logprobs] == [one.logprob for one in best]


def test_json_schema(random: Served) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["Ada \U0001f600", "Alan 你好"]},
            "age": {"type": "integer"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=400, structured_outputs=StructuredOutputs(json=schema))
    expected = random.engine.chat([{"role": "user", "content": "who"}], params).text
    asked: dict[str, Any] = {
        "model": random.engine.name,
        "messages": [{"role": "user", "content": "who"}],
        "max_completion_tokens": 400,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema},
        },
    }
    whole = random.client.chat.completions.create(**asked)
    texts, _ = joined(
        random.client.chat.completions.create(**asked, stream=True), lambda one: one.delta.content
    )
    assert whole.choices[0].message.content == texts[0] == expected
    if whole.choices[0].finish_reason == "stop":
        assert set(json.loads(texts[0])) == {"name", "age"}


def test_several_prompts_and_token_ids(random: Served) -> None:
    expected = random.engine.generate([[1, 2], [3]], SamplingParams(max_tokens=9, n=2, seed=1))
    texts = [one.text for output in expected for one in output.outputs]
    asked: dict[str, Any] = {
        "model": random.engine.name, "prompt": [[1, 2], [3]], "max_tokens": 9, "n": 2, "seed": 1,
    }  # fmt: skip
    whole = random.client.completions.create(**asked)
    assert [one.text for one in whole.choices] == texts
    assert [one.index for one in whole.choices] == [0, 1, 2, 3]
    streamed, _ = joined(
        random.client.completions.create(stream=True, **asked), lambda one: one.text
    )
    assert [streamed[one] for one in range(4)] == texts


def test_many_clients_at_once(random: Served) -> None:
    prompts = [f"number {one}" for one in range(8)]
    expected = [random.engine.generate(one, SamplingParams(max_tokens=30)).text for one in prompts]

    async def main() -> list[str]:
        client = openai.AsyncOpenAI(**random.options, max_retries=0, timeout=60)

        async def ask(row: int) -> str:
            asked: dict[str, Any] = {"model": random.engine.name, "prompt": prompts[row]}
            if row % 2:
                done = await client.completions.create(max_tokens=30, **asked)
                return str(done.choices[0].text)
            stream = await client.completions.create(max_tokens=30, stream=True, **asked)
            return "".join([chunk.choices[0].text async for chunk in stream])

        try:
            return list(await asyncio.gather(*(ask(row) for row in range(8))))
        finally:
            await client.close()

    assert asyncio.run(main()) == expected


def test_errors_have_the_clients_types(random: Served) -> None:
    asked: dict[str, Any] = {"model": random.engine.name, "prompt": "x"}
    create = random.client.completions.create
    with pytest.raises(openai.NotFoundError, match="this server runs"):
        create(model="another", prompt="x")
    for wrong, text in (
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 5000, "prompt": "x" * 600}, "max_model_len"),
        ({"extra_body": {"logit_bais": {"1": 2}}}, "logit_bais"),
        ({"extra_body": {"priority": "high"}}, "priority"),
        ({"prompt": None}, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError, match=text):
            create(**{**asked, **wrong})
    with pytest.raises(openai.BadRequestError, match="messages"):
        random.client.chat.completions.create(model=random.engine.name, messages="hello")  # type: ignore[call-overload]
    waiting: list[specrt.RequestHandle] = []
    said = ""
    while "max_queued_requests" not in said:  # a place may come free in between
        fill(random.engine, waiting)
        try:
            create(**asked, max_tokens=1)
        except openai.RateLimitError as error:
            said = str(error)
    for handle in waiting:
        handle.cancel()
        handle.result(60)
    assert create(**asked, max_tokens=1).choices[0].finish_reason == "length"


def test_contents_in_parts(random: Served) -> None:
    create = random.client.chat.completions.create
    asked: dict[str, Any] = {"model": random.engine.name, "max_tokens": 4, "temperature": 0.0}
    parts: Any = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    in_parts, whole = (
        create(messages=[{"role": "user", "content": content}], **asked).choices[0].message.content
        for content in (parts, "hello")
    )
    assert in_parts == whole
    for wrong in ({"type": "image_url", "image_url": {"url": "x"}}, "text"):
        with pytest.raises(openai.BadRequestError, match=r"\[content\] expected text parts"):
            create(messages=[{"role": "user", "content": [wrong]}], **asked)  # type: ignore[list-item]


def test_what_means_nothing_is_no_error(random: Served) -> None:
    create = random.client.completions.create
    asked: dict[str, Any] = {"model": random.engine.name, "prompt": "x", "max_tokens": 2}
    assert create(**asked, echo=False, best_of=1).choices[0].finish_reason == "length"
    for wrong in ({"echo": True}, {"best_of": 2}, {"extra_body": {"prompt_logprobs": 1}}):
        with pytest.raises(openai.BadRequestError, match="known parameters"):
            create(**asked, **wrong)
    status, answer = post(random, "completions", b'{"model": "none", "prompt": "x"}')
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    assert answer["error"]["message"].startswith("this server runs '")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_bodies_that_are_none(random: Served, path: str) -> None:
    for raw in (b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000):
        status, answer = post(random, path, raw)
        assert status == 400, raw[:9]
        assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [[None]]}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "logprobs": 2}, "logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": {"role": "user"}}, "messages"),
    ],
)
def test_parameters_of_the_wrong_kind(random: Served, wrong: dict[str, Any], word: str) -> None:
    path = "chat/completions" if "messages" in wrong else "completions"
    asked = {"model": random.engine.name, **({} if "messages" in wrong else {"prompt": "x"})}
    asked |= {"max_tokens": 2, **wrong}
    status, answer = post(random, path, json.dumps(asked).encode())
    assert status == 400
    told = answer["error"]["message"]
    assert f"[{word}]" in told or ("known parameters" in told and word in told)


def post(served: Served, path: str, body: bytes) -> tuple[int, Any]:
    """Without the client, which would not say such things."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    try:
        connection.request("POST", f"/v1/{path}", body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def fill(engine: Engine, waiting: list[specrt.RequestHandle]) -> None:
    with contextlib.suppress(specrt.QueueFullError):
        while True:
            waiting.append(engine.submit([1], SamplingParams(max_tokens=500)))


@pytest.mark.parametrize("streamed", [True, False])
def test_hanging_up_cancels(random: Served, streamed: bool) -> None:
    decoder, scheduler = random.engine._decoder, random.engine._scheduler
    assert decoder is not None
    cancelled = random.engine.metrics().requests_finished.get("abort", 0)
    asked = {"model": random.engine.name, "prompt": "x", "max_tokens": 505, "stream": streamed}
    body = json.dumps(asked).encode()
    with socket.create_connection(("127.0.0.1", random.port), 60) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        while decoder.idle:
            time.sleep(0.0001)
        if streamed:
            assert client.recv(100)
        scheduler.lock.__enter__()  # it does not come to an end by itself
    try:
        wait_until(lambda: bool(scheduler._left))
    finally:
        scheduler.lock.__exit__()
    wait_until(lambda: decoder.idle)
    assert random.engine.metrics().requests_finished["abort"] == cancelled + 1
    assert random.engine.generate("x", specrt.SamplingParams(max_tokens=2)).token_ids


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
