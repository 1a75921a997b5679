"""Buffers of every kind in an engine's checkpoint, each rank's own too; and reading it without the library."""

from __future__ import annotations

import json
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from harness.paths import SOURCE
from harness.pool import WorkerPool
from harness.random_models import PLAN, ModelSpec, RandomModel
from harness.refusals import refused
from harness.states import assert_same_bits, engine_of, take_steps, whole_states
from shardwise import initialize
from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.training_state import held_buffers


class Buffers(nn.Module):
    """Statistics of batches and buffers of many kinds; some depend on the rank's data."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.BatchNorm1d(3)  # by its name like a state of a random generator
        self.twin = nn.BatchNorm1d(3, track_running_stats=False)
        self.line = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("also_seen", self.seen)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("every_other", torch.arange(8.0)[::2])
        self.register_buffer("spread", torch.rand(1).expand(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        first = x[0, 0].detach()
        self.seen += first
        self.flags.logical_not_()
        self.count = self.count + (first > 0)  # replaced
        self.turned.add_(first)
        self.every_other.data.mul_(1.5 + first)
        self.cache += first
        return self.line(self.twin(self.generator(x)))  # [b, 3]


def test_buffers_come_back_on_one_rank(tmp_path: Path) -> None:
    with engine_of(Buffers) as engine:
        take_steps(engine, 3)
        engine.save(tmp_path)
        saved = whole_states(engine)
    manifest = read_manifest(tmp_path / "step-00000003")
    names = {tensor.name for tensor in manifest.tensors if tensor.kind == "buffer"}
    assert names == {
        *("generator.running_mean", "generator.running_var", "generator.num_batches_tracked"),
        *("seen", "flags", "count", "empty", "turned", "every_other", "spread"),
    }
    with engine_of(Buffers, seed=1) as engine:
        take_steps(engine, 1)
        cache = engine.model.cache.clone()
        seen = engine.model.seen
        engine.load(tmp_path)
        assert engine.model.also_seen is engine.model.seen is seen
        assert not engine.model.turned.is_contiguous()
        loaded = whole_states(engine)
        assert torch.equal(loaded.pop(("cache", "buffer")), cache)
        saved.pop(("cache", "buffer"))
        assert_same_bits(loaded, saved)


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_has_its_own_buffers_again(ranks: WorkerPool, tmp_path: Path, stage: int) -> None:
    saved = ranks(2).run(save_buffers, tmp_path, stage)
    assert not torch.equal(saved[0]["generator.running_mean", "buffer"], saved[1]["generator.running_mean", "buffer"])
    for rank, (loaded, again) in enumerate(ranks(2).run(load_buffers, tmp_path, stage)):
        for states in (loaded, again):
            assert torch.equal(states.pop(("cache", "buffer")), torch.zeros(3))
            assert_same_bits(states, {key: value for key, value in saved[rank].items() if key[0] != "cache"})
    first, second = (read_manifest(tmp_path / name / "step-00000004") for name in ("source", "again"))
    assert first.tensors == second.tensors
    (alone,) = ranks(1).run(load_on_one_rank, tmp_path)
    for (name, kind), value in alone.items():
        if kind == "buffer" and name != "cache":
            assert torch.equal(value, saved[0][name, kind]), name


def save_buffers(rank: int, world_size: int, root: Path, stage: int) -> Any:
    with engine_of(Buffers, zero={"stage": stage}) as engine:
        take_steps(engine, 4)  # an even number: what is replaced may stand where it stood
        engine.save(root / "source", wait=False)
        return whole_states(engine)


def load_buffers(rank: int, world_size: int, root: Path, stage: int) -> Any:
    with engine_of(Buffers, zero={"stage": 3 - stage}) as engine:
        engine.load(root / "source")
        loaded = whole_states(engine)
        engine.save(root / "again")
    with engine_of(Buffers, zero={"stage": stage}) as engine:
        engine.load(root / "again")
        return loaded, whole_states(engine)


def load_on_one_rank(rank: int, world_size: int, root: Path) -> Any:
    with engine_of(Buffers) as engine:
        engine.load(root / "source")
        return whole_states(engine)


class Fewer(Buffers):
    """A model whose buffers are gone, or of another shape."""

    def __init__(self) -> None:
        super().__init__()
        del self.every_other
        self.seen = self.also_seen = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.twin(self.generator(x)))  # [b, 3]


def test_own_buffers_that_do_not_fit_are_left_out_on_all_ranks(ranks: WorkerPool, tmp_path: Path) -> None:
    ranks(2).run(save_buffers, tmp_path, 2)
    ranks(2).run(load_fewer, tmp_path)


def load_fewer(rank: int, world_size: int, root: Path) -> None:
    with engine_of(Fewer) as engine:
        with refused("model-misfit", "unexpected every_other", "seen ((2,) there, (3,) in the model)"):
            engine.load(root / "source")
        report = engine.load(root / "source", strict=False)
        assert len(report.skipped) == 2
        assert not engine.model.seen.any()
        assert engine.model.generator.running_mean.any()


def test_only_persistent_buffers_are_held_under_all_names() -> None:
    model = Buffers()
    model.again = model.generator
    held = {each.state_shard.name: each.state_shard for each in held_buffers(model, lambda name: "runs")}
    assert held["seen"].aliases == ("also_seen",)
    assert held["generator.running_mean"].aliases == ("again.running_mean",)
    assert "cache" not in held
    assert not any(each.written for each in held.values())
    assert list(held) == [name for name in model.state_dict() if name in held]
    assert torch.equal(held["every_other"].flat.read(0, held["every_other"].flat.numel), model.every_other)


# Without the library.


SPEC = ModelSpec(width=3, num_blocks=2, is_tied=False, has_frozen=True, has_buffer=True)


def save_split(rank: int, world_size: int, root: Path) -> Any:
    torch.manual_seed(0)
    config = {
        "mesh": {"tp": 2},
        "zero": {"stage": 3},
        "precision": {"param": "bf16"},
        "run": {"device": "cpu", "timeout_s": 30.0},
    }
    model = RandomModel(SPEC)
    with initialize(model, config, plan=PLAN, loss_fn=lambda logits, batch: logits.double().square().mean()) as engine:
        engine.train_step([torch.arange(10).view(2, 5) % 11])
        engine.save(root)
        return whole_states(engine)


def test_the_public_library_and_the_manifest_suffice_to_read_a_split_checkpoint(
    ranks: WorkerPool, tmp_path: Path
) -> None:
    saved = ranks(4).run(save_split, tmp_path)[0]
    folder = tmp_path / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    opened = {name: safe_open(folder / name, "pt") for name in manifest["files"]}
    assert len(opened) == 4
    num_compared = 0
    for tensor in manifest["tensors"]:
        for state, stored in tensor["states"].items():
            if tensor["kind"] == "rank" or "value" in stored:
                continue
            whole = torch.full(tensor["shape"], torch.nan) if stored["dtype"] != "I64" else torch.zeros(tensor["shape"])
            for piece in stored["pieces"]:
                key = tensor["name"] if state == "param" else f"{tensor['name']}/{state}"
                ranges = [*zip(piece["start"], piece["stop"], strict=True)]
                if [size for _, size in ranges] != tensor["shape"] or any(start for start, _ in ranges):
                    key += f"[{', '.join(f'{start}:{stop}' for start, stop in ranges)}]"
                whole[tuple(slice(*each) for each in ranges)] = opened[piece["file"]].get_tensor(key).to(whole.dtype)
            ours = "buffer" if tensor["kind"] == "buffer" else "master" if state == "param" else state
            assert torch.equal(whole, saved[tensor["name"], ours].to(whole.dtype)), (tensor["name"], state)
            num_compared += 1
    assert num_compared > 30


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    with engine_of(Buffers) as engine:
        take_steps(engine, 1)
        engine.save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors", ""}
    for path in files:
        data = path.read_bytes()
        assert not data.startswith((b"PK", b"\x80"))  # a zip, as of torch.save, or a pickle of protocol 2 and later
        with pytest.raises((ValueError, IndexError)):
            for _ in pickletools.genops(data):
                pass


def test_the_library_neither_pickles_nor_unpickles() -> None:
    words = r"\b(pickle|cPickle|dill|cloudpickle|shelve|marshal|(torch|np)\.(load|save)|\w+_object(_list)?)\b"
    lines = r"(?m)^[^#\n]*" + words + r"(\(| import|\n|$)"
    assert re.search(lines, "    import pickle\n")
    assert re.search(lines, "state = torch.load(path)\n")
    # DeepSpeed's checkpoints are read by the loader that runs nothing, its scripts write files of torch.save, and its
    # Ulysses sends batches of any objects between the ranks of one job.
    reads, allowed = (
        "checkpoint/torch_files.py",
        {
            "compat/deepspeed/runtime/engine.py": "torch.save(",
            "compat/deepspeed/utils/zero_to_fp32.py": "torch.save(",
            "compat/deepspeed/runtime/sequence_parallel/ulysses_sp.py": "all_gather_object(",
            "train/chat.py": "ctypes.py_object(",  # an exception for a thread
            "launch/targets.py": "dist.broadcast_object_list(",  # in the text that Ray runs
        },
    )
    for path in SOURCE.rglob("*.py"):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        if name == reads:
            assert text.count("torch.load(") == text.count("weights_only=True")
            continue
        found = re.search(lines, text.replace(allowed.get(name, "import pickle("), ""))
        assert found is None, f"{path}: {found[0]}"
