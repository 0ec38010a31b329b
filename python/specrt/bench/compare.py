"""`specrt-bench compare`: specrt beside other engines, each in a process of its own, by turns."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidArgumentError, LoadError
from ..text import Tokenizer
from .plots import Plot
from .prompts import builtin_prompts
from .report import Report, progress, table

__all__ = ["PEERS", "TASKS", "Sources", "installed_peers", "measure"]

WORKERS = Path(__file__).parent / "peers"
# By name: the modules that have to be there.
PEERS = {
    "transformers": ("transformers", "torch"),
    "llama.cpp": ("llama_cpp",),
    "openvino": ("openvino_genai",),
    "vllm": ("vllm",),
}
TASKS = {
    "decode": "plain and n-gram decoding behind short prompts (tokens/s)",
    "rewrite": "the same where the answer repeats the prompt (tokens/s)",
    "rows": "cost of a pass by that of one row",
    "batch": "32 requests at once (tokens/s)",
}
ROWS = (1, 4, 16, 64)
BATCH = 32
# Rewriting is compared on answers that repeat their prompts: this many tokens a round at least.
REPEATS = 3.0
FREE = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child why the sky is blue, and why it is red in the evening.",
)


@dataclass(frozen=True)
class Sources:
    """One model's weights in the formats that engines read."""

    ours: Path
    """What specrt reads."""
    folder: Path | None = None
    """Of transformers' format."""
    gguf: dict[str, Path] = field(default_factory=dict)
    """By what a label calls the format."""

    @classmethod
    def at(cls, path: Path) -> Sources:
        """What `prepare` wrote, a checkpoint's folder, or a .gguf file. Raises LoadError."""
        if path.suffix == ".gguf" and path.is_file():
            return cls(path, gguf={path.stem.rsplit(".", 1)[-1]: path})
        found = {
            told: path / f"{kind}.gguf"
            for kind, told in (("bf16", "bf16"), ("q8_0", "Q8_0"), ("q4_0", "Q4_0"))
            if (path / f"{kind}.gguf").is_file()
        }
        folder = path / "hf" if (path / "hf").is_dir() else None
        if (path / "config.json").is_file():
            return cls(path, path, found)
        if found or folder is not None:
            ours = next(iter(path.glob("source*.gguf")), found.get("bf16", folder))
            assert ours is not None
            return cls(ours, folder, found)
        raise LoadError(
            f"[{path}] expected a folder that --prepare wrote, a checkpoint's, or a .gguf file"
        )


def installed_peers() -> dict[str, str]:
    """Engines that this Python can import, and this Python."""
    return {
        name: sys.executable
        for name, modules in PEERS.items()
        if all(importlib.util.find_spec(one) is not None for one in modules)
    }


class Worker:
    """One engine in a process of its own, which answers lines of JSON."""

    def __init__(self, label: str, python: str, script: str, *arguments: str) -> None:
        self.label = label
        self.problems: list[str] = []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, str(WORKERS / f"worker_{script}.py"), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
        except OSError as error:
            raise InvalidArgumentError(f"[peer] cannot run {python}: {error}") from error
        self.tasks: list[str] = self._read().get("ready", [])
        if not self.tasks:
            self.problems.append(f"{label} does not start: {self._last_words()}")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            answer = json.loads(line) if line else {"error": "the process ended"}
        except ValueError:
            answer = None
        return answer if isinstance(answer, dict) else {"error": f"it says {line.strip()[:80]!r}"}

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else "it says nothing"

    def run(self, task: str, **arguments: Any) -> Any:
        """The task's result, or None where the engine has no such task or fails."""
        if task not in self.tasks:
            return None
        assert self._process.stdin is not None
        print(json.dumps({"task": task, **arguments}), file=self._process.stdin, flush=True)
        answer = self._read()
        if "error" in answer:
            self.problems.append(f"{self.label}: {task}: {answer['error']}")
            self.tasks.remove(task)
            return None
        return answer["result"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def _start(
    sources: Sources, dtypes: Sequence[str], threads: int, peers: dict[str, str], isa: str
) -> tuple[list[Worker], list[str]]:
    """Workers, specrt's first, and what is left out and why."""
    count = str(threads)
    workers = [
        Worker(f"specrt {dtype}", sys.executable, "specrt", str(sources.ours), dtype, count, isa)
        for dtype in dtypes
    ]
    left_out = []
    for name, python in peers.items():
        if name in ("llama.cpp", "openvino"):
            script = name.replace(".", "_")
            files = {
                told: file
                for told, file in sources.gguf.items()
                if name == "llama.cpp" or told != "bf16"
            }
            workers += [
                Worker(f"{name} {told}", python, script, str(file), count)
                for told, file in files.items()
            ]
            if not files:
                left_out.append(f"{name} reads .gguf files, of which there are none")
        elif sources.folder is None:
            left_out.append(f"{name} reads a checkpoint's folder: see --prepare")
        elif name == "vllm":
            workers.append(Worker("vllm bf16", python, "vllm", str(sources.folder), count))
        else:
            arguments = (str(sources.folder), "bfloat16", count)
            workers.append(Worker("transformers bf16", python, "transformers", *arguments))
    return workers, left_out


Add = Callable[[str, str, float], None]


def measure(
    sources: Sources,
    *,
    peers: dict[str, str],
    dtypes: Sequence[str],
    tasks: Sequence[str],
    threads: int,
    repeats: int,
    max_tokens: int,
    isa: str = "auto",
) -> Report:
    """peers: engines by name, each with the Python that can import it."""
    for name in peers:
        if name not in PEERS:
            raise InvalidArgumentError(f"[peer] expected one of {', '.join(PEERS)}, got {name!r}")
    for name in tasks:
        if name not in TASKS:
            raise InvalidArgumentError(f"[only] expected one of {', '.join(TASKS)}, got {name!r}")
    for what, value in (("repeats", repeats), ("max_tokens", max_tokens), ("threads", threads)):
        if value < 1:
            raise InvalidArgumentError(f"[{what}] expected at least 1, got {value}")
    if not dtypes:
        raise InvalidArgumentError("[dtype] expected at least one, got none")
    free, texts = _prompts(sources.folder or sources.ours)
    workers, notes = _start(sources, dtypes, threads, peers, isa)
    figures: dict[tuple[str, str, str], list[float]] = {}
    try:
        with progress(len(tasks) * repeats, "comparing") as ticks:
            for task in tasks:
                behind = [(prompt, max_tokens) for prompt in free]
                if task == "rewrite":
                    behind = _repeating(workers[0], texts, max_tokens, notes)
                for _ in range(repeats):

                    def add(label: str, column: str, value: float, task: str = task) -> None:
                        figures.setdefault((task, label, column), []).append(value)

                    if task in ("decode", "rewrite"):
                        _decode(workers, behind, add)
                    elif task == "rows":
                        _rows(workers, free[0], add)
                    else:
                        _batch(workers, free[0], max_tokens, add)
                    ticks.step()
    finally:
        for worker in workers:
            worker.close()
    notes += [problem for worker in workers for problem in worker.problems]
    rows = _figures(figures, f"specrt {dtypes[0]}")
    return Report(
        benchmark="compare",
        target={
            "model": sources.ours.name,
            "dtype": ", ".join(dtypes),
            "cpu_isa": isa,
            "threads": threads,
        },
        settings={
            "peers": list(peers),
            "tasks": list(tasks),
            "repeats": repeats,
            "max_tokens": max_tokens,
        },
        rows=rows,
        heading=f"target  {sources.ours.name}  {threads} threads",
        tables=[_table(rows, task) for task in tasks],
        notes=[f"in brackets: specrt {dtypes[0]} by it (for rows, its cost by ours)", *notes],
        plots=[_plot(rows, task) for task in tasks if any(row["task"] == task for row in rows)],
        extra={"left_out": notes},
    )


def _prompts(source: Path) -> tuple[list[list[int]], list[list[int]]]:
    tokenizer = Tokenizer.from_pretrained(source)

    def encode(text: str) -> list[int]:
        if getattr(tokenizer.hf, "chat_template", None):
            return tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return tokenizer.encode(text)

    rewrites = [one.text for one in builtin_prompts() if one.kind == "rewrite"]
    return [encode(one) for one in FREE], [encode(one) for one in rewrites]


def _repeating(
    ours: Worker, prompts: list[list[int]], longest: int, notes: list[str]
) -> list[tuple[list[int], int]]:
    """Those whose answers repeat them, each with the tokens until its answer ends by itself."""
    found = []
    for prompt in prompts:
        answer = ours.run("answer", prompt=prompt, max_tokens=longest)
        if answer and answer["length"] > 1 and answer["acceptance_length"] >= REPEATS:
            found.append((prompt, answer["length"]))
    notes.append(
        f"rewriting: {len(found)} of {len(prompts)} prompts, those with at least {REPEATS:g} "
        "tokens a round by n-gram drafts, up to where their answers end"
    )
    return found


def _decode(workers: list[Worker], prompts: list[tuple[list[int], int]], add: Add) -> None:
    for prompt, max_tokens in prompts:
        for worker in workers:
            for speculate in (False, True):
                out = worker.run(
                    "decode", prompt=prompt, max_tokens=max_tokens, speculate=speculate
                )
                if out is not None and out["seconds"] > 0:
                    # The first token belongs to prefill.
                    rate = (len(out["tokens"]) - 1) / out["seconds"]
                    add(worker.label, "n-gram" if speculate else "plain", rate)


def _rows(workers: list[Worker], prompt: list[int], add: Add) -> None:
    for worker in workers:
        one = worker.run("rows", prompt=prompt, count=1, repeat=8)
        for count in ROWS[1:]:
            seconds = worker.run("rows", prompt=prompt, count=count, repeat=8)
            if seconds is not None and one:
                add(worker.label, f"{count} rows", seconds / one)


def _batch(workers: list[Worker], prompt: list[int], max_tokens: int, add: Add) -> None:
    for worker in workers:
        seconds = worker.run("batch", prompts=[prompt] * BATCH, max_tokens=max_tokens)
        if seconds is not None:
            add(worker.label, f"batch {BATCH}", BATCH * max_tokens / seconds)


def _figures(figures: dict[tuple[str, str, str], list[float]], ours: str) -> list[dict[str, Any]]:
    rows = []
    for (task, label, column), values in figures.items():
        middle = statistics.median(values)
        base = figures.get((task, ours, column))
        ratio = None
        if base and label != ours:
            ratio = statistics.median(base) / middle
            ratio = 1 / ratio if task == "rows" else ratio
        rows.append(
            {"task": task, "engine": label, "what": column, "median": middle, "specrt_by_it": ratio}
        )
    return rows


def _table(rows: list[dict[str, Any]], task: str) -> Any:
    own = [row for row in rows if row["task"] == task]
    columns = list(dict.fromkeys(row["what"] for row in own))
    cells: dict[str, dict[str, str]] = {}
    for row in own:
        ratio = "" if row["specrt_by_it"] is None else f" ({row['specrt_by_it']:.2f}x)"
        number = f"{row['median']:.2f}" if task == "rows" else f"{row['median']:.1f}"
        cells.setdefault(row["engine"], {})[row["what"]] = number + ratio
    shown = [[name, *(one.get(what, "–") for what in columns)] for name, one in cells.items()]
    return table(["", *columns], shown, title=TASKS[task])


def _plot(rows: list[dict[str, Any]], task: str) -> Plot:
    own = [row for row in rows if row["task"] == task]
    engines = list(dict.fromkeys(row["engine"] for row in own))
    by_name = {(row["engine"], row["what"]): row["median"] for row in own}
    whats = list(dict.fromkeys(row["what"] for row in own))
    lines = {what: [float(by_name.get((name, what), 0.0)) for name in engines] for what in whats}
    return Plot(TASKS[task], "", "", engines, lines)
