"""`zero_to_fp32.py`: the weights of a checkpoint in fp32, of DeepSpeed's and of ours, by one command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from harness.make_deepspeed import FOLDER, Small
from harness.paths import SOURCE
from harness.refusals import refused
from harness.states import engine_of
from shardwise.compat.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
    write_zero_to_fp32,
)

pytestmark = pytest.mark.usefixtures("warm_python")

NAMES = {"embed.weight", "head.weight", "mix.weight", "mix.bias", "out.weight", "base.weight", "offset"}


def expected(kind: str) -> dict[str, Tensor]:
    stored = load_file(FOLDER / kind / "expected.safetensors")
    values = {key.split(" ")[0]: value.float() for key, value in stored.items() if key.endswith((" param", " buffer"))}
    return {**values, "head.weight": values["embed.weight"]}


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", ["zero2-bf16", "zero3-bf16", "universal-of-zero3-bf16"])
def test_state_dicts_have_the_masters(kind: str) -> None:
    got = get_fp32_state_dict_from_zero_checkpoint(FOLDER / kind)
    assert got.keys() == NAMES
    assert got["head.weight"] is got["embed.weight"]
    assert_equal(got, expected(kind))
    trained = get_fp32_state_dict_from_zero_checkpoint(FOLDER / kind, exclude_frozen_parameters=True)
    assert trained.keys() == NAMES - {"base.weight"}
    model = load_state_dict_from_zero_checkpoint(Small(), FOLDER / kind)
    assert_equal(model.state_dict(), got)


@pytest.mark.parametrize("safe", [True, False])
def test_files_are_split_by_size(tmp_path: Path, safe: bool) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(FOLDER / "zero3-fp32", tmp_path, 250, safe)
    (index,) = tmp_path.glob("*.index.json")
    weight_map = json.loads(index.read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    assert len(files) > 2
    read = load_file if safe else torch.load
    got = {name: value for file in files for name, value in read(tmp_path / file).items()}
    assert got.keys() == weight_map.keys() == (NAMES - {"head.weight"} if safe else NAMES)
    wanted = expected("zero3-fp32")
    assert_equal(got, {name: wanted[name] for name in got})


def test_the_script_beside_our_checkpoints_has_the_command_line(tmp_path: Path) -> None:
    with engine_of(Small, precision={"param": "bf16"}) as engine:
        engine.load(FOLDER / "zero2-bf16")
        engine.save(tmp_path, tag="global_step3")
        engine.save(tmp_path, tag="other")
    write_zero_to_fp32(tmp_path)
    command = [sys.executable, "zero_to_fp32.py", ".", "out", "-t", "global_step3", "--max_shard_size", "1GB"]
    subprocess.run(command, cwd=tmp_path, check=True, env={"PYTHONPATH": str(SOURCE.parent)})
    got = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert_equal(got, {**expected("zero2-bf16"), "offset": Small().offset})
    main([str(tmp_path), str(tmp_path / "safe"), "--safe_serialization"])
    assert load_file(tmp_path / "safe" / "model.safetensors").keys() == NAMES - {"head.weight"}


def test_without_a_size_there_is_one_file(tmp_path: Path) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(FOLDER / "zero2-bf16", tmp_path, None)
    assert [each.name for each in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    with refused("shard-size", "5 elephants"):
        convert_zero_checkpoint_to_fp32_state_dict(FOLDER / "zero2-bf16", tmp_path, "5 elephants")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "options-not-read"),
        (["none", "out"], "no-such-path"),
        ([".", "out"], "no-checkpoint"),
        ([".", "out", "--tga", "x"], "options-not-read"),
    ],
)
def test_a_wrong_command_line_is_a_line(
    words: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zero_to_fp32.py: ")
    assert line.endswith(f"[{code}]")
