"""Writes python/specrt/_core.pyi from the installed extension; with --check, compares only."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "specrt" / "_core.pyi"


def generate() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "specrt._core", "-o", folder]
        # Anything that has no expression in Python is an error, not a comment in the stub.
        subprocess.run([*command, "--exit-code"], check=True, cwd=folder)
        text = Path(folder, "specrt", "_core.pyi").read_text(encoding="utf-8")
    # The version has its one place in version.h.
    text = re.sub(r'^__version__: str = ".*"$', "__version__: str", text, flags=re.MULTILINE)
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=100", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return formatted.stdout


def main() -> int:
    new = generate()
    if "--check" not in sys.argv[1:]:
        STUB.write_text(new, encoding="utf-8")
        return 0
    old = STUB.read_text(encoding="utf-8") if STUB.exists() else ""
    difference = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), "committed", "generated"
    )
    sys.stdout.writelines(difference)
    if old != new:
        print("python/specrt/_core.pyi is out of date: run `make stubs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
