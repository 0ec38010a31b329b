"""Prints requirements of pyproject.toml, one a line: build, project, or the name of an extra."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip carries the backport
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def requirements(groups: list[str]) -> list[str]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = {
        "build": config["build-system"]["requires"],
        "project": config["project"]["dependencies"],
        **config["project"]["optional-dependencies"],
    }
    return [requirement for group in groups for requirement in known[group]]


if __name__ == "__main__":
    # No spaces inside, so that a shell can split the output.
    print("\n".join(line.replace(" ", "") for line in requirements(sys.argv[1:])))
