"""Reading a Hugging Face config so that nothing in it that matters goes unread.

A family asks an `HfConfig` for the keys it honours. `finish()` then goes over the keys that nobody
asked for, and refuses by name those that look as if they changed the arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LoadError

__all__ = ["HfConfig", "read_json"]

_HARMLESS = frozenset({
    # what the model is called, and how it was made
    "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
    "use_cache", "gradient_checkpointing", "task_specific_params", "transformers.js_config",
    # token ids and output options, read elsewhere or used by training only
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "id2label", "label2id", "num_labels", "problem_type",
    "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward",
})  # fmt: skip

# A key that holds one of these words and that no family knows is taken to change the arithmetic.
_SUSPECT_WORDS = (
    "quant", "compress", "rope", "rotary", "yarn", "alibi", "position", "window", "sliding",
    "layer_type", "attn", "attention", "softcap", "scal", "multiplier", "expert", "moe", "norm",
    "bias", "act_fn", "hidden_act", "activation", "_tp", "mamba", "ssm", "linear", "conv",
    "residual", "sparse", "mixture", "lora", "adapter", "hyper", "mtp", "nextn", "nope", "sink",
    "clip",
)  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises LoadError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"[{path.name}] cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"[{path.name}] expected a JSON object, got {type(value).__name__}")
    return value


def _neutral(key: str, value: Any) -> bool:
    """Whether a value says that whatever its key stands for is not in use."""
    if value is None or value is False or value in (0, "", "none") or value in ([], {}):
        return True
    scale_like = any(word in key for word in ("scal", "multiplier", "factor", "_tp"))
    return scale_like and not isinstance(value, bool) and value == 1


class HfConfig:
    """A config.json (or a model's config as a dict) that remembers which keys were asked for.

    Every getter raises LoadError naming the key where the value is of the wrong kind; `null` means
    the same as an absent key, save where a getter says otherwise. `max_model_len` is what the
    caller will run at most, None for all that the model can.
    """

    def __init__(
        self, raw: Mapping[str, Any], where: str = "config.json", max_model_len: int | None = None
    ) -> None:
        self.raw = raw
        self.where = where
        self.max_model_len = max_model_len
        self._seen: set[str] = set()

    def _get(self, key: str, default: Any) -> Any:
        self._seen.add(key)
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is ...:
            raise LoadError(f"[{self.where}] expected a value for {key!r}, got none")
        return value

    def _wrong(self, key: str, wanted: str, value: object) -> LoadError:
        return LoadError(f"[{self.where} {key}] expected {wanted}, got {value!r}")

    def is_null(self, key: str) -> bool:
        """Whether the config has the key and says null."""
        return key in self.raw and self.raw[key] is None

    def integer(self, key: str, default: Any = ...) -> int:
        """A whole number; required unless there is a default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: Any = ...) -> float:
        """A number; required unless there is a default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number", value)
        return float(value)

    def positive(self, key: str, default: Any = ...) -> float:
        """A number above zero; required unless there is a default."""
        value = self.number(key, default)
        if not value > 0:
            raise self._wrong(key, "a positive number", value)
        return value

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A number above zero, or None where the config says null."""
        self._seen.add(key)
        value = self.raw.get(key, default)
        return None if value is None else self.positive(key, value)

    def window(self, key: str, default: int | None) -> int | None:
        """A window in tokens, or None where the config says null."""
        value = self.optional_number(key, default)
        if value is None or (value >= 1 and value == int(value)):
            return None if value is None else int(value)
        raise self._wrong(key, "a whole number of at least 1, or null", value)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object without its nulls; {} where there is none."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return {name: one for name, one in value.items() if one is not None}

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def only(self, key: str, *allowed: object) -> None:
        """Refuse a key whose value is none of `allowed`; absent is always allowed."""
        value = self._get(key, allowed[0])
        if not any(type(value) is type(one) and value == one for one in allowed):
            wanted = " or ".join(repr(one) for one in allowed)
            raise LoadError(
                f"[{self.where} {key}] expected {wanted}, the only kind supported here, "
                f"got {value!r}"
            )

    def unused(self, *keys: str) -> None:
        """Declare keys that have no effect in this family, whatever they hold."""
        self._seen.update(keys)

    def layer_types(self, layers: int, default: Sequence[str]) -> list[str]:
        """The kind of each layer."""
        kinds = self._get("layer_types", list(default))
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self._wrong("layer_types", f"a list of {layers}", kinds)
        return kinds

    def full_attention_only(self) -> None:
        """Refuse layer_types other than full attention, naming the first such layer."""
        layer_types = self._get("layer_types", [])
        if not isinstance(layer_types, list):
            raise self._wrong("layer_types", "a list", layer_types)
        for layer, kind in enumerate(layer_types):
            if kind != "full_attention":
                raise LoadError(
                    f"[{self.where} layer_types] expected 'full_attention' in every layer, "
                    f"got {kind!r} in layer {layer}: this kind of layer is not supported"
                )

    def finish(self) -> None:
        """Refuse by name what nobody asked for and looks as if it changed the arithmetic."""
        for key, value in self.raw.items():
            if key in self._seen or key in _HARMLESS or key.startswith("_"):
                continue
            if any(word in key.lower() for word in _SUSPECT_WORDS) and not _neutral(key, value):
                shown = repr(value)
                shown = shown if len(shown) <= 200 else shown[:200] + "..."
                raise LoadError(f"[{self.where}] {key!r} is not supported here, got {shown}")
