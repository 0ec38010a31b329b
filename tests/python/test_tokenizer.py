"""The tokenizer wrapper, and text that streams to what decoding everything at once gives."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specrt.errors import InvalidArgumentError, LoadError
from specrt.text import Detokenizer, Tokenizer


def backend(vocab: list[str], decoder: Any, specials: tuple[str, ...] = ("<s>",)) -> Tokenizer:
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    made = Backend(models.BPE({token: id_ for id_, token in enumerate(vocab)}, []))
    made.decoder = decoder
    made.add_special_tokens([AddedToken(one, normalized=False) for one in specials])
    made.add_tokens([AddedToken("an added é", normalized=False, special=False)])
    return Tokenizer(made)


def kinds() -> dict[str, Tokenizer]:
    """A tokenizer for each kind of decoder, each with bytes, spaces, specials and a hole."""
    from tokenizers import decoders

    pieces = ["▁", "▁▁", "▁a", "b", " ", "é", "日", "😀", "▁▁▁c", "a▁b", "  d"]
    some_bytes = [f"<0x{byte:02X}>" for byte in (0x0A, 0x41, 0x80, 0x9F, 0x98, 0xF0, 0xE6, 0xC3)]
    spm = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    alphabet = tiny.byte_alphabet()
    raw = [alphabet[b] for b in (0x20, 0x0A, 0x41, 0x80, 0x9F, 0x98, 0xF0, 0xE6, 0xC3, 0xED, 0xA0)]
    return {
        "byte-level": backend([*raw, alphabet[0xF0] + alphabet[0x9F], "Ġa"], decoders.ByteLevel()),
        "sentencepiece": backend(
            pieces + some_bytes, decoders.Sequence([*spm, decoders.Strip(content=" ", left=1)])
        ),
        "sentencepiece, two spaces": backend(
            pieces + some_bytes, decoders.Sequence([*spm, decoders.Strip(content=" ", left=2)])
        ),
        "sentencepiece, no prefix": backend(pieces + some_bytes, decoders.Sequence(spm)),
        "byte fallback": backend(pieces + some_bytes, decoders.ByteFallback()),
        "strip each": backend(pieces, decoders.Strip(content=" ", left=1)),
        "metaspace": backend(pieces, decoders.Metaspace()),
        "metaspace, never": backend(pieces, decoders.Metaspace(prepend_scheme="never")),
        "none": backend(pieces, None),
    }


def all_bytes() -> Tokenizer:
    from tokenizers import decoders

    return backend(tiny.byte_alphabet(), decoders.ByteLevel())


KINDS = kinds()
ALL_BYTES = all_bytes()


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.feed(one) for one in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_increments_join_to_the_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))
    pieces = stream(tokenizer, ids, skip=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    # Nothing is given before it is certain: whatever follows, the text so far stays.
    so_far = "".join(pieces[: len(ids) // 2])
    assert whole.startswith(so_far)


@pytest.mark.parametrize("kind", KINDS)
def test_flush_begins_anew(kind: str) -> None:
    tokenizer = KINDS[kind]
    detokenizer = tokenizer.detokenizer()
    ids = [8, 3, 5, 6]
    texts = ["".join([*map(detokenizer.feed, ids), detokenizer.flush()]) for _ in range(2)]
    assert texts == [tokenizer.decode(ids)] * 2


@pytest.fixture(scope="module")
def byte(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny.byte_tokenizer(tmp_path_factory.mktemp("byte")))


@given(data=st.binary(max_size=40))
@example(data="日本語 😀".encode())
@example(data=b"\xf0\x9f\x98 a\xf0\x9f")
@example(data=b"\xed\xa0\x80\xe2\x82\x80\xc0\x80\xf4\x90\x80\x80")
@settings(max_examples=500, deadline=None)
def test_bytes_stream_as_python_decodes_them(data: bytes) -> None:
    pieces = stream(ALL_BYTES, list(data))
    assert "".join(pieces) == data.decode("utf-8", "replace") == ALL_BYTES.decode(list(data))
    # Held back is at most the beginning of one character.
    for count in range(len(data) + 1):
        shown = "".join(pieces[:count])
        assert data[:count].decode("utf-8", "replace").startswith(shown)
        assert len(data[:count].decode("utf-8", "ignore")) <= len(shown)


def test_a_character_appears_with_its_last_byte(byte: Tokenizer) -> None:
    ids = byte.encode("é😀 a")
    assert stream(byte, ids) == ["", "é", "", "", "", "😀", " ", "a", ""]


def test_half_a_character_then_a_space(byte: Tokenizer) -> None:
    ids = [*"😀".encode()[:2], *b" a"]
    assert stream(byte, ids) == ["", "", "\ufffd ", "a", ""]
    assert byte.decode(ids) == "\ufffd a"


def test_leading_spaces_at_round_edges() -> None:
    """Spaces between CJK tokens stay; only the first token's is dropped, as in decode(all)."""
    for kind in ("sentencepiece", "metaspace"):
        tokenizer = KINDS[kind]
        names = {token: id_ for id_, token in enumerate(tokenizer.token_strings)}
        ids = [names[one] for one in ("▁", "日", "▁", "日", "▁a", "▁a")]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "日 日 a a"


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace", "sentencepiece, two spaces"])
def test_texts_of_single_tokens_keep_their_spaces(kind: str) -> None:
    tokenizer = KINDS[kind]
    names = {token: id_ for id_, token in enumerate(tokenizer.token_strings)}
    ids = [names[one] for one in ("b", "▁", "日", "▁a", "é", "▁a")]
    texts = [tokenizer.token_text(one) for one in ids]
    assert texts == ["b", " ", "日", " a", "é", " a"]
    assert "".join(texts) == tokenizer.decode(ids)


def test_bytes_of_tokens_add_up_to_the_text(byte: Tokenizer) -> None:
    for tokenizer, text in (
        (byte, "a日é\U0001f600 \U00010348"),
        (KINDS["sentencepiece"], "日é\U0001f600"),
        (KINDS["metaspace"], "日é\U0001f600"),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(one) for one in ids).decode() == text
        for special in tokenizer.special_ids:
            assert tokenizer.token_bytes(special).decode() == tokenizer.token_strings[special]
        assert tokenizer.token_bytes(10**6) == b""  # as a model's vocabulary may be larger


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.alone
def test_bytes_that_never_complete_take_linear_time(kind: str) -> None:
    tokenizer = KINDS[kind]
    [bad] = [id_ for id_, one in enumerate(tokenizer.token_strings)
             if one in ("<0x80>", tiny.byte_alphabet()[0x80])]  # fmt: skip

    def seconds(count: int) -> float:
        detokenizer = tokenizer.detokenizer()
        start = time.perf_counter()
        pieces = [detokenizer.feed(bad) for _ in range(count)]
        took = time.perf_counter() - start
        assert pieces == ["\ufffd"] * count
        return took

    assert seconds(100000) < 40 * max(seconds(10000), 1e-3)


def test_unknown_decoders_still_stream() -> None:
    from tokenizers import decoders

    tokenizer = backend(["hello", "##ing", "world", "new"], decoders.WordPiece(cleanup=False))
    ids = [0, 1, 2, 3, 1]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "helloing world newing"


def test_ids_outside_the_vocabulary(byte: Tokenizer) -> None:
    assert byte.vocab_size == 256 + len(tiny.SPECIALS)
    assert byte.decode([65, 287, 66, 10**9 % 2**31]) == "AB"
    assert "".join(stream(byte, [65, 287, 66])) == "AB"
    for wrong in (byte.decode, lambda ids: byte.detokenizer().feed(ids[0])):
        with pytest.raises(InvalidArgumentError, match="at least 0, got -1"):
            wrong([-1])


def test_special_tokens(byte: Tokenizer) -> None:
    ids = byte.encode("a<|im_end|>b")
    assert ids == [97, 259, 98]
    assert byte.decode(ids) == "ab"
    assert byte.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
    assert stream(byte, ids, skip=False) == ["a", "<|im_end|>", "b", ""]
    assert (byte.bos_token_id, byte.eos_token_id) == (256, 257)


def test_bos_is_added_as_hf_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for add_bos in (False, True):
        folder = tiny.byte_tokenizer(tmp_path / str(add_bos), add_bos=add_bos)
        ours, theirs = Tokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert ours.encode("hi") == theirs("hi")["input_ids"]
        assert ours.encode("hi") == [256] * add_bos + [104, 105]
        assert ours.encode("hi", add_special_tokens=False) == [104, 105]
        assert ours.encode("") == [256] * add_bos


def test_chat(tmp_path: Path) -> None:
    """Chat markers are specials, and the template's BOS is the only one."""
    tokenizer = Tokenizer.from_pretrained(tiny.byte_tokenizer(tmp_path, add_bos=True))
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages)
    want = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == want
    assert ids.count(258) == 2
    assert 256 not in ids
    shorter = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert ids[: len(shorter)] == shorter
    mine = tokenizer.apply_chat_template(messages, chat_template="<|bos|>{{ messages[0].content }}")
    assert mine == [256, 104, 105]
    theirs = tokenizer.hf.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert ids == theirs


def test_chat_refusals(tmp_path: Path) -> None:
    bare = Tokenizer.from_pretrained(tiny.byte_tokenizer(tmp_path, chat=False))
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        bare.apply_chat_template([{"role": "user", "content": "hi"}])
    picky = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidArgumentError, match="roles must alternate"):
        bare.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=picky)


def test_what_can_be_wrapped(byte: Tokenizer, tmp_path: Path) -> None:
    for one in (byte, byte.hf, byte.backend):
        assert Tokenizer(one).encode("é") == [0xC3, 0xA9]
    byte.backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_pretrained(tmp_path / "tokenizer.json").encode("é") == [0xC3, 0xA9]
    for wrong in (None, "gpt2", 3, object()):
        with pytest.raises(InvalidArgumentError, match="expected a Hugging Face tokenizer"):
            Tokenizer(wrong)
    with pytest.raises(InvalidArgumentError, match="valid Unicode"):
        byte.encode("\ud800")
    with pytest.raises(InvalidArgumentError, match="expected a string"):
        byte.encode(b"a")  # type: ignore[arg-type]


def test_tokenizers_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such file or folder"):
        Tokenizer.from_pretrained(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{}")
    for target in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(LoadError, match="cannot load the tokenizer"):
            Tokenizer.from_pretrained(target)


def test_tokenizers_written_in_python() -> None:
    """A tokenizer without a Rust backend streams through the window."""

    class Slow:
        """The least of the Hugging Face interface."""

        all_special_ids = (0,)
        eos_token_id = 0
        words = ("</s>", "one", "two")

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [self.words.index(word) for word in text.split()]

        def decode(
            self,
            ids: list[int],
            skip_special_tokens: bool = False,
            clean_up_tokenization_spaces: bool = False,
        ) -> str:
            return "".join(self.words[id_] for id_ in ids if id_ or not skip_special_tokens)

        def get_vocab(self) -> dict[str, int]:
            return {word: id_ for id_, word in enumerate(self.words)}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self.words[id_] for id_ in ids]

    tokenizer = Tokenizer(Slow())
    assert tokenizer.encode("one two") == [1, 2]
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.bos_token_id) == (3, 0, None)
    assert tokenizer.decode([1, 9, 2, 0]) == "onetwo"
    assert "".join(stream(tokenizer, [1, 9, 2, 0])) == "onetwo"


def test_same_vocabulary(tmp_path: Path, byte: Tokenizer) -> None:
    assert byte.same_vocabulary(byte) is None
    assert byte.token_strings[65] == "A"
    swapped = Tokenizer.from_pretrained(tiny.byte_tokenizer(tmp_path / "s", swap=(70, 90)))
    assert byte.same_vocabulary(swapped) == (
        "token 70 is 'F' in one tokenizer and 'Z' in the other"
    )
    # A shorter vocabulary, and one with holes, have fewer ids in common.
    shorter = backend(tiny.byte_alphabet(), None, specials=())
    assert shorter.token_strings[:256] == byte.token_strings[:256]
    assert shorter.same_vocabulary(byte) == (
        "token 256 is 'an added é' in one tokenizer and '<|bos|>' in the other"
    )


def test_detokenizer_can_be_made_by_hand(byte: Tokenizer) -> None:
    detokenizer = Detokenizer(byte)
    assert [detokenizer.feed(one) for one in b"hi"] == ["h", "i"]
    assert detokenizer.flush() == ""
