"""The command `specrt`, also `python -m specrt`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import specrt

from .cli_train import app as train_app

app = typer.Typer(
    name="specrt",
    help="Speculative decoding of large language models: faster, and the same bytes.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(train_app)


def cmake_dir() -> Path:
    """The folder to put into specrt_DIR, or beneath CMAKE_PREFIX_PATH."""
    return Path(specrt.__file__).resolve().parent / "lib" / "cmake" / "specrt"


def _print_and_exit(text: Callable[[], object]) -> Callable[[bool], None]:
    def callback(given: bool) -> None:
        if given:
            print(text())
            raise typer.Exit

    return callback


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_and_exit(lambda: specrt.__version__),
            help="Print the version.",
        ),
    ] = False,
    cmake: Annotated[
        bool,
        typer.Option(
            "--cmake-dir",
            is_eager=True,
            callback=_print_and_exit(cmake_dir),
            help="Print where find_package(specrt) finds the C++ package.",
        ),
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file or a Hugging Face hub id.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message.")
    ] = False,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="ngram, suffix, self, mtp, or the folder or hub id of a smaller model or a head."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A folder, hub id or file, where MODEL has none: a .specrt file say."),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted in a round.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sum of probabilities to keep; 1 is all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is no limit.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest token's.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled text.")] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and output become less likely.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken from the logits of tokens in the output.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same for each time that a token is in the output.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", help="Added to a token's logit; repeatable."),
    ] = None,
    allowed_token_ids: Annotated[
        list[int] | None, typer.Option(help="Only tokens so given may come; repeatable.")
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option(help="A text that may not come; repeatable.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON schema that the text follows.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="A regular expression that the whole text matches.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The text is one of these; repeatable.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="A file with a Lark grammar that the text follows.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="No end before so many tokens.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; repeatable.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option(help="End at this token; repeatable.")
    ] = None,
    include_stop_str_in_output: Annotated[
        bool, typer.Option("--include-stop-str-in-output", help="Leave the stop in the text.")
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end token.")
    ] = False,
    skip_special_tokens: Annotated[
        bool, typer.Option(help="Leave special tokens out of the text.")
    ] = True,
    verification: Annotated[
        str,
        typer.Option(
            help="coupled (the same text with any drafter), rejection, block or typical (lossy)."
        ),
    ] = "coupled",
    policy: Annotated[
        str,
        typer.Option(
            help="How much is drafted: goodput, brake, fixed, ema_tiers, off or adasd (lossy)."
        ),
    ] = "goodput",
    posterior_threshold: Annotated[
        float | None, typer.Option(help="With typical: a probability that is enough.")
    ] = None,
    posterior_alpha: Annotated[
        float | None, typer.Option(help="With typical: and so is this times exp(-entropy).")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of weights: auto, float32, bfloat16, int8, int4 or w8a8.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(help="All usable cores unless given.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output together.")] = None,
    kv_cache_bytes: Annotated[
        int | None, typer.Option(help="Target's and drafter's KV cache together.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or int8: how keys and values are kept.")
    ] = "auto",
    cpu_isa: Annotated[str, typer.Option(help="auto, scalar, avx2, avx512 or amx.")] = "auto",
    trace: Annotated[
        Path | None, typer.Option(help="Write every round to this file, for `specrt trace`.")
    ] = None,
    metrics: Annotated[
        bool, typer.Option(help="Print the metrics to standard error afterwards.")
    ] = True,
) -> None:
    """Generate text, printed as it comes."""
    params = specrt.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(_token_and_bias(one) for one in logit_bias) if logit_bias else None,
        allowed_token_ids=allowed_token_ids or None,
        bad_words=bad_words,
        structured_outputs=_structured(json_schema, regex, choice, grammar),
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=include_stop_str_in_output,
        ignore_eos=ignore_eos,
        skip_special_tokens=skip_special_tokens,
        posterior_threshold=posterior_threshold,
        posterior_alpha=posterior_alpha,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    with specrt.Engine(
        model,
        drafter=drafter,
        tokenizer=tokenizer,
        num_speculative_tokens=num_speculative_tokens,
        dtype=dtype,
        threads=threads,
        max_model_len=max_model_len,
        kv_cache_bytes=kv_cache_bytes,
        kv_cache_dtype=kv_cache_dtype,
        verification=verification,
        policy=policy,
        cpu_isa=cpu_isa,
        trace=trace,
    ) as engine:
        if chat:
            increments = engine.chat_stream([{"role": "user", "content": text}], params)
        else:
            increments = engine.stream(text, params)
        output = _print_as_it_comes(increments)
    if metrics:
        print(output.metrics, file=sys.stderr)


def _token_and_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise specrt.InvalidArgumentError(
            f"[logit_bias] expected a token id and a number, as 5=-2.5, got {text!r}"
        ) from None


def _structured(
    json_schema: Path | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> specrt.StructuredOutputs | None:
    if json_schema is None and regex is None and not choice and grammar is None:
        return None
    return specrt.StructuredOutputs(
        json=None if json_schema is None else _text_of(json_schema),
        regex=regex,
        choice=choice or None,
        grammar=None if grammar is None else _text_of(grammar),
    )


def _text_of(path: Path) -> str:
    # Bytes that are no text are the grammar's own mistake to name.
    return path.read_text(encoding="utf-8", errors="replace")


def _print_as_it_comes(
    increments: Iterator[specrt.Increment],
) -> specrt.RequestOutput:
    try:
        while True:
            print(next(increments).text, end="", flush=True)
    except StopIteration as end:
        print()
        output: specrt.RequestOutput = end.value
        return output


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file or a Hugging Face hub id.")],
    calibrate: Annotated[
        Path, typer.Option(help="A file with text like the model's work, some thousand tokens.")
    ],
    out: Annotated[Path, typer.Option(help="What is written, a name ending in .specrt.")],
    dtype: Annotated[str, typer.Option(help="Of weights: int4.")] = "int4",
    tokenizer: Annotated[str | None, typer.Option(help="A folder, where MODEL has none.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="As for generate.")] = None,
) -> None:
    """Round a model's weights by what a text makes them work on, and write the result."""
    specrt.quantize(
        model,
        _text_of(calibrate),
        out,
        dtype=dtype,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
    )


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="What Engine(trace=...) or --trace wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")],
) -> None:
    """Show a trace of rounds as one HTML page: who proposed each token, what was rejected."""
    from specrt.trace import read_trace
    from specrt.trace_html import to_html

    out.write_text(to_html(read_trace(file)), encoding="utf-8")


@app.command()
def doctor(
    target: Annotated[str, typer.Argument(help="A folder, a GGUF file or a Hugging Face hub id.")],
    drafter: Annotated[
        str, typer.Argument(help="The folder or hub id of a head or smaller model, or mtp.")
    ],
    dtype: Annotated[str, typer.Option(help="Of the target, as for generate.")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="A folder, where TARGET has none.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt a line; ten built-in ones else.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
) -> None:
    """Find out whether a drafter goes with a target, and if not, how it was meant."""
    from rich.console import Console

    from .doctor import PROMPTS, diagnose

    asked = PROMPTS if prompts is None else [one for one in _text_of(prompts).splitlines() if one]
    diagnosis = diagnose(
        target, drafter, dtype=dtype, tokenizer=tokenizer, prompts=asked, tokens=tokens
    )
    console = Console()
    console.print(diagnosis.table())
    console.print(diagnosis.verdict, highlight=False, markup=False, soft_wrap=True)
    if not diagnosis.healthy:
        raise typer.Exit(1)


@app.command()
def demo(
    threads: Annotated[int | None, typer.Option(help="All usable cores unless given.")] = None,
    head: Annotated[
        Path | None, typer.Option(help="An EAGLE-3 head for the demo's model, one more drafter.")
    ] = None,
) -> None:
    """Generate with a small model, without and with speculation, and compare."""
    from rich.console import Console

    from specrt.demo import run

    if not run(Console(), threads, head):
        fail("the text changed with speculation, which must never happen")


def fail(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    # transformers would say at every start that torch is missing. It is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        app()
    except (specrt.SpecrtError, OSError) as error:
        # One line, whatever a message from elsewhere holds.
        fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit(130)
