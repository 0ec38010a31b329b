"""The target as training needs it: running texts with its hidden states kept, and its tables."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import InvalidArgumentError, SpecrtError
from ..loaded import open_target
from ..loading import open_checkpoint
from ..planning import Features, check_room, plan_memory, plan_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..loading import Checkpoint, ModelFields
    from ..loading.source import Tensor
    from ..sampling import SamplingParams
    from ..text import Tokenizer

__all__ = ["Ran", "RunningTarget", "TargetTables", "run_texts"]


@dataclass(frozen=True)
class Ran:
    """One text that the target has run.

    `features` are bfloat16 bits [positions, states * hidden] of its first positions: all but the
    last token's where the target chose that, all where it was given.
    """

    number: int
    tokens: NDArray[np.int32]
    prompt_tokens: int
    features: NDArray[np.uint16]


class RunningTarget:
    """A target in memory whose hidden states are recorded. A context manager."""

    def __init__(
        self,
        target: Any,
        features: Features,
        *,
        dtype: str = "auto",
        tokenizer: Any = None,
        threads: int | None = None,
        max_length: int,
        batch: int = 128,
        rows: int = 1024,
    ) -> None:
        """Open it for texts of at most `max_length` tokens, `batch` at once, in passes of `rows`.

        Raises as `Engine` does.
        """
        opened = open_target(target, tokenizer=tokenizer, dtype=dtype, max_model_len=None)
        try:
            longest = opened.shape.config.max_position_embeddings
            if max_length > longest:
                raise InvalidArgumentError(
                    f"[max_length] expected at most the target's {longest}, got {max_length}"
                )
            sizes = plan_sizes(
                opened.shape,
                None,
                max_model_len=max_length,
                kv_cache_bytes=None,
                max_batch_size=batch,
                max_num_batched_tokens=max(rows, batch),
                block_size=16,
                kv_cache_dtype="auto",
                enable_prefix_caching=False,
                features=features,
            )
            check_room(plan_memory(opened.shape, None, sizes))
            self.tokenizer = opened.tokenizer
            self.eos_token_ids = opened.eos_token_ids
            self.vocab_size: int = opened.shape.config.vocab_size
            self.dtype: str = opened.shape.dtype
            model = opened.load()
        finally:
            opened.close()
        self.max_length = max_length
        self._features = features
        self._decoder: _core.Decoder | None = _core.Decoder(
            model,
            **sizes.target_options(),
            team=_core.ThreadTeam(threads or 0, False),
            cpu_isa=_core.resolve_cpu_isa("auto"),
            check_invariants=False,
        )

    def __enter__(self) -> RunningTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self._decoder = None

    def run(self, texts: Iterable[tuple[int, list[int], SamplingParams]]) -> Iterator[Ran]:
        """Run (number, prompt, parameters), many at once, and give each as it ends.

        What a text comes to does not depend on what else runs. Raises SpecrtError where one fails.
        """
        decoder = self._decoder
        assert decoder is not None
        recorder = _core.FeatureRecorder(**self._features.options())
        running: dict[int, tuple[int, list[int], list[int]]] = {}
        waiting = iter(texts)
        entering = next(waiting, None)
        while running or entering is not None:
            while entering is not None:
                number, prompt, params = entering
                most = params.max_tokens
                if not decoder.can_add(
                    len(prompt), decoder.most_tokens(len(prompt)) if most is None else most
                ):
                    break
                core = params.to_core(eos_token_ids=self.eos_token_ids)
                running[decoder.add(prompt, core, recorder)] = (number, prompt, [])
                entering = next(waiting, None)
            for sequence, tokens, _, _, finish, _, error in decoder.round(
                _core.plan_fixed(decoder, 0)
            ):
                number, prompt, chosen = running[sequence]
                chosen += tokens
                if error:
                    raise SpecrtError(f"[text {number}] {error}")
                if finish:
                    del running[sequence]
                    yield Ran(
                        number,
                        np.asarray([*prompt, *chosen], dtype=np.int32),
                        len(prompt),
                        recorder.take(sequence),
                    )


def run_texts(target: RunningTarget, texts: Iterable[tuple[int, list[int]]]) -> Iterator[Ran]:
    """Run given texts whole: (number, tokens) -> their hidden states, nothing chosen."""
    from ..sampling import SamplingParams

    one = SamplingParams(max_tokens=1, ignore_eos=True)
    for ran in target.run((number, tokens, one) for number, tokens in texts):
        yield Ran(ran.number, ran.tokens[: ran.prompt_tokens], ran.prompt_tokens, ran.features)


class TargetTables:
    """A target's config and tensors, as its checkpoint has them. A context manager."""

    def __init__(self, target: Any, dtype: str = "auto") -> None:
        """Raises as `open_checkpoint` does; a file that `Engine.save` wrote has no tables."""
        if isinstance(target, (str, os.PathLike)) and os.fspath(target).endswith(".specrt"):
            raise InvalidArgumentError(
                f"[target] expected a checkpoint to train from, got the packed {os.fspath(target)}"
            )
        self._checkpoint: Checkpoint = open_checkpoint(target, dtype=dtype)
        self.name: str = self._checkpoint.name
        self.fields: ModelFields = self._checkpoint.config
        self.names: list[str] = self._checkpoint.names
        self.eos_token_ids = self._checkpoint.eos_token_ids
        self.bos_token_id = self._checkpoint.bos_token_id

    def __enter__(self) -> TargetTables:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoint.close()

    def tensor(self, canonical: str) -> Tensor:
        """A tensor by its canonical name, float32 or bfloat16 bits."""
        return self._checkpoint.tensor(canonical)

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's own, if it has one."""
        return self._checkpoint.load_tokenizer()

    def lm_head(self) -> Tensor:
        """The output head, which is the embedding where they are tied."""
        return self.tensor("embedding" if self.fields.tied_embeddings else "lm_head")

    def fingerprint(self) -> str:
        """Tells targets apart: of the config, the norm and some rows of the embedding."""
        digest = hashlib.sha256(repr(self.fields).encode())
        digest.update(self.tensor("norm").array.tobytes())
        digest.update(self.tensor("embedding").array[:64].tobytes())
        return digest.hexdigest()[:16]
