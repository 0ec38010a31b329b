"""Text out of token ids as they come, never to be taken back.

A tokenizer's decoder is a chain of steps over token strings. Here each step keeps what it cannot
decide yet and lets the rest go, so that all increments and the flush together are what decoding
all ids at once gives, in time linear in their number.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class _Step:
    """One step of a decoder: takes a piece of text, gives what has become certain."""

    def feed(self, piece: str) -> list[str]:
        raise NotImplementedError

    def flush(self) -> list[str]:
        return []


class _Replace(_Step):
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def feed(self, piece: str) -> list[str]:
        return [piece.replace(self._old, self._new)]


class _Metaspace(_Step):
    """The replacement character is a space, except in the first token, where it is nothing."""

    def __init__(self, replacement: str, prepends: bool) -> None:
        self._replacement, self._strip = replacement, prepends

    def feed(self, piece: str) -> list[str]:
        space = "" if self._strip else " "
        self._strip = False
        return [piece.replace(self._replacement, space)]


class _Joined(_Step):
    """No decoder at all: tokens with spaces between them."""

    def __init__(self) -> None:
        self._first = True

    def feed(self, piece: str) -> list[str]:
        first, self._first = self._first, False
        return [piece if first else " " + piece]


class _Strip(_Step):
    """Drops up to `count` leading characters: of each piece, or of the text once it is fused."""

    def __init__(self, content: str, count: int, once: bool) -> None:
        self._content, self._count, self._once = content, count, once
        self._left = count

    def feed(self, piece: str) -> list[str]:
        if not self._once:
            self._left = self._count
        start = 0
        while self._left and piece.startswith(self._content, start):
            start += 1
            self._left -= 1
        if start < len(piece):
            self._left = 0
        return [piece[start:]]


@functools.lru_cache(1 << 16)
def _bytes_of(piece: str) -> bytes:
    try:
        return bytes(BYTE_ALPHABET[character] for character in piece)
    except KeyError:  # an added token, written as it is
        return piece.encode("utf-8", "replace")


class _ByteLevel(_Step):
    """Tokens spell bytes in an alphabet of 256 characters; what is not whole UTF-8 is U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: str) -> list[str]:
        return [self._decoder.decode(_bytes_of(piece))]

    def flush(self) -> list[str]:
        return [self._decoder.decode(b"", True)]


class _ByteFallback(_Step):
    """Runs of tokens like <0xE4> are UTF-8 where the whole run is, else one U+FFFD per byte.

    So a run that is valid so far stays back until it ends: a later byte could still undo it.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._text: list[str] = []
        self._bytes = 0
        self._broken = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def feed(self, piece: str) -> list[str]:
        match = _BYTE_TOKEN.fullmatch(piece)
        if match is None:
            return [*self.flush(), piece]
        if self._broken:
            return [_REPLACEMENT]
        self._bytes += 1
        try:
            self._text.append(self._decoder.decode(bytes([int(match[1], 16)])))
        except UnicodeDecodeError:
            self._broken = True
            return [_REPLACEMENT] * self._bytes
        return []

    def flush(self) -> list[str]:
        if self._broken or not self._bytes:
            result = []
        else:
            try:
                self._decoder.decode(b"", True)
                result = ["".join(self._text)]
            except UnicodeDecodeError:
                result = [_REPLACEMENT] * self._bytes
        self._reset()
        return result


def byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 as itself, other bytes from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = byte_alphabet()


def _steps(spec: dict[str, Any] | None) -> list[_Step] | None:
    """The steps of a decoder, None where one of them is of a kind not known here."""
    if spec is None:
        return [_Joined()]
    steps: list[_Step] = []
    fused = False
    for one in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
        kind = one["type"]
        if kind == "ByteLevel":
            # It decodes all tokens as one piece, which is also all that a later step sees.
            steps.append(_ByteLevel())
            fused = True
        elif kind == "ByteFallback" and not fused:
            steps.append(_ByteFallback())
        elif kind == "Replace" and not fused and "String" in one["pattern"]:
            steps.append(_Replace(one["pattern"]["String"], one["content"]))
        elif kind == "Metaspace" and not fused:
            steps.append(_Metaspace(one["replacement"], one["prepend_scheme"] != "never"))
        elif kind == "Strip" and one["stop"] == 0:
            steps.append(_Strip(one["content"], one["start"], fused))
        elif kind == "Fuse":
            fused = True
        else:
            return None
    return steps


class Detokenizer:
    """Feed token ids, get the text that has become certain.

    The increments and the flush, joined, equal `tokenizer.decode(ids)` over all the ids. Held back
    are only bytes that may still become a character, and, with byte-fallback tokenizers, a run of
    byte tokens that is valid so far. A byte that can never become a character comes out as U+FFFD.
    Each id costs the same however many came before.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._skip_special = skip_special_tokens
        backend = tokenizer.backend
        self._id_to_token = None if backend is None else backend.id_to_token
        self._begin()

    def _begin(self) -> None:
        backend = self._tokenizer.backend
        decoder = None if backend is None else backend.decoder
        spec = None if decoder is None else json.loads(decoder.__getstate__())
        steps = None if backend is None else _steps(spec)
        self._steps = steps if steps is not None else []
        self._window = _Window(self._tokenizer, self._skip_special) if steps is None else None

    def feed(self, token_id: int) -> str:
        """The text that this token makes certain; often "". Raises InvalidArgumentError."""
        if token_id < 0:
            raise InvalidArgumentError(f"[token_id] expected at least 0, got {token_id}")
        if token_id in self._skip:
            return ""
        if self._window is not None:
            return self._window.feed(token_id)
        assert self._id_to_token is not None
        token = self._id_to_token(token_id)
        if token is None:
            return ""
        if len(self._steps) == 1:
            return "".join(self._steps[0].feed(token))
        return self._run([token], 0)

    def flush(self) -> str:
        """The rest, at the end of the text. Afterwards the detokenizer begins anew."""
        if self._window is not None:
            text = self._window.flush()
        else:
            text = ""
            for index, step in enumerate(self._steps):
                text += self._run(step.flush(), index + 1)
        self._begin()
        return text

    def _run(self, pieces: Sequence[str], start: int) -> str:
        for step in self._steps[start:]:
            pieces = [out for piece in pieces for out in step.feed(piece)]
        return "".join(pieces)


class _Window:
    """For decoders of other kinds: decodes a short window again with each token.

    Text leaves when it does not end in U+FFFD, or after `_PATIENCE` tokens. Where a decoder looks
    further back than the window, increments may differ from decoding all ids in spacing only.
    """

    _PATIENCE = 16

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        self._pending.append(token_id)
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if len(self._pending) < self._PATIENCE and (
            text.endswith(_REPLACEMENT) or len(text) <= len(before)
        ):
            return ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]

    def flush(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
