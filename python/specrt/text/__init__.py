"""Text to token ids and back: the tokenizer wrapper and the incremental detokenizer."""

from __future__ import annotations

from .detokenizer import Detokenizer
from .tokenizer import Tokenizer
from .vocabulary import VocabularyMap, map_vocabulary

__all__ = ["Detokenizer", "Tokenizer", "VocabularyMap", "map_vocabulary"]
