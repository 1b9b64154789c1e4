#!/usr/bin/env bash
# Checks the CUDA kernels on an NVIDIA GPU and measures them: correctness against float64 over a grid of shapes, then
# time and GB/s beside a copy in device memory and, where PyTorch is installed, beside its attention. The last line of
# the output is one JSON document.
#
#     tests/gpu/run.sh                  needs nvcc, a GPU, Python 3.10 with NumPy and minserve's other dependencies
#     tests/gpu/run.sh --on-cpu         the same program on the CPU, with few and small shapes: checks this script
#     PYTHON=... NVCC=... tests/gpu/run.sh
#
# No network; under five minutes, of which compiling takes one.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export CUDA_DEVICE_ORDER=PCI_BUS_ID   # the first GPU is then the one that nvidia-smi names first
exec "${PYTHON:-python3}" "$root/tests/gpu/check.py" "$@"
