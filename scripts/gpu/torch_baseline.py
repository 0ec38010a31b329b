"""Plain decoding in torch, as good as a page of it gets: one captured graph a token, static cache.

The weights are those of a transformers Llama, which it shares; `generate` of the same model is the
other baseline.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from torch_time import Captured, median_seconds


def random_llama(sizes: dict[str, int | bool], device: torch.device) -> Any:
    """A transformers Llama in bfloat16 with random weights, made where it will be."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=sizes["hidden"], intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"], head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab"], max_position_embeddings=8192,
        tie_word_embeddings=sizes["tied"], bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    model.tie_weights()
    # Not part of the weights, so empty now.
    with torch.device(device):
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                scale = 0.02 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, scale)
    return model.eval()


class Decoder:
    """One sequence; `step` reads `token` and `position` and leaves the next token in `token`."""

    def __init__(self, model: Any, room: int) -> None:
        config, self.model = model.config, model
        self.device = model.lm_head.weight.device
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.eps = config.head_dim, config.rms_norm_eps
        shape = (config.num_hidden_layers, 2, 1, self.kv_heads, room, self.dim)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        places = torch.arange(room, device=self.device)
        self.places = places
        cos, sin = model.model.rotary_emb(self.cache, places[None])
        self.cos, self.sin = cos[0].to(torch.bfloat16), sin[0].to(torch.bfloat16)
        self.fused = [
            (
                torch.cat([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight,
                           layer.self_attn.v_proj.weight]),
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            )
            for layer in model.model.layers
        ]  # fmt: skip

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[self.position], self.sin[self.position]
        return x * cos + torch.cat([-second, first], -1) * sin

    def step(self) -> torch.Tensor:
        """Logits [1, vocab] of the token, which becomes the likeliest."""
        inner, h = self.model.model, self.model.model.embed_tokens(self.token)[0]
        size = (h.shape[-1],)
        seen = (self.places <= self.position)[None, None, None]
        for at, (layer, (qkv, gate_up)) in enumerate(zip(inner.layers, self.fused, strict=True)):
            x = rms_norm(h, size, layer.input_layernorm.weight, self.eps)
            split = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
            q, k, v = linear(x, qkv).split(split, -1)
            q = self._turn(q.view(1, self.heads, 1, self.dim))
            k = self._turn(k.view(1, self.kv_heads, 1, self.dim))
            keys, values = self.cache[at]
            keys.index_copy_(2, self.position, k)
            values.index_copy_(2, self.position, v.view(1, self.kv_heads, 1, self.dim))
            out = scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
            h = h + linear(out.reshape(1, -1), layer.self_attn.o_proj.weight)
            x = rms_norm(h, size, layer.post_attention_layernorm.weight, self.eps)
            gate, up = linear(x, gate_up).chunk(2, -1)
            h = h + linear(silu(gate) * up, layer.mlp.down_proj.weight)
        logits = linear(rms_norm(h, size, inner.norm.weight, self.eps), self.model.lm_head.weight)
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.position.add_(1)
        return logits


@torch.no_grad()
def graph_tokens_per_second(model: Any, prompt: list[int], tokens: int) -> float:
    """Of plain greedy decoding, the prompt left out."""
    decoder = Decoder(model, len(prompt) + tokens + 16)
    captured = Captured(decoder.step, decoder.device)
    decoder.position.zero_()
    for token in prompt:
        decoder.token.fill_(token)
        captured()

    def run() -> None:
        decoder.position.fill_(len(prompt))
        for _ in range(tokens):
            captured()

    return tokens / median_seconds(run, decoder.device, repeats=3)


@torch.no_grad()
def generate_tokens_per_second(model: Any, prompt: list[int], tokens: int) -> float:
    """Of transformers' `generate`, prompt included, as its users have it."""
    ids = torch.tensor([prompt], device=model.lm_head.weight.device)
    mask = torch.ones_like(ids)

    def run() -> None:
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens,
                             min_new_tokens=tokens)  # fmt: skip
        assert out.shape[1] == len(prompt) + tokens

    return tokens / median_seconds(run, ids.device, repeats=1)
