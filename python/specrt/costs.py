"""What rounds cost on this machine: measured when an engine starts, or taken from a file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
from pathlib import Path
from typing import Any

from . import _core
from .errors import InvalidArgumentError

__all__ = ["cache_folder", "cost_model_of"]


def cache_folder(asked: Any) -> Path | None:
    """`Engine`'s cost_cache as a folder; None keeps nothing. Raises InvalidArgumentError."""
    if asked is None or asked is False:
        return None
    if asked is True:
        # Where programs of one user keep what they can make again (XDG base directories).
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "specrt"
    if isinstance(asked, (str, os.PathLike)):
        name = os.fspath(asked)
        if isinstance(name, str) and name:
            return Path(name).expanduser()
    raise InvalidArgumentError(f"[cost_cache] expected None, True or a folder, got {asked!r}")


def cost_model_of(
    decoder: _core.Decoder,
    drafter: _core.CoreDrafter | None,
    draft_tokens: int,
    folder: Path | None,
    model: dict[str, Any],
) -> _core.CostModel:
    """Measured, or read where this machine has measured this model before.

    `model` tells models apart that cost differently. A file that cannot be read is written anew.
    Raises InvalidArgumentError where the folder cannot be written.
    """
    if folder is None:
        return _core.measure_cost(decoder, drafter, draft_tokens)
    key = {
        **model,
        "machine": _processor(),
        "isa": decoder.cpu_isa,
        "threads": decoder.threads,
        "weights": decoder.memory.weights,
        "vocabulary": decoder.vocab_size,
        "rows": decoder.max_rows,
        "drafter": drafter.name if drafter is not None else "",
        "drafter_weights": drafter.memory.weights if drafter is not None else 0,
        "draft_tokens": draft_tokens,
        "version": _core.__version__,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    file = folder / f"{digest}.cost"
    try:
        text = file.read_text(encoding="utf-8")
        kept = _core.CostModel.parse(text)
        if kept.text() == text and "\nper_token " in text:  # nothing is cut off or beside it
            return kept
    except (OSError, ValueError):
        pass
    found = _core.measure_cost(decoder, drafter, draft_tokens)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        own.write_text(found.text(), encoding="utf-8")
        own.replace(file)  # whole, whoever else does the same
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"[cost_cache] expected a folder that can be written, got {str(folder)!r}: {error}"
        ) from error
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
