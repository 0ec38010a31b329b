"""`specrt-bench`: what speculation gains on one's own model, prompts and machine.

`app` has the commands, each command a file of its own; `prompts`, `targets`, `stats` and `report`
are what they share.
"""

from __future__ import annotations

from .prompts import BenchPrompt, Totals, builtin_prompts

__all__ = ["BenchPrompt", "Totals", "builtin_prompts"]
