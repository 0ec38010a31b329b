"""Medusa-1 heads in training (Cai et al., arXiv 2401.10774): the target stays as it is.

Head i reads the final norm's output at p and says what stands at p + 2 + i; its teacher is the
target's distribution there, restricted to the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from .batches import Rows, rows_of
from .eagle3 import scaled_logits
from .loss import head_loss

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..loading import ModelFields
    from .shards import Example

__all__ = ["MedusaTrainer"]

DECAY = 0.8
"""How much less each further head counts."""


class MedusaTrainer:
    """Parameters, and the loss of a batch of texts."""

    def __init__(
        self,
        target: ModelFields,
        vocabulary: NDArray[np.int64],
        lm_head: torch.Tensor,
        *,
        num_heads: int,
        num_layers: int,
        dtype: torch.dtype,
    ) -> None:
        """Heads that say what the target's own says: their blocks are zero."""
        self.target, self.vocabulary, self.dtype = target, vocabulary, dtype
        self.num_heads, self.num_layers = num_heads, num_layers
        kept = torch.from_numpy(vocabulary)
        self._teacher_head = lm_head[kept].to(dtype)
        self._of_token = torch.full((target.vocab_size,), -1, dtype=torch.int64)
        self._of_token[kept] = torch.arange(len(kept))
        h = target.hidden_size
        made = {}
        for head in range(num_heads):
            for layer in range(num_layers):
                made[f"blocks.{head}.layers.{layer}.weight"] = torch.zeros(h, h)
                made[f"blocks.{head}.layers.{layer}.bias"] = torch.zeros(h)
            made[f"lm_heads.{head}.weight"] = lm_head[kept].float().clone()
        self.parameters = {name: value.requires_grad_() for name, value in made.items()}

    @property
    def steps_told(self) -> int:
        """How many acceptance rates `loss` gives."""
        return self.num_heads

    def rows(self, example: Example) -> Rows:
        """Which rows of a text are learnt from."""
        return rows_of(example)

    def loss(self, examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(loss a row, right guesses by head [heads], rows); see `Trainer`."""
        width = self.target.hidden_size
        states, teachers, favourites, known = [], [], [], []
        for example in examples:
            rows = self.rows(example).rows
            ahead = rows[:, None] + 1 + np.arange(self.num_heads)
            fits = ahead < min(len(example.features), len(example.tokens) - 1)
            ahead = np.where(fits, ahead, 0)
            kept = np.array(example.features[:, -width:])
            states.append(torch.from_numpy(kept[rows]).view(torch.bfloat16))
            teachers.append(torch.from_numpy(kept[ahead]).view(torch.bfloat16))
            assert example.favourites is not None
            favourites.append(torch.from_numpy(example.favourites[ahead].astype(np.int64)))
            behind = np.asarray(example.learnt)[ahead + 1] > 0
            known.append(torch.from_numpy(fits & behind))
        state, teacher = torch.cat(states).to(self.dtype), torch.cat(teachers).to(self.dtype)
        favourite, valid = torch.cat(favourites), torch.cat(known)
        inside = valid & (self._of_token[favourite.clamp(min=0)] >= 0)
        count = len(state)
        total = torch.zeros(())
        right = torch.zeros(self.num_heads)
        for head in range(self.num_heads):
            said = state.float()
            for layer in range(self.num_layers):
                name = f"blocks.{head}.layers.{layer}."
                out = F.linear(
                    said.to(self.dtype),
                    self.parameters[name + "weight"].to(self.dtype),
                ).float()
                said = said + F.silu(out + self.parameters[name + "bias"])
            with torch.no_grad():
                logits = scaled_logits(F.linear(teacher[:, head], self._teacher_head), self.target)
            weights = (DECAY**head / count) * inside[:, head].float()
            loss, hit = head_loss(
                said.to(self.dtype)[None],
                self.parameters[f"lm_heads.{head}.weight"].to(self.dtype),
                logits,
                weights[None],
            )
            total = total + loss
            share = (hit[0] & inside[:, head]).sum() / valid[:, head].sum().clamp(min=1)
            right[head] = share * count
        return total, right, count

    @property
    def _whole(self) -> bool:
        return len(self.vocabulary) == self.target.vocab_size

    def exported(self) -> dict[str, torch.Tensor]:
        """The reference's names for the whole vocabulary, else vLLM's, which know a reduced one."""
        out = {}
        for name, value in self.parameters.items():
            kept = value.detach().to(torch.bfloat16)
            parts = name.split(".")
            if not self._whole:
                out[name] = kept
            elif parts[0] == "blocks":
                out[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = kept
            else:
                out[f"{parts[1]}.{self.num_layers}.weight"] = kept
        if not self._whole:
            out["token_map"] = torch.from_numpy(self.vocabulary)
        return out

    @property
    def file(self) -> str:
        """The name that goes with the layout."""
        return "medusa_lm_head.safetensors" if self._whole else "model.safetensors"

    def config(self, base: str) -> dict[str, Any]:
        """config.json."""
        if self._whole:
            return {
                "medusa_num_heads": self.num_heads,
                "medusa_num_layers": self.num_layers,
                "base_model_name_or_path": base,
                "hidden_size": self.target.hidden_size,
                "vocab_size": self.target.vocab_size,
            }
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": len(self.vocabulary),
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "medusa_fc_bias": True,
            "torch_dtype": "bfloat16",
        }
