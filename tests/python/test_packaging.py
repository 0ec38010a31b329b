"""Both packages as their users meet them: the wheel in a fresh environment, CMake from outside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import specrt
from specrt.demo import demo_model_path

ROOT = Path(__file__).resolve().parents[2]
EMBED = ROOT / "examples" / "embed"
PROMPT = "one two three four, one two three four, one two"
MAX_TOKENS = 40


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs to the end; what was printed is in the failure."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def source_version() -> str:
    header = (ROOT / "include" / "specrt" / "version.h").read_text()
    return re.search(r'SPECRT_VERSION "([^"]+)"', header).group(1)


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one that the tests' specrt was installed from, as `make test` says, or one made here."""
    given = request.config.getoption("wheel")
    if given is not None:
        assert given.is_file()
        return Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        # Kept for the next time, and none of make's: another Python made that one.
        *("-C", "build-dir=build/wheel-of-tests", "-w", folder, "."),
        cwd=ROOT,
    )
    (path,) = folder.glob("specrt-*.whl")
    return path


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel and what it asks for, nothing else."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--disable-pip-version-check", wheel)
    return python


def test_version_has_one_source(wheel: Path) -> None:
    version = source_version()
    assert specrt.__version__ == version
    assert wheel.name.startswith(f"specrt-{version}-")
    holders = [
        path.name
        for pattern in ("*.toml", "*.txt", "*.cmake", "cmake/*", "python/specrt/**/*.py")
        for path in ROOT.glob(pattern)
        if f'"{version}"' in path.read_text()
    ]
    assert holders == []


def test_wheel_holds_what_it_should(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for header in (ROOT / "include" / "specrt").glob("*.h"):
        assert f"specrt/include/specrt/{header.name}" in names
    for name in ("lib/libspecrt.so", "lib/cmake/specrt/specrtConfig.cmake", "py.typed"):
        assert f"specrt/{name}" in names
    # Links cannot be in a wheel: a versioned name would be a copy of the library.
    assert [name for name in names if "libspecrt" in name] == ["specrt/lib/libspecrt.so"]
    assert all(name.startswith(("specrt/", "specrt-")) for name in names)


@pytest.mark.timeout(900)
def test_wheel_in_a_fresh_environment(fresh_python: Path, tmp_path: Path) -> None:
    code = "import specrt; print(specrt.__version__, specrt.cpu_isa())"
    assert run(fresh_python, "-c", code, cwd=tmp_path).stdout.split()[0] == source_version()
    packages = run(fresh_python, "-m", "pip", "list", "--format=freeze").stdout
    assert not re.search(r"^(torch|nvidia.*)==", packages, re.MULTILINE)
    specrt_command = fresh_python.parent / "specrt"
    assert run(specrt_command, "--version", cwd=tmp_path).stdout.strip() == source_version()


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_import_is_quick_and_loads_no_torch(fresh_python: Path, tmp_path: Path) -> None:
    code = (
        "import time; start = time.perf_counter(); import specrt\n"
        "seconds = time.perf_counter() - start\n"
        "import sys; print(seconds, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    # The best of five: the machine may be busy, and the first run compiles the byte code.
    runs = [run(python, "-c", code, cwd=tmp_path).stdout for python in [fresh_python] * 5]
    assert {line.split(maxsplit=1)[1].strip() for line in runs} == {"[]"}
    assert min(float(line.split()[0]) for line in runs) < 0.5
    # Where torch is there to be loaded, it is not.
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout.split(maxsplit=1)[1].strip() == "[]"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[int]]:
    """A model file, a prompt, and the ids that Python generates without a drafter."""
    path = tmp_path_factory.mktemp("model") / "demo.specrt"
    with specrt.Engine(str(demo_model_path()), max_model_len=512) as engine:
        prompt = [int(token) for token in engine.tokenizer.encode(PROMPT)]
        params = specrt.SamplingParams(max_tokens=MAX_TOKENS)
        ids = list(engine.generate(prompt, params).token_ids)
        engine.save(path)
    return path, prompt, ids


def check_embed(build: Path, saved_model: tuple[Path, list[int], list[int]], *where: str) -> None:
    run("cmake", "-S", EMBED, "-B", build, "-DCMAKE_BUILD_TYPE=Release", *where)
    run("cmake", "--build", build)
    path, prompt, expected = saved_model
    done = run(build / "embed", path, MAX_TOKENS, *prompt)
    assert [int(line) for line in done.stdout.split()] == expected
    drafts = re.search(r"(\d+) of (\d+) drafts accepted", done.stderr)
    assert int(drafts[1]) > 0, "the n-gram drafter had no part in it"
    # Several in one batch, of different lengths: each says what it says alone.
    texts = run(build / "embed", path, MAX_TOKENS, *prompt, ",", *prompt[:-2], ",", *prompt).stdout
    lines = [[int(token) for token in line.split()] for line in texts.splitlines()]
    assert len(lines) == 3
    assert lines[0] == lines[2] == expected
    shorter = run(build / "embed", path, MAX_TOKENS, *prompt[:-2]).stdout
    assert lines[1] == [int(token) for token in shorter.split()]


def test_embed_with_the_wheel(
    fresh_python: Path, saved_model: tuple[Path, list[int], list[int]], tmp_path: Path
) -> None:
    # From another folder, so that the sources cannot be what is found.
    folder = run(fresh_python, "-m", "specrt", "--cmake-dir", cwd=tmp_path).stdout.strip()
    assert Path(folder, "specrtConfig.cmake").is_file()
    check_embed(tmp_path / "build", saved_model, f"-Dspecrt_DIR={folder}")


def test_embed_with_cmake_install(
    saved_model: tuple[Path, list[int], list[int]], tmp_path: Path
) -> None:
    # What the native tests were built from, so that nothing is compiled twice.
    build = ROOT / "build" / "dev"
    run("cmake", "--preset", "dev", cwd=ROOT)
    run("cmake", "--build", build, "--target", "specrt")
    run("cmake", "--install", build, "--prefix", tmp_path / "first")
    # The package has to work from wherever it was moved to.
    shutil.move(tmp_path / "first", tmp_path / "second")
    where = f"-DCMAKE_PREFIX_PATH={tmp_path / 'second'}"
    check_embed(tmp_path / "build", saved_model, where)


def test_embed_refuses_with_one_line(
    saved_model: tuple[Path, list[int], list[int]], tmp_path: Path
) -> None:
    build = tmp_path / "build"
    folder = Path(specrt.__file__).parent / "lib" / "cmake" / "specrt"
    run("cmake", "-S", EMBED, "-B", build, f"-Dspecrt_DIR={folder}")
    run("cmake", "--build", build)
    for arguments in ([saved_model[0], 4, 1 << 30], [tmp_path / "absent.specrt", 4, 1]):
        command = [str(build / "embed"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_library_shows_only_its_own_names() -> None:
    """Symbols are hidden unless marked; what the standard library instantiates is let through."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    library = Path(specrt.__file__).parent / "lib" / "libspecrt.so"
    lines = run("nm", "-D", "-C", "--defined-only", library).stdout.splitlines()
    strong = [line.split(maxsplit=2) for line in lines]
    foreign = [name for _, kind, name in strong if kind in "TDB" and "specrt::" not in name]
    assert foreign == []


def test_command_errors_are_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specrt", "generate", str(tmp_path / "absent"), "hello"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "absent" in done.stderr


def test_command_streams_the_same_text() -> None:
    path = str(demo_model_path())
    command = [sys.executable, "-m", "specrt", "generate", path, PROMPT, "--max-tokens", "24"]
    plain = run(*command)
    speculative = run(*command, "--drafter", "ngram")
    assert plain.stdout == speculative.stdout
    with specrt.Engine(path) as engine:
        expected = engine.generate(PROMPT, specrt.SamplingParams(max_tokens=24)).text
    assert plain.stdout == expected + "\n"


def test_demo_model_without_an_index(tmp_path: Path) -> None:
    """No index: one line that says so, and nothing left behind."""
    code = "from specrt.demo import demo_model_path; demo_model_path()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "XDG_CACHE_HOME": str(tmp_path),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
        },
    )
    assert done.returncode == 1
    assert "is a package index reachable?" in done.stderr
    assert list((tmp_path / "specrt").iterdir()) == []
