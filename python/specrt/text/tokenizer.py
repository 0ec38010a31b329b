"""`specrt.Tokenizer`: one interface over any Hugging Face tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..errors import InvalidArgumentError, LoadError, UnsupportedError
from .detokenizer import Detokenizer
from .vocabulary import bytes_of_tokens

__all__ = ["Tokenizer"]


class Tokenizer:
    """Text to token ids and back, as the Hugging Face tokenizer underneath does it."""

    def __init__(self, tokenizer: Any) -> None:
        """Wraps a transformers tokenizer, a `tokenizers.Tokenizer`, or another wrapper.

        Raises InvalidArgumentError for anything else.
        """
        if isinstance(tokenizer, Tokenizer):
            tokenizer = tokenizer.hf
        if _is_bare(tokenizer):
            tokenizer = fast_tokenizer(tokenizer)
        needed = ("encode", "decode", "get_vocab", "convert_ids_to_tokens")
        if not all(callable(getattr(tokenizer, one, None)) for one in needed):
            raise InvalidArgumentError(
                f"[tokenizer] expected a Hugging Face tokenizer, got {type(tokenizer).__name__}"
            )
        self.hf: Any = tokenizer
        self._texts: dict[int, str] = {}

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str]) -> Tokenizer:
        """From a local folder, a hub id, a tokenizer.json, or a .gguf file. Raises LoadError."""
        from pathlib import Path

        from ..loading.open import find_folder

        path = Path(source).expanduser()
        if path.is_file() and path.suffix == ".gguf":
            from ..loading.gguf_file import GgufFile
            from .gguf_tokenizer import tokenizer_from_metadata

            return tokenizer_from_metadata(GgufFile(path).metadata)
        try:
            if path.is_file():
                from tokenizers import Tokenizer as Backend

                return cls(Backend.from_file(str(path)))
            from transformers import AutoTokenizer

            # The folder is local from here on: nothing is fetched twice, and no code in it runs.
            folder = find_folder(source, weights=False)
            return cls(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False))
        except LoadError:
            raise
        except Exception as error:  # transformers and tokenizers raise many kinds
            raise LoadError(f"[{source}] cannot load the tokenizer: {error}") from error

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` underneath, None for one written in Python."""
        return getattr(self.hf, "backend_tokenizer", None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with BOS and the like exactly where the tokenizer adds them.

        Special tokens written in the text are recognised. Raises InvalidArgumentError for text
        that is not valid Unicode.
        """
        if not isinstance(text, str):
            raise InvalidArgumentError(f"[text] expected a string, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"[text] expected valid Unicode: {error}") from error
        ids = self.hf.encode(text, add_special_tokens=add_special_tokens)
        return [int(one) for one in ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without tidying of spaces; ids that stand for nothing give ""."""
        known = [one for one in map(int, ids) if self._stands(one)]
        text = self.hf.decode(
            known,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def token_text(self, token_id: int) -> str:
        """What a token adds to a text that has begun: with the space that it begins with, which
        some tokenizers strip at the beginning of a text. A part of a character is U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            # Behind another token.
            before = self._before
            whole = self.decode([*before, token_id], skip_special_tokens=False)
            text = whole.removeprefix(self.decode(before, skip_special_tokens=False))
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes as they stand in a text, also where they are a part of a character.

        Those of a text's tokens, one behind the other, are the text's; a special token's are its
        name's, and there are none where the tokenizer has no such token.
        """
        spelt = self._bytes.get(token_id, b"")
        return spelt.encode() if isinstance(spelt, str) else spelt

    @cached_property
    def _bytes(self) -> dict[int, bytes | str]:
        return bytes_of_tokens(self)

    @cached_property
    def _before(self) -> list[int]:
        """Tokens of a text that ends in a letter; none where there are no such tokens."""
        letter = self.encode("a", add_special_tokens=False)
        for ids in (letter, *([one] for one in sorted(self._token_of))):
            if self.decode(ids, skip_special_tokens=False)[-1:].isalpha():
                return ids
        return []

    def _stands(self, token_id: int) -> bool:
        if token_id < 0:
            raise InvalidArgumentError(f"[ids] expected at least 0, got {token_id}")
        return self.backend is not None or token_id in self._token_of

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental detokenizer."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        The template writes BOS where it wants one; none is added. `options` go to the template,
        `add_generation_prompt=True` among them by default. Raises InvalidArgumentError where there
        is no template or the template refuses the messages.
        """
        if not options.get("chat_template") and not getattr(self.hf, "chat_template", None):
            raise InvalidArgumentError(
                "[chat] this tokenizer has no chat template: give a prompt to generate(), or a "
                "chat_template"
            )
        options = {"add_generation_prompt": True, **options, "tokenize": False}
        try:
            text = self.hf.apply_chat_template(list(messages), **options)
        except ImportError as error:
            raise UnsupportedError(f"[chat] chat templates need jinja2: {error}") from error
        except Exception as error:  # the template is a program of its own
            raise InvalidArgumentError(f"[messages] the chat template failed: {error}") from error
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that stands for a token."""
        return max(self._token_of, default=-1) + 1

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        return self._special("eos_token_id")

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the tokenizer names one."""
        return self._special("bos_token_id")

    def _special(self, name: str) -> int | None:
        value = getattr(self.hf, name, None)
        return None if value is None else int(value)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        if self.backend is None:
            return frozenset(int(one) for one in self.hf.all_special_ids)
        added = self.backend.get_added_tokens_decoder()
        return frozenset(id_ for id_, token in added.items() if token.special)

    @cached_property
    def _token_of(self) -> dict[int, str]:
        return {int(id_): token for token, id_ in self.hf.get_vocab().items()}

    @cached_property
    def token_strings(self) -> list[str | None]:
        """Token strings by id, None for ids that stand for nothing."""
        return [self._token_of.get(id_) for id_ in range(self.vocab_size)]

    def same_vocabulary(self, other: Tokenizer) -> str | None:
        """None where both give the same strings to the ids they have in common.

        Otherwise a sentence naming the first difference. Ids that stand for nothing in one of the
        two, such as padding at the end of a vocabulary, are left out.
        """
        pairs = zip(self.token_strings, other.token_strings)  # noqa: B905  (sizes may differ)
        for id_, (one, two) in enumerate(pairs):
            if one is not None and two is not None and one != two:
                return f"token {id_} is {one!r} in one tokenizer and {two!r} in the other"
        return None


def fast_tokenizer(backend: Any, **options: Any) -> Any:
    """A transformers tokenizer around a `tokenizers.Tokenizer`."""
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=backend, clean_up_tokenization_spaces=False, **options)


def _is_bare(tokenizer: Any) -> bool:
    """A `tokenizers.Tokenizer`, found without importing that package."""
    kind = type(tokenizer)
    return kind.__module__.split(".")[0] == "tokenizers" and kind.__name__ == "Tokenizer"
