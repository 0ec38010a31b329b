"""Text to token ids and back: the tokenizer wrapper and the incremental detokenizer."""

from __future__ import annotations

from .detokenizer import Detokenizer
from .tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
