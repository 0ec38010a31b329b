"""An EAGLE-3 head in training: one layer over three of the target's hidden states (2503.01840).

Row p of a text has the target's states at p and the token at p + 1, and says what stands at p + 2;
its teacher is the target's distribution there, restricted to the draft vocabulary. Training-time
test: in step 1 a row has, in place of the target's states, what the row before came to in step 0,
and attends to step 0's keys only up to that row, and to its own. So on for further steps: what the
head meets when it drafts on its own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from .batches import Rows, rows_of
from .loss import head_loss
from .parts import attend, matrix, norm, rotary_tables, rotate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..loading import ModelFields
    from .shards import Example

__all__ = ["Eagle3Sizes", "Eagle3Trainer"]

DECAY = 0.8
"""How much less each further step of the test counts."""


@dataclass(frozen=True)
class Eagle3Sizes:
    """What a head is made of; hidden size, heads and norms are the target's."""

    aux_layers: tuple[int, ...]
    """Layers of the target whose input is read."""
    intermediate_size: int
    rope_theta: float
    max_positions: int


class Eagle3Trainer:
    """Parameters, and the loss of a batch of texts."""

    def __init__(
        self,
        target: ModelFields,
        sizes: Eagle3Sizes,
        vocabulary: NDArray[np.int64],
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        norm_weight: torch.Tensor,
        scales: torch.Tensor,
        *,
        test_steps: int,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        """A fresh head. `scales` [states * hidden] are the sizes of the target's channels.

        The layer is random; the output head starts as the target's with its norm folded in, at
        a size that gives random states logits of size 1.
        """
        self.target, self.sizes, self.vocabulary = target, sizes, vocabulary
        self.test_steps, self.dtype = test_steps, dtype
        self._scales = scales
        kept = torch.from_numpy(vocabulary)
        self._embedding = embedding.to(dtype)
        self._teacher_head = lm_head[kept].to(dtype)
        self._of_token = torch.full((target.vocab_size,), -1, dtype=torch.int64)
        self._of_token[kept] = torch.arange(len(kept))
        inv_freq = tuple(
            sizes.rope_theta ** (-2.0 * i / target.head_dim) for i in range(target.head_dim // 2)
        )
        self._cos, self._sin = rotary_tables(inv_freq, sizes.max_positions)

        g = torch.Generator().manual_seed(seed)
        h, ffn = target.hidden_size, sizes.intermediate_size
        q, kv = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
        parts = len(sizes.aux_layers)
        head = lm_head[kept].float() * norm_weight.float()
        made = {
            "fc.weight": matrix((h, parts * h), g),
            "midlayer.hidden_norm.weight": torch.ones(h),
            "midlayer.input_layernorm.weight": torch.ones(h),
            "midlayer.post_attention_layernorm.weight": torch.ones(h),
            "midlayer.self_attn.q_proj.weight": matrix((q, 2 * h), g),
            "midlayer.self_attn.k_proj.weight": matrix((kv, 2 * h), g),
            "midlayer.self_attn.v_proj.weight": matrix((kv, 2 * h), g),
            "midlayer.self_attn.o_proj.weight": matrix((h, q), g),
            "midlayer.mlp.gate_proj.weight": matrix((ffn, h), g),
            "midlayer.mlp.up_proj.weight": matrix((ffn, h), g),
            "midlayer.mlp.down_proj.weight": matrix((h, ffn), g),
            "norm.weight": torch.ones(h),
            "lm_head.weight": head / head.norm(dim=1).mean(),
        }
        self.parameters = {name: value.requires_grad_() for name, value in made.items()}

    @property
    def steps_told(self) -> int:
        """How many acceptance rates `loss` gives."""
        return self.test_steps

    def rows(self, example: Example) -> Rows:
        """Which rows of a text are learnt from."""
        return rows_of(example)

    def loss(self, examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(loss a row, right guesses by step [steps], rows they are of).

        A guess is right where head and target have the same favourite; a favourite outside of the
        draft vocabulary is a miss, and teaches nothing.
        """
        batch = _Batch(examples, [self.rows(one) for one in examples], self.sizes)
        states, teacher = self._forward(batch)
        head = self.parameters["lm_head.weight"].to(self.dtype)
        inside = self._of_token[batch.favourites] >= 0
        weights = torch.stack([
            (DECAY**step / len(inside)) * (inside & batch.valid(step)).float()
            for step in range(self.test_steps)
        ])  # fmt: skip
        loss, right = head_loss(states, head, teacher, weights)
        valid = torch.stack([batch.valid(step) for step in range(self.test_steps)])
        # Of rows where a step could be made; scaled to all, so that one number divides.
        share = (right & inside & valid).sum(1) / valid.sum(1).clamp(min=1)
        return loss, share * len(inside), len(inside)

    def _forward(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """States [steps, rows, hidden] before the output head, and the teacher's logits."""
        p, t, dtype = self.parameters, self.target, self.dtype
        eps = t.norm_eps
        w = {
            name: one.to(dtype) for name, one in p.items() if one.ndim == 2 and name != "fc.weight"
        }
        fc = (p["fc.weight"] / self._scales).to(dtype)
        stream = F.linear(batch.features.to(dtype), fc).float()
        embedded = norm(
            F.embedding(batch.next_tokens, self._embedding).float(),
            p["midlayer.input_layernorm.weight"], eps,
        ).to(dtype)  # fmt: skip
        own = embedded[batch.flat_rows]
        layer = "midlayer.self_attn."
        qkv = [w[layer + f"{one}_proj.weight"] for one in "qkv"]

        def heads(x: torch.Tensor, which: int, positions: torch.Tensor) -> torch.Tensor:
            out = F.linear(x, qkv[which]).view(len(x), -1, t.head_dim)
            if which == 2:
                return out
            return rotate(out.float(), self._cos[positions], self._sin[positions]).to(dtype)

        def after(x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
            x = x + F.linear(attended, w[layer + "o_proj.weight"]).float()
            into = norm(x, p["midlayer.post_attention_layernorm.weight"], eps).to(dtype)
            gate = F.linear(into, w["midlayer.mlp.gate_proj.weight"])
            up = F.linear(into, w["midlayer.mlp.up_proj.weight"])
            return x + F.linear(F.silu(gate) * up, w["midlayer.mlp.down_proj.weight"]).float()

        def first_input(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            normed = norm(x, p["midlayer.hidden_norm.weight"], eps).to(dtype)
            return torch.cat([tokens, normed], -1)

        whole = first_input(stream, embedded)
        k = heads(whole, 1, batch.positions).split_with_sizes(batch.contexts)
        v = heads(whole, 2, batch.positions).split_with_sizes(batch.contexts)
        x, into = stream[batch.flat_rows], whole[batch.flat_rows]
        further: list[tuple[torch.Tensor, torch.Tensor]] = []
        out = []
        for step in range(self.test_steps):
            if step > 0:
                # What the row before came to, beside this row's own token.
                x = F.pad(x[:-1], (0, 0, 1, 0))
                into = first_input(x, own)
                further = [
                    (F.pad(a[:-1], (0, 0, 0, 0, 1, 0)), F.pad(b[:-1], (0, 0, 0, 0, 1, 0)))
                    for a, b in further
                ]
                further.append((
                    heads(into, 1, batch.row_positions), heads(into, 2, batch.row_positions)
                ))  # fmt: skip
            q = heads(into, 0, batch.row_positions).split_with_sizes(batch.rows)
            # split, since the backward pass of a slice writes all that is not in it.
            apart = [
                (a.split_with_sizes(batch.rows), b.split_with_sizes(batch.rows)) for a, b in further
            ]
            attended = torch.cat([
                attend(
                    q[text], k[text], v[text], batch.hidden(text, step),
                    [(a[text], b[text]) for a, b in apart],
                )
                for text in range(len(q))
            ])  # fmt: skip
            x = after(x, attended)
            out.append(norm(x, p["norm.weight"], eps).to(dtype))
        with torch.no_grad():
            teacher = F.linear(batch.teacher_states.to(dtype), self._teacher_head)
            teacher = scaled_logits(teacher, t)
        return torch.stack(out), teacher

    def exported(self) -> dict[str, torch.Tensor]:
        """Tensors in EAGLE-3's names, channel scales folded in; matrices and norms bfloat16."""
        out = {}
        for name, value in self.parameters.items():
            value = value.detach()
            out[name] = (value / self._scales if name == "fc.weight" else value).to(torch.bfloat16)
        kept = torch.from_numpy(self.vocabulary)
        out["d2t"] = kept - torch.arange(len(kept))
        out["t2d"] = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        out["t2d"][kept] = True
        return out

    def config(self) -> dict[str, Any]:
        """config.json. Layers other than EAGLE-3's default are named as vLLM reads them."""
        t, layers = self.target, list(self.sizes.aux_layers)
        out: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": t.hidden_size,
            "target_hidden_size": t.hidden_size,
            "intermediate_size": self.sizes.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": t.num_heads,
            "num_key_value_heads": t.num_kv_heads,
            "head_dim": t.head_dim,
            "vocab_size": t.vocab_size,
            "draft_vocab_size": len(self.vocabulary),
            "max_position_embeddings": t.max_position_embeddings,
            "rms_norm_eps": t.norm_eps,
            "rope_theta": self.sizes.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            # vLLM and SGLang take the same layers where none are named, and count named ones
            # differently: so the default goes unnamed, and says so to specrt.
            "specrt_aux_layer_ids": layers,
        }
        if layers != [2, t.num_layers // 2, t.num_layers - 3]:
            out["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True,
            }  # fmt: skip
        return out


def scaled_logits(logits: torch.Tensor, target: ModelFields) -> torch.Tensor:
    """The target's scale and soft cap on what its output head gives."""
    if target.logits_scale != 1.0:
        logits = logits * target.logits_scale
    if target.final_softcap > 0:
        logits = target.final_softcap * torch.tanh(logits / target.final_softcap)
    return logits


class _Batch:
    """Texts one behind the other, and their learnt rows one behind the other."""

    def __init__(
        self, examples: Sequence[Example], rows: Sequence[Rows], sizes: Eagle3Sizes
    ) -> None:
        parts = len(sizes.aux_layers)
        features, teachers, tokens, flat, own, favourites = [], [], [], [], [], []
        self.rows = [len(one.rows) for one in rows]
        self.contexts = [one.context for one in rows]
        self._visible: list[tuple[torch.Tensor, int]] = []
        runs, at = [], 0
        for example, of in zip(examples, rows, strict=True):
            width = example.features.shape[1] // (parts + 1)
            kept = torch.from_numpy(np.asarray(example.features[: of.context + 1]).copy())
            kept = kept.view(torch.bfloat16)
            where = torch.from_numpy(of.rows)
            features.append(kept[: of.context, : parts * width])
            teachers.append(kept[where + 1, parts * width :])
            assert example.favourites is not None
            favourites.append(torch.from_numpy(example.favourites[of.rows + 1].astype(np.int64)))
            tokens.append(torch.from_numpy(example.tokens[1 : 1 + of.context].astype(np.int64)))
            flat.append(where + at)
            own.append(where)
            self._visible.append((where, of.context))
            # How many rows before a row stand right before it.
            gaps = np.flatnonzero(np.diff(of.rows, prepend=-2) != 1)
            starts = np.zeros(len(of.rows), dtype=np.int64)
            starts[gaps] = gaps
            runs.append(torch.from_numpy(np.arange(len(of.rows)) - np.maximum.accumulate(starts)))
            at += of.context
        self.features = torch.cat(features)
        self.teacher_states, self.favourites = torch.cat(teachers), torch.cat(favourites)
        self.next_tokens = torch.cat(tokens)
        self.flat_rows, self.row_positions = torch.cat(flat), torch.cat(own)
        self.positions = torch.cat([torch.arange(one.context) for one in rows])
        self._runs = torch.cat(runs)

    def valid(self, step: int) -> torch.Tensor:
        """Rows that the steps before could lead to."""
        return self._runs >= step

    def hidden(self, text: int, step: int) -> torch.Tensor:
        """[rows, positions]: where a row of this step does not look among step 0's keys."""
        where, context = self._visible[text]
        return torch.arange(context)[None] > where[:, None] - step
