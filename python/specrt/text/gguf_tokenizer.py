"""A tokenizer out of a GGUF file's metadata, token for token what the original gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import LoadError
from .detokenizer import BYTE_ALPHABET
from .tokenizer import Tokenizer, fast_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

__all__ = ["tokenizer_from_metadata"]

_CONTROL, _USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

# How text is cut before merging: a regex; "gpt2" for the byte-level default; "digits" for that
# after cutting out every digit.
_PRE_TOKENIZERS = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "smollm": "digits",
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer from `tokenizer.*` keys.

    Raises LoadError naming a kind of tokenizer or pre-tokenizer that is not known, a list that is
    missing, or a special token that does not exist.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise LoadError(f"[tokenizer.ggml.model] expected 'gpt2' or 'llama', got {kind!r}")
    _add_tokens(backend, metadata, tokens, kind)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{ours}_token": _token(metadata, f"{theirs}_token_id", tokens)
        for ours, theirs in names.items()
    }
    _add_bos_and_eos(backend, metadata, special, kind)
    stated = {name: token for name, token in special.items() if token is not None}
    hf = fast_tokenizer(backend, **stated)
    template = metadata.get("tokenizer.chat_template")
    if template:
        hf.chat_template = template
    return Tokenizer(hf)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise LoadError(f"[tokenizer.ggml.{key}] expected a list of strings, got none")
    if key == "tokens" and len(set(value)) != len(value):
        raise LoadError("[tokenizer.ggml.tokens] expected distinct tokens, got some twice")
    return value


def _token(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> str | None:
    id_ = metadata.get(f"tokenizer.ggml.{key}")
    if id_ is None:
        return None
    if not isinstance(id_, int) or not 0 <= id_ < len(tokens):
        raise LoadError(f"[tokenizer.ggml.{key}] expected one of {len(tokens)} ids, got {id_!r}")
    return tokens[id_]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    """GPT-2's kind: BPE over an alphabet of 256 characters that stand for bytes."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise LoadError(
            f"[tokenizer.ggml.pre] unknown pre-tokenizer {pre!r}; "
            f"known: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    merges = _pairs(metadata)
    backend = Backend(
        _model(
            models.BPE,
            vocab={token: id_ for id_, token in enumerate(tokens)},
            merges=merges,
            # Llama 3's vocabulary holds whole words that no chain of merges reaches.
            ignore_merges=_PRE_TOKENIZERS[pre] is _LLAMA3,
        )
    )
    how = _PRE_TOKENIZERS[pre]
    if how == "gpt2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif how == "digits":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(how), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    """Llama 2's kind: BPE whose merges follow from the tokens' scores, with byte fallback."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    if "tokenizer.ggml.merges" in metadata:
        merges = _pairs(metadata)
    else:
        merges = _merges_from_scores(metadata, tokens)
    unknown = _token(metadata, "unknown_token_id", tokens)
    backend = Backend(
        _model(
            models.BPE,
            vocab={token: id_ for id_, token in enumerate(tokens)},
            merges=merges,
            unk_token=unknown if unknown is not None else "<unk>" if "<unk>" in tokens else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _model(kind: Any, **options: Any) -> Any:
    try:
        return kind(**options)
    except Exception as error:  # tokenizers raises plain Exception
        raise LoadError(f"[tokenizer.ggml.merges] do not fit the tokens: {error}") from error


def _pairs(metadata: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The merges that a file lists, each "left right"."""
    return [tuple(one.split(" ", 1)) for one in _strings(metadata, "merges")]


def _merges_from_scores(metadata: Mapping[str, Any], tokens: list[str]) -> list[tuple[str, ...]]:
    """Every way to make a token of two others, best score first.

    Equal scores are broken by longer parts first, then by the vocabulary's order.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise LoadError(
            f"[tokenizer.ggml.scores] expected {len(tokens)} scores, or merges, got neither"
        )
    ids = {token: id_ for id_, token in enumerate(tokens)}
    found = [
        (-scores[ids[token]], -cut, cut - len(token), ids[token], ids[token[:cut]], token, cut)
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(token[:cut], token[cut:]) for *_, token, cut in sorted(found)]


def _add_tokens(
    backend: Backend, metadata: Mapping[str, Any], tokens: list[str], kind: str
) -> None:
    """Tokens to be found whole in text: control tokens are special, user-defined ones are not."""
    from tokenizers import AddedToken

    types = metadata.get("tokenizer.ggml.token_type") or []
    control, defined = [], []
    for token, type_ in zip(tokens, types):  # noqa: B905  (a short list leaves the rest normal)
        # In a byte-level vocabulary, a control token in other characters was mislabelled.
        if type_ == _CONTROL and (kind != "gpt2" or all(one in BYTE_ALPHABET for one in token)):
            control.append(AddedToken(token, normalized=False, special=True))
        elif type_ == _USER_DEFINED:
            defined.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(control)
    backend.add_tokens(defined)


def _add_bos_and_eos(
    backend: Backend, metadata: Mapping[str, Any], special: Mapping[str, str | None], kind: str
) -> None:
    """What encode() puts around a text; where the file does not say, llama.cpp's defaults."""
    from tokenizers import processors

    template, used = ["$A:0"], []
    for name, default in (("bos", kind == "llama"), ("eos", False)):
        if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        token = special[f"{name}_token"]
        if token is None:
            raise LoadError(
                f"[tokenizer.ggml.add_{name}_token] is true, but there is no {name}_token_id"
            )
        template.insert(0 if name == "bos" else len(template), f"{token}:0")
        used.append((token, backend.token_to_id(token)))
    if used:
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B:1"], special_tokens=used
        )
