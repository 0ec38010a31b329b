"""Keeps an engine busy for minutes: arrivals, cancels, bad requests and full queues at random.

    python bench/soak.py --minutes 20
    python bench/soak.py --minutes 20 --model FOLDER --drafter suffix

Everything that comes out is compared with what a plain engine said of it alone; a request that
nothing comes of for `--patience` seconds is stuck; memory may not grow once it has warmed up. Ends
with a line of numbers, and status 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import specrt
from specrt import Engine, SamplingParams, SpecrtError
from specrt.drafters import DraftModel, Merge, NGram, Suffix

WARM = 0.25
"""Of the time, after which memory is measured,"""
GROWTH = 24 << 20
"""and how many bytes more it may come to: what allocators keep."""


def requests(vocab: int, limit: int) -> list[tuple[list[int], SamplingParams]]:
    """What is asked for: prompts that begin alike or not, of all lengths, in every manner."""
    dice = random.Random(1)
    shared = [dice.randrange(vocab) for _ in range(40)]
    made = []
    for row in range(48):
        own = [dice.randrange(vocab) for _ in range(1 + row % 17)]
        prompt = shared[: 8 * (row % 6)] + own
        options: dict[str, Any] = {
            "max_tokens": dice.choice([1, 5, 20, 60, 120]),
            "temperature": dice.choice([0.0, 0.0, 0.7, 1.1]),
            "seed": row,
            "n": dice.choice([1, 1, 1, 3]),
            "logprobs": dice.choice([None, None, 1]),
            "repetition_penalty": dice.choice([1.0, 1.0, 1.2]),
            "ignore_eos": row % 2 == 0,
        }
        if len(prompt) + options["max_tokens"] < limit:
            made.append((prompt, SamplingParams(**options)))
    return made


def essence(output: specrt.RequestOutput) -> Any:
    return [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in output.outputs]


class Soak:
    """One engine under load, and what it should say."""

    def __init__(self, engine: Engine, expected: list[Any], asked: list[Any], patience: float):
        self.engine, self.expected, self.asked, self.patience = engine, expected, asked, patience
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stop = threading.Event()
        self._lock = threading.Lock()

    def note(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def check(self, row: int, output: specrt.RequestOutput, *, cancelled: bool = False) -> None:
        got, whole = essence(output), self.expected[row]
        aborted = any(one.finish_reason == "abort" for one in output.outputs)
        if aborted:
            fine = cancelled and all(
                mine[0] == its[0][: len(mine[0])] for mine, its in zip(got, whole, strict=True)
            )
        else:
            fine = got == whole
        self.note("cancelled" if aborted else "finished")
        self.note_preemptions(output)
        if not fine:
            self.wrong.append(f"request {row}: {got} instead of {whole}")

    def note_preemptions(self, output: specrt.RequestOutput) -> None:
        with self._lock:
            self.counts["preemptions"] += sum(one.metrics.preemptions for one in output.outputs)
            self.counts["tokens"] += sum(len(one.token_ids) for one in output.outputs)

    def work(self, seed: int) -> None:
        dice = random.Random(seed)
        kinds = [self.by_handle, self.by_stream, self.by_generate, self.by_tasks, self.badly]
        while not self.stop.is_set():
            kind = dice.choice(kinds)
            try:
                kind(dice)
            except specrt.QueueFullError:
                self.note("queue full")
                time.sleep(0.005)
            except TimeoutError:
                self.wrong.append(f"{kind.__name__} is stuck")
                self.stop.set()
            except Exception as error:
                self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def by_handle(self, dice: random.Random) -> None:
        row = dice.randrange(len(self.asked))
        handle = self.engine.submit(*self.asked[row], priority=dice.randrange(3))
        cancelled = dice.random() < 0.3
        if cancelled:
            time.sleep(dice.random() * 0.02)
            handle.cancel()
        elif dice.random() < 0.1:
            self.note("let go of")
            return
        self.check(row, handle.result(self.patience), cancelled=cancelled)

    def by_stream(self, dice: random.Random) -> None:
        row = dice.randrange(len(self.asked))
        prompt, params = self.asked[row]
        if params.n > 1:
            return
        stream, text = self.engine.stream(prompt, params), ""
        leave = dice.random() < 0.3
        while True:
            try:
                text += next(stream).text
            except StopIteration as end:
                self.check(row, end.value)
                if text != end.value.text:
                    self.wrong.append(f"request {row}: streamed {text!r}")
                return
            if leave and dice.random() < 0.2:
                stream.close()
                self.note("left a stream")
                return

    def by_generate(self, dice: random.Random) -> None:
        rows = [dice.randrange(len(self.asked)) for _ in range(1 + dice.randrange(3))]
        prompts, params = zip(*(self.asked[row] for row in rows), strict=True)
        for row, output in zip(rows, self.engine.generate(prompts, params), strict=True):
            self.check(row, output)

    def by_tasks(self, dice: random.Random) -> None:
        async def one(row: int) -> None:
            handle = self.engine.submit(*self.asked[row])
            if dice.random() < 0.3:
                async for _ in handle:
                    if dice.random() < 0.3:
                        self.note("left a task's stream")
                        return
            self.check(row, await handle)

        async def main() -> None:
            rows = [dice.randrange(len(self.asked)) for _ in range(3)]
            tasks = asyncio.gather(*(one(row) for row in rows))
            await asyncio.wait_for(tasks, self.patience)

        asyncio.run(main())

    def badly(self, dice: random.Random) -> None:
        prompt: list[int] = dice.choice(
            [[], [-1], [1 << 30], [1] * (self.engine.max_model_len + 1)]
        )
        try:
            self.engine.submit(prompt)
        except SpecrtError:
            self.note("refused")
        else:
            self.wrong.append(f"{prompt[:3]} of {len(prompt)} tokens was taken")


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def soak(engine: Engine, plain: Engine, vocab: int, args: argparse.Namespace) -> int:
    asked = requests(vocab, args.limit)
    expected = [essence(plain.generate(prompt, params)) for prompt, params in asked]
    plain.close()
    run = Soak(engine, expected, asked, args.patience)
    decoder = engine._decoder
    assert decoder is not None
    free = decoder.free_kv_tokens
    threads = [threading.Thread(target=run.work, args=(one,)) for one in range(args.threads)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    seconds, first, most = args.minutes * 60, 0, 0
    while time.monotonic() < begin + seconds and not run.stop.is_set():
        time.sleep(min(1.0, seconds / 20))
        if time.monotonic() > begin + WARM * seconds:
            gc.collect()
            first = first or resident()
            most = max(most, resident())
    run.stop.set()
    for thread in threads:
        thread.join(args.patience)
        if thread.is_alive():
            run.wrong.append("a thread is stuck")
    end = time.monotonic() + args.patience
    while not decoder.idle and time.monotonic() < end:
        time.sleep(0.01)
    if not decoder.idle or decoder.free_kv_tokens != free:
        run.wrong.append(f"blocks leak: {decoder.free_kv_tokens} of {free} tokens free")
    if most - first > GROWTH:
        run.wrong.append(f"memory grew from {first >> 20} to {most >> 20} MiB")
    numbers = {**run.counts, "minutes": args.minutes, "wrong": len(run.wrong)}
    numbers |= {"MiB warm": first >> 20, "MiB most": most >> 20}
    print(json.dumps(numbers))
    for one in run.wrong[:10]:
        print(one[:500], file=sys.stderr)
    return 1 if run.wrong else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A soak of the engine.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--model", help="a folder or hub id; the demo model unless given")
    parser.add_argument("--drafter", default="merged", help="ngram, suffix, merged or none")
    parser.add_argument("--draft-model", help="for merged: a smaller model besides")
    parser.add_argument("--threads", type=int, default=8, help="that ask")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds until it is stuck")
    parser.add_argument("--limit", type=int, default=256, help="tokens of the longest request")
    args = parser.parse_args(arguments)
    if args.model is None:
        from specrt.demo import demo_model_path

        args.model = demo_model_path()
    drafters: dict[str, Any] = {"none": None, "ngram": NGram(), "suffix": Suffix()}
    parts = [NGram(), Suffix()]
    if args.draft_model is not None:
        parts.append(DraftModel(model=args.draft_model))
    drafters["merged"] = Merge(parts)
    sizes: dict[str, Any] = {"max_model_len": args.limit, "threads": 2}
    plain = Engine(args.model, **sizes)
    vocab = plain.tokenizer.vocab_size if plain.tokenizer is not None else 100
    # A pool of two and a half of the longest requests for eight places: it runs full all the time.
    whole = specrt.plan(args.model, **sizes, max_batch_size=8)
    room = max(whole.target_kv_cache * 5 // 16, 1)
    with Engine(
        args.model,
        drafters[args.drafter],
        max_batch_size=8,
        max_num_batched_tokens=64,
        max_queued_requests=12,
        kv_cache_bytes=room,
        check_invariants=True,
        **sizes,
    ) as engine:
        engine._scheduler._reserve = 8
        return soak(engine, plain, vocab, args)


if __name__ == "__main__":
    sys.exit(main())
