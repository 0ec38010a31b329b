"""Prints the folder of a CUDA toolkit that has nvcc: this machine's, or one made of packages.

    python scripts/cuda_toolkit.py FOLDER

Where no nvcc is on the PATH or at /usr/local/cuda, pip installs NVIDIA's packages for this
interpreter's platform into FOLDER. Nothing of it needs a GPU or a driver.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

# Compiler, its back end and headers are of one release; the tools that look at objects came later.
PACKAGES = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-culibos==13.0.85",
    "nvidia-cuda-cuobjdump==13.2.51",
    "nvidia-cuda-nvdisasm==13.2.51",
]


def present() -> Path | None:
    for nvcc in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if nvcc is None or not Path(nvcc).exists():
            continue
        # nvcc itself knows best: what is on the PATH may be a wrapper.
        out = subprocess.run(
            [nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        top = next(line for line in out.splitlines() if line.startswith("#$ TOP="))
        return Path(top.removeprefix("#$ TOP=")).resolve()
    return None


def install(packages: list[str], folder: Path) -> Path:
    """Installs packages into `folder`; returns where their files are."""
    roots = folder / "nvidia" / "cu13"
    stamp = folder / f".{'-'.join(packages[:1])}-{len(packages)}"
    if not stamp.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        command = [*pip, "--no-deps", "--upgrade", "--target", str(folder), *packages]
        subprocess.run(command, check=True, stdout=sys.stderr)
        stamp.touch()
    if (roots / "lib").exists() and not (roots / "lib64").exists():
        (roots / "lib64").symlink_to("lib")  # where CMake looks
    return roots


def toolkit(folder: Path) -> Path:
    return present() or install(PACKAGES, folder)


def tool(name: str, folder: Path) -> Path:
    """cuobjdump or nvdisasm: the toolkit's, or a package's."""
    for known in (shutil.which(name), f"/usr/local/cuda/bin/{name}"):
        if known is not None and Path(known).exists():
            return Path(known)
    packages = [p for p in PACKAGES if "cuobjdump" in p or "nvdisasm" in p]
    return install(packages, folder) / "bin" / name


if __name__ == "__main__":
    print(toolkit(Path(sys.argv[1]).resolve()))
