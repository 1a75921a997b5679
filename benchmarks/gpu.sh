#!/usr/bin/env bash
# What one GPU can show: the CUDA tests, then step time and memory beside plain torch and FSDP2.
# Usage: benchmarks/gpu.sh [folder for the results]; needs torch with CUDA and the package's dependencies.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
mkdir -p "$out"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python3 -m pytest tests/gpu tests/test_pool.py tests/test_memory.py -p no:cacheprovider 2>&1 | tee "$out/gpu_tests.txt"
status=$?
python3 benchmarks/gpu_step.py --json "$out/gpu_step.json" 2>&1 | tee "$out/gpu_step.txt" || status=1
exit $status
