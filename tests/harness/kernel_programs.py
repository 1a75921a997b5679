"""Runs a program of this folder that compiles kernels: in a child, since Triton in a test's process interprets them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import Any

from harness.paths import ROOT


def spilled_by(program: str, *arguments: str) -> dict[Any, Any]:
    """What a program prints: the bytes that each of its kernels spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    command = [sys.executable, str(ROOT / "tests" / "harness" / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[Any, Any] = ast.literal_eval(done.stdout)
    return found
