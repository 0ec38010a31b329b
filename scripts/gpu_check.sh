#!/usr/bin/env bash
# The whole check on a GPU, in under 8 minutes and without a network: builds for the GPU that is here,
# parity, compute-sanitizer, kernels beside cuBLAS, whole models beside transformers and torch.
#
#     scripts/gpu_check.sh [--out FOLDER] [--stages NAME ...] [--cutlass FOLDER] [--limit SECONDS]
#
# Takes Python >= 3.10 with torch, numpy, transformers, pybind11, cmake and ninja (PYTHON names it),
# nvcc, and CUTLASS's headers. Leaves report.json, report.md and a log of each stage in FOLDER.
# Exit code: 0 all passed, 1 a stage failed, 2 wrong arguments, 3 none failed and not everything
# could run, 4 no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/gpu "$@"
