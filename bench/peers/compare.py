"""specrt beside other engines, in alternating runs; see README.md in this folder.

compare.py MODELS [--threads N] [--repeat N] [--peer NAME[=PYTHON]]... [--only TASK,...]
           [--weights DTYPE,...] [--isa ISA]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROWS = (1, 4, 16, 64)
# Rewriting is compared on answers that repeat their prompts: this many tokens a round at least.
REPEATS = 3.0
FREE = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child why the sky is blue, and why it is red in the evening.",
)


class Worker:
    """One engine in a process of its own."""

    def __init__(self, label: str, python: str, script: str, *arguments: str) -> None:
        self.label = label
        log = Path(tempfile.gettempdir()) / f"bench_peers_{label.replace(' ', '_')}.log"
        self.log = log.open("w")
        self.process = subprocess.Popen(
            [python, str(HERE / f"worker_{script}.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.tasks: list[str] = self._read().get("ready", [])
        if not self.tasks:
            print(f"{label}: does not start; see {log}")

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        return answer

    def run(self, task: str, **arguments: Any) -> Any:
        """The task's result, or None where the engine has no such task or fails."""
        if task not in self.tasks:
            return None
        assert self.process.stdin is not None
        print(json.dumps({"task": task, **arguments}), file=self.process.stdin, flush=True)
        answer = self._read()
        if "error" in answer:
            print(f"{self.label}: {task}: {answer['error']}")
            self.tasks.remove(task)
            return None
        return answer["result"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def start(
    models: Path, threads: int, peers: dict[str, str], isa: str, weights: list[str]
) -> list[Worker]:
    count = str(threads)
    source = str(next(models.glob("source*.gguf"), models / "bf16.gguf"))
    workers = [
        Worker(f"specrt {dtype}", sys.executable, "specrt", source, dtype, count, isa)
        for dtype in ("bfloat16", "int8", "int4", "w8a8")
        if dtype in weights
    ]
    formats = {"bf16": ("bf16", "bfloat16"), "q8_0": ("Q8_0", "int8"), "q4_0": ("Q4_0", "int4")}
    formats = {kind: told for kind, (told, dtype) in formats.items() if dtype in weights}
    for name, python in peers.items():
        if name == "llama.cpp":
            workers += [
                Worker(
                    f"llama.cpp {told}", python, "llama_cpp", str(models / f"{kind}.gguf"), count
                )
                for kind, told in formats.items()
            ]
        elif name == "openvino":
            workers += [
                Worker(f"openvino {told}", python, "openvino", str(models / f"{kind}.gguf"), count)
                for kind, told in formats.items()
                if kind != "bf16"
            ]
        elif name == "vllm":
            workers.append(Worker("vllm bf16", python, "vllm", str(models / "hf"), count))
        elif name == "transformers":
            arguments = (str(models / "hf"), "bfloat16", count)
            workers.append(Worker("transformers bf16", python, "transformers", *arguments))
        else:
            raise SystemExit(f"no peer is called {name}")
    return [worker for worker in workers if worker.tasks]


class Table:
    """Medians of figures by engine and column, and their ratio to specrt's bfloat16."""

    def __init__(self) -> None:
        self.figures: dict[tuple[str, str], list[float]] = {}

    def add(self, label: str, column: str, value: float | None) -> None:
        if value is not None:
            self.figures.setdefault((label, column), []).append(value)

    def show(self, title: str, unit: str) -> None:
        print(f"\n{title} ({unit}; median, and specrt bfloat16 over it)")
        labels = list(dict.fromkeys(label for label, _ in self.figures))
        columns = list(dict.fromkeys(column for _, column in self.figures))
        print(f"  {'':20}" + "".join(f"{column:>22}" for column in columns))
        for label in labels:
            cells = []
            for column in columns:
                values = self.figures.get((label, column))
                ours = self.figures.get(("specrt bfloat16", column))
                if not values:
                    cells.append("–")
                    continue
                middle = statistics.median(values)
                ratio = f" ({statistics.median(ours) / middle:.2f}x)" if ours else ""
                cells.append(f"{middle:.1f}{ratio}")
            print(f"  {label:20}" + "".join(f"{cell:>22}" for cell in cells))
        sys.stdout.flush()


def prompts_of(models: Path, texts: Sequence[str]) -> list[list[int]]:
    from specrt.text import Tokenizer

    tokenizer = Tokenizer.from_pretrained(models / "hf")
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]


def rewriting(workers: list[Worker], models: Path, longest: int) -> list[tuple[list[int], int]]:
    """Prompts whose answers repeat them, each with the tokens of its answer."""
    data = json.loads((files("specrt") / "data" / "prompts.json").read_text())
    texts = [one["text"] for one in data["prompts"] if one["kind"] == "rewrite"]
    found = []
    for prompt in prompts_of(models, texts):
        answer = workers[0].run("answer", prompt=prompt, max_tokens=longest)
        told = f"{answer['length']} tokens, {answer['acceptance_length']:.2f} a round by n-gram"
        taken = answer["acceptance_length"] >= REPEATS
        print(f"rewriting: {told}{'' if taken else ': left out'}")
        if taken:
            found.append((prompt, answer["length"]))
    return found


def decode(
    workers: list[Worker], prompts: list[tuple[list[int], int]], options: argparse.Namespace
) -> Table:
    table = Table()
    for _ in range(options.repeat):
        for prompt, length in prompts:
            for worker in workers:
                for speculate in (False, True):
                    out = worker.run(
                        "decode", prompt=prompt, max_tokens=length, speculate=speculate
                    )
                    if out is not None:
                        # The first token belongs to prefill.
                        rate = (len(out["tokens"]) - 1) / out["seconds"]
                        table.add(worker.label, "n-gram" if speculate else "plain", rate)
    return table


def rows(workers: list[Worker], prompt: list[int], options: argparse.Namespace) -> Table:
    costs: dict[str, dict[int, list[float]]] = {}
    for _ in range(options.repeat):
        for count in ROWS:
            for worker in workers:
                seconds = worker.run("rows", prompt=prompt, count=count, repeat=8)
                if seconds is not None:
                    costs.setdefault(worker.label, {}).setdefault(count, []).append(seconds)
    table = Table()
    for label, by_count in costs.items():
        one = statistics.median(by_count[1])
        for count in ROWS[1:]:
            table.add(label, f"{count} rows / 1", statistics.median(by_count[count]) / one)
    return table


def batch(workers: list[Worker], prompt: list[int], options: argparse.Namespace) -> Table:
    table = Table()
    prompts = [prompt] * 32
    for _ in range(options.repeat):
        for worker in workers:
            seconds = worker.run("batch", prompts=prompts, max_tokens=options.tokens)
            if seconds is not None:
                table.add(worker.label, "batch 32", 32 * options.tokens / seconds)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, help="what prepare.py wrote")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME[=PYTHON]")
    parser.add_argument("--only", default="decode,rewrite,rows,batch")
    parser.add_argument("--weights", default="bfloat16,int8,int4,w8a8")
    parser.add_argument("--isa", default="auto", help="specrt's instruction-set level")
    options = parser.parse_args()
    peers = {}
    for peer in options.peer:
        name, _, python = peer.partition("=")
        peers[name] = python or sys.executable
    free = prompts_of(options.models, FREE)
    workers = start(options.models, options.threads, peers, options.isa, options.weights.split(","))
    wanted = options.only.split(",")
    if "decode" in wanted:
        with_length = [(prompt, options.tokens) for prompt in free]
        decode(workers, with_length, options).show("free text", "tokens/s")
    if "rewrite" in wanted:
        rewrites = rewriting(workers, options.models, 2 * options.tokens)
        decode(workers, rewrites, options).show("rewriting", "tokens/s")
    if "rows" in wanted:
        rows(workers, free[0], options).show("cost of a pass", "times one row")
    if "batch" in wanted:
        batch(workers, free[0], options).show("32 requests at once", "tokens/s")
    for worker in workers:
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
