"""Tests of a GPU run on the virtual device, and so does the plan for 15 minutes of a real one, with tiny sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from device.virtual import reason_to_skip

pytestmark = [
    pytest.mark.begin,
    pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or ""),
]

ROOT = Path(__file__).parents[2]
# One of each kind: what all of them find takes minutes.
QUICK = "calls_nccl or fp16_overflow or plain_training[2-none] or plain_training[3-selective] or released_storage"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose tests' folder is known; a process of its own, since the device is torch's from then on."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT / "src")))}
    environ["PYTHON"], environ["PYTHONWARNINGS"] = sys.executable, "ignore"
    environ.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=3600)


def run_tests(*arguments: str) -> dict[str, int]:
    """How many of the tests of a GPU ended how."""
    ended = run(sys.executable, "-m", "pytest", "-n0", "-p", "device.plugin", *arguments)
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", ended.stdout.splitlines()[-1])
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    return {how: int(count) for count, how in counts}


@pytest.mark.usefixtures("warm_python")
def test_tests_of_a_gpu_pass() -> None:
    assert run_tests("tests/gpu/test_cuda.py", "-k", QUICK)["passed"] == 8


@pytest.mark.full
def test_all_tests_of_a_gpu_pass_or_name_a_kernel() -> None:
    assert run_tests("tests/gpu", "--timeout", "1800")["passed"] >= 127


@pytest.mark.full
def test_the_plan_of_a_gpu_is_rehearsed(tmp_path: Path) -> None:
    ended = run("bash", "benchmarks/gpu.sh", "all", str(tmp_path), "--tiny")
    how = {part["name"]: part["how"] for part in json.loads((tmp_path / "plan.json").read_text())}
    assert (ended.returncode, set(how.values())) == (0, {"ok"}), ended.stdout


@pytest.mark.full
@pytest.mark.parametrize("fault", ["a gather is not waited for", "a side stream does not wait for what it reads"])
def test_the_sanitizer_of_cuda_sees_a_fault(fault: str) -> None:
    program = f"""
import device.process
import gpu_smoke
from device.faults import FAULTS
from torch.cuda._sanitizer import CUDASanitizerErrors
fault = next(each for each in FAULTS if each.name == {fault!r})
with fault.plant():
    try:
        gpu_smoke.take_steps(gpu_smoke.make_engine(*gpu_smoke.LAYOUTS["stage 3, recompute none"]), 1)
    except CUDASanitizerErrors:
        print("seen")
"""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "src", "benchmarks"))
    environ = os.environ | {"PYTHONPATH": path, "TORCH_CUDA_SANITIZER": "1"}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=600)
    assert ended.stdout.strip() == "seen", ended.stderr[-2000:]
