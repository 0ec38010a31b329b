"""From records to shards: texts as given, or answered by the target, with its hidden states."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError, LoadError
from ..planning import Features
from ..sampling import SamplingParams
from .records import OnBadLine, Record, read_records, tokens_of
from .shards import Example, ShardStore
from .target import RunningTarget, TargetTables, run_texts

__all__ = ["Collected", "DataOptions", "collect"]

SHARD = 256
"""Records in a shard."""

Say = Callable[[str], None]
Told = Callable[[int, int, int], None]
"""Records done, records in all, tokens done."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where training texts come from."""

    data: Path
    """JSON lines; see `specrt.train.records`."""
    generate: bool = False
    """The target answers the records' last user message itself, through the engine."""
    max_new_tokens: int = 256
    """Of an answer."""
    temperature: float = 0.8
    greedy_share: float = 0.5
    """Of the answers, those that are greedy; the others are sampled at `temperature`."""
    max_length: int = 1024
    """Tokens of a text; what goes beyond is cut off, an answer earlier."""
    on_bad_line: OnBadLine = "error"
    max_disk: int = 20 * 10**9
    """Bytes of shards: records that would go beyond are left out."""
    batch: int = 128
    """Texts that run at once."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_length", "max_disk", "batch", "seed"):
            value = getattr(self, name)
            least = 0 if name == "seed" else 4 if name == "max_length" else 1
            most = 2**32 if name == "seed" else 2**63
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < most:
                raise InvalidArgumentError(
                    f"[{name}] expected an integer >= {least}, got {value!r}"
                )
        if not 0.0 <= self.greedy_share <= 1.0:
            raise InvalidArgumentError(
                f"[greedy_share] expected a share from 0 to 1, got {self.greedy_share!r}"
            )
        SamplingParams(temperature=self.temperature)

    def made_with(self, tables: TargetTables, features: Features) -> dict[str, Any]:
        """What shards depend on: to go on with them, all of it has to be the same."""
        digest = hashlib.sha256()
        try:
            digest.update(self.data.read_bytes())
        except OSError as error:
            raise LoadError(f"[{self.data}] cannot be read: {error}") from error
        made: dict[str, Any] = {
            "format": 1,
            "target": tables.fingerprint(),
            "data": digest.hexdigest()[:16],
            "features": [list(features.layers), features.normed],
            "generate": self.generate,
            "max_length": self.max_length,
            "on_bad_line": self.on_bad_line,
        }
        if self.generate:
            made |= {
                "max_new_tokens": self.max_new_tokens,
                "temperature": self.temperature,
                "greedy_share": self.greedy_share,
                "seed": self.seed,
            }
        return made

    def params_of(self, number: int, room: int) -> SamplingParams:
        """How the record of that number is answered, with `room` tokens at most."""
        greedy = int((number + 1) * self.greedy_share) > int(number * self.greedy_share)
        return SamplingParams(
            max_tokens=min(self.max_new_tokens, room),
            temperature=0.0 if greedy else self.temperature,
            seed=(self.seed << 32) + number,
        )


@dataclass(frozen=True)
class Collected:
    """What came of it."""

    store: ShardStore
    examples: int
    tokens: int
    learnt: int
    left_out: int
    """Records for which there was no room on the disk, or whose prompt is too long."""
    seconds: float
    """Spent by this call: what an earlier one had done is not in it."""


class _Plan:
    """The prompts of all records, and which shards are still to be made."""

    def __init__(
        self, options: DataOptions, target: RunningTarget, records: list[Record], say: Say
    ) -> None:
        tokenizer = target.tokenizer
        if tokenizer is None:
            raise InvalidArgumentError("[tokenizer] expected one to read the data with, got none")
        self.prompts: list[tuple[list[int], list[int]]] = []
        self.left_out = 0
        for record in records:
            if options.generate:
                tokens = tokenizer.apply_chat_template(list(record.question))
                learnt = [0] * len(tokens)
                # Nothing to learn from an answer without room.
                fits = len(tokens) + 8 <= options.max_length
            else:
                try:
                    tokens, learnt = tokens_of(record, tokenizer)
                except ValueError as error:
                    if options.on_bad_line == "error":
                        raise LoadError(f"[{options.data} line {record.line}] {error}") from error
                    say(f"{options.data} line {record.line} skipped: {error}")
                    self.left_out += 1
                    continue
                tokens, learnt = tokens[: options.max_length], learnt[: options.max_length]
                fits = sum(learnt) > 0 and len(tokens) > 2
            if fits:
                self.prompts.append((tokens, learnt))
            else:
                self.left_out += 1
        if not self.prompts:
            raise LoadError(f"[{options.data}] expected at least one record that fits, got none")

    @property
    def shards(self) -> int:
        return -(-len(self.prompts) // SHARD)

    def of(self, shard: int) -> range:
        return range(shard * SHARD, min(len(self.prompts), (shard + 1) * SHARD))


def collect(
    target: Any,
    tables: TargetTables,
    features: Features,
    options: DataOptions,
    folder: Path,
    *,
    dtype: str = "auto",
    tokenizer: Any = None,
    threads: int | None = None,
    say: Say,
    told: Told = lambda *_: None,
) -> Collected:
    """Fill a folder with shards; those that are there already are left alone.

    `say` is told what will be taken before it is, and each bad line. Raises as `Engine`,
    `read_records` and `ShardStore` do.
    """
    started = time.monotonic()
    found = read_records(
        options.data, answers=not options.generate, on_bad_line=options.on_bad_line
    )
    for bad in found.bad:
        say(f"{options.data} line {bad.number} skipped: {bad.reason}")
    store = ShardStore(folder, options.made_with(tables, features))
    store.drop_partial()
    with RunningTarget(
        target,
        features,
        dtype=dtype,
        tokenizer=tokenizer,
        threads=threads,
        max_length=options.max_length,
        batch=options.batch,
    ) as running:
        plan = _Plan(options, running, found.records, say)
        width = features_width(tables, features)
        missing = [one for one in range(plan.shards) if not store.has(one)]
        need = sum(_most_rows(plan, options, one) for one in missing) * width * 2
        used = store.bytes_used()
        say(
            f"{len(plan.prompts)} texts in {plan.shards} shards, {len(missing)} to make: at most "
            f"{need / 1e9:.2f} GB more in {folder}, where {used / 1e9:.2f} GB are; bound "
            f"{options.max_disk / 1e9:.2f} GB"
        )
        store.check_room(min(need, max(0, options.max_disk - used)))
        _fill(running, plan, options, store, missing, told)
    examples = tokens = learnt = 0
    for one in store.examples():
        examples, tokens = examples + 1, tokens + len(one.tokens)
        learnt += int((one.learnt > 0).sum())
    left_out = plan.left_out + len(plan.prompts) - examples
    if examples == 0:
        raise InvalidArgumentError(
            f"[max_disk] expected room for one shard at least, got {options.max_disk} bytes"
        )
    return Collected(store, examples, tokens, learnt, left_out, time.monotonic() - started)


def features_width(tables: TargetTables, features: Features) -> int:
    """Values a position."""
    return (len(features.layers) + features.normed) * tables.fields.hidden_size


def _most_rows(plan: _Plan, options: DataOptions, shard: int) -> int:
    more = options.max_new_tokens if options.generate else 0
    return sum(min(len(plan.prompts[one][0]) + more, options.max_length) for one in plan.of(shard))


def _fill(
    target: RunningTarget,
    plan: _Plan,
    options: DataOptions,
    store: ShardStore,
    missing: list[int],
    told: Told,
) -> None:
    """Run what is missing. Texts of the next shards enter as those of the first end, so that
    passes stay full; a shard is written when its last text has ended."""
    full = False
    waiting: dict[int, dict[int, Example]] = {}
    done = tokens = 0
    total = sum(len(plan.of(one)) for one in missing)

    def entering() -> Iterator[int]:
        for shard in missing:
            if full:
                return
            waiting[shard] = {}
            yield from plan.of(shard)

    if options.generate:
        ran = target.run(
            (one, prompt, options.params_of(one, options.max_length - len(prompt)))
            for one in entering()
            for prompt in (plan.prompts[one][0],)
        )
    else:
        ran = run_texts(target, ((one, plan.prompts[one][0]) for one in entering()))
    for text in ran:
        shard = text.number // SHARD
        learnt = np.array(plan.prompts[text.number][1], dtype=np.uint8)
        if options.generate:
            learnt = np.zeros(len(text.tokens), dtype=np.uint8)
            greedy = options.params_of(text.number, 1).temperature == 0.0
            learnt[text.prompt_tokens :] = 2 if greedy else 1
        waiting[shard][text.number] = Example(text.tokens, learnt, text.features)
        done, tokens = done + 1, tokens + len(text.tokens)
        told(done, total, tokens)
        if len(waiting[shard]) == len(plan.of(shard)):
            examples = waiting.pop(shard)
            ordered = [examples[one] for one in sorted(examples)]
            if store.bytes_used() + store.bytes_of(ordered) > options.max_disk:
                full = True
                continue
            store.write(shard, ordered)
