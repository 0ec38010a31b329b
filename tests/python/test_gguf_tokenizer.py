"""Tokenizers rebuilt from GGUF metadata give the ids that transformers' conversion gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from test_gguf import converted, demo_model, write

from specrt.errors import LoadError
from specrt.loading import open_checkpoint
from specrt.text import Tokenizer
from specrt.text.gguf_tokenizer import tokenizer_from_metadata

__all__ = ["demo_model"]  # a fixture

PAGE = [
    "",
    "Hello, world! It's a fine day; isn't it? We'LL SEE.",
    "def average(numbers):\n    total = 0\n\tfor n in numbers:\n        total += n\n\n\n    return",
    "日本語のテキストと한국어, 中文字符。 Ελληνικά, العربية, עברית, हिन्दी",
    "😀👍🏽👨‍👩‍👧‍👦 flags 🇫🇷🇯🇵 é e\u0301 ﬁ ½ ² Ⅻ ٣",
    "1 12 123 1234 3.14159 1,000,000 2024-01-31 0x7F",
    "   leading,   inside  and trailing   ",
    "\n\n\n  \t\t \r\n\r\n x",
    "\u200b\ufeffzero width\u00a0space\u3000wide",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|endoftext|><|im_sta rt|>",
    "https://example.com/a?b=c&d=%20 user@host #tag $x^2$ {[()]} \\n",
    "don't can't I'm you're they've he'd O'Neil 'quoted' \"double\"",
    "\x00\x01\x7f control",
]


def theirs(path: Path) -> Any:
    """transformers' conversion of a .gguf file's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_demo_model(demo_model: Path) -> None:
    from tokenizers import pre_tokenizers

    ours, hf = Tokenizer.from_pretrained(demo_model), theirs(demo_model)
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (1, 2, 49152)
    assert ours.same_vocabulary(Tokenizer(hf)) is None
    for text in PAGE:
        if not any(character.isnumeric() for character in text):
            assert ours.encode(text) == hf.encode(text), text
    # transformers does not know the pre-tokenizer "smollm" and takes GPT-2's, which keeps digits
    # together with what precedes them; the model was trained with every digit cut out.
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), hf.backend_tokenizer.pre_tokenizer]
    )
    for text in PAGE:
        ids = ours.encode(text)
        assert ids == hf.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == hf.decode(ids, skip_special_tokens=True)
        detokenizer = ours.detokenizer()
        pieces = [detokenizer.feed(id_) for id_ in ids]
        assert "".join(pieces) + detokenizer.flush() == ours.decode(ids)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1  2"}]
    for one in (messages, messages[1:]):
        want = hf.apply_chat_template(one, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat_template(one) == want


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary with merges learned from this page, and chat markers."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(PAGE * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    keys = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": vocab + specials,
        "token_type": [1] * len(vocab) + [3, 3, 3, 4],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "eos_token_id": len(vocab) + 2,
        "bos_token_id": len(vocab),
        "padding_token_id": len(vocab),
    }
    return {f"tokenizer.ggml.{key}": one for key, one in {**keys, **changes}.items()
            if one is not None}  # fmt: skip


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A Llama 2 style vocabulary: scores, byte tokens, no merges."""
    words = ["▁", "▁t", "he", "▁the", "in", "▁a", "er", "▁world", "Hel", "lo", "▁Hello", "is"]
    letters = [chr(c) for c in range(33, 127)]
    extra = ["wo", "rl", "▁wo", "rld", "ld", "▁H", "el", "▁▁", "▁▁▁▁", "on", "日", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = list(dict.fromkeys([*words, *extra, *letters]))
    tokens += pieces
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(i % 37) for i in range(len(pieces))]
    keys = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": types,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": one for key, one in {**keys, **changes}.items()
            if one is not None}  # fmt: skip


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return converted(tiny.tiny_llama(tmp_path_factory.mktemp("hf"), vocab=1024))


@pytest.mark.parametrize(
    "metadata",
    [
        byte_level_metadata(),
        byte_level_metadata(pre="llama-bpe"),
        byte_level_metadata(pre="default"),
        byte_level_metadata(pre="gpt-2", add_bos_token=True),
        byte_level_metadata(add_bos_token=True, add_eos_token=True),
        sentencepiece_metadata(),
        sentencepiece_metadata(add_bos_token=False, add_eos_token=True),
        sentencepiece_metadata(add_bos_token=True),
    ],
    ids=["qwen2", "llama-bpe", "default", "gpt-2", "bos and eos", "spm", "spm eos", "spm bos"],
)
def test_ids_are_those_of_transformers(
    tmp_path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.gguf", tensors, keys={"vocab_size": 1024}, general=metadata)
    with open_checkpoint(path) as checkpoint:
        ours = checkpoint.load_tokenizer()
    assert ours is not None
    hf = theirs(path)
    for text in [*PAGE, "<think>a</think>", "Hello the world is in", " <s> x</s>y"]:
        assert ours.encode(text) == hf.encode(text), text
        ids = ours.encode(text)
        assert ours.decode(ids) == hf.decode(ids, skip_special_tokens=True), text
    assert (ours.bos_token_id, ours.eos_token_id) == (hf.bos_token_id, hf.eos_token_id)


def test_prefix_space_can_be_off() -> None:
    on = tokenizer_from_metadata(sentencepiece_metadata())
    off = tokenizer_from_metadata(sentencepiece_metadata(add_space_prefix=False))
    names = {token: id_ for id_, token in enumerate(on.token_strings)}
    assert on.encode("the") == [1, names["▁the"]]
    assert off.encode("the") == [1, names["t"], names["he"]]
    assert on.decode(on.encode("the")) == off.decode(off.encode("the")) == "the"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "t5"}, "expected 'gpt2' or 'llama', got 't5'"),
        ({"model": "bert"}, "'bert'"),
        ({"pre": "tekken"}, "unknown pre-tokenizer 'tekken'; known: .*smollm"),
        ({"tokens": None}, "tokens"),
        ({"merges": None}, "merges"),
        ({"merges": ["q zzz"]}, "merges"),
        ({"merges": ["q"]}, "merges"),
        ({"tokens": ["a", "a"]}, "distinct"),
        ({"eos_token_id": 100000}, "eos_token_id.*100000"),
        ({"add_bos_token": True, "bos_token_id": None}, "no bos_token_id"),
    ],
)
def test_metadata_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=says):
        tokenizer_from_metadata(byte_level_metadata(**changes))


def test_scores_missing() -> None:
    with pytest.raises(LoadError, match="scores"):
        tokenizer_from_metadata(sentencepiece_metadata(scores=None))


def test_chat_template() -> None:
    metadata = {**byte_level_metadata(), "tokenizer.chat_template": tiny.CHAT_TEMPLATE}
    tokenizer = tokenizer_from_metadata(metadata)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == tokenizer.token_strings.index("<|im_start|>")
