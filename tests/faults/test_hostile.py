"""Checkpoints that were made to hurt: pipes and links for files, names of files elsewhere, values of any type."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from harness.checkpoints import save, values_of
from harness.mutations import forge, opened_paths
from harness.refusals import refused
from harness.states import assert_same_bits, engine_of, options, take_steps, whole_states
from shardwise.checkpoint import training_state as trajectory
from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.compare import compare
from shardwise.checkpoint.manifest import MANIFEST_NAME, CheckpointError
from shardwise.checkpoint.offline import verify
from shardwise.cli.main import main

FILE = "rank-00000-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "a", values_of({"a": (6,)}), num_ranks=1)


@pytest.mark.parametrize("name", [MANIFEST_NAME, FILE])
def test_a_pipe_or_a_link_in_the_place_of_a_file_is_refused_at_once(folder: Path, name: str, tmp_path: Path) -> None:
    other = save(tmp_path / "b", values_of({"a": (6,)}), num_ranks=1)
    for put in (os.mkfifo, lambda path: path.symlink_to(other / name)):
        (folder / name).unlink()
        put(folder / name)
        for read in (lambda: read_manifest(folder), lambda: compare(folder, other)):
            with refused("file-unreadable", name, "it is a "):
                read()
        (damage,) = verify(folder).damages
        assert ": it is a " in str(damage)
        for command in ("show", "verify"):
            assert main(["checkpoint", command, str(folder)]) == 1


def test_latest_may_be_a_pipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "latest").unlink()
    os.mkfifo(folder.parent / "latest")
    assert main(["checkpoint", "show", str(folder.parent)]) == 1
    assert "a pipe" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["/etc/passwd", "../../../../../../etc/passwd", ".."])
def test_no_file_out_of_the_folder_is_opened(folder: Path, file: str) -> None:
    def rename(values: dict[str, Any]) -> None:
        values["files"] = {file: os.stat("/etc/passwd").st_size}
        values["tensors"] = []

    forge(folder, rename)
    with opened_paths() as opened:
        (damage,) = verify(folder).damages
        assert main(["checkpoint", "verify", str(folder)]) == 1
    assert "is not the name of a file" in damage.what
    assert not [path for path in opened if path.endswith("passwd")]


def first(values: dict[str, Any]) -> dict[str, Any]:
    return values["tensors"][0]


def piece(values: dict[str, Any]) -> dict[str, Any]:
    return first(values)["states"]["param"]["pieces"][0]


FORGERIES: dict[str, Callable[[dict[str, Any], Any], object]] = {
    "offset": lambda values, value: piece(values).update(offset=value),
    "file": lambda values, value: piece(values).update(file=value),
    "start": lambda values, value: piece(values).update(start=value),
    "crc32": lambda values, value: piece(values).update(crc32=value),
    "files": lambda values, value: values.update(files=value),
    "step": lambda values, value: values.update(step=value),
    "tensors": lambda values, value: values.update(tensors=value),
    "shape": lambda values, value: first(values).update(shape=value),
    "states": lambda values, value: first(values).update(states=value),
    "dtype": lambda values, value: first(values)["states"]["param"].update(dtype=value),
    "number": lambda values, value: first(values)["states"]["step"].update(value=value),
    "layout": lambda values, value: values.update(layout={"mesh": value, "pipeline": value}),
    "trajectory": lambda values, value: values.update(trajectory={"optimizer": value, "scheduler": [value]}),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", FORGERIES)
def test_values_of_other_types_are_refused(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / MANIFEST_NAME).read_text()
    for value in ("x", "\x1b[31m", [0], [1.5], ["3"], [3, 3], -1, 2**70, 1.5, True, {"a": {}}, "int", 7):
        (folder / MANIFEST_NAME).write_text(text)
        forge(folder, lambda values, value=value: FORGERIES[name](values, value))
        if (name, value) in (
            ("step", 7),
            ("number", 1.5),
            ("number", -1),
            ("number", 7),
            ("number", True),
            ("offset", 7),
            ("start", [0]),
        ):
            continue  # may be
        with pytest.raises(CheckpointError) as caught:
            read_manifest(folder)
        assert str(caught.value).isprintable()
        for command in ("show", "verify"):
            assert main(["checkpoint", command, str(folder)]) == 1
        assert "\x1b" not in "".join(capsys.readouterr())


# What a run takes over beside tensors.


def adamw(model: nn.Module) -> dict[str, Any]:
    """An optimizer and a schedule of the user's, whose options come from the checkpoint."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    return {"optimizer": optimizer, "scheduler": lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)}


def rmsprop(model: nn.Module) -> dict[str, Any]:
    """An optimizer whose states only it knows."""
    return {"optimizer": torch.optim.RMSprop([each for each in model.parameters() if each.requires_grad], lr=0.05)}


def saved_by(root: Path, arguments: Any = adamw, **sections: Any) -> Path:
    with engine_of(arguments=arguments, **sections) as engine:
        take_steps(engine, 2)
        engine.save(root)
    return root / "step-00000002"


def check_refused(root: Path, code: str, arguments: Any = adamw, strict: bool = True, **sections: Any) -> None:
    """An engine that has trained refuses it in one line, is as before and trains on; weights alone it takes."""
    with engine_of(seed=1, arguments=arguments, **sections) as engine:
        take_steps(engine, 1)
        before = whole_states(engine), options(engine)
        with refused(code, "weights_only=True"):
            engine.load(root, strict=strict)
        assert_same_bits(whole_states(engine), before[0])
        assert options(engine) == before[1]
        engine.load(root, weights_only=True)
        take_steps(engine, 1)


def options_of_group(values: dict[str, Any]) -> dict[str, Any]:
    return values["trajectory"]["optimizer"]["groups"][0]


def schedule(values: dict[str, Any]) -> dict[str, Any]:
    return values["trajectory"]["scheduler"]["state"]


GARBAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "lr is text": lambda values: options_of_group(values).update(lr="0.1"),
    "lr is not a number": lambda values: options_of_group(values).update(lr=float("nan")),
    "lr is larger than any": lambda values: options_of_group(values).update(lr=10**400),
    "lr is nothing": lambda values: options_of_group(values).update(lr=None),
    "one beta": lambda values: options_of_group(values).update(betas=[0.9]),
    "a beta is a list": lambda values: options_of_group(values).update(betas=[0.9, [0.9]]),
    "a flag is text": lambda values: options_of_group(values).update(amsgrad="no"),
    "T_max is text": lambda values: schedule(values).update(T_max="7"),
    "rates are text": lambda values: schedule(values).update(base_lrs=["0.1"]),
    "no optimizer": lambda values: values["trajectory"].pop("optimizer"),
    "no groups": lambda values: values["trajectory"]["optimizer"].pop("groups"),
    "no scaler": lambda values: values["trajectory"].pop("scaler"),
    "half a scaler": lambda values: values["trajectory"].update(scaler={"scale": 2.0}),
    "no state of the schedule": lambda values: values["trajectory"]["scheduler"].pop("state"),
    "no normaliser": lambda values: values["trajectory"].update(normaliser=None),
    "last_epoch is text": lambda values: schedule(values).update(last_epoch="2"),
}
# What is missing is refused as a whole; what cannot stand for a value, as one that does not fit.
INCOMPLETE = list(GARBAGE)[list(GARBAGE).index("no optimizer") :]


@pytest.mark.quick(7)
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_for_a_hyperparameter_is_refused_before_anything_changes(tmp_path: Path, name: str) -> None:
    code = "run-state-incomplete" if name in INCOMPLETE else "model-misfit"
    forge(saved_by(tmp_path), GARBAGE[name])
    check_refused(tmp_path, code)


def test_what_is_garbage_can_be_left_out(tmp_path: Path) -> None:
    forge(saved_by(tmp_path), GARBAGE["lr is text"])
    with engine_of(arguments=adamw) as engine:
        report = engine.load(tmp_path, strict=False)
        assert [line for line in report.skipped if "lr is '0.1'" in line]
        assert engine.optimizer.param_groups[0]["lr"] == 0.05
        take_steps(engine, 1)


def test_the_optimizers_parameters_are_no_option(tmp_path: Path) -> None:
    forge(saved_by(tmp_path), lambda values: options_of_group(values).update(params=[1.0], foreach="x"))
    with engine_of(arguments=adamw) as engine:
        engine.load(tmp_path)
        assert math.isfinite(take_steps(engine, 1)[0])
        assert all(isinstance(each, nn.Parameter) for each in engine.optimizer.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("arguments", "state", "tiers"),
    [(adamw, "exp_avg", {}), (rmsprop, "square_avg", {}), (adamw, "exp_avg_sq", {"optimizer": "host"})],
)
def test_a_number_in_the_place_of_a_tensor_is_refused(
    tmp_path: Path, arguments: Any, state: str, tiers: dict[str, str]
) -> None:
    def change(values: dict[str, Any]) -> None:
        states = next(each["states"] for each in values["tensors"] if each["name"] == "up.weight")
        states[state] = {"dtype": "F32", "value": 1.0}

    forge(saved_by(tmp_path, arguments, tiers=tiers), change)
    check_refused(tmp_path, "optimizer-states-unfit", arguments, tiers=tiers)


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", ["I32", "U32"])
@pytest.mark.parametrize(
    ("arguments", "state", "which", "code"),
    [
        (adamw, "param", "one", "model-misfit"),
        (adamw, "param", "all", "model-misfit"),
        (adamw, "exp_avg", "one", "no-whole-checkpoint"),
        (adamw, "exp_avg", "all", "optimizer-states-unfit"),
        (rmsprop, "square_avg", "one", "no-whole-checkpoint"),
        (rmsprop, "square_avg", "all", "optimizer-states-unfit"),
    ],
)
def test_integers_in_the_place_of_floating_numbers_are_refused(
    tmp_path: Path, arguments: Any, state: str, which: str, code: str, dtype: str
) -> None:
    """The engine is as it was, and the whole checkpoint loads after it with the dtypes that it has."""
    saved_by(tmp_path / "whole", arguments)

    def change(values: dict[str, Any]) -> None:
        parameters = [each["states"] for each in values["tensors"] if each["kind"] == "parameter"]
        stored = [states for states in parameters if state in states]
        for states in stored if which == "all" else stored[:1]:
            states[state]["dtype"] = dtype

    forge(saved_by(tmp_path / "forged", arguments), change)
    with engine_of(seed=1, arguments=arguments) as engine:
        take_steps(engine, 1)
        before = whole_states(engine)
        with refused(code):
            engine.load(tmp_path / "forged")
        assert_same_bits(whole_states(engine), before)
        engine.load(tmp_path / "whole")
        assert all(each.dtype.is_floating_point for each in whole_states(engine).values())
        take_steps(engine, 1)


@pytest.mark.parametrize("tiers", [{}, {"optimizer": "host"}])
def test_a_tensor_in_the_place_of_a_number_is_refused(tmp_path: Path, tiers: dict[str, str]) -> None:
    def change(values: dict[str, Any]) -> None:
        states = next(each["states"] for each in values["tensors"] if each["name"] == "up.weight")
        states["step"] = states.pop("exp_avg")

    forge(saved_by(tmp_path, tiers=tiers), change)
    check_refused(tmp_path, "optimizer-states-unfit", tiers=tiers)


@pytest.mark.parametrize("tiers", [{}, {"optimizer": "host"}])
@pytest.mark.parametrize("is_option", [False, True])
def test_states_that_the_options_ask_for_must_be_there(tmp_path: Path, tiers: dict[str, str], is_option: bool) -> None:
    def change(values: dict[str, Any]) -> None:
        if is_option:
            options_of_group(values).update(amsgrad=True)
        else:
            next(each["states"] for each in values["tensors"] if each["name"] == "up.bias").pop("exp_avg")

    forge(saved_by(tmp_path, tiers=tiers), change)
    check_refused(tmp_path, "optimizer-states-unfit", tiers=tiers)


def test_options_that_ask_for_other_states_are_taken_with_these(tmp_path: Path) -> None:
    def amsgrad(model: nn.Module) -> dict[str, Any]:
        trained = [each for each in model.parameters() if each.requires_grad]
        return {"optimizer": torch.optim.AdamW(trained, amsgrad=True)}

    def plain(model: nn.Module) -> dict[str, Any]:
        return {"optimizer": torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])}

    saved_by(tmp_path, amsgrad)
    with engine_of(arguments=plain) as engine:
        engine.load(tmp_path)
        assert engine.optimizer.param_groups[0]["amsgrad"]
        take_steps(engine, 1)
    check_refused(
        tmp_path, "optimizer-states-unfit", plain, tiers={"optimizer": "host"}
    )  # which has made space for its own


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("torch", b"\0" * 16),
        ("python", b"x"),
        ("python", b"[3, [1, 2], null]"),
        ("python", b"[3, 7, null]"),
        ("numpy", b'["MT19937", [1], 0, 0, 0.0]'),
        ("numpy", json.dumps(["MT19937", [1] * 624, 10**6, 0, 0.0]).encode()),
        ("numpy", json.dumps(["MT19937", [-1] * 624, 0, 0, 0.0]).encode()),
        ("numpy", b'["MT19937", 7, 0, 0, 0.0]'),
    ],
)
def test_a_generators_state_that_is_none_is_refused(tmp_path: Path, name: str, state: bytes) -> None:
    forged = trajectory.generator_states(torch.device("cpu")) | {name: torch.tensor(list(state), dtype=torch.uint8)}
    with patch.object(trajectory, "generator_states", lambda device: forged):
        saved_by(tmp_path)
    with engine_of(arguments=adamw) as engine:
        with refused("generator-state-malformed", "weights_only=True"):
            engine.load(tmp_path)
        with pytest.raises(RuntimeError):
            take_steps(engine, 1)  # half of the states were loaded


@pytest.mark.parametrize("mesh", [{"dp_shard": 2**40}, {"dp_shard": 2**12, "tp": 2**12}, {"dp": 2}, {"tp": 0}])
def test_a_mesh_that_no_run_has_is_refused(folder: Path, mesh: dict[str, int]) -> None:
    forge(folder, lambda values: values.update(layout={"mesh": mesh}))
    with refused("manifest-malformed", "mesh"):
        read_manifest(folder)


def test_a_checkpoint_that_says_nothing_of_its_mesh_is_loaded(tmp_path: Path) -> None:
    forge(saved_by(tmp_path), lambda values: values.update(layout={}))
    with engine_of(arguments=adamw) as engine:
        assert engine.load(tmp_path).step == 2
