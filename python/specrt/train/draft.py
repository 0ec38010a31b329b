"""A smaller Llama distilled from the target: some of its layers, its embedding and output head.

Row p says what stands at p + 1; its teacher is the target's whole distribution there. Embedding and
output head stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from ..errors import UnsupportedError
from .batches import Rows
from .eagle3 import scaled_logits
from .loss import head_loss
from .parts import attend, norm, rotary_tables, rotate, stored

if TYPE_CHECKING:
    from ..loading import ModelFields
    from .shards import Example
    from .target import TargetTables

__all__ = ["DraftTrainer", "spread_layers"]

_NAMES = (
    "attention_norm", "attention.q", "attention.k", "attention.v", "attention.o", "mlp_norm",
    "mlp.gate", "mlp.up", "mlp.down",
)  # fmt: skip


def spread_layers(count: int, kept: int) -> list[int]:
    """Evenly over all layers, the first and the last among them."""
    if kept == 1:
        return [0]
    return [round(i * (count - 1) / (kept - 1)) for i in range(kept)]


def check_family(fields: ModelFields) -> None:
    """Raise UnsupportedError for a target that is no plain Llama."""
    plain = (
        fields.activation == "silu" and fields.norm_placement == "pre"
        and fields.qk_norm == "none" and not fields.windows and not fields.attention_softcap
        and not fields.final_softcap and fields.embedding_scale == 1.0
        and fields.residual_scale == 1.0 and fields.logits_scale == 1.0
        and fields.attention_scale == 0.0 and fields.rope_scale == 1.0
        and not (fields.qkv_bias or fields.output_bias or fields.mlp_bias)
    )  # fmt: skip
    if not plain:
        raise UnsupportedError(
            f"[target] expected a plain Llama to take layers from, got {fields.family}: train "
            "eagle3 or medusa for it"
        )


class DraftTrainer:
    """Parameters, and the loss of a batch of texts."""

    def __init__(
        self,
        tables: TargetTables,
        layers: Sequence[int],
        rope_theta: float,
        *,
        max_positions: int,
        dtype: torch.dtype,
    ) -> None:
        """The target's layers of those numbers. Raises UnsupportedError where it is no Llama."""
        self.target, self.layers, self.dtype = tables.fields, list(layers), dtype
        check_family(self.target)
        self.rope_theta = rope_theta
        self._embedding = stored(tables.tensor("embedding"))
        self._head = stored(tables.lm_head()).to(dtype)
        self._cos, self._sin = rotary_tables(self.target.rope_inv_freq, max_positions)
        made = {"norm": stored(tables.tensor("norm")).float()}
        for place, layer in enumerate(self.layers):
            for name in _NAMES:
                made[f"layers.{place}.{name}"] = stored(
                    tables.tensor(f"layers.{layer}.{name}")
                ).float()
        self.parameters = {name: value.requires_grad_() for name, value in made.items()}

    @property
    def steps_told(self) -> int:
        """How many acceptance rates `loss` gives."""
        return 1

    @staticmethod
    def rows_of(example: Example) -> Rows:
        """Rows p whose token p + 1 is to be learnt."""
        known = min(len(example.features), len(example.tokens) - 1)
        learnt = np.asarray(example.learnt[1 : 1 + known]) > 0
        return Rows(known, np.flatnonzero(learnt))

    def rows(self, example: Example) -> Rows:
        """Which rows of a text are learnt from."""
        return self.rows_of(example)

    def loss(self, examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(loss a row, right guesses [1], rows); see `Trainer`."""
        width = self.target.hidden_size
        rows = [self.rows(one) for one in examples]
        contexts = [one.context for one in rows]
        starts = np.cumsum([0, *contexts[:-1]])
        flat = torch.from_numpy(
            np.concatenate([one.rows + at for one, at in zip(rows, starts, strict=True)])
        )
        tokens = torch.cat([
            torch.from_numpy(example.tokens[: of.context].astype(np.int64))
            for example, of in zip(examples, rows, strict=True)
        ])  # fmt: skip
        teacher = torch.cat([
            torch.from_numpy(np.asarray(example.features[of.rows, -width:])).view(torch.bfloat16)
            for example, of in zip(examples, rows, strict=True)
        ])  # fmt: skip
        x = self._run(tokens, contexts)[flat]
        states = norm(x, self.parameters["norm"], self.target.norm_eps).to(self.dtype)
        with torch.no_grad():
            logits = scaled_logits(F.linear(teacher.to(self.dtype), self._head), self.target)
        weights = torch.full((1, len(flat)), 1.0 / len(flat))
        loss, right = head_loss(states[None], self._head, logits, weights)
        return loss, right.sum(1), len(flat)

    def _run(self, tokens: torch.Tensor, contexts: list[int]) -> torch.Tensor:
        """The residual stream [tokens, hidden] of texts one behind the other."""
        t, p, dtype = self.target, self.parameters, self.dtype
        positions = torch.cat([torch.arange(one) for one in contexts])
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = [torch.triu(torch.ones(one, one, dtype=torch.bool), 1) for one in contexts]
        x = F.embedding(tokens, self._embedding).float()
        for place in range(len(self.layers)):

            def w(name: str, place: int = place) -> torch.Tensor:
                value = p[f"layers.{place}.{name}"]
                return value.to(dtype) if value.ndim == 2 else value

            into = norm(x, w("attention_norm"), t.norm_eps).to(dtype)
            q, k, v = (
                F.linear(into, w(f"attention.{one}")).view(len(x), -1, t.head_dim) for one in "qkv"
            )
            q, k = (rotate(one.float(), cos, sin).to(dtype) for one in (q, k))
            apart = zip(*(one.split_with_sizes(contexts) for one in (q, k, v)), hidden, strict=True)
            attended = torch.cat([attend(a, b, c, unseen, []) for a, b, c, unseen in apart])
            x = x + F.linear(attended, w("attention.o")).float()
            into = norm(x, w("mlp_norm"), t.norm_eps).to(dtype)
            gated = F.silu(F.linear(into, w("mlp.gate"))) * F.linear(into, w("mlp.up"))
            x = x + F.linear(gated, w("mlp.down")).float()
        return x

    def exported(self) -> dict[str, torch.Tensor]:
        """Tensors as a Llama's checkpoint names them, bfloat16."""
        from ..loading.family import LLAMA_NAMES

        out = {LLAMA_NAMES["embedding"]: self._embedding.to(torch.bfloat16)}
        if not self.target.tied_embeddings:
            out[LLAMA_NAMES["lm_head"]] = self._head.to(torch.bfloat16)
        for name, value in self.parameters.items():
            parts = name.split(".", 2)
            known = name if len(parts) < 3 else f"layers.{{i}}.{parts[2]}"
            stored_name = LLAMA_NAMES[known].replace("{i}", parts[1] if len(parts) > 1 else "")
            out[stored_name] = value.detach().to(torch.bfloat16)
        return out

    def config(self, eos_token_ids: Sequence[int], bos_token_id: int | None) -> dict[str, Any]:
        """config.json."""
        t = self.target
        eos: Any = list(eos_token_ids)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": t.vocab_size,
            "hidden_size": t.hidden_size,
            "intermediate_size": t.intermediate_size,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": t.num_heads,
            "num_key_value_heads": t.num_kv_heads,
            "head_dim": t.head_dim,
            "max_position_embeddings": t.max_position_embeddings,
            "rms_norm_eps": t.norm_eps,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": t.tied_embeddings,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "torch_dtype": "bfloat16",
        }
