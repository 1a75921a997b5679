#!/usr/bin/env bash
# What 15 minutes of one GPU can show, on a machine without a network. benchmarks/gpu_plan.py has the parts.
#
#   benchmarks/gpu.sh wheels FOLDER            with a network: download what the GPU's image may lack
#   WHEELS=FOLDER benchmarks/gpu.sh correctness OUT       first, 300 s: NCCL, CUDA's sanitizer, saves, tests/gpu
#   WHEELS=FOLDER benchmarks/gpu.sh figures OUT           then, 560 s: step time, offload, sparse kernels, int8 states
#   benchmarks/gpu.sh all OUT --tiny           without a GPU: rehearse both on the virtual device, with tiny sizes
#
# PYTHON is the interpreter, python3 by default; the wheels are of TARGET_PYTHON, 3.12 by default. --only PARTS chooses.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# Of what the library and its tests import, all but torch, numpy, Triton and transformers: those are the image's.
packages="pydantic pydantic-core annotated-types typing-inspection typing-extensions click psutil pyyaml rich pygments
  markdown-it-py mdurl safetensors pytest pytest-timeout pytest-xdist execnet pluggy iniconfig packaging hypothesis
  sortedcontainers"

if [[ ${1:-} == wheels ]]; then
  mkdir -p "${2:?the folder}"
  pins=$(for name in $packages; do grep -h -i -m 1 "^$name==" requirements.lock requirements-dev.lock | head -n 1 | sed 's/ *;.*//'; done)
  platforms=$(for n in 17 27 28 34; do echo "--platform manylinux_2_${n}_x86_64"; done)
  # shellcheck disable=SC2086
  exec "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${TARGET_PYTHON:-3.12}" \
    --implementation cp $platforms --platform manylinux2014_x86_64 --dest "$2" $pins
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [[ -n ${WHEELS:-} ]]; then
  # Only what the image lacks: another numpy or click than the image's own could break what it has.
  missing=$("$python" - "$WHEELS" <<'PYTHON'
import importlib.metadata, pathlib, sys

for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    name, version = wheel.name.split("-")[:2]
    try:
        found = importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        found = None
    # pydantic names the one version of its core that it runs with.
    if found is None or (name == "pydantic_core" and found != version):
        print(wheel)
PYTHON
  )
  if [[ -n $missing ]]; then
    # shellcheck disable=SC2086
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" $missing || exit
  fi
fi
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
"$python" benchmarks/gpu_plan.py "$@"
