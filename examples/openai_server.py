"""An OpenAI-compatible server: completions and chat, streamed or not, over one engine.

    pip install '.[server]'
    python examples/openai_server.py HuggingFaceTB/SmolLM2-135M-Instruct --drafter ngram

Parameters are OpenAI's and those of `specrt.SamplingParams`; one that is neither is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import specrt

Json = dict[str, Any]
Steps = list[dict[int, specrt.Logprob]]
NOT_SAME = {"logprobs", "prompt_logprobs", "structured_outputs"}
SAME = {one.name for one in fields(specrt.SamplingParams)} - NOT_SAME
NOT_SAMPLING = {"model", "messages", "prompt", "stream", "stream_options", "priority", "user"}
MEANS_NOTHING = (("echo", False), ("best_of", 1), ("suffix", ""), ("store", False))
"""What clients send that asks for nothing; other values of these are refused."""
WRONG_REQUEST = (ValueError, specrt.CapacityError, specrt.UnsupportedError)


def of_kind(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, kind):
        return value
    raise specrt.InvalidArgumentError(f"[{name}] expected {kind.__name__}, got {value!r}")


def schema_of(form: Json) -> Json | str | None:
    """What `response_format` asks for; None: any text."""
    kind = of_kind("response_format", form, dict).get("type")
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        schema: Json | None = of_kind("json_schema", form.get(kind), dict).get("schema")
        return {} if schema is None else schema
    if kind != "text":
        raise specrt.InvalidArgumentError(
            f"[response_format] expected type text, json_object or json_schema, got {kind!r}"
        )
    return None


def sampling_params(body: Json, engine: specrt.Engine, chat: bool) -> specrt.SamplingParams:
    given = {key: body[key] for key in body.keys() - NOT_SAMPLING if body[key] is not None}
    for key, nothing in MEANS_NOTHING:
        if key in given and given[key] == nothing:
            del given[key]
    wanted: Json = {"max_tokens": None if chat else 16}  # None: as many as there is room for
    wanted |= {key: given.pop(key) for key in SAME & given.keys()}
    wanted["max_tokens"] = given.pop("max_completion_tokens", wanted["max_tokens"])
    if "logit_bias" in wanted:  # JSON has no integer keys
        bias = of_kind("logit_bias", wanted["logit_bias"], dict)
        wanted["logit_bias"] = {int(key): value for key, value in bias.items()}
    asked = given.pop("logprobs", False)
    if chat and of_kind("logprobs", asked, bool):
        wanted["logprobs"] = given.pop("top_logprobs", 0)
    elif asked is not False:
        wanted["logprobs"] = asked
    schema = schema_of(given.pop("response_format", {"type": "text"}))
    if schema is not None:
        wanted["structured_outputs"] = specrt.StructuredOutputs(json=schema)
    if given:
        raise specrt.InvalidArgumentError(f"[body] expected known parameters, got {given}")
    return replace(engine.default_sampling_params, **wanted)


def chat_logprobs(steps: Steps, most: int, tokenizer: specrt.Tokenizer | None) -> Json:
    def entry(token: int, one: specrt.Logprob) -> Json:
        spelt = list(tokenizer.token_bytes(token)) if tokenizer is not None else None
        return {"token": one.decoded_token, "logprob": one.logprob, "bytes": spelt}

    def best(step: dict[int, specrt.Logprob]) -> list[Json]:
        ranked = sorted(step.items(), key=lambda pair: pair[1].rank)[:most]
        return [entry(*pair) for pair in ranked]

    return {"content": [{**entry(*next(iter(s.items()))), "top_logprobs": best(s)} for s in steps]}


def text_logprobs(steps: Steps) -> Json:
    chosen = [next(iter(step.values())) for step in steps]
    return {
        "tokens": [one.decoded_token for one in chosen],
        "token_logprobs": [one.logprob for one in chosen],
        "top_logprobs": [{o.decoded_token: o.logprob for o in step.values()} for step in steps],
    }


def usage(outputs: list[specrt.RequestOutput]) -> Json:
    prompt = sum(len(one.prompt_token_ids) for one in outputs)
    made = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def failure(error: Exception) -> Json:
    return {"error": {"message": str(error), "type": type(error).__name__}}


def conversation(messages: Any) -> Any:
    """Contents in text parts become one text each; what is wrong is left to be refused."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return messages
    return [{**one, "content": text_of(one.get("content"))} for one in messages]


def text_of(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise specrt.UnsupportedError(f"[content] expected text parts, got {part!r}")
    return "".join(of_kind("text", part.get("text"), str) for part in content)


async def body_of(request: Request) -> Json:
    try:
        return of_kind("body", await request.json(), dict)  # type: ignore[no-any-return]
    except RecursionError as error:
        raise specrt.InvalidArgumentError("[body] expected less deep JSON") from error


async def unless_gone(
    request: Request, handles: list[specrt.RequestHandle]
) -> list[specrt.RequestOutput]:
    """All outputs; once whoever asked has hung up, what there is of them."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for handle in handles:
            handle.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return [await handle for handle in handles]
    finally:
        watcher.cancel()
        for handle in handles:  # one has failed: nobody waits for the others
            handle.cancel()


def build(engine: specrt.Engine) -> FastAPI:
    app = FastAPI(title="specrt")

    def start(body: Json, params: specrt.SamplingParams, chat: bool) -> list[specrt.RequestHandle]:
        priority = body.get("priority", 0)
        if chat:
            messages = conversation(body.get("messages"))
            return [engine.chat_submit(messages, params, priority=priority)]
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return [
            engine.submit(p, params, priority=priority) for p in (prompt if several else [prompt])
        ]

    async def answer(request: Request, chat: bool) -> Response:
        body = await body_of(request)
        if body.get("model") != engine.name:
            wrong = f"this server runs {engine.name!r}, not {body.get('model')!r}"
            told = {"message": wrong, "type": "NotFoundError", "code": "model_not_found"}
            return JSONResponse({"error": told}, status_code=404)
        stream = of_kind("stream", body.get("stream") or False, bool)
        options = of_kind("stream_options", body.get("stream_options") or {}, dict)
        params = sampling_params(body, engine, chat)
        handles = start(body, params, chat)
        head: Json = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": engine.name}
        head["object"] = "chat.completion" if chat else "text_completion"

        def choice(row: int, one: specrt.Increment | specrt.Completion, key: str) -> Json:
            text: Any = {"role": "assistant", "content": one.text} if chat else one.text
            made = {"index": row * params.n + one.index, key: text, "logprobs": None}
            if one.logprobs is not None:
                most = params.logprobs or 0
                made["logprobs"] = text_logprobs(one.logprobs)
                if chat:
                    made["logprobs"] = chat_logprobs(one.logprobs, most, engine.tokenizer)
            return {**made, "finish_reason": one.finish_reason or None}

        async def events() -> AsyncIterator[str]:
            chunk = {**head, "object": "chat.completion.chunk"} if chat else head
            key = "delta" if chat else "text"
            begun = set()
            try:
                for row, handle in enumerate(handles):
                    async for one in handle:
                        told = choice(row, one, key)
                        if chat and one.index in begun:  # the role comes once
                            del told["delta"]["role"]
                        begun.add(one.index)
                        yield event({**chunk, "choices": [told]})
                if options.get("include_usage"):
                    total = usage([await handle for handle in handles])
                    yield event({**chunk, "choices": [], "usage": total})
            except specrt.SpecrtError as error:
                yield event(failure(error))
            finally:  # whoever has hung up needs no more of it
                for handle in handles:
                    handle.cancel()
            yield "data: [DONE]\n\n"

        if stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        outputs = await unless_gone(request, handles)
        key = "message" if chat else "text"
        choices = [choice(row, c, key) for row, out in enumerate(outputs) for c in out.outputs]
        return JSONResponse({**head, "choices": choices, "usage": usage(outputs)})

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat=True)

    @app.get("/v1/models")
    async def models() -> Json:
        own = {"id": engine.name, "object": "model", "created": 0, "owned_by": "specrt"}
        return {"object": "list", "data": [own]}

    async def failed(_: Request, error: Exception) -> JSONResponse:
        full = isinstance(error, specrt.QueueFullError)
        status = 429 if full else 400 if isinstance(error, WRONG_REQUEST) else 500
        return JSONResponse(failure(error), status_code=status)

    for kind in (specrt.SpecrtError, *WRONG_REQUEST):
        app.exception_handler(kind)(failed)
    return app


def event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server.")
    parser.add_argument("model", help="a folder, hub id or .gguf file")
    parser.add_argument("--drafter", help='"ngram", "suffix", or a smaller model')
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--max-queued-requests", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = vars(parser.parse_args())
    where = {"host": args.pop("host"), "port": args.pop("port")}
    with specrt.Engine(args.pop("model"), args.pop("drafter"), **args) as engine:
        uvicorn.run(build(engine), **where)


if __name__ == "__main__":
    main()
