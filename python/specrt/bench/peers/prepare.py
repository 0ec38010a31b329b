"""The same weights in every engine's format: `specrt-bench compare MODEL.gguf --prepare OUT`, or
prepare.py MODEL.gguf OUT in a Python that has the other engines.

Writes OUT/{bf16,q8_0,q4_0}.gguf (by llama.cpp's own quantiser, so llama-cpp-python has to be
importable) and the folder OUT/hf (by transformers). What is there already is kept.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

FORMATS = {
    "bf16": "LLAMA_FTYPE_MOSTLY_BF16",
    "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
}


def gguf(source: Path, out: Path) -> None:
    try:
        import llama_cpp
    except ImportError:
        print("no llama-cpp-python here: the .gguf files are left out")
        return
    for name, kind in FORMATS.items():
        target = out / f"{name}.gguf"
        if target.exists():
            continue
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, kind)
        params.allow_requantize = True
        names = str(source).encode(), str(target).encode()
        if llama_cpp.llama_model_quantize(*names, ctypes.byref(params)):
            raise OSError(f"llama.cpp could not write {target}")
        print(target)


def folder(source: Path, out: Path) -> None:
    target = out / "hf"
    if target.exists():
        return
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        print("no transformers with torch here: the folder is left out")
        return
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # What was read knows where it came from, and would not be written.
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    print(target)


def prepare(source: Path, out: Path) -> None:
    """Raises OSError."""
    source = source.resolve()
    if source.suffix != ".gguf" or not source.is_file():
        raise OSError(f"[prepare] expected a .gguf file, got {source}")
    out.mkdir(parents=True, exist_ok=True)
    gguf(source, out)
    folder(source, out)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
