"""The commands `specrt train ...`. torch is imported when one of them runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from .train.kinds import Kind

app = typer.Typer(
    name="train",
    help="Fit a drafter to a target and to data (needs the extra `train`: torch).",
    no_args_is_help=True,
)


def _shared(
    target: Annotated[str, typer.Option(help="A folder, a GGUF file or a Hugging Face hub id.")],
    data: Annotated[
        Path, typer.Option(help='JSON lines: {"text"}, {"messages"}, {"prompt", "response"}.')
    ],
    out: Annotated[Path, typer.Option(help="The folder that the drafter is written to.")],
    generate: Annotated[
        bool,
        typer.Option("--generate", help="The target answers the prompts of the data itself."),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Of such an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of the sampled ones.")] = 0.8,
    greedy_share: Annotated[float, typer.Option(help="Of answers that are greedy.")] = 0.5,
    max_length: Annotated[int, typer.Option(help="Tokens of a text; it is cut there.")] = 1024,
    on_bad_line: Annotated[
        str, typer.Option(help="error, or skip: what becomes of a line that is no record.")
    ] = "error",
    max_disk: Annotated[float, typer.Option(help="GB that hidden states may take.")] = 20.0,
    batch: Annotated[int, typer.Option(help="Texts that the target runs at once.")] = 128,
    steps: Annotated[int | None, typer.Option(help="Of the optimiser.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Times over the data; 4 unless given.")] = (
        None
    ),
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Of training steps; without --steps and --epochs it is the schedule."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Learnt tokens in a step, about.")] = 1280,
    learning_rate: Annotated[float, typer.Option(help="The highest.")] = 1.5e-3,
    warmup: Annotated[int, typer.Option(help="Steps in which it rises.")] = 30,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Norm of the gradient at most.")] = 1.0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps; a run goes on from there.")] = 200,
    seed: Annotated[int, typer.Option(help="Of answers, order and first weights.")] = 0,
    threads: Annotated[int | None, typer.Option(help="All usable cores unless given.")] = None,
    precision: Annotated[
        str, typer.Option(help="Of training: auto, float32 or bfloat16.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the target, as for generate.")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="A folder, where it has none.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Hidden states and checkpoints; OUT/training unless given.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help='JSON lines of {"prompt", "kind"} to measure on; else forty built in.'),
    ] = None,
    held_out_tokens: Annotated[int, typer.Option(help="Of an answer there; 0: none.")] = 128,
    held_out_temperature: Annotated[
        list[float] | None, typer.Option(help="0 unless given; repeatable.")
    ] = None,
) -> dict[str, Any]:
    """Options that all kinds share."""
    return locals()


def _command(kind: Callable[..., Kind], add: Callable[..., Any]) -> None:
    """A command of the shared options and those of `add`, which makes of them the kind's own."""
    own = inspect.signature(add, eval_str=True).parameters
    shared = inspect.signature(_shared, eval_str=True).parameters

    @functools.wraps(add)
    def run(**given: Any) -> None:
        mine = {name: given.pop(name) for name in own}
        _run(kind, add(**mine), given)

    parameters = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for one in [*shared.values(), *own.values()]
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    app.command()(run)


def _run(kind: Callable[..., Kind], own: dict[str, Any], given: dict[str, Any]) -> None:
    from rich.console import Console

    try:
        from .train.collect import DataOptions
        from .train.loop import LoopOptions
        from .train.run import TrainOptions, train
    except ImportError as error:
        raise UnsupportedError(
            f"[train] needs torch, which the extra 'train' brings (pip install 'specrt[train]'): "
            f"{error}"
        ) from error
    disk = given["max_disk"]
    if not 0 < disk < 2**30:
        raise InvalidArgumentError(f"[max_disk] expected GB > 0, got {disk}")
    threads = given["threads"]
    options = TrainOptions(
        target=given["target"],
        out=given["out"],
        data=DataOptions(
            max_disk=int(disk * 1e9),
            **{
                one: given[one]
                for one in (
                    "data", "generate", "max_new_tokens", "temperature", "greedy_share",
                    "max_length", "on_bad_line", "batch", "seed",
                )
            },
        ),
        loop=LoopOptions(
            **{
                one: given[one]
                for one in (
                    "steps", "epochs", "max_minutes", "rows", "learning_rate", "warmup",
                    "weight_decay", "clip", "checkpoint_every", "seed", "threads",
                )
            },
        ),
        work=given["work"],
        dtype=given["dtype"],
        tokenizer=given["tokenizer"],
        threads=threads,
        held_out=given["held_out"],
        held_out_tokens=given["held_out_tokens"],
        temperatures=tuple(given["held_out_temperature"] or (0.0,)),
    )  # fmt: skip
    train(kind(precision=given["precision"], **own), options, Console())


def _eagle3_kind(**options: Any) -> Kind:
    from .train.kinds import Eagle3Kind

    return Eagle3Kind(**options)


def eagle3(
    draft_vocab_size: Annotated[int, typer.Option(help="Tokens that the head can say.")] = 8192,
    aux_layers: Annotated[
        str | None,
        typer.Option(metavar="I,J,K", help="Layers whose input it reads; 2, n // 2, n - 3 else."),
    ] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="The target's else.")] = None,
    rope_theta: Annotated[float | None, typer.Option(help="The target's else.")] = None,
    test_steps: Annotated[int, typer.Option(help="Of training-time test.")] = 3,
) -> dict[str, Any]:
    """An EAGLE-3 head, in the layout that vLLM and SGLang read."""
    layers = None
    if aux_layers is not None:
        try:
            layers = tuple(int(one) for one in aux_layers.split(","))
        except ValueError:
            raise InvalidArgumentError(
                f"[aux_layers] expected layers as 2,15,27, got {aux_layers!r}"
            ) from None
    return {
        "draft_vocab_size": draft_vocab_size,
        "aux_layers": layers,
        "intermediate_size": intermediate_size,
        "rope_theta": rope_theta,
        "test_steps": test_steps,
    }


_command(_eagle3_kind, eagle3)


def _medusa_kind(**options: Any) -> Kind:
    from .train.kinds import MedusaKind

    return MedusaKind(**options)


def medusa(
    num_heads: Annotated[int, typer.Option(help="Tokens ahead.")] = 4,
    num_layers: Annotated[int, typer.Option(help="Residual blocks of a head.")] = 1,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Tokens that they can say; 0: all, in the reference's layout.")
    ] = 8192,
) -> dict[str, Any]:
    """Medusa-1 heads, in vLLM's layout or the reference's."""
    return {
        "num_heads": num_heads,
        "num_layers": num_layers,
        "draft_vocab_size": draft_vocab_size or None,
    }


def _draft_kind(**options: Any) -> Kind:
    from .train.kinds import DraftKind

    return DraftKind(**options)


def draft(
    layers: Annotated[int, typer.Option(help="Of the target's, evenly spread.")] = 4,
) -> dict[str, Any]:
    """A smaller Llama distilled from the target: some of its layers, its embedding and head."""
    return {"layers": layers}


_command(_medusa_kind, medusa)
_command(_draft_kind, draft)
