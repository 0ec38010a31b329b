"""Two vocabularies side by side: which tokens mean the same text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["VocabularyMap", "bytes_of_tokens", "map_vocabulary"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class VocabularyMap:
    """A draft model's view of the target's tokens."""

    draft_of_target: list[int]
    """By target id, the draft id of the same text; -1 where there is none."""
    pieces: list[list[int]]
    """By target id without one, the draft model's tokens of its text."""
    shared: int
    """How many target tokens the draft model knows."""


def map_vocabulary(target: Tokenizer, draft: Tokenizer, vocab_size: int) -> VocabularyMap:
    """Match tokens by their bytes, ends of text by their role, special tokens by their name.

    `vocab_size` is the target model's; ids beyond its tokenizer's match nothing.
    """
    own, other = bytes_of_tokens(target), bytes_of_tokens(draft)
    by_bytes: dict[bytes | str, int] = {}
    for id_, text in other.items():
        by_bytes.setdefault(text, id_)
    draft_of_target = [-1] * vocab_size
    for id_, text in own.items():
        if id_ < vocab_size:
            draft_of_target[id_] = by_bytes.get(text, -1)
    ends = target.eos_token_id, draft.eos_token_id
    if ends[0] is not None and ends[1] is not None and ends[0] < vocab_size:
        draft_of_target[ends[0]] = ends[1]
    pieces: list[list[int]] = [[] for _ in range(vocab_size)]
    for id_, text in own.items():
        if id_ < vocab_size and draft_of_target[id_] < 0 and isinstance(text, bytes):
            # A part of a character has no text of its own; the draft model does without it.
            readable = text.decode("utf-8", errors="ignore")
            if readable:
                pieces[id_] = draft.encode(readable, add_special_tokens=False)
    return VocabularyMap(draft_of_target, pieces, sum(one >= 0 for one in draft_of_target))


def bytes_of_tokens(tokenizer: Tokenizer) -> dict[int, bytes | str]:
    """Each token's bytes as they stand in a text; special tokens stay names."""
    backend = tokenizer.backend
    spec = ""
    if backend is not None and backend.decoder is not None:
        spec = json.dumps(json.loads(backend.decoder.__getstate__()))
    byte_level = "ByteLevel" in spec
    alphabet = _byte_alphabet()
    found: dict[int, bytes | str] = {}
    for id_, token in enumerate(tokenizer.token_strings):
        if token is None:
            continue
        if id_ in tokenizer.special_ids:
            found[id_] = token
        elif byte_level:
            if all(one in alphabet for one in token):
                found[id_] = bytes(alphabet[one] for one in token)
            else:
                found[id_] = token.encode()
        elif match := _BYTE_TOKEN.fullmatch(token):
            found[id_] = bytes([int(match.group(1), 16)])
        else:
            found[id_] = token.replace("\u2581", " ").encode()
    return found


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the rest from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(one): one for one in printable}
    rest = [one for one in range(256) if one not in set(printable)]
    alphabet.update({chr(256 + index): one for index, one in enumerate(rest)})
    return alphabet
