"""specrt-bench: each command on tiny models, what it refuses, and the keys of its JSON."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import greedy
from typer.testing import CliRunner

from specrt import Engine, InvalidArgumentError, LoadError, SpecrtError
from specrt.bench import Totals, builtin_prompts, kernels, stats
from specrt.bench.app import app
from specrt.bench.compare import Sources, Worker, installed_peers
from specrt.bench.load import Level, Repetition, run_level
from specrt.bench.prompts import read_prompts
from specrt.bench.random_model import random_model
from specrt.bench.sweep import tau_of
from specrt.bench.targets import PLAIN, Contender, Target, contenders, parse_drafter
from specrt.drafters import Merge, NGram, SelfDraft

FAST = ["--threads", "1", "--repeats", "2", "--dtype", "float32"]
SPREAD = {"median", "low", "high"}
REPORT = {"benchmark", "version", "specrt", "machine", "target", "settings", "rows"}


def bench(tmp_path: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """The JSON that a command writes, and what it prints."""
    file = tmp_path / "out.json"
    result = CliRunner().invoke(app, [*map(str, arguments), "--json", str(file)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["version"] == 1
    assert set(found["target"]) == {"model", "dtype", "cpu_isa", "threads"}
    assert set(found["machine"]) == {"processor", "cores", "system"}
    return found, result.output


def refused(*arguments: object) -> SpecrtError:
    """The error that a command ends in."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert isinstance(result.exception, SpecrtError), result.output
    return result.exception


# --- run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_of_two(l2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    arguments: list[object] = ["run", l2, "--max-tokens", 12, "--per-kind", 1]
    arguments += ["--kind", "chat", "--kind", "code", "--max-model-len", 2048, "--by-kind"]
    arguments += ["--drafter", "ngram", "--drafter", "self-layers=1", "--gamma", 3]
    return bench(tmp_path_factory.mktemp("run"), *arguments, "--policy", "brake", *FAST)


def test_run(run_of_two: tuple[dict[str, Any], str]) -> None:
    found, output = run_of_two
    assert set(found) == REPORT | {"kinds"}
    names = ["plain", "ngram fixed γ=3", "ngram brake"]
    names += ["self-layers=1 fixed γ=3", "self-layers=1 brake"]
    assert [row["name"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert set(row) == {
            *("name", "tokens_per_second", "vs_plain", "acceptance_length", "alpha"),
            *("alpha_per_position", "gamma_used", "draft_share", "verify_share", "sample_share"),
            *("wasted", "tokens", "rounds", "drafted", "accepted", "ttft_seconds"),
            *("tpot_seconds", "inter_token_seconds", "lossless", "same_text"),
        }
        for name in ("tokens_per_second", "vs_plain", "ttft_seconds", "inter_token_seconds"):
            assert set(row[name]) == SPREAD
            assert 0 < row[name]["low"] <= row[name]["median"] <= row[name]["high"]
        assert row["tokens"] == row["accepted"] + row["rounds"] == 2 * 11
        assert math.isclose(row["draft_share"] + row["verify_share"] + row["sample_share"], 1)
        assert row["lossless"] is True
        assert row["same_text"] is (None if row["name"] == "plain" else True)
    plain, self_draft = found["rows"][0], found["rows"][3]
    assert plain["vs_plain"] == dict.fromkeys(SPREAD, 1.0)
    assert plain["drafted"] == plain["wasted"] == plain["gamma_used"] == 0
    assert self_draft["drafted"] > 0
    assert self_draft["wasted"] == 1 - self_draft["accepted"] / self_draft["drafted"]
    assert "same text: yes" in output
    for column in ("tok/s", "vs plain", "τ", "α", "γ used", "draft", "verify", "sample", "wasted"):
        assert column in output
    assert set(found["kinds"]) == {"chat", "code"}
    for place, row in enumerate(found["rows"]):
        for what in ("tokens", "rounds", "drafted", "accepted"):
            assert row[what] == sum(rows[place][what] for rows in found["kinds"].values())


def test_run_of_prompts_of_ones_own(tmp_path: Path, l2: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two one"}\n\n{"prompt": "three", "kind": "short"}\n')
    found, output = bench(
        tmp_path, "run", l2, "--prompts", prompts, "--max-tokens", 6, "--concurrency", 2, *FAST
    )
    assert [row["name"] for row in found["rows"]] == ["plain", "ngram"]
    assert found["settings"]["prompts"] == found["settings"]["concurrency"] == 2
    assert "same text: yes" in output


def test_run_tells_another_text(tmp_path: Path, l2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Target.engine

    def broken(self: Target, contender: Contender, **options: Any) -> Engine:
        engine = plain(self, contender, **options)
        if contender != PLAIN:
            generate = engine.generate

            def other(prompts: Any, params: Any) -> Any:
                outputs = generate(prompts, params)
                outputs[0].outputs[0].token_ids[-1] ^= 1
                return outputs

            engine.generate = other  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(Target, "engine", broken)
    result = CliRunner().invoke(
        app, ["run", str(l2), "--per-kind", "1", "--kind", "chat", "--max-tokens", "4",
              "--max-model-len", "2048", *FAST]
    )  # fmt: skip
    assert result.exit_code == 1
    assert "same text: NO" in result.output


def test_typical_is_not_compared(tmp_path: Path, l2: Path) -> None:
    arguments = ["--per-kind", 1, "--kind", "chat", "--max-tokens", 6, "--max-model-len", 2048]
    arguments += ["--verification", "typical", "--temperature", 1.0]
    found, output = bench(tmp_path, "run", l2, *arguments, *FAST)
    assert found["rows"][1]["lossless"] is False
    assert found["rows"][1]["same_text"] is None
    assert "not compared" in output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["run", "--repeats", 0], "repeats"),
        (["run", "--max-tokens", 0], "max_tokens"),
        (["run", "--concurrency", 0], "concurrency"),
        (["run", "--kind", "songs"], "kind"),
        (["run", "--per-kind", 0], "per_kind"),
        (["run", "--policy", "clever"], "policy"),
        (["run", "--gamma", 3, "--gamma", 3], "twice"),
        (["run", "--drafter", "self-layers=x"], "self-layers"),
        (["run", "--json", "no/such/folder/x.json"], "json"),
        (["run", "--plot", "x.pdf"], "plot"),
        (["run", "--prompts", "no-such-file"], "prompts"),
        (["run", "--json", "."], "json"),
        (["sweep", "--gamma", 0], "gamma"),
        (["sweep", "--gamma", 2, "--gamma", 2], "gamma"),
        (["sweep", "--alpha", 0.5, "--alpha", 0.5], "alpha"),
        (["sweep", "--max-tokens", 1], "max_tokens"),
        (["sweep", "--max-tokens", 3, "--gamma", 8, "--rounds", 2], "max_tokens"),
        (["sweep", "--prompt-tokens", 2**62], "prompt_tokens"),
        (["sweep", "--max-model-len", 20, "--prompt-tokens", 19], "max_tokens"),
        (["sweep", "--alpha", 1.5], "alpha"),
        (["sweep", "--rounds", 0], "rounds"),
        (["sweep", "--alpha", 0.5, "--drafter", "ngram"], "alphas or drafters"),
        (["load", "--concurrency", 0], "concurrency"),
        (["load", "--rate", 0], "rate"),
        (["load", "--rate", "inf"], "rate"),
        (["load", "--rate", "nan"], "rate"),
        (["load", "--concurrency", 1, "--concurrency", 1, "--prompt-tokens", 4], "levels"),
        (["load", "--gamma", 1, "--gamma", 1, "--prompt-tokens", 4], "contenders"),
        (["load", "--policy", "off", "--policy", "off", "--prompt-tokens", 4], "contenders"),
        (["load", "--alpha", 0.5, "--drafter", "suffix"], "alpha"),
        (["load", "--drafter", ""], "drafter"),
        (["load", "--prompt-tokens", 4, "--prompts", "some.txt"], "prompt_tokens"),
        (["load", "--prompt-tokens", 2**62], "prompt_tokens"),
        (["load", "--requests", 0], "requests"),
        (["load", "--target-tpot-ms", 0], "target_tpot"),
        (["load", "--random", "tiny"], "random"),
        (["kernels", "--rows", 0], "rows"),
        (["kernels", "--context", 0], "context"),
        (["compare", "--threads", 0], "threads"),
        (["compare", "--only", "dancing"], "only"),
        (["compare", "--peer", "nobody"], "peer"),
        (["compare", "--repeats", 0], "repeats"),
    ],
)
def test_refusals(counter: Path, arguments: list[Any], word: str) -> None:
    error = refused(arguments[0], counter, *arguments[1:])
    assert isinstance(error, (InvalidArgumentError, LoadError))
    assert word in str(error)


def test_a_saved_model_has_its_own_dtype(counter: Path, tmp_path: Path) -> None:
    saved = tmp_path / "one.specrt"
    with Engine(counter, max_model_len=32, max_batch_size=1) as engine:
        engine.save(saved)
    assert "dtype" in str(refused("sweep", saved, "--dtype", "int8"))


def test_the_native_benchmark_takes_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_native", lambda: Path("/bin/false"))
    assert "[cpu_isa]" in str(refused("kernels", "--native", "--cpu-isa", "scalar"))
    assert "[threads]" in str(refused("kernels", "--native", "--threads", 0))


def test_a_peer_that_says_something_else() -> None:
    worker = Worker("echo", "/bin/echo", "transformers")
    worker.close()
    assert worker.tasks == []
    assert "echo does not start" in worker.problems[0]


# --- the others ---------------------------------------------------------------------------------


def test_sweep_of_drafters(tmp_path: Path, l2: Path) -> None:
    arguments = ["--drafter", "ngram", "--drafter", "self-layers=1", "--gamma", 1, "--gamma", 4]
    arguments += ["--rounds", 20, "--max-tokens", 16, "--max-model-len", 2048]
    found, output = bench(tmp_path, "sweep", l2, *arguments, *FAST)
    assert [(row["drafts"], row["gamma"]) for row in found["rows"]] == [
        *(("ngram", 1), ("ngram", 4), ("self-layers=1", 1), ("self-layers=1", 4))
    ]
    for row in found["rows"]:
        assert set(row) == {
            *("drafts", "alpha_set", "gamma", "tokens_per_second", "vs_plain"),
            *("acceptance_length", "alpha", "rounds", "drafted", "accepted", "same_text"),
        }
        assert row["rounds"] >= 20
        assert row["same_text"] is True
    assert "γ=4" in output


def test_sweep_of_acceptance_rates(tmp_path: Path) -> None:
    arguments = ["--random", "tiny", "--alpha", 0.0, "--alpha", 0.6, "--alpha", 1.0, "--gamma", 3]
    arguments += ["--rounds", 1500, "--max-tokens", 256, "--repeats", 1, "--threads", 1]
    found, output = bench(tmp_path, "sweep", *arguments)
    none, some, full = found["rows"]
    assert none["acceptance_length"] == none["tau_theory"] == 1
    assert full["acceptance_length"] == full["tau_theory"] == 4
    # The standard error of 1500 rounds is 1.3 % here.
    assert some["acceptance_length"] == pytest.approx(tau_of(0.6, 3), rel=0.06)
    assert some["alpha"] == pytest.approx(0.6, abs=0.05)
    for row in found["rows"]:
        assert row["same_text"] is None
        assert row["speedup_by_tau"] == row["vs_plain"]["median"] / row["acceptance_length"]
    assert "not the model's text" in output


def test_theory() -> None:
    assert tau_of(0.0, 5) == 1
    assert tau_of(1.0, 5) == 6
    assert math.isclose(tau_of(0.6, 5), sum(0.6**i for i in range(6)))


def test_load(tmp_path: Path, l2: Path) -> None:
    arguments = ["--concurrency", 3, "--rate", 200, "--requests", 5, "--max-tokens", 8]
    arguments += ["--gamma", 2, "--gamma", 4, "--policy", "brake", "--target-tpot-ms", 1e4]
    arguments += ["--prompt-tokens", 9, "--max-model-len", 64]
    found, output = bench(tmp_path, "load", l2, *arguments, *FAST)
    assert set(found) == REPORT
    names = ["plain", "fixed γ=2", "fixed γ=4", "brake"]
    assert [row["name"] for row in found["rows"]] == names * 2
    assert [row["level"]["rate"] for row in found["rows"]] == [None] * 4 + [200.0] * 4
    for row in found["rows"]:
        assert set(row) == {
            *("level", "name", "throughput", "throughputs", "vs_plain", "vs_best", "best"),
            *("gamma_used", "acceptance_length", "ttft_seconds", "tpot_seconds"),
            *("inter_token_seconds", "queue_seconds", "preemptions", "tpot_met"),
            *("lossless", "same_text"),
        }
        assert len(row["throughputs"]) == 2
        assert min(row["throughputs"]) > 0
        assert row["tpot_met"] == 1
        for what in ("ttft_seconds", "tpot_seconds", "inter_token_seconds"):
            assert 0 < row[what]["p50"] <= row[what]["p90"] <= row[what]["p99"]
        assert row["same_text"] is (None if row["name"] == "plain" else True)
        assert (row["vs_best"] is None) is (row["name"] != "brake")
    assert set(found["rows"][3]["best"]) <= set(names[:3])
    assert found["rows"][0]["vs_plain"]["mean"] == 1
    assert "3 at a time" in output
    assert "Poisson" in output


def test_goodput_plans_for_the_target(
    tmp_path: Path, l2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    made = Target.engine

    def engine(self: Target, contender: Contender, **options: Any) -> Engine:
        seen[contender.name] = options.get("target_tpot_seconds")
        return made(self, contender, **options)

    monkeypatch.setattr(Target, "engine", engine)
    arguments = ["--concurrency", 1, "--requests", 1, "--max-tokens", 4, "--prompt-tokens", 4]
    arguments += ["--gamma", 2, "--policy", "goodput", "--policy", "brake", "--max-model-len", 64]
    bench(tmp_path, "load", l2, *arguments, "--target-tpot-ms", 1e4, *FAST)
    assert seen == {"plain": None, "fixed γ=2": None, "goodput": 10.0, "brake": None}


def test_a_level_keeps_its_concurrency(counter: Path) -> None:
    most = 0
    with Engine(counter, threads=1, max_model_len=64, max_batch_size=8) as engine:
        observer = engine._scheduler.observer
        told = observer.round

        def watch(plan: Any, results: Any, seconds: float) -> None:
            nonlocal most
            most = max(most, len(plan))
            told(plan, results, seconds)

        observer.round = watch  # type: ignore[method-assign]
        prompts = [[one] for one in range(9)]
        repetition = run_level(engine, Level(concurrency=3), prompts, greedy(12), seed=0)
        assert most <= 3
        assert [one.prompt_token_ids for one in repetition.outputs] == prompts
        run_level(engine, Level(rate=1e5), prompts, greedy(40), seed=0)
        assert most > 3
        with pytest.raises(InvalidArgumentError):
            run_level(engine, Level(concurrency=2), [[1], [999]], greedy(2), seed=0)
    assert Repetition(2.0, repetition.outputs).throughput == 9 * 12 / 2


def test_kernels(tmp_path: Path) -> None:
    arguments = ["--random", "tiny", "--rows", 3, "--rows", 8, "--context", 20, "--passes", 3]
    found, _ = bench(tmp_path, "kernels", *arguments, *FAST)
    assert [row["rows"] for row in found["rows"]] == [1, 3, 8]
    for row in found["rows"]:
        assert set(row) == {"rows", "pass_seconds", "round_seconds", "by_one_row"}
        assert 0 < row["pass_seconds"] <= row["round_seconds"]
    assert found["rows"][0]["by_one_row"] == 1


def test_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bench_forward"
    line = (
        "tiny amx     bfloat16 1 threads, context 20: t(1) 2.00 ms, 9.0 GB/s of 10.0, t(1) is 1.11 "
        "times reading;  t(M)/t(1):  4: 1.50  8: 2.25"
    )
    program.write_text(f"#!/bin/sh\necho '{line}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(kernels, "find_native", lambda: program)
    arguments = ["--native", "--rows", 4, "--rows", 8]
    found, output = bench(tmp_path, "kernels", *arguments)
    assert [(row["rows"], row["by_one_row"]) for row in found["rows"]] == [
        (1, 1),
        (4, 1.5),
        (8, 2.25),
    ]
    assert found["rows"][2]["pass_seconds"] == pytest.approx(0.0045)
    assert "9.0 of 10.0 GB/s" in output
    program.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    assert "exit status 3" in str(refused("kernels", *arguments))
    monkeypatch.setattr(kernels, "find_native", lambda: None)
    assert "[native]" in str(refused("kernels", "--native"))


def test_memory(tmp_path: Path, l2: Path) -> None:
    arguments = ["--drafter", "ngram", "--drafter", "self-int4", "--dtype", "float32"]
    arguments += ["--dtype", "int4", "--max-model-len", 128, "--max-batch-size", 2, "--load"]
    found, output = bench(tmp_path, "memory", l2, *arguments)
    assert [(row["dtype"], row["drafter"]) for row in found["rows"]] == [
        *(("float32", "none"), ("float32", "ngram"), ("float32", "self-int4")),
        *(("int4", "none"), ("int4", "ngram")),
    ]
    assert "int4, self-int4: [self draft] expected" in output  # no coarser than the target
    for row in found["rows"]:
        assert set(row) == {
            *("dtype", "drafter", "target_weights", "target_kv_cache", "target_workspace"),
            *("drafter_weights", "drafter_kv_cache", "drafter_workspace", "drafter_index"),
            *("kv_cache_tokens", "total", "taken"),
        }
        # Lookups' indexes grow with the texts; all else is known before.
        assert row["total"] <= row["taken"] <= row["total"] + (row["drafter"] == "ngram") * 1e6
    assert found["rows"][2]["drafter_weights"] > 0
    assert "total" in output


def test_compare_with_transformers(tmp_path: Path, l2: Path) -> None:
    arguments = ["--peer", "transformers", "--only", "decode", "--only", "rows"]
    arguments += ["--max-tokens", 3, "--repeats", 1, "--threads", 1, "--dtype", "float32"]
    found, output = bench(tmp_path, "compare", l2, *arguments)
    assert set(found) == REPORT | {"left_out"}
    engines = {row["engine"] for row in found["rows"]}
    assert engines == {"specrt float32", "transformers bf16"}
    whats = {row["what"] for row in found["rows"] if row["engine"] == "specrt float32"}
    assert whats == {"plain", "n-gram", "4 rows", "16 rows", "64 rows"}
    for row in found["rows"]:
        assert set(row) == {"task", "engine", "what", "median", "specrt_by_it"}
        assert row["median"] > 0
        assert (row["specrt_by_it"] is None) is (row["engine"] == "specrt float32")
    assert "transformers bf16" in output


def test_peers(tmp_path: Path, l2: Path) -> None:
    assert installed_peers()["transformers"] == sys.executable
    assert Sources.at(l2) == Sources(l2, l2)
    with pytest.raises(LoadError, match="prepare"):
        Sources.at(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "q4_0.gguf").touch()
    sources = Sources.at(tmp_path)
    assert (sources.ours, sources.folder) == (tmp_path / "hf", tmp_path / "hf")
    assert sources.gguf == {"Q4_0": tmp_path / "q4_0.gguf"}
    with pytest.raises(InvalidArgumentError, match="cannot run"):
        Worker("x", str(tmp_path / "no-python"), "specrt")
    silent = Worker("x", sys.executable, "vllm", "nowhere", "1")
    silent.close()
    assert silent.tasks == []
    assert "does not start" in silent.problems[0]


@pytest.mark.parametrize("name", ["out.png", "out.html"])
def test_plots(tmp_path: Path, l2: Path, name: str) -> None:
    plot = tmp_path / name
    arguments = ["--concurrency", 1, "--concurrency", 2, "--requests", 2, "--max-tokens", 4]
    arguments += ["--prompt-tokens", 5, "--max-model-len", 64, "--repeats", 1, "--threads", 1]
    bench(tmp_path, "load", l2, *arguments, "--plot", plot)
    written = plot.read_bytes()
    if name.endswith("png"):
        from matplotlib.image import imread

        picture = imread(plot)
        assert picture.shape[1] == 960
        assert picture[..., :3].std() > 0.05
    else:
        text = written.decode()
        assert text.count("<svg") == 2
        # Names of namespaces stand there; nothing is fetched.
        assert "<script" not in text
        assert 'href="http' not in text
        assert "src=" not in text


def test_memory_can_be_drawn(tmp_path: Path, l2: Path) -> None:
    plot = tmp_path / "m.html"
    bench(tmp_path, "memory", l2, "--drafter", "self-int4", "--max-model-len", 64, "--plot", plot)
    assert "<svg" in plot.read_text()


# --- parts --------------------------------------------------------------------------------------


def test_prompts() -> None:
    prompts = builtin_prompts()
    kinds = ("chat", "code", "rewrite", "summarise", "answer")
    assert Counter(one.kind for one in prompts) == dict.fromkeys(kinds, 8)
    assert len({one.id for one in prompts}) == len({one.text for one in prompts}) == 40


def test_lengths_of_prompts(demo_tokenizer: Any) -> None:
    lengths = [len(demo_tokenizer.encode(one.text)) for one in builtin_prompts()]
    assert min(lengths) >= 50
    assert max(lengths) <= 400


def test_reading_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("first\n\nsecond\n")
    found = [(one.kind, one.text) for one in read_prompts(path)]
    assert found == [("own", "first"), ("own", "second")]
    path.write_text("\n")
    with pytest.raises(LoadError, match="at least one"):
        read_prompts(path)
    path = tmp_path / "p.jsonl"
    for line in ("x", "[]", '{"prompt": 3}', '{"text": "a"}', '{"prompt": ""}'):
        path.write_text('{"prompt": "fine"}\n' + line + "\n")
        with pytest.raises(LoadError, match="line 2"):
            read_prompts(path)


def test_totals_add_up(l2: Path) -> None:
    with Engine(l2, "ngram", threads=1, max_model_len=160) as engine:
        outputs = engine.generate([[1, 2, 3] * 6, [7, 8] * 9], greedy(60))
        nothing = engine.generate([5], greedy(0))
    both = Totals.of(one.metrics for one in [*outputs, nothing])
    assert both.tokens == 118 == both.accepted + both.rounds
    assert both.drafted == sum(one.metrics.drafted_tokens for one in outputs)
    assert both.gamma == both.drafted / both.rounds
    assert math.isclose(sum(both.time_shares), 1)
    one = Totals.of([outputs[0].metrics])
    assert one.acceptance_length == pytest.approx(outputs[0].metrics.acceptance_length)
    assert one.alpha == pytest.approx(outputs[0].metrics.alpha)
    assert one.alpha_per_position == pytest.approx(outputs[0].metrics.alpha_per_position)
    assert one.time_shares == pytest.approx(outputs[0].metrics.time_shares)
    empty = Totals.of([])
    assert empty.acceptance_rate == empty.tokens_per_second == empty.alpha == 0.0
    assert empty.gamma == empty.wasted == sum(empty.time_shares) == 0


def test_contenders() -> None:
    assert [one.name for one in contenders(["ngram"], [], [])] == ["plain", "ngram"]
    names = [one.name for one in contenders(["ngram"], ["brake"], [1, 5])]
    assert names == ["plain", "fixed γ=1", "fixed γ=5", "brake"]
    merged = parse_drafter("ngram+self-layers=3")
    assert isinstance(merged, Merge)
    assert list(merged.parts) == [NGram(), SelfDraft(layers=3)]
    with pytest.raises(InvalidArgumentError, match="random"):
        Target("model", random="tiny")


def test_random_models(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="smollm2-135m"):
        random_model("huge", tmp_path)
    with Engine(random_model("tiny", tmp_path), threads=1, max_model_len=128) as engine:
        output = engine.generate([1, 2, 3], greedy(60, ignore_eos=True))
    assert len(set(output.token_ids)) > 5
    with Target(None, random="tiny", dtype="int8", threads=1, max_model_len=64) as target:
        assert (target.dtype, target.vocab_size) == ("int8", 512)
        assert max(map(max, target.random_prompts(3, 50))) < 512
        folder = target.path.parent
        with pytest.raises(InvalidArgumentError, match="tokenizer"):
            target.encode(builtin_prompts())
    assert not folder.exists()


def test_statistics() -> None:
    spread = stats.Spread.of([3.0, 1.0, 2.0])
    assert (spread.low, spread.median, spread.high) == (1.5, 2.0, 2.5)
    interval = stats.mean_interval([1.0, 2.0, 3.0, 4.0])
    # Student's t of 3 degrees of freedom at 97.5 % is 3.182.
    assert interval.mean == 2.5
    assert interval.margin == pytest.approx(3.182 * math.sqrt(5 / 3) / 2, rel=1e-3)
    assert (interval.low, interval.high) == (2.5 - interval.margin, 2.5 + interval.margin)
    assert math.isnan(stats.mean_interval([1.0]).margin)
    assert stats.mean_interval([1.0]).as_json() == {"mean": 1.0, "margin": None}
    assert stats.mean_interval([1.0, 3.0] * 50).margin == pytest.approx(
        1.984 * math.sqrt(100 / 99) / 10, rel=2e-3
    )


def test_the_best_is_chosen_by_other_repetitions() -> None:
    # In even repetitions b is lucky, in odd ones a is: the luck of the one it is beside is never
    # what it was chosen for.
    others = {"a": [1.0, 3.0, 1.0, 3.0], "b": [3.0, 1.0, 3.0, 1.0]}
    found = stats.beside_best([2.0] * 4, others)
    assert found is not None
    assert found.best == ("b", "a")
    assert found.ratio.mean == 2.0
    steady = stats.beside_best([2.0] * 4, {"a": [1.0] * 4, "b": [4.0] * 4})
    assert steady is not None
    assert steady.best == ("b", "b")
    assert (steady.ratio.mean, steady.ratio.margin) == (0.5, 0.0)
    assert stats.beside_best([1.0], others) is None
    assert stats.beside_best([1.0, 1.0], {}) is None


def test_no_bar_without_a_terminal(
    tmp_path: Path, l2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bench(tmp_path, "memory", l2, "--max-model-len", 64)
    arguments = ["--random", "tiny", "--rows", 2, "--context", 5, "--passes", 2]
    bench(tmp_path, "kernels", *arguments, "--repeats", 1, "--threads", 1)
    assert capfd.readouterr().err == ""
