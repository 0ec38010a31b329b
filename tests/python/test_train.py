"""`specrt train`: tiny trainings from end to end, and what they rest on."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from draft_heads import Head, Restated
from rich.console import Console
from typer.testing import CliRunner

import specrt
from specrt.cli import app
from specrt.errors import CapacityError, InvalidArgumentError, LoadError
from specrt.planning import Features
from specrt.train import collect as collecting
from specrt.train.batches import Batches, Position, rows_of
from specrt.train.collect import DataOptions, collect
from specrt.train.eagle3 import _Batch
from specrt.train.kinds import DraftKind, Eagle3Kind, Kind, MedusaKind, channel_scales
from specrt.train.loop import LoopOptions
from specrt.train.loss import head_loss
from specrt.train.records import read_records, tokens_of
from specrt.train.run import Report, TrainOptions, train
from specrt.train.shards import Example, ShardStore
from specrt.train.target import RunningTarget, TargetTables, run_texts
from specrt.train.vocabulary import choose_vocabulary, coverage

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "two",
    "red",
    "hens",
    "by",
    "my",
    "barn",
]
LAYERS = (2, 4, 5)


def sentences(count: int, seed: int) -> list[str]:
    r = random.Random(seed)
    return [" ".join(r.choice(WORDS) for _ in range(4)) for _ in range(count)]


def write_lines(path: Path, lines: list[Any]) -> Path:
    text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What comes next follows mostly from the last tokens: a drafter can learn it soon."""
    path = tmp_path_factory.mktemp("train") / "target"
    made = tiny.tiny_llama(path, vocab=264, layers=8, seed=3, lm_head_scale=4.0)
    return tiny.byte_tokenizer(made)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    return write_lines(path, [{"prompt": one, "kind": "any"} for one in sentences(96, 0)])


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "held_out.jsonl"
    return write_lines(path, [{"prompt": one + "?"} for one in sentences(8, 1)])


def eagle3(**changes: Any) -> Eagle3Kind:
    options = {"draft_vocab_size": 128, "aux_layers": LAYERS, "precision": "float32"}
    return Eagle3Kind(**{**options, **changes})


def run(
    kind: Kind, target: Path, data: Path, out: Path, held_out: Path | None = None, **loop: Any
) -> Report:
    options = {"rows": 256, "learning_rate": 4e-3, "warmup": 5, "threads": 1, **loop}
    return train(
        kind,
        TrainOptions(
            target=target,
            out=out,
            threads=2,
            data=DataOptions(data=data, generate=True, max_new_tokens=32, batch=32),
            loop=LoopOptions(**options),
            held_out=held_out,
            held_out_tokens=24 if held_out else 0,
        ),
        Console(quiet=True),
    )


# Kinds, steps, the learning rate, and by how much τ of a chain has to grow.
TRAININGS: dict[str, tuple[Kind, int, float, float]] = {
    "eagle3": (eagle3(), 60, 4e-3, 0.15),
    "medusa": (MedusaKind(num_heads=2, draft_vocab_size=128, precision="float32"), 150, 1e-2, 0.15),
    "medusa-whole": (
        MedusaKind(num_heads=1, draft_vocab_size=None, precision="bfloat16"), 80, 1e-2, 0.1,
    ),
    "draft": (DraftKind(layers=2, precision="float32"), 40, 4e-3, 0.15),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAININGS)
def test_training_accepts_more(
    name: str, target: Path, data: Path, held_out: Path, tmp_path: Path
) -> None:
    """From prompts to a checkpoint that the engine drafts with, better than an untrained one."""
    kind, steps, rate, margin = TRAININGS[name]
    before = run(kind, target, data, tmp_path / "a", held_out, steps=1, learning_rate=1e-9)
    # The same data, another run.
    shutil.copytree(tmp_path / "a/training/data", tmp_path / "b/training/data")
    after = run(kind, target, data, tmp_path / "b", held_out, steps=steps, learning_rate=rate)
    assert after.examples == before.examples == 96
    assert after.history[-1].loss < before.history[0].loss
    untrained, trained = (one.measured[0].acceptance_length for one in (before, after))
    assert trained > untrained + margin
    assert (tmp_path / "b/training.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((tmp_path / "b/metrics.json").read_text())
    assert told["measured"][0]["acceptance_length"] == pytest.approx(trained)
    # What training counts is what the engine accepts: of the same texts, nearly.
    assert after.measured[0].alpha_per_position[0] == pytest.approx(
        after.history[-1].right[0], abs=0.2
    )


def test_a_head_is_recognised_without_a_word(target: Path, data: Path, tmp_path: Path) -> None:
    """Layers that are EAGLE-3's default go unnamed for others, and are known here."""
    run(eagle3(aux_layers=None), target, data, tmp_path / "a", steps=1)
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert "eagle_config" not in config
    assert config["specrt_aux_layer_ids"] == [2, 4, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with specrt.Engine(target, drafter=str(tmp_path / "a"), self_test=False) as engine:
            assert engine.generate([5, 6, 7], specrt.SamplingParams(max_tokens=4)).token_ids
    run(eagle3(aux_layers=(1, 6)), target, data, tmp_path / "b", steps=1)
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 6]


class Killed(Exception):
    """Stands for the end of a process: nothing is tidied up."""


@pytest.mark.parametrize("kind", [eagle3(), DraftKind(layers=1, precision="float32")])
def test_kill_and_resume(
    kind: Kind, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while data are made and while it trains, a run ends with the same bytes."""
    monkeypatch.setattr(collecting, "SHARD", 16)
    run(kind, target, data, tmp_path / "whole", steps=17, checkpoint_every=5)

    def killed(where: Any, name: str, after: int) -> None:
        own, calls = getattr(where, name), 0

        def dying(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise Killed
            return own(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, dying)
            with pytest.raises(Killed):
                run(kind, target, data, tmp_path / "cut", steps=17, checkpoint_every=5)

    killed(ShardStore, "write", 2)
    store = ShardStore(
        tmp_path / "cut/training/data",
        json.loads((tmp_path / "cut/training/data/data.json").read_text()),
    )
    assert len(store.shards()) == 2
    killed(torch.optim.AdamW, "step", 12)
    assert not (tmp_path / "cut/model.safetensors").exists()
    run(kind, target, data, tmp_path / "cut", steps=17, checkpoint_every=5)
    whole, cut = ((tmp_path / one / "model.safetensors").read_bytes() for one in ("whole", "cut"))
    assert whole == cut
    # Another run does not go on from there.
    with pytest.raises(InvalidArgumentError, match="learning_rate"):
        run(kind, target, data, tmp_path / "cut", steps=17, learning_rate=1e-3)
    with pytest.raises(InvalidArgumentError, match="max_new_tokens"):
        train(
            kind,
            TrainOptions(
                target=target,
                out=tmp_path / "cut",
                data=DataOptions(data=data, generate=True, max_new_tokens=8),
            ),
            Console(quiet=True),
        )


BAD = {
    "not JSON": '{"prompt": "cut off',
    "not an object": "[1, 2]",
    "nothing to read": '{"id": 3}',
    "two kinds": '{"prompt": "a", "text": "b"}',
    "no text": '{"prompt": 5}',
    "no user": '{"messages": [{"role": "system", "content": "x"}]}',
    "a message of other keys": '{"messages": [{"role": "user", "name": "x"}]}',
    "half a character": '{"prompt": "\\ud83d"}',
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_line_is_told_with_its_number(bad: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "a"}, "", BAD[bad], {"prompt": "b"}])
    with pytest.raises(LoadError, match="line 3"):
        read_records(path, answers=False, on_bad_line="error")
    found = read_records(path, answers=False, on_bad_line="skip")
    assert [one.line for one in found.records] == [1, 4]
    assert [one.number for one in found.bad] == [3]


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff\xfe"}\n')
    with pytest.raises(LoadError, match="line 2"):
        read_records(path, answers=True, on_bad_line="error")
    assert len(read_records(path, answers=True, on_bad_line="skip").records) == 1
    path.write_bytes(b"\xff\n")
    with pytest.raises(LoadError, match="at least one record"):
        read_records(path, answers=True, on_bad_line="skip")


def test_command_line(target: Path, held_out: Path, tmp_path: Path) -> None:
    """A corrupted line refuses with its number, or is skipped with a word."""
    path = write_lines(
        tmp_path / "d.jsonl",
        [{"text": one} for one in sentences(4, 2)] + ["{broken", {"prompt": "a", "response": "b"}],
    )
    asked = ["train", "eagle3", "--target", str(target), "--data", str(path)]
    asked += ["--out", str(tmp_path / "out"), "--steps", "2", "--aux-layers", "2,4,5"]
    asked += ["--draft-vocab-size", "64", "--held-out", str(held_out), "--held-out-tokens", "4"]
    failed = CliRunner().invoke(app, asked)
    assert isinstance(failed.exception, LoadError)
    assert "line 5" in str(failed.exception)
    done = CliRunner().invoke(app, [*asked, "--on-bad-line", "skip"])
    assert done.exception is None, done.output
    assert "line 5 skipped" in done.output
    assert "5 texts" in done.output
    assert (tmp_path / "out/model.safetensors").stat().st_size > 0


def test_which_tokens_are_learnt(target: Path, tmp_path: Path) -> None:
    tokenizer = specrt.Tokenizer.from_pretrained(target)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    path = write_lines(tmp_path / "d.jsonl", [{"messages": messages}, {"text": "all of it"}])
    chat, text = read_records(path, answers=True, on_bad_line="error").records
    tokens, learnt = tokens_of(chat, tokenizer)
    said = tokenizer.decode([one for one, kept in zip(tokens, learnt, strict=True) if kept])
    assert said.replace("\n", "").replace(" ", "") in ("twofour", "two<|eos|>four<|eos|>")
    assert tokens_of(text, tokenizer) == (tokenizer.encode("all of it"), [1] * 9)


def test_states_are_the_targets(target: Path) -> None:
    """What is recorded, of given and of chosen tokens, is what transformers computes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = [[5, 9, 2, 77, 31], list(range(40, 90)), [8, 8]]
    params = specrt.SamplingParams(max_tokens=9, ignore_eos=True)
    features = Features(layers=LAYERS, normed=True)
    with RunningTarget(target, features, max_length=64, batch=2, rows=16) as running:
        ran = list(running.run((i, one, params) for i, one in enumerate(prompts)))
        given = list(run_texts(running, enumerate(one.tokens.tolist() for one in ran)))
    with specrt.Engine(target) as engine:
        expected = engine.generate(prompts, params)
    assert sorted(one.number for one in ran) == [0, 1, 2]
    for one in ran:
        tokens = one.tokens.tolist()
        assert tokens == [*prompts[one.number], *expected[one.number].token_ids]
        assert len(one.features) == len(tokens) - 1
        with torch.no_grad():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        own = torch.from_numpy(one.features).view(torch.bfloat16).float()
        wanted = torch.cat([*(states[i][0] for i in LAYERS), states[-1][0]], -1)
        torch.testing.assert_close(own, wanted[:-1], rtol=2e-2, atol=2e-2)
        same = next(other for other in given if other.tokens.tolist() == tokens)
        assert len(same.features) == len(tokens)
        assert np.array_equal(same.features[:-1], one.features)


@pytest.mark.parametrize("steps", [1, 3])
def test_loss_and_gradient(steps: int) -> None:
    g = torch.Generator().manual_seed(0)
    rows, width, vocab = 150, 16, 40
    states = torch.randn(steps, rows, width, generator=g, requires_grad=True)
    head = torch.randn(vocab, width, generator=g, requires_grad=True)
    teacher = torch.randn(rows, vocab, generator=g) * 3
    weights = torch.rand(steps, rows, generator=g) * (torch.rand(steps, rows, generator=g) > 0.3)
    loss, right = head_loss(states, head, teacher, weights)
    (2.0 * loss).backward()
    got = [states.grad, head.grad]
    states.grad = head.grad = None
    logits = states @ head.t()
    expected = -(torch.softmax(teacher, -1) * torch.log_softmax(logits, -1)).sum(-1)
    expected = (weights * expected).sum()
    (2.0 * expected).backward()
    torch.testing.assert_close(loss, expected)
    assert torch.equal(right, logits.argmax(-1) == teacher.argmax(-1))
    for one, other in zip(got, [states.grad, head.grad], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_training_time_test_is_drafting(target: Path) -> None:
    """Step i at a row is the i-th token of a draft that began i rows before."""
    texts = [list(range(60, 72)), [7, 3, 200, 9, 41, 41, 8]]
    features = Features(layers=LAYERS, normed=True)
    with TargetTables(target) as tables, RunningTarget(target, features, max_length=64) as running:
        examples = [
            Example(
                one.tokens, np.ones(len(one.tokens), np.uint8), one.features,
                np.zeros(len(one.features), np.int32),
            )
            for one in run_texts(running, enumerate(texts))
        ]  # fmt: skip
        examples[1].learnt[:3] = 0
        trainer = eagle3().make(tables, examples, 5, lambda _: None)
        embedding = torch.from_numpy(tables.tensor("embedding").array.copy())
    batch = _Batch(examples, [trainer.rows(one) for one in examples], trainer.sizes)
    with torch.no_grad():
        states, _ = trainer._forward(batch)
        logits = states @ trainer.parameters["lm_head.weight"].t()
    head = Head("eagle3", vocab=264, draft_vocab=128, ffn=trainer.sizes.intermediate_size)
    head.theta, head.eps = trainer.sizes.rope_theta, trainer.target.norm_eps
    for name, value in trainer.parameters.items():
        head.tensors[name.replace("midlayer.", "layers.0.")] = value.detach()
    head.tensors["fc.weight"] = trainer.parameters["fc.weight"].detach() / trainer._scales
    restated = Restated(head, embedding, embedding)
    row = 0
    compared = 0
    for example in examples:
        tokens = example.tokens.tolist()
        seen = torch.from_numpy(example.features.copy()).view(torch.bfloat16).float()[:, : 3 * 64]
        for p in trainer.rows(example).rows.tolist():
            for step in range(trainer.test_steps):
                if bool(batch.valid(step)[row]):
                    before: list[Any] = []
                    for at in range(p - step + 1):
                        state, expected, entry = restated.row(
                            tokens[at + 1], seen[at], False, at, before
                        )
                        before.append(entry)
                    for at in range(p - step + 1, p + 1):
                        state, expected, entry = restated.row(
                            tokens[at + 1], state, True, at, before
                        )
                        before.append(entry)
                    torch.testing.assert_close(logits[step, row], expected, rtol=1e-3, atol=1e-3)
                    compared += 1
            row += 1
    assert compared > 30


def test_rows_and_batches() -> None:
    learnt = np.array([0, 0, 0, 1, 1, 1, 0, 1, 1], dtype=np.uint8)
    example = Example(np.arange(9, dtype=np.int32), learnt, np.zeros((8, 4), np.uint16))
    rows = rows_of(example)
    # Rows 2, 3: tokens 3, 4 and 4, 5; row 6: tokens 7 and 8, whose teacher is state 7.
    assert rows.rows.tolist() == [2, 3, 6]
    assert rows.context == 7
    assert rows_of(Example(example.tokens[:2], learnt[:2], example.features[:1])).context == 0
    sizes = [5, 0, 9, 1, 1, 7, 3]
    batches = Batches(sizes, 8, seed=1)
    for epoch in (0, 1):
        flat = [one for batch in batches.of_epoch(epoch) for one in batch]
        assert sorted(flat) == [0, 2, 3, 4, 5, 6]
        for batch in batches.of_epoch(epoch)[:-1]:
            assert sum(sizes[one] for one in batch) >= 8
    assert batches.of_epoch(0) != batches.of_epoch(1)
    at = Position()
    for batch in [*batches.of_epoch(0), *batches.of_epoch(1)]:
        got, at = batches.at(at)
        assert got == batch
    assert at == Position(2, 0)
    with pytest.raises(LoadError, match="something to learn"):
        Batches([0, 0], 8, seed=1)


def test_draft_vocabulary() -> None:
    texts = [np.array([7, 7, 3, 9], np.int32), np.array([9, 7], np.int32)]
    assert choose_vocabulary(texts, 12, 2).tolist() == [7, 9]
    # What never occurs comes in the order of ids.
    assert choose_vocabulary(texts, 12, 5).tolist() == [0, 1, 3, 7, 9]
    assert coverage(texts, np.array([7, 9]), 12) == pytest.approx(5 / 6)
    with pytest.raises(InvalidArgumentError, match="draft_vocab_size"):
        choose_vocabulary(texts, 12, 13)


def test_scales_leave_out_what_is_not_learnt() -> None:
    values = torch.tensor([[1000.0, 0.0], [3.0, 0.0], [4.0, 0.0]], dtype=torch.bfloat16)
    example = Example(
        np.zeros(4, np.int32), np.array([0, 1, 1, 1], np.uint8), values.view(torch.uint16).numpy()
    )
    assert channel_scales([example], 2).tolist() == pytest.approx([12.5**0.5, 1.0])


def test_the_disk_is_bounded(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may be taken is told before, and not exceeded."""
    monkeypatch.setattr(collecting, "SHARD", 16)
    said: list[str] = []

    def made(most: int, folder: str) -> Any:
        options = DataOptions(data=data, generate=True, max_new_tokens=8, batch=8, max_disk=most)
        with TargetTables(target) as tables:
            features = Features(normed=True)
            return collect(target, tables, features, options, tmp_path / folder, say=said.append)

    whole = made(10**9, "whole")
    used = whole.store.bytes_used()
    assert whole.examples == 96
    assert whole.left_out == 0
    half = made(used // 2, "half")
    assert 16 <= half.examples < 96
    assert half.examples + half.left_out == 96
    assert half.store.bytes_used() <= used // 2
    assert f"bound {used // 2 / 1e9:.2f} GB" in said[-1]
    with pytest.raises(InvalidArgumentError, match="max_disk"):
        made(1000, "none")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))
    with pytest.raises(CapacityError, match="disk"):
        made(10**9, "full")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("draft_vocab_size", lambda: eagle3(draft_vocab_size=0)),
        ("precision", lambda: eagle3(precision="float16")),
        ("steps", lambda: LoopOptions(steps=0)),
        ("epochs", lambda: LoopOptions(steps=5, epochs=1.0)),
        ("max_minutes", lambda: LoopOptions(max_minutes=float("nan"))),
        ("greedy_share", lambda: DataOptions(data=Path("x"), greedy_share=1.5)),
        ("temperature", lambda: DataOptions(data=Path("x"), temperature=-1.0)),
        ("seed", lambda: DataOptions(data=Path("x"), seed=2**32)),
        ("num_heads", lambda: MedusaKind(num_heads=True)),
        ("layers", lambda: DraftKind(layers=0)),
    ],
)
def test_options_are_checked(name: str, make: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        make()


def test_the_clock_ends_a_run(target: Path, data: Path, tmp_path: Path) -> None:
    """By time alone, the learning rate falls with it; beside steps, it cuts them off."""
    report = run(eagle3(), target, data, tmp_path / "a", max_minutes=0.02)
    assert report.history[-1].step >= 1
    shutil.copytree(tmp_path / "a/training/data", tmp_path / "b/training/data")
    cut = run(eagle3(), target, data, tmp_path / "b", max_minutes=0.01, steps=10**6)
    assert 1 <= cut.history[-1].step < 10**6
