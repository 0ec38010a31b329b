"""Steps, from wherever a run stands: optimiser, schedule, checkpoints, what was seen."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import InvalidArgumentError, LoadError, NumericError
from .batches import Batches, Position
from .shards import Example

__all__ = ["LoopOptions", "Point", "Trainer", "run_loop"]


class Trainer(Protocol):
    """A drafter in training."""

    parameters: dict[str, torch.Tensor]

    @property
    def steps_told(self) -> int: ...

    def loss(self, examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(loss a row, right guesses by position, rows)."""


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a drafter is fitted."""

    steps: int | None = None
    """Of the optimiser; None: by `epochs`, or by `max_minutes` alone."""
    epochs: float | None = None
    """Times that the data are seen; None without steps and minutes: 4."""
    max_minutes: float | None = None
    """Of training, earlier calls of the same run included. With `steps` or `epochs` it stops a run
    that would take longer; alone it is the schedule: the learning rate falls with the time."""
    rows: int = 1280
    """Learnt rows in a step, about."""
    learning_rate: float = 1.5e-3
    """The highest, which falls as a cosine to a fiftieth."""
    warmup: int = 30
    """Steps in which it rises."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Norm of the gradient at most."""
    checkpoint_every: int = 200
    """Steps."""
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1), ("rows", 1), ("warmup", 0), ("checkpoint_every", 1), ("seed", 0),
            ("threads", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in ("steps", "threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
                raise InvalidArgumentError(
                    f"[{name}] expected an integer >= {least}, got {value!r}"
                )
        for name in ("epochs", "max_minutes", "learning_rate", "weight_decay", "clip"):
            value = getattr(self, name)
            if value is None and name in ("epochs", "max_minutes"):
                continue
            fine = isinstance(value, (int, float)) and not isinstance(value, bool)
            if (
                not fine
                or not math.isfinite(value)
                or not (value > 0 or (value == 0 and name == "weight_decay"))
            ):
                raise InvalidArgumentError(f"[{name}] expected a number > 0, got {value!r}")
        if self.steps is not None and self.epochs is not None:
            raise InvalidArgumentError("[epochs] expected steps or epochs, got both")

    def same_run(self) -> dict[str, Any]:
        """What two calls have to agree on to be one run."""
        kept = asdict(self)
        for one in ("checkpoint_every", "threads", "max_minutes"):
            del kept[one]
        kept["by_time"] = self.by_time
        return kept

    @property
    def by_time(self) -> bool:
        """Whether the schedule is the clock's."""
        return self.max_minutes is not None and self.steps is None and self.epochs is None


@dataclass(frozen=True)
class Point:
    """What some steps came to, on average."""

    step: int
    loss: float
    right: list[float]
    """Share of rows whose favourite was right, by position."""


class _State:
    """Where a run stands; all of it is in a checkpoint."""

    def __init__(self) -> None:
        self.step = 0
        self.position = Position()
        self.seconds = 0.0
        self.history: list[Point] = []


def run_loop(
    trainer: Trainer,
    examples: Sequence[Example],
    sizes: Sequence[int],
    options: LoopOptions,
    folder: Path,
    *,
    identity: dict[str, Any],
    say: Callable[[str], None],
    told: Callable[[float, Point], None],
) -> list[Point]:
    """Train to the end, or to `max_minutes`; go on where a checkpoint in `folder` says so.

    `sizes` are the learnt rows of each example; `identity` says what else makes a run what it is.
    `told` gets the share of the run that is done and the last point. On the same number of threads,
    a run that was cut off and resumed ends with the same weights as one that was not (with a
    schedule by steps). Raises InvalidArgumentError where the checkpoint is of another run, and
    NumericError where the loss is no number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads or threads)
    try:
        return _run(trainer, examples, sizes, options, folder, identity, say, told)
    finally:
        torch.set_num_threads(threads)


def _run(
    trainer: Trainer,
    examples: Sequence[Example],
    sizes: Sequence[int],
    options: LoopOptions,
    folder: Path,
    identity: dict[str, Any],
    say: Callable[[str], None],
    told: Callable[[float, Point], None],
) -> list[Point]:
    batches = Batches(sizes, options.rows, options.seed)
    optimiser = _optimiser(trainer, options)
    identity = {**identity, **options.same_run()}
    state = _State()
    path = folder / "checkpoint.pt"
    if path.exists():
        _restore(path, trainer, optimiser, state, identity)
        say(f"going on from step {state.step}")
    total = _total_steps(options, batches)
    limit = None if options.max_minutes is None else 60.0 * options.max_minutes
    started, before = time.monotonic(), state.seconds
    since: list[tuple[float, list[float]]] = []

    def flush() -> None:
        if since:
            state.history.append(_mean(state.step, since))
            since.clear()
            told(done(), state.history[-1])

    def done() -> float:
        if total is not None:
            return state.step / total
        assert limit is not None
        return min(1.0, state.seconds / limit)

    while done() < 1.0:
        if limit is not None and state.seconds >= limit:
            say(f"stopped at step {state.step} of {total}: {options.max_minutes} minutes are over")
            break
        chosen, following = batches.at(state.position)
        rate = options.learning_rate * _schedule(state.step, done(), options.warmup)
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss, right, rows = trainer.loss([examples[one] for one in chosen])
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NumericError(f"[loss] expected a finite number, got {value} in step {state.step}")
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trainer.parameters.values(), options.clip)
        optimiser.step()
        state.step += 1
        state.position = following
        state.seconds = before + time.monotonic() - started
        since.append((value, [float(one) / rows for one in right]))
        if len(since) == 10:
            flush()
        if state.step % options.checkpoint_every == 0:
            flush()
            _save(path, trainer, optimiser, state, identity)
    flush()
    _save(path, trainer, optimiser, state, identity)
    lines = [json.dumps(asdict(one)) for one in state.history]
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return state.history


def _optimiser(trainer: Trainer, options: LoopOptions) -> torch.optim.Optimizer:
    matrices = [one for one in trainer.parameters.values() if one.ndim > 1]
    vectors = [one for one in trainer.parameters.values() if one.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [one for one in groups if one["params"]], lr=options.learning_rate, betas=(0.9, 0.95),
        fused=True,
    )  # fmt: skip


def _total_steps(options: LoopOptions, batches: Batches) -> int | None:
    """None where the clock decides."""
    if options.by_time:
        return None
    if options.steps is not None:
        return options.steps
    epochs = 4.0 if options.epochs is None else options.epochs
    total, epoch = 0, 0
    while epochs > 0:
        whole = len(batches.of_epoch(epoch))
        total += max(1, round(whole * min(1.0, epochs)))
        epoch, epochs = epoch + 1, epochs - 1.0
    return total


def _schedule(step: int, done: float, warmup: int) -> float:
    """Share of the highest learning rate."""
    cosine = 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return cosine * min(1.0, (step + 1) / (warmup + 1))


def _mean(step: int, seen: list[tuple[float, list[float]]]) -> Point:
    count = len(seen)
    positions = len(seen[0][1])
    return Point(
        step,
        sum(one for one, _ in seen) / count,
        [sum(right[i] for _, right in seen) / count for i in range(positions)],
    )


def _save(
    path: Path,
    trainer: Trainer,
    optimiser: torch.optim.Optimizer,
    state: _State,
    identity: dict[str, Any],
) -> None:
    kept = {
        "identity": json.dumps(identity, sort_keys=True),
        "parameters": {name: one.detach() for name, one in trainer.parameters.items()},
        "optimiser": optimiser.state_dict(),
        "step": state.step,
        "epoch": state.position.epoch,
        "batch": state.position.batch,
        "seconds": state.seconds,
        "history": [asdict(one) for one in state.history],
    }
    partial = path.with_name(path.name + ".partial")
    torch.save(kept, partial)
    os.replace(partial, path)


def _restore(
    path: Path,
    trainer: Trainer,
    optimiser: torch.optim.Optimizer,
    state: _State,
    identity: dict[str, Any],
) -> None:
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)
        had = json.loads(kept["identity"])
    except Exception as error:  # torch raises many kinds for a damaged file
        raise LoadError(f"[{path}] cannot be read as a checkpoint: {error}") from error
    wanted = json.loads(json.dumps(identity))
    for key in sorted({*had, *wanted}):
        if had.get(key) != wanted.get(key):
            raise InvalidArgumentError(
                f"[{key}] expected {had.get(key)!r}, as the run in {path.parent} has it, got "
                f"{wanted.get(key)!r}: go on with that, or use another folder"
            )
    with torch.no_grad():
        for name, one in trainer.parameters.items():
            one.copy_(kept["parameters"][name])
    optimiser.load_state_dict(kept["optimiser"])
    state.step = kept["step"]
    state.position = Position(kept["epoch"], kept["batch"])
    state.seconds = kept["seconds"]
    state.history = [Point(**one) for one in kept["history"]]
