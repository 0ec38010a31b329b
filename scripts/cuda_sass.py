"""Looks into compiled CUDA objects: is the matrix unit used where it is meant, and what is spilled?

    python scripts/cuda_sass.py OBJECT_OR_LIBRARY ... [--tools FOLDER]

Prints a line for each kernel and fails where one lacks the instruction that it is named for here,
or where a hot kernel keeps registers in local memory. cuobjdump comes from the toolkit, or from
PyPI into FOLDER.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from cuda_toolkit import tool

# By a part of the kernel's mangled name: the instruction that it has to have.
MEANT = {
    "device_kernelINS_4gemm": "HGMMA",  # CUTLASS's products on sm_90a
    "4GemmI": "HMMA",
    "9AttentionI": "HMMA",
}
COPIES = ("LDGSTS", "UBLKCP", "UTMALDG")  # asynchronous copies: cp.async and TMA


def kernels_of(path: Path, cuobjdump: Path) -> list[dict[str, object]]:
    environment = {**os.environ, "PATH": f"{cuobjdump.parent}:{os.environ['PATH']}"}

    def dump(option: str) -> str:
        command = [str(cuobjdump), option, str(path)]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout

    usage: dict[tuple[str, str], dict[str, int]] = {}
    arch = ""
    name = ""
    for line in dump("-res-usage").splitlines():
        if found := re.search(r"arch = (sm_\w+)|for (sm_\w+)", line):
            arch = found[1] or found[2]
        if found := re.search(r"Function (\S+?):?$", line.strip()):
            name = found[1]
        if found := re.search(r"REG:(\d+) STACK:(\d+)", line):
            local = re.search(r"LOCAL:(\d+)", line)
            usage[arch, name] = {
                "registers": int(found[1]),
                "stack": int(found[2]) + (int(local[1]) if local else 0),
            }
    kernels: list[dict[str, object]] = []
    counts: Counter[str] = Counter()
    for line in dump("-sass").splitlines():
        if found := re.search(r"arch = (sm_\w+)|code for (sm_\w+)", line):
            arch = found[1] or found[2]
        elif found := re.search(r"Function : (\S+)", line):
            counts = Counter()
            used = usage.get((arch, found[1]), {})
            kernels.append({"name": found[1], "arch": arch, "counts": counts, **used})
        elif found := re.match(r"\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", line):
            counts[found[1]] += 1
    return kernels


def short(name: str) -> str:
    """A mangled name's template arguments in few letters."""
    if "device_kernelINS_4gemm" in name:
        unit = re.search(r"MMA_(\w+?)_SS", name)
        return f"CUTLASS wgmma {unit[1] if unit else '?'}"
    found = re.search(r"cuda5enterINS0_\d+(\w+?)E+vNT_4Args", name)
    if found is None:
        return name
    text = found[1].replace("INS_4simt", " ").replace("LNS0_6StoredE", " stored ")
    return re.sub(r"E?Li(\d+)", r" \1", re.sub(r"4(Bf16|Half)E?", r"\1", text)).rstrip("EI")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tools", type=Path, default=Path("build/cuda-tools"))
    options = parser.parse_args()
    cuobjdump = tool("cuobjdump", options.tools.resolve())
    tool("nvdisasm", options.tools.resolve())  # which cuobjdump calls
    faults = []
    seen = set()
    for path in options.files:
        for kernel in kernels_of(path, cuobjdump):
            name = str(kernel["name"])
            counts = kernel["counts"]
            assert isinstance(counts, Counter)
            unit = next((u for u in ("HGMMA", "HMMA") if counts[u]), "-")
            copies = next((c for c in COPIES if counts[c]), "-")
            stack, local = kernel.get("stack", 0), counts["LDL"] + counts["STL"]
            line = f"{kernel['arch']:7} {short(name):44} {unit:6} {counts[unit]:5} {copies:8}"
            print(
                f"{line} registers {kernel.get('registers', '?'):>3}  stack {stack}  local {local}"
            )
            for part, wanted in MEANT.items():
                if part not in name:
                    continue
                seen.add(part)
                if counts[wanted] == 0:
                    faults.append(f"{short(name)} on {kernel['arch']}: no {wanted}")
                if local > 0:
                    faults.append(f"{short(name)} on {kernel['arch']}: {local} local accesses")
    faults += [f"no kernel named {part}" for part in MEANT if part not in seen]
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
