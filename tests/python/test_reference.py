"""Against transformers: the demo model's texts, and tiny models' logits of every family."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import (
    AlwaysWrong,
    Branching,
    HalfRight,
    Oracle,
    Tally,
    assert_identities,
    assert_same,
    greedy,
    known,
)

import specrt
from specrt import Engine, RequestOutput, drafters

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 2, 3, 4, 5, 6, 7,",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "Roses are red,\nviolets are blue,\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Q: What is the largest planet?\nA:",
    "A",
    "In 1969, the first people landed on",
    "import numpy as np\n\nx = np.array([1, 2, 3])\ny = np.array([1, 2, 3])\n",
    "To be, or not to be, that is",
    "Ingredients:\n- 2 eggs\n- 100 g of flour\n- 1 cup of milk\n\nSteps:\n1.",
    "Monday, Tuesday, Wednesday,",
    "Die Hauptstadt von Deutschland ist",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n',
    "The three laws of motion are",
    "Berlin is the capital of Germany. Paris is the capital of France. Rome is",
    "Once there was a boy named Tim. Tim had a red ball. Tim's red ball was",
]
TOKENS = 200
CLOSE = 1e-4
"""Two candidates whose logits differ by less are taken for a tie between implementations."""


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """The demo model in transformers, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from specrt.demo import demo_model_path

    path = demo_model_path()
    # What from_pretrained(gguf_file=...) does, without its need for accelerate.
    stated = load_gguf_checkpoint(path, return_tensors=False)["config"]
    model = LlamaForCausalLM(LlamaConfig(**stated)).to(torch.float32).eval()
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    assert model.config.tie_word_embeddings
    yield model
    del model, loaded
    gc.collect()


@pytest.fixture(scope="module")
def demo(demo_fp32: Path, demo_tokenizer: specrt.Tokenizer) -> Callable[..., Engine]:
    """Engines over the demo model in float32."""

    def make(drafter: Any = None, **options: Any) -> Engine:
        return Engine(
            demo_fp32,
            drafter,
            tokenizer=demo_tokenizer,
            max_model_len=320,
            max_batch_size=20,
            **options,
        )

    return make


@pytest.fixture(scope="module")
def plain(demo: Callable[..., Engine]) -> list[RequestOutput]:
    """The demo model's own continuations, whatever they are."""
    with demo() as engine:
        return engine.generate(PROMPTS, greedy(TOKENS, ignore_eos=True))


def reference_greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """transformers' own greedy texts of prompts of one length."""
    import torch

    feed = torch.tensor(prompts)
    model.generation_config.eos_token_id = None  # so that it goes on
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its threads wait for one another at every little step
    try:
        out = model.generate(
            feed,
            attention_mask=torch.ones_like(feed),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    finally:
        torch.set_num_threads(threads)
    return out[:, feed.shape[1] :].tolist()


def forced_logits(model: Any, output: RequestOutput) -> np.ndarray:
    """The logits from which transformers would have chosen each token of an output."""
    import torch

    tokens = [*output.prompt_token_ids, *output.token_ids[:-1]]
    with torch.inference_mode():
        count = len(output.token_ids)
        return model(torch.tensor([tokens]), logits_to_keep=count).logits[0].numpy()


def assert_greedy(logits: np.ndarray, tokens: Sequence[int]) -> None:
    """Every token is the arg-max after those before it, which by induction makes the whole text
    the one that transformers generates. Up to the first tie, that is: it ends the comparison."""
    for at, token in enumerate(tokens):
        best = int(logits[at].argmax())
        if token == best:
            continue
        gap = float(logits[at, best] - logits[at, token])
        assert gap < CLOSE, f"token {at}: {token} where transformers has {best}, ahead by {gap}"
        return


def test_demo_model_equals_transformers(reference: Any, plain: list[RequestOutput]) -> None:
    for output in plain:
        assert len(output.token_ids) == TOKENS
        assert_greedy(forced_logits(reference, output), output.token_ids)


def test_demo_model_equals_transformers_decoding(
    reference: Any, plain: list[RequestOutput]
) -> None:
    outputs = [plain[1], plain[5]]
    theirs = reference_greedy(reference, [one.prompt_token_ids for one in outputs], TOKENS)
    for output, tokens in zip(outputs, theirs, strict=True):
        if tokens != output.token_ids:
            at = next(i for i in range(TOKENS) if tokens[i] != output.token_ids[i])
            logits = forced_logits(reference, output)[at]
            assert abs(logits[tokens[at]] - logits[output.token_ids[at]]) < CLOSE, at


def test_demo_model_with_ngram(demo: Callable[..., Engine], plain: list[RequestOutput]) -> None:
    with demo("ngram") as engine:
        outputs = engine.generate(PROMPTS, greedy(TOKENS, ignore_eos=True))
    assert_same(outputs, plain, "ngram")
    for output in outputs:
        assert_identities(output)
    assert sum(output.metrics.accepted_tokens for output in outputs) > 500


def test_demo_model_with_every_drafter(
    demo: Callable[..., Engine],
    demo_bf16: Path,
    demo_tokenizer: specrt.Tokenizer,
    plain: list[RequestOutput],
) -> None:
    rows, tokens = [0, 3, 7, 13], 60
    texts = known(plain)
    vocab = demo_tokenizer.vocab_size
    given = {
        "ngram": drafters.NGram(prompt_lookup_min=1, prompt_lookup_max=3),
        "draft model": drafters.DraftModel(model=demo_bf16, tokenizer=demo_tokenizer),
        "oracle": Oracle(texts, vocab),
        "half": HalfRight(texts, vocab),
        "wrong": AlwaysWrong(texts, vocab),
        "tree": Branching(texts, vocab),
    }
    tally = Tally()
    for name, drafter in given.items():
        with demo(drafter, num_speculative_tokens=6) as engine:
            outputs = engine.generate([PROMPTS[i] for i in rows], greedy(tokens, ignore_eos=True))
        tally.add(outputs)
        for row, output in zip(rows, outputs, strict=True):
            assert output.token_ids == plain[row].token_ids[:tokens], (name, row)
            assert output.metrics.drafted_tokens > 0, (name, row)
    tally.assert_mixed()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tiny.tiny_llama, {}),
    "llama-llama3": (tiny.tiny_llama, {"rope": LLAMA3}),
    "llama-wide-heads": (tiny.tiny_llama, {"head_dim": 32}),
    "llama-narrow-heads": (tiny.tiny_llama, {"head_dim": 8}),
    "llama-tied": (tiny.tiny_llama, {"tie": True}),
    "llama-mha": (tiny.tiny_llama, {"kv_heads": 4}),
    "llama-mqa-deep": (tiny.tiny_llama, {"kv_heads": 1, "layers": 4}),
    "llama-biases": (tiny.tiny_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-sizes": (tiny.tiny_llama, {"vocab": 131, "ffn": 100, "hidden": 72}),
    "qwen2": (tiny.tiny_qwen2, {}),
    "qwen2-untied": (tiny.tiny_qwen2, {"tie": False, "layers": 3}),
}
LENGTHS = (1, 2, 31, 32, 33, 1000)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, options = FAMILIES[request.param]
    return make(tmp_path_factory.mktemp("family"), **options)


def log_softmax(output: RequestOutput) -> np.ndarray:
    """All log-probabilities of an output that has them for the whole vocabulary."""
    assert output.logprobs is not None
    rows = np.empty((len(output.logprobs), len(output.logprobs[0])))
    for row, step in zip(rows, output.logprobs, strict=True):
        assert len(step) == len(row)
        for token, one in step.items():
            row[token] = one.logprob
    return rows


def assert_close(got: np.ndarray, logits: np.ndarray, what: Any) -> None:
    """Log-softmax within 1e-4 of the largest value: logits agree up to a constant."""
    logits = logits.astype(np.float64)
    top = logits.max(-1, keepdims=True)
    expected = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max(), what


def test_families_equal_transformers(family: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32).eval()
    vocab = model.config.vocab_size
    draw = np.random.default_rng(5)
    prompts = [draw.integers(0, vocab, length).tolist() for length in LENGTHS]
    # min 1, so that random texts have matches too.
    ngram = drafters.NGram(prompt_lookup_min=1, prompt_lookup_max=3)
    with Engine(family, ngram, max_model_len=1100, max_batch_size=8) as engine:
        outputs = engine.generate(prompts, greedy(24, logprobs=vocab))
    assert sum(output.metrics.drafted_tokens for output in outputs) > 0
    for length, output in zip(LENGTHS, outputs, strict=True):
        logits = forced_logits(model, output)
        assert_close(log_softmax(output), logits, length)
        assert_greedy(logits, output.token_ids)


@pytest.mark.parametrize("isa", specrt.available_cpu_isas())
def test_each_isa_equals_transformers(isa: str, l2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(l2, dtype=torch.float32).eval()
    vocab = model.config.vocab_size
    prompts = [[3], list(range(100, 133))]
    with Engine(l2, "ngram", max_model_len=128, max_batch_size=2, cpu_isa=isa) as engine:
        assert engine.cpu_isa == isa
        outputs = engine.generate(prompts, greedy(40, logprobs=vocab))
    for output in outputs:
        assert_close(log_softmax(output), forced_logits(model, output), isa)


def test_in_memory_model_equals_its_checkpoint(l2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(l2, dtype=torch.float32)
    prompt = [5, 6, 7, 5, 6, 7, 5]
    with Engine(l2, max_model_len=128, max_batch_size=1) as engine:
        expected = engine.generate(prompt, greedy(50, logprobs=2))
    with Engine(
        model, "ngram", tokenizer=tiny_tokenizer(l2), max_model_len=128, max_batch_size=1
    ) as engine:
        got = engine.generate(prompt, greedy(50, logprobs=2))
    assert_same([got], [expected], "in memory")


def tiny_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
