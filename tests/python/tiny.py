"""Makers of tiny checkpoints, all from fixed seeds, for every test that needs a model.

`tiny_llama`, `tiny_qwen2` and `tiny_family` are random models that use the KV cache for real.
`bigram` and `counter` have outputs known by arithmetic. `byte_tokenizer` gives every byte a token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 128,
    vocab: int = 128,
    dtype: str = "float32",
    tie: bool = False,
    sharded: bool = False,
    rope: dict[str, Any] | None = None,
    seed: int = 0,
    lm_head_scale: float = 8.0,
    max_positions: int = 2048,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    eos_token_id: int | list[int] | None = None,
) -> Path:
    """A random Llama checkpoint; the lm_head is scaled up so that the best token is clear."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tie,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    return _save(LlamaForCausalLM, config, path, dtype, sharded, seed, lm_head_scale)


def tiny_qwen2(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 128,
    vocab: int = 288,
    dtype: str = "float32",
    tie: bool = True,
    sharded: bool = False,
    rope: dict[str, Any] | None = None,
    seed: int = 0,
    lm_head_scale: float = 8.0,
    max_positions: int = 2048,
    eos_token_id: int | list[int] | None = None,
) -> Path:
    """A random Qwen2 checkpoint with q/k/v biases; its vocabulary is padded beyond BYTE's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=tie,
        eos_token_id=eos_token_id,
    )
    return _save(Qwen2ForCausalLM, config, path, dtype, sharded, seed, lm_head_scale)


# What the tiny models of all families have in common, and what a family needs besides.
_SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {
        "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24},
    "phi3": {},
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3,
        "logits_scaling": 1.7,
    },
    "olmo2": {},
}  # fmt: skip


def tiny_family(
    path: Path,
    model_type: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    lm_head_scale: float = 8.0,
    **changes: Any,
) -> Path:
    """A random model of any family; `changes` are keys of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**_SIZES, **_OF_FAMILY[model_type], **changes})
    make = AutoModelForCausalLM.from_config
    return _save(make, config, path, dtype, False, seed, lm_head_scale)


def _save(
    model_class: Any,
    config: Any,
    path: Path,
    dtype: str,
    sharded: bool,
    seed: int,
    lm_head_scale: float,
) -> Path:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model = model_class(config)
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                centre = 0.0 if config.model_type.startswith("gemma") else 1.0
                parameter.copy_(centre + 0.1 * values)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * values)
            elif name == "model.embed_tokens.weight":
                # A tied table has to serve as both: its scale is that of an lm_head.
                tied = config.tie_word_embeddings
                parameter.copy_(values * (lm_head_scale / 8.0 if tied else 1.0))
            else:
                scale = lm_head_scale if name == "lm_head.weight" else 1.0
                parameter.copy_(values * (scale / parameter.shape[-1] ** 0.5))
        model = model.to(getattr(torch, dtype))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = max(size // 2, 1)
    model.save_pretrained(path, max_shard_size=limit if sharded else "5GB")
    return path


def bigram(path: Path, table: np.ndarray, *, eos_token_id: int | list[int] | None = None) -> Path:
    """A Llama of one layer whose next-token logits are row `table[last token]`, exactly.

    `table` is [V, V] float32: hidden = V, attention and MLP add nothing, the embedding is the
    identity. RMSNorm turns a one-hot of width V into sqrt(V) times a one-hot, which the lm_head
    divides out: V is a power of 4, which keeps that exact. Blind to faults of the KV cache.
    """
    vocab = table.shape[0]
    if table.shape != (vocab, vocab) or vocab not in (4, 16, 64, 256):
        raise ValueError(f"expected a square table of 4, 16, 64 or 256 tokens, got {table.shape}")
    eye = np.eye(vocab, dtype=np.float32)
    zero = np.zeros((vocab, vocab), np.float32)
    ones = np.ones(vocab, np.float32)
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": eye,
        f"{layer}input_layernorm.weight": ones,
        f"{layer}self_attn.q_proj.weight": eye,
        f"{layer}self_attn.k_proj.weight": eye,
        f"{layer}self_attn.v_proj.weight": eye,
        f"{layer}self_attn.o_proj.weight": zero,
        f"{layer}post_attention_layernorm.weight": ones,
        f"{layer}mlp.gate_proj.weight": eye,
        f"{layer}mlp.up_proj.weight": eye,
        f"{layer}mlp.down_proj.weight": zero,
        "model.norm.weight": ones,
        "lm_head.weight": np.ascontiguousarray(table.T.astype(np.float32) / vocab**0.5),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": vocab,
        "intermediate_size": vocab,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-30,  # nothing beside a mean square of 1/V, so the norm stays exact
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": eos_token_id,
    }
    write_checkpoint(path, config, tensors)
    return path


def counter(path: Path, vocab: int = 16, *, step: int = 1, sharpness: float = 40.0) -> Path:
    """A bigram model whose next token is (last + step) mod vocab, nearly always.

    With step 2 it is the drafter that is always wrong for a counter of step 1.
    """
    table = np.zeros((vocab, vocab), np.float32)
    table[np.arange(vocab), (np.arange(vocab) + step) % vocab] = sharpness
    return bigram(path, table)


def half_right(path: Path, vocab: int = 16, *, sharpness: float = 40.0) -> Path:
    """A counter that is right after even tokens and two ahead after odd ones."""
    table = np.zeros((vocab, vocab), np.float32)
    last = np.arange(vocab)
    table[last, (last + 1 + last % 2) % vocab] = sharpness
    return bigram(path, table)


def write_checkpoint(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """A config.json and a model.safetensors."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    path: Path, *, add_bos: bool = False, chat: bool = True, swap: tuple[int, int] | None = None
) -> Path:
    """Saves BYTE: token b is byte b, then the `SPECIALS` from 256 on; no merges.

    `swap` exchanges the strings of two ids, for tests of mismatched vocabularies.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    order = list(range(256))
    if swap is not None:
        order[swap[0]], order[swap[1]] = order[swap[1]], order[swap[0]]
    alphabet = byte_alphabet()
    backend = Tokenizer(models.BPE({alphabet[b]: i for i, b in enumerate(order)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(one, normalized=False) for one in SPECIALS])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=["<|bos|>", "$A"], special_tokens=[("<|bos|>", 256)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
