#!/usr/bin/env bash
# What one GPU can show: the CUDA tests, step time and memory beside plain torch and FSDP2, offload, and
# block-sparse attention beside dense.
# Usage: benchmarks/gpu.sh [folder for the results] [parts: tests, step, offload, attention; all by default]
# Needs torch with CUDA and the package's dependencies.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
parts=${2:-tests,step,offload,attention}
mkdir -p "$out"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0
if [[ $parts == *tests* ]]; then
  python3 -m pytest tests/gpu tests/unit/runtime/test_buffer_pool.py tests/unit/runtime/test_memory_tracker.py -p no:cacheprovider 2>&1 | tee "$out/gpu_tests.txt" || status=1
fi
if [[ $parts == *step* ]]; then
  python3 benchmarks/gpu_step.py --json "$out/gpu_step.json" 2>&1 | tee "$out/gpu_step.txt" || status=1
fi
if [[ $parts == *offload* ]]; then
  python3 benchmarks/gpu_offload.py --json "$out/gpu_offload.json" 2>&1 | tee "$out/gpu_offload.txt" || status=1
fi
if [[ $parts == *attention* ]]; then
  python3 benchmarks/gpu_attention.py --json "$out/gpu_attention.json" 2>&1 | tee "$out/gpu_attention.txt" || status=1
  python3 benchmarks/gpu_attention.py --lengths '' --longest --json "$out/gpu_longest.json" 2>&1 \
    | tee "$out/gpu_longest.txt" || status=1
fi
exit $status
