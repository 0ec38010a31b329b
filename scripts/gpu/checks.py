"""Whole engines on a device, tiny models: drafter, batch, chunks and padding change nothing.

    python scripts/gpu/checks.py --device cuda --models FOLDER [--only NAME ...] [--json FILE]

Every check also runs on the CPU (tests/python/test_gpu_checks.py). One that the engine refuses with
UnsupportedError is not available, which is said and is no failure. Returns 1 where a check failed,
3 where none failed and some were not available.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))

import numpy as np
import overheads
import tiny
from helpers import AlwaysWrong, Branching, HalfRight, Oracle, assert_same, greedy, known

import specrt
from specrt import RequestOutput, SamplingParams
from specrt.drafters import DraftModel, Eagle, Eagle3, Medusa, NGram, SelfDraft, Suffix

VOCAB = 128
CHECKS: dict[str, Callable[[Setup], str]] = {}


@dataclass
class Setup:
    """A device, and models that are made when first asked for."""

    device: str
    folder: Path
    made: dict[str, Path] = field(default_factory=dict)

    def model(self, name: str, **options: Any) -> Path:
        """A random Llama of `options`, or what `name` has been made as before."""
        path = self.folder / name
        if name not in self.made:
            if not (path / "model.safetensors").exists():
                make = tiny.counter if name.startswith("counter") else tiny.tiny_llama
                make(path, vocab=options.pop("vocab", VOCAB), **options)
            self.made[name] = path
        return path

    @property
    def l2(self) -> Path:
        return self.model("l2")

    @property
    def other(self) -> Path:
        return self.model("other", hidden=32, heads=2, kv_heads=1, ffn=48, seed=7)

    def engine(self, target: Path, drafter: Any = None, **options: Any) -> specrt.Engine:
        given = {"device": self.device, "dtype": "bfloat16", "max_batch_size": 8, "threads": 2}
        return specrt.Engine(target, drafter, **{"policy": "fixed", **given, **options})

    def run(
        self, target: Path, drafter: Any, prompts: Any, params: Any, **options: Any
    ) -> list[RequestOutput]:
        with self.engine(target, drafter, **options) as engine:
            return engine.generate(prompts, params)


def check(function: Callable[[Setup], str]) -> Callable[[Setup], str]:
    """Registers one; its docstring says what it shows, its result what it saw."""
    CHECKS[function.__name__] = function
    return function


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


def drafters_for(at: Setup, texts: list[list[int]]) -> dict[str, Any]:
    """Every kind, good and bad."""
    return {
        "n-gram": NGram(num_speculative_tokens=4),
        "suffix": Suffix(num_speculative_tokens=4),
        "itself in int4": SelfDraft(num_speculative_tokens=3),
        "first layer": SelfDraft(layers=1, num_speculative_tokens=3),
        "other model": DraftModel(model=at.other, dtype="bfloat16", num_speculative_tokens=4),
        "oracle": Oracle(texts, VOCAB),
        "always wrong": AlwaysWrong(texts, VOCAB),
        "half right": HalfRight(texts, VOCAB),
        "trees": Branching(texts, VOCAB),
    }


def accepted(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """Drafted and accepted tokens of all."""
    metrics = [one.metrics for output in outputs for one in output.outputs]
    return sum(m.drafted_tokens for m in metrics), sum(m.accepted_tokens for m in metrics)


@check
def devices_agree(at: Setup) -> str:
    """CPU and device: the same log-probabilities within bfloat16's tolerance, and the same greedy
    tokens but where the two likeliest are close."""
    tolerance = 0.3
    prompts = prompts_of(3, 17, 40)
    params = greedy(24, logprobs=2)
    here = at.run(at.l2, None, prompts, params)
    reference = Setup("cpu", at.folder)
    there = reference.run(at.l2, None, prompts, params)
    for one, other in zip(here, there, strict=True):
        steps = other.outputs[0].logprobs
        assert steps is not None
        for mine, theirs, step in zip(one.token_ids, other.token_ids, steps, strict=True):
            if mine == theirs:
                continue
            best = sorted((entry.logprob for entry in step.values()), reverse=True)
            assert best[0] - best[1] < tolerance, f"{mine} for {theirs}, {best}"
            break
    texts = known(there)
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    worst = 0.0
    rows = zip(at.run(at.l2, None, texts, asked), reference.run(at.l2, None, texts, asked),
               strict=True)  # fmt: skip
    for one, other in rows:
        for mine, theirs in zip(
            one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True
        ):
            for token, entry in (mine or {}).items():
                assert theirs is not None
                worst = max(worst, abs(entry.logprob - theirs[token].logprob))
    assert worst <= tolerance, worst
    return f"log-probabilities differ by {worst:.4f} at most"


@check
def drafters_change_nothing(at: Setup) -> str:
    """Greedy and sampled: tokens and log-probabilities bit for bit those of plain decoding, with
    good, bad and branching drafters."""
    prompts = [*prompts_of(5, 23), [27, 27, 3, 27, 27, 9, 27, 27, 40, 27, 27]]
    both, refused = [0, 0], set()
    for params in (greedy(20, logprobs=1), SamplingParams(temperature=0.9, max_tokens=20, seed=5)):
        plain = at.run(at.l2, None, prompts, params)
        assert_same(at.run(at.l2, None, prompts, params), plain, "plain again")
        for name, drafter in drafters_for(at, known(plain)).items():
            try:
                outputs = at.run(at.l2, drafter, prompts, params)
            except specrt.errors.UnsupportedError:
                refused.add(name)
                continue
            assert_same(outputs, plain, name)
            for i, count in enumerate(accepted(outputs)):
                both[i] += count
    assert 0 < both[1] < both[0]
    return f"{both[1]} of {both[0]} drafted tokens accepted{_but(refused)}"


@check
def company_changes_nothing(at: Setup) -> str:
    """Alone, together, in another order, in small chunks, from the prefix cache: the same bits."""
    prompts = [*prompts_of(1, 30, 7, 18), [4, 5] * 10, prompts_of(30)[0][:16]]
    params = [greedy(16, logprobs=1, seed=i if i % 2 else 0) for i in range(len(prompts))]
    for i in (1, 4):
        params[i] = SamplingParams(temperature=0.8, max_tokens=16, seed=i, logprobs=1)
    with at.engine(at.l2, NGram(num_speculative_tokens=4)) as engine:
        alone = [engine.generate(*each) for each in zip(prompts, params, strict=True)]
        together = engine.generate(prompts, params)
    assert_same(together, alone, "together")
    order = [3, 5, 1, 0, 4, 2]
    moved = at.run(at.l2, "ngram", [prompts[i] for i in order], [params[i] for i in order])
    assert_same(moved, [alone[i] for i in order], "in another order")
    for options in ({"max_num_batched_tokens": 16}, {"enable_prefix_caching": False},
                    {"block_size": 1}, {"max_batch_size": 3}):  # fmt: skip
        assert_same(at.run(at.l2, "ngram", prompts, params, **options), alone, options)
    return f"{len(prompts)} requests"


@check
def limits_hold_for_every_drafter(at: Setup) -> str:
    """Near the context limit every drafter ends with 'length' at exactly the limit."""
    prompts = [prompts_of(n, seed=n)[0] for n in range(26, 32)]
    params = greedy(64, ignore_eos=True)
    limit = {"max_model_len": 32, "num_speculative_tokens": 5}
    plain = at.run(at.l2, None, prompts, params, max_model_len=32)
    drafters = drafters_for(at, known(plain))
    refused = set()
    for name, drafter in drafters.items():
        try:
            outputs = at.run(at.l2, drafter, prompts, params, **limit)
        except specrt.errors.UnsupportedError:
            refused.add(name)
            continue
        for output in outputs:
            assert output.outputs[0].finish_reason == "length", name
            assert len(output.prompt_token_ids) + len(output.token_ids) == 32, name
        assert_same(outputs, plain, name)
    return f"{len(drafters) - len(refused)} drafters{_but(refused)}"


def _but(refused: set[str]) -> str:
    return f"; refused by name: {', '.join(sorted(refused))}" if refused else ""


@check
def short_draft_model(at: Setup) -> str:
    """A draft model of 32 positions under a target of 128, beyond both 32 and its context: plain's
    output; under compute-sanitizer nothing is read out of bounds."""
    target = at.model("positions128", max_positions=128)
    draft = at.model("positions32", max_positions=32, seed=3)
    prompts = prompts_of(10, 40)
    plain = at.run(target, None, prompts, greedy(60, logprobs=1))
    drafter = DraftModel(model=draft, dtype="bfloat16", num_speculative_tokens=4)
    assert_same(at.run(target, drafter, prompts, greedy(60, logprobs=1)), plain, "drafted")
    return f"{sum(len(one.token_ids) for one in plain)} tokens"


@check
def any_number_of_rows(at: Setup) -> str:
    """max_batch_size 2 with drafts of 7 and 8, batches of 1 and 2; then drafts of 1 to 17: graphs
    of a size that was not foreseen are made or not needed."""
    prompts = prompts_of(9, 14)
    params = greedy(12)
    plain = at.run(at.l2, None, prompts, params)
    for k in (7, 8):
        with at.engine(at.l2, SelfDraft(num_speculative_tokens=k), max_batch_size=2) as engine:
            for count in (1, 2, 1):
                assert_same(engine.generate(prompts[:count], params), plain[:count], (k, count))
    for k in range(1, 18):
        outputs = at.run(at.l2, Oracle(known(plain), VOCAB), prompts, params,
                         num_speculative_tokens=k)  # fmt: skip
        assert_same(outputs, plain, k)
    return "drafts of 1 to 17"


@check
def memory_is_known(at: Setup) -> str:
    """Too small a budget is refused at the start with what is needed; after warm-up a hundred
    rounds take no more memory."""
    try:
        at.engine(at.l2, SelfDraft(), kv_cache_bytes=4096).close()
    except specrt.errors.CapacityError as error:
        said = str(error)
    else:
        raise AssertionError("a cache of 4096 bytes was not refused")
    assert any(character.isdigit() for character in said), said
    used = []
    with at.engine(at.l2, SelfDraft(num_speculative_tokens=3)) as engine:
        for _ in range(3):
            engine.generate(prompts_of(8, 20, 33), greedy(40))
            used.append(_memory_in_use(at.device))
    assert used[1] == used[2], used
    return f"{used[2]} bytes in use on the device" if used[2] else "of the CPU nothing is measured"


def _memory_in_use(device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    number = int(device.partition(":")[2] or 0)
    total = specrt._core.cuda_devices()[number].memory
    return total - specrt._core.cuda_free_memory(number)


@check
def padding_rows_write_nothing(at: Setup) -> str:
    """Three requests in a graph for four, beside pages that the prefix cache keeps: what it kept is
    the same afterwards, acceptance too."""
    shared = prompts_of(64, seed=9)[0]
    params = greedy(20, logprobs=1, prompt_logprobs=0)
    options = {"check_invariants": True, "block_size": 4}
    drafter = DraftModel(model=at.other, dtype="bfloat16", num_speculative_tokens=3)
    cold = at.run(at.l2, drafter, shared, params, **options)
    with at.engine(at.l2, drafter, **options) as engine:
        first = engine.generate(shared, params)
        for seed in range(3):
            engine.generate(prompts_of(11, 5, 19, seed=seed), greedy(12))
        again = engine.generate(shared, greedy(20, logprobs=1))
        whole = engine.generate(shared, params)
    assert_same([first, whole], [cold, cold], "cold and warm")
    assert again.token_ids == first.token_ids
    assert accepted([again]) == accepted([first])
    cached = again.outputs[0].metrics.cached_prompt_tokens
    assert cached >= 64 - 2 * 4, cached
    return f"{cached} prompt tokens from the cache"


@check
def rejected_drafts_leave_nothing(at: Setup) -> str:
    """After rounds that reject, the log-probabilities of the text are, bit for bit, those of a pass
    over the whole text."""
    target = at.model("layers4", layers=4)
    prompts = prompts_of(40, 6)
    params = greedy(24, logprobs=0)
    plain = at.run(target, None, prompts, params)
    for drafter in (AlwaysWrong, HalfRight, Branching):
        outputs = at.run(target, drafter(known(plain), VOCAB), prompts, params,
                         max_num_batched_tokens=32)  # fmt: skip
        texts = known(outputs)
        forced = at.run(target, None, texts, greedy(1, prompt_logprobs=0))
        for output, row in zip(outputs, forced, strict=True):
            steps = output.outputs[0].logprobs
            assert steps is not None
            assert row.prompt_logprobs is not None
            forced_steps = row.prompt_logprobs[-len(steps) :]
            for token, got, want in zip(output.token_ids, steps, forced_steps, strict=True):
                assert want is not None
                assert got[token].logprob == want[token].logprob, drafter.__name__
    return "three drafters, four layers"


@check
def draft_model_of_other_heads(at: Setup) -> str:
    """Target with 4 query heads, draft model with 8 and another width, three requests."""
    prompts = prompts_of(4, 21, 9)
    plain = at.run(at.l2, None, prompts, greedy(20, logprobs=1))
    for name, sizes in {"heads8": {"heads": 8}, "narrow": {"hidden": 32, "ffn": 64}}.items():
        draft = at.model(name, seed=5, **sizes)
        outputs = at.run(
            at.l2, DraftModel(model=draft, dtype="bfloat16"), prompts, greedy(20, logprobs=1)
        )
        assert_same(outputs, plain, name)
        assert accepted(outputs)[0] > 0, name
    return "8 heads over 4, width 32 under 64"


@check
def own_drafts_are_all_accepted(at: Setup) -> str:
    """The target as its own draft model: every draft is accepted, greedy and sampled."""
    drafted = 0
    for params in (greedy(33), SamplingParams(temperature=1.0, max_tokens=33, seed=3)):
        for k in (1, 3, 7):
            itself = DraftModel(model=at.l2, dtype="bfloat16", num_speculative_tokens=k)
            outputs = at.run(at.l2, itself, prompts_of(12, 5), params)
            all_of, good = accepted(outputs)
            cut = sum(one.outputs[0].metrics.truncated_rounds for one in outputs)
            assert all_of - good <= cut * k, (k, all_of, good)
            drafted += all_of
    assert drafted > 0
    return f"{drafted} tokens"


def random_eagle3(at: Setup) -> tuple[Path, Path]:
    """A target and a head of random weights for it."""
    from draft_heads import Head, write

    head = Head("eagle3", seed=8)
    path = write(at.folder / "head3", head.config(), head.stored())
    return at.model("layers6", layers=6, seed=9, lm_head_scale=4.0), path


@check
def heads_draft(at: Setup) -> str:
    """An EAGLE head whose every draft is right has all of them accepted; an EAGLE-3 head of random
    weights changes nothing."""
    import torch
    from draft_heads import Head, write

    size = 16
    target = at.model("counter16", vocab=size)
    head = Head("eagle", hidden=size, target_hidden=size, heads=2, kv_heads=2, head_dim=8,
                ffn=size, vocab=size, eps=1e-30)  # fmt: skip
    for name, tensor in head.tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    # The state behind the norm is the last token's one-hot; turned by one it is the next one's.
    head.tensors["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size).roll(1, 0)], -1)
    path = write(at.folder / "head16", head.config(), head.stored())
    for params in (greedy(13), SamplingParams(max_tokens=13, temperature=0.7, seed=1)):
        (output,) = at.run(
            target, Eagle(path, dtype="bfloat16", num_speculative_tokens=3), [[3, 4, 5]], params
        )
        assert output.token_ids == [(6 + i) % size for i in range(13)]
        assert accepted([output]) == (9, 9)
    target, path = random_eagle3(at)
    plain = at.run(target, None, prompts_of(20, 4), greedy(40, logprobs=1))
    spec = Eagle3(path, dtype="bfloat16", num_speculative_tokens=2, aux_layer_ids=(1, 3, 4))
    outputs = at.run(target, spec, prompts_of(20, 4), greedy(40, logprobs=1))
    assert_same(outputs, plain, "EAGLE-3")
    drafted, good = accepted(outputs)
    assert drafted > 0
    return f"9 of 9 accepted; EAGLE-3, random: {good} of {drafted}"


@check
def medusa_drafts(at: Setup) -> str:
    """Medusa heads whose every draft is right have all of them accepted, by greedy requests and
    beside sampled ones."""
    from safetensors.numpy import save_file

    size = 16
    target = at.model("counter16", vocab=size)
    folder = at.folder / "medusa16"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"})
    )
    tensors = {}
    for i in range(3):
        tensors[f"{i}.0.linear.weight"] = np.zeros((size, size), np.float32)
        tensors[f"{i}.0.linear.bias"] = np.zeros(size, np.float32)
        # The state is the last token's one-hot; head i says what comes i + 2 behind it.
        tensors[f"{i}.1.weight"] = np.roll(np.eye(size, dtype=np.float32), i + 2, 0).copy()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    drafter = Medusa(model=folder, dtype="bfloat16", tree="chain")
    both = [greedy(13), SamplingParams(max_tokens=13, temperature=0.3, seed=1)]
    for params in (both[:1], both):
        outputs = at.run(target, drafter, [[3, 4, 5]] * len(params), params)
        for output in outputs:
            assert output.token_ids == [(6 + i) % size for i in range(13)]
        assert accepted(outputs[:1]) == (9, 9)
    return "9 of 9 accepted"


@check
def float16_models(at: Setup) -> str:
    """In float16: log-probabilities within its tolerance of float32's on the CPU, and the same
    bytes whatever drafts and whoever is beside. The CPU refuses it by name."""
    from draft_heads import Head, write

    prompts = prompts_of(5, 23, 40)
    params = greedy(24, logprobs=1)
    try:
        plain = at.run(at.l2, None, prompts, params, dtype="float16")
    except specrt.UnsupportedError as error:
        if at.device.startswith("cuda"):
            raise
        return str(error)
    texts = known(plain)
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    here = at.run(at.l2, None, texts, asked, dtype="float16")
    exact = Setup("cpu", at.folder).run(at.l2, None, texts, asked, dtype="float32")
    worst = 0.0
    for one, other in zip(here, exact, strict=True):
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine is not None
            assert theirs is not None
            (token,) = mine
            worst = max(worst, abs(mine[token].logprob - theirs[token].logprob))
    assert worst <= 0.04, worst
    for name, drafter in drafters_for(at, texts).items():
        outputs = at.run(at.l2, drafter, prompts, params, dtype="float16")
        assert_same(outputs, plain, name)
    (alone,) = at.run(at.l2, NGram(num_speculative_tokens=2), prompts[1:2], params, dtype="float16")
    assert_same([alone], plain[1:2], "alone")
    head = Head("eagle3", seed=8)
    path = write(at.folder / "head3", head.config(), head.stored())
    target = at.model("layers6", layers=6, seed=9, lm_head_scale=4.0)
    spec = Eagle3(path, num_speculative_tokens=2, aux_layer_ids=(1, 3, 4))
    outputs = at.run(target, spec, prompts, params, dtype="float16")
    assert_same(outputs, at.run(target, None, prompts, params, dtype="float16"), "EAGLE-3")
    return f"log-probabilities differ by {worst:.4f} at most from float32's"


@check
def two_clients(at: Setup) -> str:
    """Two threads, twenty requests each, with a drafter: done within 30 s, each as if alone (fault
    173)."""
    prompts = [prompts_of(3 + i % 17, seed=i)[0] for i in range(40)]
    params = greedy(12)
    failed: list[BaseException] = []
    outputs: list[RequestOutput | None] = [None] * 40
    begin = time.monotonic()
    with at.engine(at.l2, SelfDraft(num_speculative_tokens=3)) as engine:

        def client(which: int) -> None:
            try:
                for i in range(which, 40, 2):
                    outputs[i] = engine.generate(prompts[i], params)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, begin + 30 - time.monotonic()))
            assert not thread.is_alive(), "not done within 30 s"
        if failed:
            raise failed[0]
    seconds = time.monotonic() - begin
    assert_same([o for o in outputs if o], at.run(at.l2, None, prompts, params), "two clients")
    return f"{seconds:.1f} s"


@check
def rounds_ask_little(at: Setup) -> str:
    """After warm-up, a round is one wait for the device, one copy from it, a few launches and no
    allocation, with as little Python as is allowed."""
    prompts = prompts_of(9, 14, 20, 25)
    params = greedy(60, ignore_eos=True)
    with at.engine(at.l2, NGram(num_speculative_tokens=3)) as engine:
        engine.generate(prompts, params)
        before = specrt._core.cuda_counts()
        rounds, python = overheads.python_of_rounds(lambda: overheads.wait(engine, prompts, params))
        after = specrt._core.cuda_counts()
    counts = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("launches", "copies_to_host", "waits", "allocations")
    }
    if at.device.startswith("cuda"):
        # The pass, what decides, and moves of accepted paths; rounds with prompts take more.
        assert counts["launches"] <= 6 * rounds + 200, (rounds, counts)
        assert rounds <= counts["copies_to_host"] <= rounds + 4, (rounds, counts)
        assert rounds <= counts["waits"] <= 2 * rounds, (rounds, counts)
        assert counts["allocations"] == 0, counts
        assert python <= overheads.bound(len(prompts)), python
    else:
        assert not any(counts.values()), counts
    return f"{rounds} rounds: {counts}, {1e6 * python:.0f} µs of Python in each"


@check
def drafts_are_one_copy(at: Setup) -> str:
    """Drafts, chain or tree, greedy or following the target's noise, grow on the device: all steps
    of a batch are one copy and one wait more than the round itself."""
    prompts = prompts_of(9, 14)
    params = [
        greedy(40, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=40, ignore_eos=True),
    ]
    target, head = random_eagle3(at)
    model = DraftModel(model=at.other, dtype="bfloat16", num_speculative_tokens=4)
    tree = Eagle3(head, dtype="bfloat16", num_speculative_tokens=12, depth=4, top_k=3,
                  aux_layer_ids=(1, 3, 4))  # fmt: skip
    told = []
    for name, on, drafter in (("chain", at.l2, model), ("tree", target, tree)):
        with at.engine(on, drafter) as engine:
            engine.generate(prompts, params)
            before, passes = specrt._core.cuda_counts(), engine.metrics().passes
            engine.generate(prompts, params)
            after, rounds = specrt._core.cuda_counts(), engine.metrics().passes - passes
        copies = after.copies_to_host - before.copies_to_host
        if at.device.startswith("cuda"):
            assert rounds < copies <= 2 * rounds + 8, (name, rounds, copies)
            assert after.allocations == before.allocations, name
        else:
            assert copies == 0
        told.append(f"{name}: {copies} copies in {rounds} rounds")
    return ", ".join(told)


@dataclass
class Result:
    name: str
    state: str  # "passed", "failed" or "not available"
    detail: str
    seconds: float


def run_check(name: str, at: Setup) -> Result:
    begin = time.monotonic()
    try:
        state, detail = "passed", CHECKS[name](at)
    except specrt.errors.UnsupportedError as error:
        state, detail = "not available", str(error)
    except Exception as error:
        traceback.print_exc()
        state, detail = "failed", f"{type(error).__name__}: {error}"
    return Result(name, state, detail, time.monotonic() - begin)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True, help="cpu, cuda or cuda:N")
    parser.add_argument("--models", type=Path, required=True, help="where tiny models are or go")
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), default=list(CHECKS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.models.mkdir(parents=True, exist_ok=True)
    at = Setup(options.device, options.models)
    results = []
    for name in options.only:
        results.append(result := run_check(name, at))
        print(f"{result.state:13} {name}  {result.seconds:.1f} s  {result.detail}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([vars(one) for one in results], indent=1))
    states = [one.state for one in results]
    if "failed" in states:
        return 1
    return 3 if "not available" in states else 0


if __name__ == "__main__":
    sys.exit(main())
