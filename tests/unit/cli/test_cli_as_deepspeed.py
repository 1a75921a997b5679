"""`shardwise run --as-deepspeed` and `shardwise as-deepspeed`: programs that import deepspeed get this library."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import Distribution

import pytest

from harness.paths import SOURCE
from shardwise.cli.main import main
from shardwise.launch.as_deepspeed import DEEPSPEED_VERSION, deepspeed_environment

pytestmark = pytest.mark.usefixtures("warm_python")

SAME = """
import deepspeed, sys
import deepspeed.ops.sparse_attention as theirs
import shardwise.compat.deepspeed.ops.sparse_attention as ours
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
assert deepspeed is sys.modules["shardwise.compat.deepspeed"] and theirs is ours is deepspeed.ops.sparse_attention
assert ours.__spec__.name == ours.__name__ == "shardwise.compat.deepspeed.ops.sparse_attention"
"""
GATES = """
from importlib.metadata import version
from importlib.util import find_spec
assert find_spec("deepspeed") and find_spec("deepspeed.ops") and find_spec("deepspeed.no_such") is None
print(version("deepspeed"))
"""
CHILD = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import deepspeed; print(deepspeed.__name__)"], check=True)
"""
LIGHT = """
import sys, torch
before = set(sys.modules)
import deepspeed
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(new - {"shardwise", "deepspeed"}), "torch._inductor" in sys.modules)
"""


def run_as_deepspeed(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python code by `shardwise run --as-deepspeed`."""
    command = [sys.executable, "-m", "shardwise", "run", "--as-deepspeed", "--", "python", "-c", code]
    path = os.pathsep.join([str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **environ}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        (SAME, ""),
        (GATES, f"{DEEPSPEED_VERSION}+shardwise\n"),
        (CHILD, "shardwise.compat.deepspeed\n"),
        (LIGHT, "[] False\n"),
    ],
    ids=["same modules", "version gates", "children", "light"],
)
def test_a_command_gets_this_library_as_deepspeed(code: str, stdout: str) -> None:
    result = run_as_deepspeed(code)
    assert (result.returncode, result.stdout) == (0, stdout), result.stderr


def test_rank_0_says_who_answers() -> None:
    saying = [run_as_deepspeed("import deepspeed", RANK=rank).stderr for rank in "01"]
    assert [text.count("deepspeed is Shardwise") for text in saying] == [1, 0]


def test_the_command_s_exit_code_and_arguments_are_its_own() -> None:
    assert run_as_deepspeed("import sys; sys.exit(7)").returncode == 7
    assert run_as_deepspeed("import deepspeed.no_such").stderr.endswith("No module named 'deepspeed.no_such'\n")


def test_a_shell_takes_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["as-deepspeed"]) == 0
    script = f"{capsys.readouterr().out}\npython -c 'import deepspeed'; command -v deepspeed"
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert result.stdout.endswith("deepspeed_path/bin/deepspeed\n"), result.stderr


def test_the_metadata_names_the_release_whose_names_these_are() -> None:
    folder = deepspeed_environment({})["PYTHONPATH"]
    found = [each.version for each in Distribution.discover(name="deepspeed", path=[folder])]
    assert found == [f"{DEEPSPEED_VERSION}+shardwise"]


def test_an_environment_that_has_the_folders_stays_as_it_is() -> None:
    once = deepspeed_environment({"PYTHONPATH": "/mine", "PATH": "/bin"})
    assert deepspeed_environment(once) == once


@pytest.mark.parametrize(
    ("command", "words"),
    [([], "Missing argument"), (["no-such-program"], "[program-not-usable]"), ([str(SOURCE)], "[program-not-usable]")],
)
def test_what_cannot_be_run_is_refused(command: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--as-deepspeed", "--", *command]) == 2
    assert words in capsys.readouterr().err
