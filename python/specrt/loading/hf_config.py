"""Reading a Hugging Face config so that nothing in it that matters goes unread.

A family asks an `HfConfig` for the keys it honours. `finish()` then goes over the keys that nobody
asked for, and refuses by name those that look as if they changed the arithmetic.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import LoadError
from .rope import default_inv_freq, llama3_inv_freq

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
    the same as an absent key.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where
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

    def rope(self, head_dim: int, max_positions: int) -> tuple[float, ...]:
        """Inverse frequencies, from whichever of the three layouts the config uses.

        `rope_scaling` (where not empty) stands before `rope_parameters`, and a theta inside either
        before one at top level, as transformers reads them.
        """
        places = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self._get(key, {})
            if not isinstance(value, dict):
                raise self._wrong(key, "an object", value)
            if value:
                places[key] = {name: one for name, one in value.items() if one is not None}
        if len(places) == 2 and places["rope_scaling"] != places["rope_parameters"]:
            warnings.warn(
                f"{self.where}: rope_scaling and rope_parameters differ; rope_scaling is used",
                stacklevel=2,
            )
        parameters = places.get("rope_scaling") or places.get("rope_parameters") or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        theta = self.number("rope_theta", 10000.0)
        if "rope_theta" in parameters:
            inner = HfConfig(parameters, f"{self.where} rope").number("rope_theta")
            if self.raw.get("rope_theta") not in (None, inner):
                warnings.warn(
                    f"{self.where}: rope_theta is {theta:g} at top level and {inner:g} among the "
                    "rope parameters; the latter is used",
                    stacklevel=2,
                )
            theta = inner
        if not theta > 0:
            raise self._wrong("rope_theta", "a positive number", theta)

        self.unused("original_max_position_embeddings")  # read below where the kind uses it
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if parameters.get("partial_rotary_factor", 1) != 1:
            raise LoadError(
                f"[{self.where} rope] partial_rotary_factor "
                f"{parameters['partial_rotary_factor']} is not supported"
            )
        if kind == "llama3":
            known |= {
                "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
            }  # fmt: skip
            # transformers lets a top-level value override the one among the rope parameters.
            original = self.raw.get("original_max_position_embeddings")
            if original is not None:
                parameters = {**parameters, "original_max_position_embeddings": original}
            frequencies = llama3_inv_freq(theta, head_dim, parameters, max_positions)
        elif kind == "default":
            known |= {"factor"} if parameters.get("factor") == 1 else set()
            frequencies = default_inv_freq(theta, head_dim)
        else:
            raise LoadError(
                f"[{self.where} rope_type] expected 'default' or 'llama3', got {kind!r}: "
                "this kind of rope scaling is not supported"
            )
        for key in parameters:
            if key not in known:
                raise LoadError(f"[{self.where} rope] {key!r} is not supported for type {kind!r}")
        return tuple(float(value) for value in frequencies)

    def finish(self) -> None:
        """Refuse by name what nobody asked for and looks as if it changed the arithmetic."""
        for key, value in self.raw.items():
            if key in self._seen or key in _HARMLESS or key.startswith("_"):
                continue
            if any(word in key.lower() for word in _SUSPECT_WORDS) and not _neutral(key, value):
                shown = repr(value)
                shown = shown if len(shown) <= 200 else shown[:200] + "..."
                raise LoadError(f"[{self.where}] {key!r} is not supported here, got {shown}")
