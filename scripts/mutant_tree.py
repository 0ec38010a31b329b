"""A copy of the sources that `mutants.py` breaks, builds and tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ["CMakeLists.txt", "cmake", "include", "src", "cuda", "tests/native", "tests/cuda_logic"]
# A mutant may well loop for ever, which is a failure too.
TIME_LIMIT_S = 300


@dataclass(frozen=True)
class Mutant:
    """One replacement in one file, and a part of the names of the tests that should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def run(command: list[str], limit: float | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, f"no end within {limit:.0f} s")


def tool(name: str) -> str:
    """The tool beside this Python, as pip installs it, or the one on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"[{name}] expected beside {sys.executable} or on PATH, got none")
    return found


class Tree:
    """A copy of the sources with a build folder."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.source = folder / "source"
        self.build = folder / "build"
        self.jobs = jobs
        for name in COPIED:
            origin, target = ROOT / name, self.source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if origin.is_dir():
                shutil.copytree(origin, target, dirs_exist_ok=True)
            else:
                shutil.copy2(origin, target)

    def configure(self) -> None:
        done = run(
            [
                tool("cmake"),
                *("-S", str(self.source), "-B", str(self.build), "-G", "Ninja"),
                f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
                "-DCMAKE_BUILD_TYPE=None",
                "-DCMAKE_CXX_FLAGS=-O1",
                "-DSPECRT_TESTS=ON",
            ]
        )
        if done.returncode != 0:
            sys.exit(f"cmake failed:\n{done.stdout}")

    def compile(self) -> subprocess.CompletedProcess[str]:
        return run([tool("ninja"), "-C", str(self.build), f"-j{self.jobs}", "specrt_tests"])

    def test(self, part: str | None) -> subprocess.CompletedProcess[str]:
        program = self.build / "tests" / "native" / "specrt_tests"
        return run([str(program), *([part] if part else [])], TIME_LIMIT_S)


def try_mutant(tree: Tree, mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests caught it, and how."""
    path = tree.source / mutant.file
    text = path.read_text(encoding="utf-8")
    count = text.count(mutant.old)
    if count != 1:
        sys.exit(f"[{mutant.name}] expected its text once in {mutant.file}, got {count} times")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        built = tree.compile()
        if built.returncode != 0:
            sys.exit(f"[{mutant.name}] expected a mutant that compiles, got\n{built.stdout}")
        done = tree.test(mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return False, "every test passed"
    failed = [line[7:] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if failed:
        return True, failed[0] + (f" and {len(failed) - 1} more" if len(failed) > 1 else "")
    if done.returncode == 1:
        sys.exit(f"[{mutant.name}] expected tests named *{mutant.tests}*, got\n{done.stdout}")
    return True, f"exit status {done.returncode}"


def unfit(mutants: list[Mutant]) -> list[str]:
    """What is wrong with mutants that do not fit the sources any more."""
    found = []
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/native/test_*.cpp")]
    tests = re.findall(r"^TEST\((\w+)\)", "\n".join(sources), re.MULTILINE)
    for name in sorted({one.name for one in mutants}):
        if sum(one.name == name for one in mutants) > 1:
            found.append(f"[{name}] expected one mutant of that name, got several")
    for one in mutants:
        file = ROOT / one.file
        count = file.read_text(encoding="utf-8").count(one.old) if file.is_file() else 0
        if count != 1:
            found.append(f"[{one.name}] expected its text once in {one.file}, got {count} times")
        if one.old == one.new:
            found.append(f"[{one.name}] expected another text in place of its own, got the same")
        if not any(one.tests in test for test in tests):
            found.append(f"[{one.name}] expected native tests named *{one.tests}*, got none")
    return found
