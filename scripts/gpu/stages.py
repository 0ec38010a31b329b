"""The stages of the check on a GPU. Each has a time limit of its own, within what is left of the
whole's; one that fails does not stop those behind it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESERVE = 3.0  # seconds that a stage leaves for the report


class Unavailable(Exception):
    """Something that a stage needs is not on this machine, or the engine refuses it by name."""


class Failed(Exception):
    pass


class TimedOut(Exception):
    pass


@dataclass
class Context:
    root: Path
    out: Path
    build: Path
    gpu: dict[str, Any]
    cutlass: Path | None = None
    limit: float = 470.0
    begun: float = field(default_factory=time.monotonic)
    stage: str = ""
    deadline: float = 0.0

    def run(
        self, command: Sequence[str | Path], *, accept: Sequence[int] = (0,), to: Path | None = None
    ) -> int:
        """Runs to the end or the stage's limit; output goes to the stage's log, or stdout to `to`.

        Raises Failed for exit codes that are not in `accept`, TimedOut at the limit, when all that
        the command started has been ended.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimedOut(f"no time left for {Path(command[0]).name}")
        path = os.pathsep.join(
            str(p) for p in (self.build / "py", os.environ.get("PYTHONPATH", "")) if str(p)
        )
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1",
                       "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # fmt: skip
        log_path = self.out / f"{self.stage}.log"
        with log_path.open("a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n")
            log.flush()
            with to.open("w") if to else log as output:
                process = subprocess.Popen(
                    [str(part) for part in command], cwd=self.root, env=environment,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=log, start_new_session=True,
                )  # fmt: skip
                try:
                    code = process.wait(timeout=left)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    raise TimedOut(f"{Path(command[0]).name} after {left:.0f} s") from None
        if code not in accept:
            last = [line for line in log_path.read_text().splitlines() if line.strip()][-1]
            raise Failed(f"{Path(command[0]).name} returned {code}: {last[:200]}")
        return code

    def python(self, script: str, *arguments: str | Path, accept: Sequence[int] = (0,)) -> int:
        return self.run([sys.executable, HERE / script, *arguments], accept=accept)


@dataclass
class Outcome:
    name: str
    state: str  # "passed", "failed", "timed out" or "not available"
    seconds: float
    detail: str = ""
    data: Any = None


@dataclass(frozen=True)
class Stage:
    name: str
    limit: float
    """Seconds."""
    run: Callable[[Context], str]
    """Gives what to say of it."""
    data: str = ""
    """The JSON file that it leaves, as far as it came, in the folder of the report."""


def run_stage(stage: Stage, context: Context) -> Outcome:
    begin = time.monotonic()
    ends = context.begun + context.limit - RESERVE
    context.stage, context.deadline = stage.name, min(begin + stage.limit, ends)
    (context.out / f"{stage.name}.log").unlink(missing_ok=True)
    data_path = context.out / stage.data if stage.data else None
    if data_path:
        data_path.unlink(missing_ok=True)
    try:
        state, detail = "passed", stage.run(context)
    except Unavailable as error:
        state, detail = "not available", str(error)
    except TimedOut as error:
        state, detail = "timed out", str(error)
    except Exception as error:  # whatever it is: the other stages go on
        state, detail = "failed", str(error) or type(error).__name__
    data = None
    if data_path and data_path.exists():
        try:
            data = json.loads(data_path.read_text())
        except ValueError:
            detail += "; its JSON is cut off"
            state = "failed" if state == "passed" else state
    return Outcome(stage.name, state, time.monotonic() - begin, detail, data)


def find_gpu() -> dict[str, Any]:
    """Name, compute capability, memory and driver. Raises RuntimeError where there is none."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        raise RuntimeError("this machine has no device /dev/nvidia*")
    code = (
        "import json, torch\n"
        "assert torch.cuda.is_available(), 'torch sees none'\n"
        "p = torch.cuda.get_device_properties(0)\n"
        "print(json.dumps({'name': p.name, 'architecture': p.major * 10 + p.minor,"
        " 'memory': p.total_memory, 'torch': torch.__version__, 'cuda': torch.version.cuda}))\n"
    )
    try:
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                               timeout=60)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError("asking torch took more than 60 s") from None
    if found.returncode != 0:
        lines = found.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else "torch ended without a word")
    gpu: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    smi = shutil.which("nvidia-smi")
    if smi:
        asked = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True)
        gpu["driver"] = (
            answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else "unknown"
        )
    return gpu


def cuda_tool(name: str) -> Path | None:
    places = [shutil.which(name)]
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root:
            places += [f"{root}/bin/{name}", f"{root}/compute-sanitizer/{name}"]
    return next((Path(place) for place in places if place and Path(place).exists()), None)


def architecture_to_build(architecture: int) -> str:
    """Of SPECRT_CUDA_ARCHITECTURES, what runs on a GPU of this compute capability."""
    if architecture // 10 == 8:
        return "80"  # machine code of 8.0 runs on 8.6 and 8.9
    if architecture == 90:
        return "90"
    raise Unavailable(f"expected a GPU of compute capability 8.x or 9.0, got {architecture / 10}")


def _cutlass(context: Context) -> Path:
    packaged = "cutlass_library/source"
    places = [context.cutlass, context.root / "build/cuda-tools" / packaged]
    places += [Path(folder) / packaged for folder in sys.path if folder]
    for place in places:
        if place and (place / "include/cutlass/cutlass.h").exists():
            return place
    raise Unavailable("expected CUTLASS's headers (--cutlass, or the package nvidia-cutlass)")


def build(context: Context) -> str:
    code = architecture_to_build(context.gpu["architecture"])
    nvcc = cuda_tool("nvcc")
    if nvcc is None:
        raise Unavailable("expected nvcc on the PATH, in $CUDA_HOME or in /usr/local/cuda")
    cmake: list[str | Path] = [shutil.which("cmake") or ""]
    if not cmake[0]:
        cmake = [sys.executable, "-m", "cmake"]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    context.run([
        *cmake, "-S", context.root, "-B", context.build, *generator, "-DCMAKE_BUILD_TYPE=Release",
        "-DSPECRT_CUDA=ON", "-DSPECRT_PYTHON=ON", "-DSPECRT_TESTS=ON", "-DSPECRT_BENCH=ON",
        f"-DSPECRT_CUDA_ARCHITECTURES={code}", f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCUTLASS_DIR={_cutlass(context)}", f"-DPython_EXECUTABLE={sys.executable}",
    ])  # fmt: skip
    context.run([
        *cmake, "--build", context.build, "--parallel", str(os.cpu_count() or 2), "--target",
        "specrt", "_core", "specrt_cuda_device", "bench_cuda",
    ])  # fmt: skip
    package = context.build / "py" / "specrt"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for path in (context.root / "python" / "specrt").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    extension = next(context.build.glob("_core*.so"), None)
    if extension is None:
        raise Failed(f"no _core*.so in {context.build}")
    (package / extension.name).symlink_to(extension)
    return f"for sm_{code}"


def kernels(context: Context) -> str:
    """The kernels' tests on the GPU."""
    context.run([context.build / "tests/cuda_device/specrt_cuda_device"])
    lines = (context.out / f"{context.stage}.log").read_text().splitlines()
    return next(line for line in reversed(lines) if "passed" in line)


def engine(context: Context) -> str:
    """Parity of whole engines."""
    code = context.python(
        "checks.py", "--device", "cuda", "--models", context.out / "models", "--json",
        context.out / "checks.json", accept=(0, 3),
    )  # fmt: skip
    results = json.loads((context.out / "checks.json").read_text())
    refused = [one for one in results if one["state"] == "not available"]
    told = f"{len(results) - len(refused)} of {len(results)} checks passed"
    if code == 3:
        raise Unavailable(f"{told}; {refused[0]['name']}: {refused[0]['detail']}")
    return told


def products(context: Context) -> str:
    """Products beside cuBLAS."""
    ours = context.out / "products-specrt.json"
    seconds = f"{max(5.0, 0.45 * (context.deadline - time.monotonic())):.0f}"
    context.run([context.build / "bench/bench_cuda", "--seconds", seconds], to=ours)
    context.python("products.py", ours, context.out / "products.json")
    return "" if json.loads(ours.read_text())["whole"] else "time was up before all were measured"


def scratch() -> Path:
    """In memory where there is room: the packed model of 8B is 16 GB."""
    memory = Path("/dev/shm")
    if memory.exists() and shutil.disk_usage(memory).free > 40 << 30:
        return memory
    return Path(tempfile.gettempdir())


def _end_to_end(shape: str) -> Callable[[Context], str]:
    def run(context: Context) -> str:
        to = context.out / f"{shape}.json"
        left = context.deadline - time.monotonic() - 2
        # Removed here, since a process that is ended at its limit removes nothing.
        folder = tempfile.mkdtemp(prefix="specrt-", dir=scratch())
        arguments = [shape, "--json", to, "--seconds", f"{left:.0f}", "--scratch", folder]
        try:
            code = context.python("end_to_end.py", *arguments, accept=(0, 3))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if code == 3:
            rows = json.loads(to.read_text())["rows"]
            raise Unavailable("; ".join(row["refused"] for row in rows if row.get("refused")))
        return ""

    return run


def sanitizer(context: Context) -> str:
    """compute-sanitizer over small shapes, and over an engine whose draft model is short."""
    tool = cuda_tool("compute-sanitizer")
    if tool is None:
        raise Unavailable("expected compute-sanitizer on the PATH or in the CUDA toolkit")
    tests = context.build / "tests/cuda_device/specrt_cuda_device"
    small = ["shim_", "cuda_rms_norm", "cuda_embedding", "cuda_rope", "cuda_products_end",
             "cuda_commit", "cuda_padding", "cuda_choice", "cuda_walk", "cuda_products_of_int4",
             "cuda_attention_of_other", "device_graph"]  # fmt: skip
    told = []
    for name, options in {"memcheck": ["--exact-memory"], "racecheck": [], "synccheck": []}.items():
        checked = [tool, "--tool", name, "--error-exitcode", "9", tests, *options, *small]
        context.run(checked)
        told.append(name)
    models = context.out / "models"
    code = context.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, HERE / "checks.py",
         "--device", "cuda", "--models", models, "--only", "short_draft_model"],
        accept=(0, 3),
    )  # fmt: skip
    if code == 3:
        raise Unavailable(f"{', '.join(told)} clean; the engine refuses short_draft_model")
    return f"{', '.join(told)} clean, an engine too"


STAGES = {
    stage.name: stage
    for stage in (
        Stage("build", 190, build),
        Stage("kernels", 40, kernels),
        Stage("products", 50, products, "products.json"),
        Stage("engine", 60, engine, "checks.json"),
        Stage("end_to_end_1b", 60, _end_to_end("llama-3.2-1b"), "llama-3.2-1b.json"),
        Stage("end_to_end_8b", 110, _end_to_end("llama-3.1-8b"), "llama-3.1-8b.json"),
        Stage("sanitizer", 60, sanitizer),
    )
}
