"""What the workers of all engines share: tasks come in and results go out as lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["Clock", "serve"]


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._start


def serve(tasks: dict[str, Callable[..., Any]]) -> None:
    """Answer each line {"task": name, ...} with {"result": ...} or {"error": text}.

    Engines write to stdout as they like; answers go to the descriptor that stdout was.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": sorted(tasks)}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        name = task.pop("task")
        try:
            answer = {"result": tasks[name](**task)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
