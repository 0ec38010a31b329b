"""The command `specrt-bench`, also `python -m specrt.bench`."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cli import fail
from ..errors import InvalidArgumentError, SpecrtError
from .report import Report, check_outputs, emit

if TYPE_CHECKING:
    from .targets import Target

app = typer.Typer(
    name="specrt-bench",
    help="What speculation gains on your model, prompts and machine. Everything that is compared "
    "takes turns in one process.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str | None,
    typer.Argument(
        help="A folder, a GGUF or .specrt file or a hub id; the demo model unless given."
    ),
]
Random = Annotated[
    str | None,
    typer.Option(
        help="Instead of a model, random weights: tiny, smollm2-135m, llama-3.2-1b or llama-3.1-8b."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Of weights: auto, float32, bfloat16, int8, int4 or w8a8.")
]
Tokenizer = Annotated[str | None, typer.Option(help="A folder, where the model has none.")]
Threads = Annotated[int | None, typer.Option(help="All usable cores unless given.")]
MaxModelLen = Annotated[int, typer.Option(help="Prompt and output together.")]
Isa = Annotated[str, typer.Option(help="auto, scalar, avx2, avx512 or amx.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw them here: a .png or a self-contained .html.")
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        help="ngram, suffix, self, self-int4, self-int8, self-w8a8, self-layers=N, mtp, a model "
        "or head; A+B merges; repeatable.",
    ),
]
Policies = Annotated[
    list[str] | None, typer.Option("--policy", help="As Engine's policy; repeatable.")
]
Gammas = Annotated[
    list[int] | None,
    typer.Option("--gamma", help="A fixed number of draft tokens a round; repeatable."),
]
Repeats = Annotated[int, typer.Option(help="Repetitions, by turns.")]
Prompts = Annotated[
    Path | None,
    typer.Option(help="One a line, or .jsonl with prompt and kind; a built-in set unless given."),
]


def _target(ctx: typer.Context, **instead: Any) -> Target:
    """What a command measures: those of its options that `Target` has."""
    from .targets import Target

    known = inspect.signature(Target).parameters
    given = {name: value for name, value in ctx.params.items() if name in known}
    return Target(**{**given, **instead})


def _threads(given: int | None) -> int:
    """For processes of others."""
    if given is not None and given < 1:
        raise InvalidArgumentError(f"[threads] expected at least 1, got {given}")
    return len(os.sched_getaffinity(0)) if given is None else given


def _done(report: Report, json_file: Path | None, plot: Path | None) -> None:
    emit(report, json_file, plot)
    if report.failed is not None:
        fail(report.failed)


@app.command()
def run(
    ctx: typer.Context,
    model: Model = None,
    drafter: Drafters = None,
    policy: Policies = None,
    gamma: Gammas = None,
    prompts: Prompts = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="chat, code, rewrite, summarise or answer, of the built-in set; repeatable."
        ),
    ] = None,
    per_kind: Annotated[int | None, typer.Option(help="Prompts of each kind.")] = None,
    by_kind: Annotated[bool, typer.Option("--by-kind", help="A table a kind as well.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 128,
    concurrency: Annotated[int, typer.Option(help="Prompts that run at once.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    verification: Annotated[
        str, typer.Option(help="coupled, rejection, block or typical.")
    ] = "coupled",
    repeats: Repeats = 3,
    dtype: Dtype = "auto",
    tokenizer: Tokenizer = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = 1024,
    cpu_isa: Isa = "auto",
    json_file: Json = None,
    plot: PlotFile = None,
) -> None:
    """Drafters and policies on prompts: speed, τ, α, γ, where the time goes; is the text the same?

    Without --gamma and --policy each drafter runs as Engine has it by default.
    """
    from .prompts import builtin_prompts, read_prompts
    from .run import measure
    from .targets import contenders

    check_outputs(json_file, plot)
    chosen = builtin_prompts() if prompts is None else read_prompts(prompts)
    kinds = list(dict.fromkeys(one.kind for one in chosen))
    for one in kind or ():
        if one not in kinds:
            raise InvalidArgumentError(f"[kind] expected one of {', '.join(kinds)}, got {one!r}")
    if per_kind is not None and per_kind < 1:
        raise InvalidArgumentError(f"[per_kind] expected at least 1, got {per_kind}")
    chosen = [
        prompt
        for one in kinds
        if not kind or one in kind
        for prompt in [each for each in chosen if each.kind == one][:per_kind]
    ]
    competing = contenders(drafter or ["ngram"], policy or [], gamma or [])
    with _target(ctx) as target:
        report = measure(
            target,
            chosen,
            competing,
            max_tokens=max_tokens,
            repeats=repeats,
            concurrency=concurrency,
            verification=verification,
            temperature=temperature,
            by_kind=by_kind,
        )
    _done(report, json_file, plot)


@app.command()
def sweep(
    ctx: typer.Context,
    model: Model = None,
    random: Random = None,
    gamma: Gammas = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(help="Probability that a free draft is accepted; repeatable."),
    ] = None,
    drafter: Drafters = None,
    rounds: Annotated[int, typer.Option(help="Of each cell, at least.")] = 300,
    max_tokens: Annotated[int, typer.Option(help="Of a request.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Of a random prompt.")] = 32,
    repeats: Repeats = 3,
    dtype: Dtype = "auto",
    tokenizer: Tokenizer = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = 1024,
    cpu_isa: Isa = "auto",
    json_file: Json = None,
    plot: PlotFile = None,
) -> None:
    """γ against preset acceptance rates (the text is not the model's then), or against drafters."""
    from .prompts import builtin_prompts
    from .sweep import measure

    check_outputs(json_file, plot)
    if prompt_tokens < 1:
        raise InvalidArgumentError(f"[prompt_tokens] expected at least 1, got {prompt_tokens}")
    with _target(ctx) as target:
        if drafter and target.tokenizer is not None:
            prompts = target.encode(builtin_prompts())
        else:
            prompts = target.random_prompts(16, prompt_tokens)
        report = measure(
            target,
            gammas=gamma or [1, 3, 5, 7],
            alphas=alpha or ([] if drafter else [0.2, 0.4, 0.6, 0.8, 0.9]),
            drafters=drafter or [],
            rounds=rounds,
            repeats=repeats,
            max_tokens=max_tokens,
            prompts=prompts,
        )
    _done(report, json_file, plot)


@app.command()
def load(
    ctx: typer.Context,
    model: Model = None,
    random: Random = None,
    drafter: Annotated[str | None, typer.Option(help="As for run; ngram unless given.")] = None,
    policy: Policies = None,
    gamma: Gammas = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Requests at any time; repeatable.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Poisson arrivals, so many a second; repeatable."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Of a repetition; four times the concurrency or ten seconds' arrivals."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Of a request: it has that many.")] = 64,
    prompts: Prompts = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Random prompts of that length instead.")
    ] = None,
    target_tpot_ms: Annotated[
        float | None,
        typer.Option(help="Time a token after the first; tells how many requests stayed below."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Free drafts, accepted with this probability, instead of a drafter's."),
    ] = None,
    repeats: Repeats = 5,
    dtype: Dtype = "auto",
    tokenizer: Tokenizer = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = 1024,
    cpu_isa: Isa = "auto",
    json_file: Json = None,
    plot: PlotFile = None,
) -> None:
    """Policies under load: throughput, time to first token, per token and between tokens.

    Beside plain decoding, fixed γ of 3 and 5 and Engine's own default, unless --gamma or --policy
    say otherwise.
    """
    from .load import Level, measure
    from .prompts import builtin_prompts, read_prompts
    from .targets import PLAIN, Contender, parse_drafter

    check_outputs(json_file, plot)
    levels = [Level(concurrency=one) for one in concurrency or ()]
    levels += [Level(rate=one) for one in rate or ()]
    if not levels:
        levels = [Level(concurrency=one) for one in (1, 4, 16)]
    if target_tpot_ms is not None and not target_tpot_ms > 0:
        raise InvalidArgumentError(f"[target_tpot_ms] expected above 0, got {target_tpot_ms}")
    if prompt_tokens is not None and prompt_tokens < 1:
        raise InvalidArgumentError(f"[prompt_tokens] expected at least 1, got {prompt_tokens}")
    if prompt_tokens is not None and prompts is not None:
        raise InvalidArgumentError("[prompt_tokens] expected no prompts beside it, got a file")
    if alpha is None:
        how = parse_drafter("ngram" if drafter is None else drafter)
    elif drafter is not None:
        raise InvalidArgumentError(f"[alpha] expected no drafter beside it, got {drafter!r}")
    else:
        from ..drafters import Synthetic

        how = Synthetic()
    competing = [PLAIN]
    asked = bool(gamma or policy)
    for one in gamma or ([] if asked else [3, 5]):
        competing.append(Contender(f"fixed γ={one}", how, "fixed", one))
    competing += [Contender(name, how, name) for name in policy or ()]
    if not asked:
        competing.append(Contender("default", how))
    with _target(ctx) as target:
        if prompt_tokens is not None or (target.tokenizer is None and prompts is None):
            ids = target.random_prompts(64, prompt_tokens or 64)
        else:
            ids = target.encode(builtin_prompts() if prompts is None else read_prompts(prompts))
        report = measure(
            target,
            competing,
            levels,
            prompts=ids,
            requests=requests,
            max_tokens=max_tokens,
            repeats=repeats,
            target_tpot=None if target_tpot_ms is None else target_tpot_ms / 1e3,
            synthetic=alpha,
        )
    _done(report, json_file, plot)


@app.command()
def kernels(
    ctx: typer.Context,
    model: Model = None,
    random: Random = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of a pass; repeatable.")] = None,
    context: Annotated[int, typer.Option(help="Tokens before them.")] = 512,
    passes: Annotated[int, typer.Option(help="Of each row count in a repetition.")] = 8,
    native: Annotated[
        bool,
        typer.Option("--native/--package", help="Run the native benchmark, which has to be built."),
    ] = False,
    repeats: Repeats = 3,
    dtype: Dtype = "auto",
    threads: Threads = None,
    cpu_isa: Isa = "auto",
    json_file: Json = None,
    plot: PlotFile = None,
) -> None:
    """What a pass of many rows costs against a pass of one: what verifying drafts costs."""
    from .kernels import find_native, measure, run_native

    check_outputs(json_file, plot)
    counts = rows or [1, 2, 4, 8, 16, 32, 64]
    if native:
        program = find_native()
        if program is None:
            raise InvalidArgumentError(
                "[native] expected bench_forward built beside the sources (-DSPECRT_BENCH=ON), "
                "found none"
            )
        if model is not None:
            raise InvalidArgumentError("[native] expected --random, got a model")
        if cpu_isa != "auto":
            raise InvalidArgumentError(
                f"[cpu_isa] expected auto, which the native benchmark takes, got {cpu_isa!r}"
            )
        report = run_native(
            program,
            shape=random or "smollm2-135m",
            dtypes=["bfloat16", "int8", "int4"] if dtype == "auto" else [dtype],
            rows=counts,
            context=context,
            repeats=repeats * passes,
            threads=_threads(threads),
        )
    else:
        with _target(ctx, max_model_len=context + 1024) as target:
            report = measure(target, rows=counts, context=context, passes=passes, repeats=repeats)
    _done(report, json_file, plot)


@app.command()
def memory(
    model: Annotated[
        str | None, typer.Argument(help="As for run; the demo model unless given.")
    ] = None,
    drafter: Drafters = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Of weights, as for run; repeatable.")
    ] = None,
    take: Annotated[
        bool, typer.Option("--load", help="Load each as well, and tell what it took.")
    ] = False,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output together.")] = None,
    kv_cache_bytes: Annotated[int | None, typer.Option(help="Target's and drafter's.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or int8.")] = "auto",
    max_batch_size: Annotated[int, typer.Option(help="Requests that run at once.")] = 32,
    json_file: Json = None,
    plot: PlotFile = None,
) -> None:
    """What target, drafters and KV cache take, before anything is loaded."""
    from .memory import measure

    check_outputs(json_file, plot)
    if model is None:
        from ..demo import demo_model_path

        model = str(demo_model_path())
    report = measure(
        model,
        drafters=drafter or [],
        dtypes=dtype or ["auto"],
        load=take,
        options={
            "max_model_len": max_model_len,
            "kv_cache_bytes": kv_cache_bytes,
            "kv_cache_dtype": kv_cache_dtype,
            "max_batch_size": max_batch_size,
        },
    )
    _done(report, json_file, plot)


@app.command()
def compare(
    model: Annotated[
        Path, typer.Argument(help="A checkpoint's folder, a .gguf file, or what --prepare wrote.")
    ],
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=PYTHON]",
            help="transformers, llama.cpp, openvino or vllm, in this Python or another; those that "
            "are installed here unless given; repeatable.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="decode, rewrite, rows or batch; repeatable.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Of specrt's weights; repeatable.")
    ] = None,
    prepare: Annotated[
        Path | None,
        typer.Option(
            help="First write MODEL, a .gguf file, in every engine's format to this folder."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 96,
    repeats: Repeats = 5,
    threads: Threads = None,
    cpu_isa: Isa = "auto",
    json_file: Json = None,
    plot: PlotFile = None,
) -> None:
    """specrt beside other engines on the same weights and prompts."""
    from .compare import TASKS, Sources, installed_peers, measure

    check_outputs(json_file, plot)
    if prepare is not None:
        from .peers.prepare import prepare as write_formats

        write_formats(model, prepare)
        model = prepare
    peers = installed_peers()
    if peer is not None:
        split = [one.partition("=") for one in peer]
        peers = {name: python or sys.executable for name, _, python in split}
    report = measure(
        Sources.at(model),
        peers=peers,
        dtypes=dtype or ["bfloat16"],
        tasks=only or list(TASKS),
        threads=_threads(threads),
        repeats=repeats,
        max_tokens=max_tokens,
        isa=cpu_isa,
    )
    _done(report, json_file, plot)


def main() -> None:
    # transformers would say at every start that torch is missing. It is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        app()
    except (SpecrtError, OSError) as error:
        fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit(130)
