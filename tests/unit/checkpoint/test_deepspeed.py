"""DeepSpeed's checkpoints load bit for bit, and nothing in their files is executed.

`tests/data/deepspeed` has checkpoints that DeepSpeed 0.19.8 has made on two ranks, each with what DeepSpeed itself read
of its states; `harness/make_deepspeed.py` made them.
"""

from __future__ import annotations

import os
import shutil
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from harness.make_deepspeed import CLIENT_STATE, FOLDER, KINDS, Small
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.states import engine_of
from shardwise import Engine
from shardwise.checkpoint.commit import candidates, read_manifest
from shardwise.checkpoint.deepspeed import describe, read_run_state
from shardwise.cli import main as cli

UNIVERSAL = ("universal-of-zero2-bf16", "universal-of-zero3-bf16")
ALL = (*KINDS, *UNIVERSAL)
PLAN = {"mix": "column", "out": "row"}


def tokens_of(step: int) -> Tensor:
    return torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(step))


def assert_as_saved(engine: Engine, kind: str) -> None:
    """Masters, moments, buffers, frozen parameters and counts are those that DeepSpeed read."""
    expected = load_file(FOLDER / kind / "expected.safetensors")
    assert len(expected) == 4 * 3 + 2
    for key, value in expected.items():
        name, state = key.split(" ")
        if state == "buffer":
            got = dict(engine.model.named_buffers())[name]
            assert torch.equal(got.to(value.dtype), value)
            continue
        if state == "param" and "master" in engine.states_of(name):
            state = "master"
        got = engine.read(name, state)
        assert torch.equal(got, value.to(got.dtype)), key
        if state == "exp_avg":
            assert engine.read(name, "step") == 3
    assert engine.num_steps == 3


@pytest.mark.parametrize("stage", range(4))
def test_masters_and_moments_come_back_bit_for_bit(stage: int) -> None:
    with engine_of(Small, seed=1, zero={"stage": stage}, precision={"param": "bf16"}) as engine:
        for kind in ALL:
            engine.train_step([tokens_of(0)])  # what a load overwrites
            report = engine.load(FOLDER / kind)
            assert (report.step, report.extra, report.skipped, report.missing) == (3, CLIENT_STATE, (), ())
            assert_as_saved(engine, kind)
        engine.train_step([tokens_of(1)])
        assert engine.read("mix.bias", "step") == 4


@pytest.mark.quick(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 2}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_read_their_own_parts(ranks: WorkerPool, mesh: dict[str, int], stage: int) -> None:
    ranks(2).run(load_all, mesh, stage)


def load_all(rank: int, world_size: int, mesh: dict[str, int], stage: int) -> None:
    arguments = (lambda _: {"plan": PLAN}) if "tp" in mesh else None
    with engine_of(Small, seed=1, arguments=arguments, zero={"stage": stage}, mesh=mesh) as engine:
        for kind in ALL:
            engine.load(FOLDER / kind)
            assert_as_saved(engine, kind)


def test_ranks_read_only_what_they_hold(ranks: WorkerPool) -> None:
    read = ranks(2).run(bytes_read)
    whole = sum(each["states"] for each in read) / 2
    assert all(each["read"] < 0.7 * whole for each in read)


def bytes_read(rank: int, world_size: int) -> dict[str, int]:
    with engine_of(Small, zero={"stage": 3}) as engine:
        report = engine.load(FOLDER / "zero3-fp32")
    stored = [each for tensor in read_manifest(report.path).tensors for each in tensor.states.values()]
    return {
        "read": report.num_read_bytes,
        "states": sum(4 * piece.rect.numel for each in stored for piece in each.pieces),
    }


class Warmup:
    """A schedule with the state of DeepSpeed's own."""

    last_batch_iteration = -1

    def step(self) -> None:
        self.last_batch_iteration += 1

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]


def given(model: nn.Module, make_scheduler: Callable[[torch.optim.Optimizer], Any]) -> dict[str, Any]:
    decayed = [each for name, each in model.named_parameters() if "weight" in name and each.requires_grad]
    others = [each for name, each in model.named_parameters() if "bias" in name]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], lr=1.0)
    return {"optimizer": optimizer, "scheduler": make_scheduler(optimizer)}


def test_a_given_optimizer_and_schedule_take_over() -> None:
    with engine_of(Small, arguments=lambda model: given(model, lambda _: Warmup()), optimizer={}) as engine:
        assert engine.load(FOLDER / "zero1-fp32").skipped == ()
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
        assert engine.optimizer.param_groups[0]["betas"] == (0.9, 0.98)
        assert engine.scheduler.last_batch_iteration == 2


def test_a_schedule_of_another_class_is_refused() -> None:
    def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)

    with engine_of(Small, arguments=lambda model: given(model, make), optimizer={}) as engine:
        with refused("model-misfit", "LambdaLR"):
            engine.load(FOLDER / "zero1-fp32")
        assert len(engine.load(FOLDER / "zero1-fp32", strict=False).skipped) == 1
        assert_as_saved(engine, "zero1-fp32")


def test_a_schedule_of_the_config_goes_on_where_it_was() -> None:
    schedule = {"name": "linear", "warmup_steps": 2, "total_steps": 10}
    with engine_of(Small, scheduler=schedule) as engine:
        engine.load(FOLDER / "zero1-fp32")
        assert engine.scheduler.last_epoch == 3


def test_loss_scales_are_taken_over() -> None:
    fp16 = {"param": "fp16", "initial_loss_scale": 2.0}
    with engine_of(Small, precision=fp16) as engine:
        engine.load(FOLDER / "zero2-fp16")
        assert engine.train_step([tokens_of(1)]).loss_scale == 16


@pytest.mark.parametrize("kind", ["zero2-bf16", "zero3-bf16", UNIVERSAL[0]])
def test_the_state_of_the_run(kind: str) -> None:
    (folder,) = candidates(FOLDER / kind)
    run = read_run_state(folder)
    assert run.client_state == CLIENT_STATE
    assert run.lr_scheduler is not None
    assert run.lr_scheduler["last_batch_iteration"] == 2
    assert (run.global_steps, run.global_samples, run.skipped_steps) == (3, 12, 0)


def test_weights_alone_and_what_does_not_fit() -> None:
    with engine_of(Small, seed=1) as engine:
        engine.load(FOLDER / "zero2-bf16", weights_only=True)
        assert engine.num_steps == 0
    with engine_of(nn.Linear(3, 5)) as engine, refused("model-misfit", "missing weight", "unexpected"):
        engine.load(FOLDER / "zero2-bf16")


def test_the_newest_is_the_one_that_latest_names(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "zero2-bf16", tmp_path, dirs_exist_ok=True)
    for name in ("global_step4", "global_step10"):
        shutil.copytree(tmp_path / "global_step3", tmp_path / name)
    assert [each.name for each in candidates(tmp_path)] == ["global_step3", "global_step10", "global_step4"]
    (tmp_path / "latest").unlink()
    assert candidates(tmp_path)[0].name == "global_step10"
    with engine_of(Small) as engine:
        assert engine.load(tmp_path, tag="global_step4").path.name == "global_step4"


def test_the_commands_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(FOLDER / "zero2-bf16")
    assert cli.main(["checkpoint", "show", source, "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in ("ZeRO-2 over 2 ranks", "mix.weight", "exp_avg_sq", "bf16"))
    assert cli.main(["checkpoint", "diff", source, str(FOLDER / "zero2-round-robin"), "--weights"]) == 0
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = ["--hf-config", str(tmp_path / "config.json")]
    assert cli.main(["checkpoint", "export", source, str(tmp_path / "out"), *config]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["mix.weight"].dtype == torch.bfloat16
    assert cli.main(["checkpoint", "verify", source]) == 2
    assert "deepspeed-no-checksums" in capsys.readouterr().err


# What is refused.


class Touch:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def deepspeed_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of DeepSpeed's names, with the classes that its files name, for `rewrite`."""
    classes = {
        "utils.tensor_fragment": {"fragment_address": object},
        "runtime.fp16.loss_scaler": {"LossScaler": object, "DynamicLossScaler": object},
        "runtime.zero.config": {"ZeroStageEnum": int},
    }
    for path, named in classes.items():
        parts = ["deepspeed", *path.split(".")]
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or types.ModuleType(name))
        for name, base in named.items():
            own = type(name, (base,), {"__module__": f"deepspeed.{path}"})
            setattr(sys.modules[f"deepspeed.{path}"], name, own)


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change what a file of `torch.save` has, without the library's own reader."""
    torch.save(change(torch.load(path, weights_only=False)), path)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("zero2-bf16", "*model_states.pt"),
        ("zero2-bf16", "*rank_1*optim_states.pt"),
        ("zero3-fp32", "*rank_1*model_states.pt"),
        (UNIVERSAL[0], "zero/mix.bias/exp_avg.pt"),
        (UNIVERSAL[0], "zero/optimizer_state.pt"),
    ],
)
def test_a_hostile_pickle_is_refused_by_name(tmp_path: Path, kind: str, pattern: str) -> None:
    shutil.copytree(FOLDER / kind, tmp_path, dirs_exist_ok=True)
    folder = candidates(tmp_path)[0]
    (path,) = folder.glob(pattern)
    torch.save({"optimizer_state_dict": {}, "module": {}, "param": Touch(tmp_path / "touched")}, path)
    with engine_of(Small) as engine, refused("pickle-refused", path.name, "system"):
        engine.load(tmp_path)
    if "model" in pattern and "rank_1" not in pattern:
        with refused("pickle-refused", path.name, "system"):
            read_run_state(folder)
    assert not (tmp_path / "touched").exists()


def test_code_under_a_name_that_is_allowed_is_not_run(tmp_path: Path) -> None:
    """A stand-in has no methods, and an attribute may be named like one: nothing calls it."""
    shutil.copytree(FOLDER / "zero2-fp16", tmp_path, dirs_exist_ok=True)
    (path,) = candidates(tmp_path)[0].glob("zero_pp_rank_0*optim_states.pt")
    text = b"cdeepspeed.utils.tensor_fragment\nfragment_address\n)\x81}(X\x0c\x00\x00\x00__setstate__cos\nsystem\nub."
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + text)
        file.writestr("archive/version", "3\n")
    with refused("pickle-refused", "system"):
        describe(path.parent)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: path.unlink(), "file-missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-200]), "file-unreadable"),
        (lambda path: path.write_bytes(b"\x80\x02}q\x00."), "deepspeed-malformed"),
        (lambda path: torch.save({"optimizer_state_dict": {"partition_count": [2]}}, path), "deepspeed-malformed"),
        (lambda path: torch.save([1, 2], path), "deepspeed-malformed"),
        (
            lambda path: path.rename(path.with_name("zero_pp_rank_0_mp_rank_01_optim_states.pt")),
            "deepspeed-model-parallel",
        ),
    ],
)  # fmt: skip
def test_what_deepspeed_does_not_write_is_refused(tmp_path: Path, damage: Callable[[Path], object], code: str) -> None:
    shutil.copytree(FOLDER / "zero1-fp32", tmp_path, dirs_exist_ok=True)
    folder = candidates(tmp_path)[0]
    (path,) = folder.glob("*rank_1*optim_states.pt")
    damage(path)
    with refused(code):
        describe(folder)


def test_stage_0_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "zero1-fp32", tmp_path, dirs_exist_ok=True)
    folder = candidates(tmp_path)[0]
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    with refused("deepspeed-stage-0"):
        describe(folder)


@pytest.mark.usefixtures("deepspeed_names")
def test_a_part_that_is_too_short_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "zero3-fp32", tmp_path, dirs_exist_ok=True)
    folder = candidates(tmp_path)[0]

    def shorten(content: Any) -> Any:
        masters = content["optimizer_state_dict"]["fp32_flat_groups"]
        masters[0] = masters[0][:-1].clone()
        return content

    (path,) = folder.glob("*rank_1*optim_states.pt")
    rewrite(path, shorten)
    with refused("elements-missing"):
        describe(folder)


@pytest.mark.usefixtures("deepspeed_names")
def test_files_of_a_gpu_are_read_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER / "zero1-fp32", tmp_path, dirs_exist_ok=True)
    folder = candidates(tmp_path)[0]
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
    for path in folder.glob("*.pt"):
        rewrite(path, lambda content: content)
    monkeypatch.undo()
    with engine_of(Small, seed=1) as engine:
        engine.load(tmp_path)
        assert_as_saved(engine, "zero1-fp32")
    assert read_run_state(folder).client_state == CLIENT_STATE
