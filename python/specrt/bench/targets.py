"""What is measured: a target, loaded once for many engines, and what competes on it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .. import _core
from ..drafters import MTP, Merge, SelfDraft, Suffix, resolve
from ..engine import Engine
from ..errors import InvalidArgumentError
from ..planning import SAVED_SUFFIX
from ..text import Tokenizer
from .prompts import BenchPrompt
from .random_model import random_model

__all__ = ["PLAIN", "Contender", "Target", "contenders", "parse_drafter"]


@dataclass(frozen=True)
class Contender:
    """One way to decode."""

    name: str
    drafter: Any = None
    policy: str | None = None
    """None: the engine's own default."""
    gamma: int | None = None
    """num_speculative_tokens; None: the drafter's own default."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Engine`."""
        found: dict[str, Any] = {"drafter": self.drafter}
        if self.policy is not None:
            found["policy"] = self.policy
        if self.gamma is not None:
            found["num_speculative_tokens"] = self.gamma
        return found


PLAIN = Contender("plain")


def parse_drafter(text: str) -> Any:
    """As the command line names it: what `Engine` takes as `drafter`, or several joined by "+".

    Beside `Engine`'s own names: "self-int4", "self-int8" and "self-w8a8" (the target in that
    precision), "self-layers=N" (its first N layers). "suffix" looks in a request's own text alone
    here: what repeats the same prompts would find its own earlier answers.
    """
    parts = text.split("+")
    if len(parts) > 1:
        return Merge([parse_drafter(one) for one in parts])
    if text == "suffix":
        return Suffix(suffix_decoding_max_cached_requests=0)
    if text in ("self-int4", "self-int8", "self-w8a8"):
        return SelfDraft(precision=text.removeprefix("self-"))
    if text.startswith("self-layers="):
        count = text.removeprefix("self-layers=")
        if not count.isdigit():
            raise InvalidArgumentError(f"[drafter] expected self-layers=N, got {text!r}")
        return SelfDraft(layers=int(count))
    return resolve(text)


def contenders(
    drafters: Sequence[str], policies: Sequence[str], gammas: Sequence[int]
) -> list[Contender]:
    """Plain decoding, then each drafter with each fixed γ and each policy.

    Without γ and policies: each drafter as `Engine` has it by default.
    """
    found = [PLAIN]
    for text in drafters:
        drafter = parse_drafter(text)
        label = f"{text} " if len(drafters) > 1 else ""
        for gamma in gammas:
            found.append(Contender(f"{label}fixed γ={gamma}", drafter, "fixed", gamma))
        found += [Contender(f"{label}{policy}", drafter, policy) for policy in policies]
        if not gammas and not policies:
            found.append(Contender(text, drafter))
    names = [one.name for one in found]
    twice = {one for one in names if names.count(one) > 1}
    if twice:
        raise InvalidArgumentError(f"[contenders] expected each once, got {', '.join(twice)} twice")
    return found


class Target:
    """A model as one packed file that all engines map: its weights are in memory once."""

    def __init__(
        self,
        model: str | None,
        *,
        random: str | None = None,
        dtype: str = "auto",
        tokenizer: str | None = None,
        threads: int | None = None,
        max_model_len: int = 1024,
        cpu_isa: str = "auto",
    ) -> None:
        """model: as `Engine`'s target; None takes the demo model. random: a shape's name."""
        if model is not None and random is not None:
            raise InvalidArgumentError(f"[random] expected no model beside it, got {model}")
        self._folder = tempfile.TemporaryDirectory(prefix="specrt-bench-")
        folder = Path(self._folder.name)
        self.common: dict[str, Any] = {
            "threads": threads,
            "max_model_len": max_model_len,
            "cpu_isa": cpu_isa,
        }
        self.tokenizer: Tokenizer | None = None
        if tokenizer is not None:
            self.tokenizer = Tokenizer.from_pretrained(tokenizer)
        self._given: str | Path = ""
        if random is not None:
            self.name = f"{random}, random weights"
            self.path = self._given = random_model(random, folder, dtype=dtype)
        else:
            if model is None:
                from ..demo import demo_model_path

                model = str(demo_model_path())
            self._given = model
            self.name = Path(model).name
            self.path = self._pack(model, folder, dtype)
        # A file that was packed before has its own dtype: another one is refused here.
        with self.engine(PLAIN, max_batch_size=1, dtype=dtype) as engine:
            self.dtype: str = engine.dtype
            self.cpu_isa: str = engine.cpu_isa
            self.threads: int = engine.threads
        self.vocab_size: int = _core.Model.map(str(self.path)).config.vocab_size

    def _pack(self, model: str, folder: Path, dtype: str) -> Path:
        if model.endswith(SAVED_SUFFIX) and os.path.isfile(model):
            return Path(model)
        packed = folder / "target.specrt"
        limits = {**self.common, "max_batch_size": 1}
        with Engine(model, dtype=dtype, tokenizer=self.tokenizer, **limits) as engine:
            self.tokenizer = engine.tokenizer
            engine.save(packed)
        return packed

    def engine(self, contender: Contender, **options: Any) -> Engine:
        """An engine for it; `options` as `Engine` has them."""
        # A multi-token prediction module is read from the target's own checkpoint.
        source = self._given if _reads_checkpoint(contender.drafter) else self.path
        return Engine(
            source, tokenizer=self.tokenizer, **{**self.common, **contender.options(), **options}
        )

    def encode(self, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
        """Token ids, through the chat template where there is one. Raises InvalidArgumentError."""
        if self.tokenizer is None:
            raise InvalidArgumentError(
                "[prompts] expected a target with a tokenizer, got none: give --tokenizer"
            )
        if not getattr(self.tokenizer.hf, "chat_template", None):
            return [self.tokenizer.encode(one.text) for one in prompts]
        return [
            self.tokenizer.apply_chat_template([{"role": "user", "content": one.text}])
            for one in prompts
        ]

    def random_prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Prompts of random tokens, always the same. Raises InvalidArgumentError."""
        limit = self.common["max_model_len"]
        if not 0 < tokens < limit:
            raise InvalidArgumentError(
                f"[prompt_tokens] expected 1 to {limit - 1}, below max_model_len, got {tokens}"
            )
        draw = np.random.default_rng(1)
        return [draw.integers(0, self.vocab_size, tokens).tolist() for _ in range(count)]

    def describe(self) -> dict[str, Any]:
        """For headings and JSON."""
        return {
            "model": self.name,
            "dtype": self.dtype,
            "cpu_isa": self.cpu_isa,
            "threads": self.threads,
        }

    def __str__(self) -> str:
        plural = "" if self.threads == 1 else "s"
        return f"{self.name}  {self.dtype}  {self.cpu_isa}  {self.threads} thread{plural}"

    def close(self) -> None:
        """Remove what was written."""
        self._folder.cleanup()

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _reads_checkpoint(drafter: Any) -> bool:
    if isinstance(drafter, Merge):
        return any(_reads_checkpoint(one) for one in drafter.parts)
    return isinstance(drafter, MTP) or drafter == "mtp"
